/* A child cgroup per command, in the sandbox's own v2 directory: what ends a command whole, double forks included.
 *
 * Making and removing one is a quarter of what the guest does for a short command, so a sandbox that runs many uses some again: those
 * that are empty and were never killed (up to Linux 6.18 a killed one kills what is cloned into it later). They are given up when
 * nothing has run for a moment. A sandbox's first command leaves none behind: most of the short-lived ones run just that. A machine keeps one
 * for good, its first command's too: a fork's children, whose code is cold, find it there. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guest.h"

#define NAME_SIZE 48
#define MOST_KEPT 8 /* with open descriptors, running or idle */

struct group {
    struct group *next;        /* among the idle ones, or those left behind */
    uint64_t number;           /* of the first command that it was for: its name is c<number> */
    uint64_t used_us, last_us; /* CPU time: before its present command; as read last */
    int dir, cpu_stat, events; /* kept open for the next command; -1 */
    bool kept, spoilt;         /* spoilt: not to be used again */
};
static struct group *idle, *left;
static unsigned kept_count, taken_count;

/* "c<number>" and `tail` behind it. */
static const char *name_of(char name[NAME_SIZE], const struct group *group, const char *tail) {
    size_t size = strlen(tail);
    char *end = name + NAME_SIZE - 1 - size;
    memcpy(end, tail, size + 1);
    char *start = format_u64(end, group->number);
    *--start = 'c';
    return start;
}

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static void close_all(struct group *group) {
    close_fd(&group->dir);
    close_fd(&group->cpu_stat);
    close_fd(&group->events);
    kept_count -= group->kept;
    group->kept = false;
}

