/* LOOK: what programs of this machine do with files, as its own kernel tells it by fanotify (wire.h, LOOKING OUT). A forked child of the
 * guest's, as root, for as long as the edge wants it.
 *
 * Three groups, so that a flood in one can't make another lose events: `exact` has files that are watched by their full names and every start
 * of a program; `wide` all that is read or written anywhere; `names` what is created, renamed and removed. Over layers the third is set on
 * the file system that the overlay writes to, which is mounted once more for that, nowhere: the overlay itself can't tell names. There
 * a file that is copied up comes by a rename from elsewhere, and one of a layer's that is removed becomes a whiteout. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fanotify.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "bytes.h"
#include "guest.h"
#include "vm.h"

#ifndef FAN_RENAME
#define FAN_RENAME 0x10000000
#define FAN_EVENT_INFO_TYPE_OLD_DFID_NAME 10
#define FAN_EVENT_INFO_TYPE_NEW_DFID_NAME 12
#endif
#define WRITTEN (FAN_MODIFY | FAN_CLOSE_WRITE)
#define UPPER "/upper"
#define FSCONFIG_SET_STRING 1
#define FSCONFIG_CMD_CREATE 6
#define MOST_FILES 256
#define PROGRAMS 512  /* whose start is remembered: they may have ended before what they did is looked at */
#define PARENTS 4
#define ARGV_BYTES 512
#define SETTLE_TRIES 60 /* a start is told before the new program is there: 10 ms, then 200 more */

static int exact = -1, wide = -1, names = -1, place = -1; /* place: of the file system that `names` is about */
static const char *below = ""; /* where in it the machine's files are */
static pid_t self;
static struct stat own; /* the guest's program */
static char *const *wanted;
static struct file {
    dev_t device;
    ino_t inode;
    const char *path;
} files[MOST_FILES];
static size_t file_count;
static struct program {
    pid_t pid;
    char path[256];
} programs[PROGRAMS];
static uint8_t record[DSEC_LOOK_HEADER + DSEC_LOOK_TEXT];
static size_t text;

/* --- patterns ---------------------------------------------------------------------------------------------------------------------- */

/* One name; p..pe and s..se. A star that fails is tried once further on, the last one only: that is enough. */
static bool name_matches(const char *p, const char *pe, const char *s, const char *se) {
    const char *star = NULL, *from = NULL;
    while (s < se) {
        if (p < pe && *p == '*') {
            star = p++;
            from = s;
        } else if (p < pe && (*p == '?' || *p == *s)) {
            p++;
            s++;
        } else if (star) {
            p = star + 1;
            s = ++from;
        } else {
            return false;
        }
    }
    while (p < pe && *p == '*') p++;
    return p == pe;
}

static bool path_matches(const char *p, const char *s) {
    while (*p) {
        const char *pe = strchrnul(p + 1, '/');
        if (pe - p == 3 && p[1] == '*' && p[2] == '*') {
            if (!*pe) return true;
            for (; s && *s; s = strchr(s + 1, '/')) {
                if (path_matches(pe, s)) return true;
            }
            return false;
        }
        if (*s != '/') return false;
        const char *se = strchrnul(s + 1, '/');
        if (!name_matches(p + 1, pe, s + 1, se)) return false;
        p = pe;
        s = se;
    }
    return !*s;
}

static bool wants(char what, const char *path) {
    for (char *const *each = wanted; *each; each++) {
        if (**each == what && path_matches(*each + 1, path)) return true;
    }
    return false;
}

static bool any(char what) {
    for (char *const *each = wanted; *each; each++) {
        if (**each == what) return true;
    }
    return false;
}

/* --- who did it -------------------------------------------------------------------------------------------------------------------- */

static ssize_t read_of(pid_t pid, const char *what, char *data, size_t capacity) {
    char path[48];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, what);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, data, capacity - 1);
    if (fd >= 0) close(fd);
    data[size > 0 ? size : 0] = 0;
    return size;
}

static bool link_of(const char *path, char *target, size_t capacity) {
    ssize_t size = readlink(path, target, capacity - 1);
    target[size > 0 ? size : 0] = 0;
    return size > 0;
}

static bool program_of(pid_t pid, char *program, size_t capacity) {
    char path[48];
    snprintf(path, sizeof path, "/proc/%d/exe", (int)pid);
    return link_of(path, program, capacity);
}

