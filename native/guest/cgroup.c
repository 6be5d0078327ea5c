/* A child cgroup per command, `c<op>`, in the sandbox's own v2 directory: what ends a command whole, double forks included. */
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

/* "c<op>" and `tail` behind it. */
static const char *name_of(char name[NAME_SIZE], uint64_t op, const char *tail) {
    size_t size = strlen(tail);
    char *end = name + NAME_SIZE - 1 - size;
    memcpy(end, tail, size + 1);
    char *start = format_u64(end, op);
    *--start = 'c';
    return start;
}

int cgroup_make(uint64_t op) {
    char buffer[NAME_SIZE];
    const char *name = name_of(buffer, op, "");
    if (mkdirat(guest.cgroup, name, 0755) && errno != EEXIST) return -errno;
    int fd = openat(guest.cgroup, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

int cgroup_kill(uint64_t op) {
    char name[NAME_SIZE];
    int fd = openat(guest.cgroup, name_of(name, op, "/cgroup.kill"), O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    int error = write(fd, "1", 1) == 1 ? 0 : -errno;
    close(fd);
    return error;
}

int cgroup_remove(uint64_t op) {
    char name[NAME_SIZE];
    if (unlinkat(guest.cgroup, name_of(name, op, ""), AT_REMOVEDIR) == 0 || errno == ENOENT) return 0;
    return -EBUSY;
}

int cgroup_cpu_us(uint64_t op, uint64_t *cpu_us) {
    static const char WORD[] = "usage_usec ";
    char name[NAME_SIZE], text[128];
    int fd = openat(guest.cgroup, name_of(name, op, "/cpu.stat"), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size < (ssize_t)sizeof WORD || memcmp(text, WORD, sizeof WORD - 1) != 0) return -EINVAL;
    text[size] = 0;
    *cpu_us = strtoull(text + sizeof WORD - 1, NULL, 10);
    return 0;
}

/* --- cgroups that commands left behind, with background processes in them -------------------------------------------------------- */

static uint64_t *left;
static size_t left_count, left_capacity;

void cgroup_remove_later(uint64_t op) {
    if (left_count == left_capacity) {
        size_t capacity = left_capacity ? left_capacity * 2 : 16;
        uint64_t *grown = realloc(left, capacity * sizeof *left);
        if (!grown) return; /* an empty directory stays: harmless, and it goes with the sandbox */
        left = grown;
        left_capacity = capacity;
    }
    left[left_count++] = op;
}

void cgroup_sweep(void) {
    for (size_t i = 0; i < left_count;) {
        if (cgroup_remove(left[i]) == 0) {
            left[i] = left[--left_count];
        } else {
            i++;
        }
    }
}

void cgroup_kill_left(void) {
    for (size_t i = 0; i < left_count; i++) cgroup_kill(left[i]);
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