static int make(struct group *group) {
    char name[NAME_SIZE];
    if (mkdirat(guest.cgroup, name_of(name, group, ""), 0755) && errno != EEXIST) return -errno;
    group->dir = openat(guest.cgroup, name_of(name, group, ""), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (group->dir >= 0) return 0;
    int error = -errno;
    unlinkat(guest.cgroup, name_of(name, group, ""), AT_REMOVEDIR);
    return error;
}

int group_take(uint64_t op, struct group **taken) {
    struct group *group = idle;
    taken_count += taken_count < 2;
    if (group) {
        idle = group->next;
    } else {
        group = malloc(sizeof *group);
        if (!group) return -ENOMEM;
        *group = (struct group){.number = op, .dir = -1, .cpu_stat = -1, .events = -1};
        int error = make(group);
        if (error) {
            free(group);
            return error;
        }
        group->kept = (taken_count > 1 || guest.machine) && kept_count < MOST_KEPT;
        kept_count += group->kept;
    }
    *taken = group;
    return 0;
}

int group_directory(const struct group *group) { return group->dir; }

void group_entered(struct group *group) {
    if (!group->kept) close_fd(&group->dir);
}

int group_kill(struct group *group) {
    char name[NAME_SIZE];
    group->spoilt = true;
    int fd = openat(guest.cgroup, name_of(name, group, "/cgroup.kill"), O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    int error = write(fd, "1", 1) == 1 ? 0 : -errno;
    close(fd);
    return error;
}

/* The beginning of one of its files; *fd stays open where the group is kept. False where that isn't to be had. */
static bool read_file(const struct group *group, int *fd, const char *tail, char *text, size_t capacity) {
    char name[NAME_SIZE];
    if (*fd < 0) *fd = openat(guest.cgroup, name_of(name, group, tail), O_RDONLY | O_CLOEXEC);
    if (*fd < 0) return false;
    ssize_t size = pread(*fd, text, capacity - 1, 0);
    if (!group->kept) close_fd(fd);
    text[size > 0 ? size : 0] = 0;
    return size > 0;
}

static int read_cpu_us(struct group *group) {
    static const char WORD[] = "usage_usec ";
    char text[128];
    if (!read_file(group, &group->cpu_stat, "/cpu.stat", text, sizeof text) || strncmp(text, WORD, sizeof WORD - 1) != 0) return -EINVAL;
    group->last_us = strtoull(text + sizeof WORD - 1, NULL, 10);
    return 0;
}

int group_cpu_us(struct group *group, uint64_t *cpu_us) {
    int error = read_cpu_us(group);
    if (error) group->spoilt = true; /* where the next command would begin is not known */
    else *cpu_us = group->last_us - group->used_us;
    return error;
}

static bool is_empty(struct group *group) {
    char text[64];
    return read_file(group, &group->events, "/cgroup.events", text, sizeof text) && strstr(text, "populated 0\n");
}

static int remove_group(struct group *group) {
    char name[NAME_SIZE];
    if (unlinkat(guest.cgroup, name_of(name, group, ""), AT_REMOVEDIR) && errno != ENOENT) return -EBUSY;
    close_all(group);
    free(group);
    return 0;
}

int group_end(struct group *group) {
    if (!group->kept || group->spoilt || !is_empty(group)) return remove_group(group);
    group->used_us = group->last_us;
    group->next = idle;
    idle = group;
    trim_soon();
    return 0;
}

void groups_trim(bool all) {
    struct group **from = guest.machine && !all && idle ? &idle->next : &idle;
    for (struct group *group; (group = *from);) {
        *from = group->next;
        if (remove_group(group)) group_end_later(group);
    }
}

/* --- cgroups that commands left behind, with background processes in them -------------------------------------------------------- */

void group_end_later(struct group *group) {
    close_all(group);
    group->next = left;
    left = group;
}

void groups_sweep(void) {
    for (struct group **at = &left, *group; (group = *at);) {
        struct group *next = group->next;
        if (remove_group(group) == 0) *at = next;
        else at = &group->next;
    }
}

void groups_kill_left(void) {
    for (struct group *group = left; group; group = group->next) group_kill(group);
}

/* --- without a cgroup ------------------------------------------------------------------------------------------------------------- */

#define MOST_VICTIMS 4096

struct process {
    pid_t pid, parent, group, session;
};

static bool read_process(int proc, const char *name, struct process *process) {
    char path[64], text[512];
    size_t size = strlen(name);
    if (size > 20) return false;
    memcpy(path, name, size);
    memcpy(path + size, "/stat", 6);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return false;
    text[got] = 0;
    char *at = strrchr(text, ')'); /* the program's name may hold anything, parentheses too */
    if (!at || strlen(at) < 4) return false;
    at += 4; /* ") S " */
    process->pid = (pid_t)strtol(name, NULL, 10);
    process->parent = (pid_t)strtol(at, &at, 10);
    process->group = (pid_t)strtol(at, &at, 10);
    process->session = (pid_t)strtol(at, &at, 10);
    return true;
}

static bool among(const pid_t *pids, size_t count, pid_t pid) {
    for (size_t i = 0; i < count; i++) {
        if (pids[i] == pid) return true;
    }
    return false;
}

/* Best effort: a process that made a session of its own and whose parents are gone is not found. With the guest's own pid: all that
 * descends from it, which finds those too, because orphans become its children. */
void kill_tree(pid_t leader) {
    pid_t *victims = malloc(MOST_VICTIMS * sizeof *victims);
    int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    size_t count = 0;
    bool all = leader == getpid();
    if (!all) kill(-leader, SIGKILL);
    for (int round = 0; victims && proc >= 0 && round < 16; round++) {
        size_t before = count;
        char buffer[8192];
        long got;
        lseek(proc, 0, SEEK_SET);
        while ((got = syscall(SYS_getdents64, proc, buffer, sizeof buffer)) > 0) {
            for (long at = 0; at < got;) {
                struct dirent64 *entry = (void *)(buffer + at);
                at += entry->d_reclen;
                struct process process;
                if (entry->d_name[0] < '1' || entry->d_name[0] > '9' || !read_process(proc, entry->d_name, &process)) continue;
                bool ours = process.parent == leader || among(victims, count, process.parent) ||
                            (!all && (process.session == leader || process.group == leader));
                if (!ours || process.pid <= 1 || process.pid == getpid() || among(victims, count, process.pid) || count == MOST_VICTIMS) continue;
                kill(process.pid, SIGKILL);
                victims[count++] = process.pid;
            }
        }
        if (count == before) break;
    }
    if (proc >= 0) close(proc);
    free(victims);
}