static struct program *remembered(pid_t pid) {
    struct program *found = &programs[(unsigned)pid % PROGRAMS];
    return found->pid == pid ? found : NULL;
}

static void remember(pid_t pid, const char *path) {
    struct program *at = &programs[(unsigned)pid % PROGRAMS];
    at->pid = pid;
    snprintf(at->path, sizeof at->path, "%s", path);
}

/* The guest at work for the edge. */
static bool is_ours(pid_t pid) {
    char path[48];
    struct stat st;
    if (pid == self) return true;
    snprintf(path, sizeof path, "/proc/%d/exe", (int)pid);
    return stat(path, &st) == 0 && st.st_dev == own.st_dev && st.st_ino == own.st_ino;
}

static long number_in(const char *status, const char *name) {
    const char *at = strstr(status, name);
    return at ? strtol(at + strlen(name), NULL, 10) : 0;
}

/* --- records ----------------------------------------------------------------------------------------------------------------------- */

static void add_word(const char *word) {
    size_t size = strnlen(word, PATH_MAX) + 1;
    if (text + size > DSEC_LOOK_TEXT) return;
    memcpy(record + DSEC_LOOK_HEADER + text, word, size);
    record[DSEC_LOOK_HEADER + text + size - 1] = 0;
    text += size;
}

static void tell(enum dsec_look kind, const char *path, pid_t pid) {
    char status[2048] = "", program[PATH_MAX] = "", argv[ARGV_BYTES], line[PATH_MAX + 16];
    uint8_t words = 0;
    long uid = 0, above = 0;
    text = 0;
    if (pid && read_of(pid, "status", status, sizeof status) > 0) {
        uid = number_in(status, "\nUid:");
        above = number_in(status, "\nPPid:");
    }
    struct program *known = remembered(pid);
    if (!program_of(pid, program, sizeof program) && known) snprintf(program, sizeof program, "%s", known->path);
    add_word(path);
    add_word(program);
    ssize_t size = pid ? read_of(pid, "cmdline", argv, sizeof argv) : 0;
    for (ssize_t at = 0; at < size && words < DSEC_LOOK_WORDS; at += (ssize_t)strlen(argv + at) + 1, words++) add_word(argv + at);
    for (int i = 0; i < PARENTS && above > 1; i++) {
        if (!program_of((pid_t)above, program, sizeof program) || read_of((pid_t)above, "status", status, sizeof status) <= 0) break;
        snprintf(line, sizeof line, "%ld %s", above, program);
        add_word(line);
        above = number_in(status, "\nPPid:");
    }
    record[0] = (uint8_t)kind;
    record[1] = words;
    put_u16(record + 2, (uint16_t)text);
    put_u32(record + 4, (uint32_t)pid);
    put_u32(record + 8, (uint32_t)uid);
    put_all(1, record, DSEC_LOOK_HEADER + text);
}

/* --- files ------------------------------------------------------------------------------------------------------------------------- */

static int mark(int group, unsigned flags, uint64_t mask, int at, const char *path) {
    return (int)syscall(SYS_fanotify_mark, group, FAN_MARK_ADD | flags, mask, at, path);
}

static void mark_file(const char *path) {
    struct stat st;
    if (stat(path, &st) || mark(exact, 0, FAN_OPEN | WRITTEN, AT_FDCWD, path)) return; /* it may come later */
    size_t i = 0;
    while (i < file_count && strcmp(files[i].path, path) != 0) i++;
    if (i == MOST_FILES) return;
    files[i] = (struct file){st.st_dev, st.st_ino, path};
    if (i == file_count) file_count++;
}

static const char *fixed(const char *path) {
    for (char *const *each = wanted; *each; each++) {
        if (**each == 'F' && strcmp(*each + 1, path) == 0) return *each + 1;
    }
    return NULL;
}

static bool is_loader(const char *path) {
    const char *name = strrchr(path, '/');
    return name && strncmp(name, "/ld", 3) == 0 && strstr(name, ".so");
}

static void started(pid_t pid, const char *path) {
    if (is_loader(path)) return;
    remember(pid, path);
    if (!wants('s', path)) return;
    char program[PATH_MAX], argv[ARGV_BYTES];
    for (int i = 0; i < SETTLE_TRIES; i++) { /* its words come a moment after it */
        if (!program_of(pid, program, sizeof program)) break;
        if (strcmp(program, path) == 0 && read_of(pid, "cmdline", argv, sizeof argv) > 0) break;
        nanosleep(&(struct timespec){.tv_nsec = i < 20 ? 500000 : 5000000}, NULL);
    }
    tell(LOOK_START, path, pid);
}

static void file_event(const struct fanotify_event_metadata *event, bool everything) {
    char path[PATH_MAX], link[32];
    struct stat st;
    snprintf(link, sizeof link, "/proc/self/fd/%d", event->fd);
    if (event->pid == self || !link_of(link, path, sizeof path) || fstat(event->fd, &st)) return;
    static const char gone[] = " (deleted)";
    size_t size = strlen(path);
    if (size > sizeof gone && strcmp(path + size - (sizeof gone - 1), gone) == 0) path[size - (sizeof gone - 1)] = 0;
    if (event->mask & FAN_OPEN_EXEC && !everything) started(event->pid, path);
    if (!(event->mask & (FAN_OPEN | WRITTEN))) return;
    const char *name = path;
    bool named = false;
    for (size_t i = 0; i < file_count && !named; i++) {
        if (files[i].device != st.st_dev || files[i].inode != st.st_ino) continue;
        name = files[i].path;
        named = true;
    }
    if (everything == named || is_ours(event->pid)) return; /* what is watched by its name is told of once */
    if (event->mask & WRITTEN && (named || wants('w', name))) tell(LOOK_WRITE, name, event->pid);
    if (event->mask & FAN_OPEN && (named || wants('r', name))) tell(LOOK_READ, name, event->pid);
}

/* --- names ------------------------------------------------------------------------------------------------------------------------- */

struct entry {
    bool there; /* below what the machine has for its files */
    bool whiteout;
    char path[PATH_MAX];
};

static void find_entry(const struct fanotify_event_info_fid *info, struct entry *entry) {
    struct file_handle *handle = (struct file_handle *)info->handle;
    const char *name = (const char *)(handle->f_handle + handle->handle_bytes);
    char link[32], directory[PATH_MAX];
    struct stat st;
    entry->there = false;
    int fd = open_by_handle_at(place, handle, O_PATH | O_CLOEXEC);
    if (fd < 0) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    size_t skip = strlen(below);
    if (link_of(link, directory, sizeof directory) && strncmp(directory, below, skip) == 0 && (!directory[skip] || directory[skip] == '/')) {
        bool top = !directory[skip] || strcmp(directory + skip, "/") == 0;
        int size = snprintf(entry->path, sizeof entry->path, "%s/%s", top ? "" : directory + skip, name);
        entry->there = size > 0 && size < PATH_MAX;
        entry->whiteout = fstatat(fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISCHR(st.st_mode) && st.st_rdev == makedev(0, 0);
    }
    close(fd);
}

static void came(const char *path, pid_t pid) {
    const char *name = fixed(path);
    if (name) mark_file(name);
    if (wants('w', path)) tell(LOOK_WRITE, path, pid);
}

static void went(const char *path, pid_t pid, bool directory) {
    if (directory || wants('m', path)) tell(LOOK_REMOVE, path, pid); /* with what is below it, which the edge knows */
}

static void name_event(const struct fanotify_event_metadata *event) {
    static struct entry from, to;
    bool directory = event->mask & FAN_ONDIR;
    from.there = to.there = false;
    for (const uint8_t *at = (const uint8_t *)event + event->metadata_len, *end = (const uint8_t *)event + event->event_len; at < end;) {
        const struct fanotify_event_info_fid *info = (const void *)at;
        if (info->hdr.info_type == FAN_EVENT_INFO_TYPE_OLD_DFID_NAME) find_entry(info, &from);
        else if (info->hdr.info_type == FAN_EVENT_INFO_TYPE_NEW_DFID_NAME || info->hdr.info_type == FAN_EVENT_INFO_TYPE_DFID_NAME) find_entry(info, &to);
        if (!info->hdr.len) break;
        at += info->hdr.len;
    }
    if (is_ours(event->pid)) {
        if (to.there && fixed(to.path)) mark_file(fixed(to.path));
        return;
    }
    if (event->mask & FAN_CREATE && to.there && !to.whiteout) came(to.path, event->pid);
    if (event->mask & FAN_DELETE && to.there) went(to.path, event->pid, directory);
    if (!(event->mask & FAN_RENAME)) return;
    if (from.there) went(from.path, event->pid, directory);
    if (!to.there) return;
    if (to.whiteout) went(to.path, event->pid, false);
    else if (from.there || !*below) came(to.path, event->pid);
    else if (fixed(to.path)) mark_file(fixed(to.path));
}

/* --- the loop ---------------------------------------------------------------------------------------------------------------------- */

static int drain(int group) {
    static uint8_t buffer[65536] __attribute__((aligned(8)));
    ssize_t size = read(group, buffer, sizeof buffer);
    if (size < 0) return errno == EAGAIN || errno == EINTR ? 0 : -errno;
    const struct fanotify_event_metadata *event = (const void *)buffer;
    for (; FAN_EVENT_OK(event, size); event = FAN_EVENT_NEXT(event, size)) {
        if (event->mask & FAN_Q_OVERFLOW) tell(LOOK_LOST, "", 0);
        else if (group == names) name_event(event);
        else file_event(event, group == wide);
        if (event->fd >= 0) close(event->fd);
    }
    return 0;
}

/* The file system that the overlay writes to, mounted once more, nowhere; in a machine without layers the root. */
static int open_place(void) {
    char device[80];
    if (guest.service || !vm_find_disk("disk", device, sizeof device)) return open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int made = (int)syscall(SYS_fsopen, "ext4", 1 /* FSOPEN_CLOEXEC */);
    if (made < 0) return -1;
    int mounted = -1;
    if (syscall(SYS_fsconfig, made, FSCONFIG_SET_STRING, "source", device, 0) == 0 && syscall(SYS_fsconfig, made, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0) {
        mounted = (int)syscall(SYS_fsmount, made, 1 /* FSMOUNT_CLOEXEC */, 0);
    }
    close(made);
    if (mounted < 0) return -1;
    int opened = openat(mounted, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* what leads to a mount is no file, by which handles are opened */
    close(mounted);
    below = UPPER;
    return opened;
}

static int group_of(unsigned more, uint64_t mask, int at, const char *path) {
    int group = (int)syscall(SYS_fanotify_init, FAN_CLOEXEC | FAN_NONBLOCK | FAN_UNLIMITED_MARKS | more, O_RDONLY | O_CLOEXEC | O_LARGEFILE);
    if (group >= 0 && mark(group, FAN_MARK_FILESYSTEM, mask, at, path)) {
        close(group);
        return -1;
    }
    return group;
}

void look_out(const struct request *request, int report) {
    wanted = request->argv;
    self = getpid();
    for (char *const *each = wanted; *each; each++) {
        if (!strchr("Frwms", **each) || (*each)[1] != '/') child_fail(report, STAGE_LOOK, EINVAL);
    }
    if (stat("/proc/self/exe", &own)) child_fail(report, STAGE_LOOK, errno);
    exact = group_of(0, FAN_OPEN_EXEC, AT_FDCWD, "/");
    if (exact < 0) child_fail(report, STAGE_LOOK, errno);
    uint64_t everything = (any('w') ? WRITTEN : 0) | (any('r') ? FAN_OPEN : 0);
    if (everything && (wide = group_of(0, everything, AT_FDCWD, "/")) < 0) child_fail(report, STAGE_LOOK, errno);
    if (any('w') || any('m') || any('F')) {
        place = open_place();
        if (place >= 0) names = group_of(FAN_REPORT_DFID_NAME, FAN_CREATE | FAN_DELETE | FAN_RENAME | FAN_ONDIR, place, ".");
        if (names < 0) child_fail(report, STAGE_LOOK, errno);
    }
    for (char *const *each = wanted; *each; each++) {
        if (**each == 'F') mark_file(*each + 1);
    }
    tell(LOOK_READY, "", 0);
    struct pollfd groups[] = {{exact, POLLIN, 0}, {wide, POLLIN, 0}, {names, POLLIN, 0}, {1, 0, 0}};
    while (poll(groups, 4, -1) >= 0 || errno == EINTR) {
        if (groups[3].revents) break; /* nobody reads any more */
        for (int i = 0; i < 3; i++) {
            if (groups[i].revents && drain(groups[i].fd)) _exit(1);
        }
    }
    _exit(0);
}
