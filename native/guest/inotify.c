/* WATCH: what happens in a directory, or in the whole tree below it, as event records on stdout. Runs in a forked child, as the user.
 *
 * A directory is watched first and listed then, so that nothing falls between. What is in a directory that appears later is told as
 * created, since it may have come before the watch did. Directories are opened below PATH without following symbolic links; no
 * descriptor of PATH stays open meanwhile, because the kernel reports a directory's removal when its last user has gone. Watches are
 * known by the kernel's number (`wd`), which goes with the directory; their paths follow what is renamed.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "bytes.h"
#include "guest.h"

#define MASK (IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF)
#define BUCKETS 1024
#define MOST_PATH 4096
#define PAIR_MS 20 /* how long the other half of a rename may take */

struct directory {
    struct directory *next; /* in its bucket */
    int wd;
    char path[]; /* below PATH; empty: PATH itself */
};

static struct directory *buckets[BUCKETS];
static unsigned count;
static int inotify, root_wd = -1;
static const char *root_path;
static struct stat root;
static bool recursive;

static char **pending; /* paths of directories that are still to be followed */
static size_t pending_count, pending_capacity;

/* --- the table ------------------------------------------------------------------------------------------------------------------- */

static struct directory **slot_of(int wd) {
    struct directory **at = &buckets[(unsigned)wd % BUCKETS];
    while (*at && (*at)->wd != wd) at = &(*at)->next;
    return at;
}

static void forget(int wd) {
    struct directory **at = slot_of(wd), *found = *at;
    if (!found) return;
    *at = found->next;
    free(found);
    count--;
}

static void remember(int wd, const char *path) {
    forget(wd);
    if (count >= DSEC_MAX_WATCHES) file_fail(ENOSPC, "too many directories to watch");
    size_t size = strlen(path) + 1;
    struct directory *made = malloc(sizeof *made + size);
    if (!made) file_fail(ENOMEM, "out of memory");
    made->wd = wd;
    memcpy(made->path, path, size);
    made->next = buckets[(unsigned)wd % BUCKETS];
    buckets[(unsigned)wd % BUCKETS] = made;
    count++;
}

/* Whether `path` is `top` or below it. */
static bool within(const char *path, const char *top) {
    size_t size = strlen(top);
    return strncmp(path, top, size) == 0 && (path[size] == 0 || path[size] == '/');
}

/* The directories at and below `from` are at and below `to` now; NULL: out of the tree. */
static void relocate(const char *from, const char *to) {
    size_t found = 0;
    int *wds = malloc((count + 1) * sizeof *wds);
    if (!wds) file_fail(ENOMEM, "out of memory");
    for (size_t i = 0; i < BUCKETS; i++) {
        for (const struct directory *each = buckets[i]; each; each = each->next) {
            if (within(each->path, from)) wds[found++] = each->wd;
        }
    }
    for (size_t i = 0; i < found; i++) {
        char path[2 * MOST_PATH];
        if (to) {
            size_t size = strlen(to);
            memcpy(path, to, size);
            strcpy(path + size, (*slot_of(wds[i]))->path + strlen(from));
            if (strlen(path) >= MOST_PATH) file_fail(ENAMETOOLONG, "a path in the tree is too long");
            remember(wds[i], path);
        } else {
            inotify_rm_watch(inotify, wds[i]);
            forget(wds[i]);
        }
    }
    free(wds);
}

/* --- telling --------------------------------------------------------------------------------------------------------------------- */

static void tell(char kind, bool directory, const char *path, const char *before) {
    uint8_t head[DSEC_EVENT_SIZE] = {(uint8_t)kind, directory};
    size_t size = strlen(path), before_size = before ? strlen(before) : 0;
    put_u16(head + 2, (uint16_t)size);
    put_u16(head + 4, (uint16_t)before_size);
    tree_emit(head, sizeof head);
    tree_emit(path, size);
    if (before_size) tree_emit(before, before_size);
}

static _Noreturn void gone(void) {
    tell('r', true, "", NULL);
    tree_flush();
    _exit(0);
}

/* `name` in a directory, as a path. */
static void join(char path[MOST_PATH], const char *directory, const char *name) {
    size_t size = strlen(directory), name_size = strlen(name);
    if (size + name_size + 2 > MOST_PATH) file_fail(ENAMETOOLONG, "a path in the tree is too long");
    memcpy(path, directory, size);
    if (size) path[size++] = '/';
    memcpy(path + size, name, name_size + 1);
}

/* --- following ------------------------------------------------------------------------------------------------------------------- */

static void follow_later(const char *path) {
    if (pending_count == pending_capacity) {
        pending_capacity = pending_capacity ? pending_capacity * 2 : 64;
        pending = realloc(pending, pending_capacity * sizeof *pending);
        if (!pending) file_fail(ENOMEM, "out of memory");
    }
    if (pending_count + count > 2 * DSEC_MAX_WATCHES) file_fail(ENOSPC, "too many directories to watch");
    if (!(pending[pending_count++] = strdup(path))) file_fail(ENOMEM, "out of memory");
}

static int open_root(void) {
    struct stat status;
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, root_path,
                          &(struct open_how){.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS}, sizeof(struct open_how));
    if (fd < 0 && root_wd < 0) file_fail(errno, "cannot open the directory");
    if (fd < 0 || fstat(fd, &status)) gone();
    if (root_wd < 0) root = status;
    if (status.st_ino != root.st_ino || status.st_dev != root.st_dev) gone();
    return fd;
}

static int open_below(int top, const char *path) {
    struct open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC, .resolve = RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH};
    return (int)syscall(SYS_openat2, top, *path ? path : ".", &how, sizeof how);
}

/* Watches one directory. What is in it is told as created where `announce` says so and it wasn't watched before. */
static void follow_one(int top, const char *path, bool announce) {
    char buffer[8192], name[MOST_PATH];
    int fd = open_below(top, path);
    bool first = root_wd < 0;
    if (fd < 0 && first) file_fail(errno, "cannot open the directory");
    if (fd < 0) return; /* gone again, or not for this user to read */
    if (first) refuse_procfs(fd);
    errno = EACCES;
    int wd = is_procfs(fd) || fchdir(fd) ? -1 : inotify_add_watch(inotify, ".", MASK | IN_ONLYDIR | IN_EXCL_UNLINK);
    if (wd < 0 && (errno == ENOSPC || first)) file_fail(errno, "cannot watch the directory");
    if (wd < 0) {
        close(fd);
        return;
    }
    if (first) root_wd = wd;
    announce &= !*slot_of(wd);
    remember(wd, path);
    long got;
    while ((recursive || announce) && (got = syscall(SYS_getdents64, fd, buffer, sizeof buffer)) > 0) {
        for (long at = 0; at < got;) {
            const struct dirent64 *entry = (const void *)(buffer + at);
            struct stat status;
            bool fresh, directory = entry->d_type == DT_DIR;
            at += entry->d_reclen;
            if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 || is_temporary(entry->d_name, &fresh)) continue;
            if (entry->d_type == DT_UNKNOWN) {
                directory = fstatat(fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(status.st_mode);
            }
            if (!directory && !announce) continue;
            join(name, path, entry->d_name);
            if (announce) tell('c', directory, name, NULL);
            if (directory && recursive) follow_later(name);
        }
    }
    close(fd);
}

static void follow(const char *path, bool announce) {
    int top = open_root();
    follow_later(path);
    while (pending_count) {
        char *next = pending[--pending_count];
        follow_one(top, next, announce);
        free(next);
    }
    if (chdir("/")) _exit(1); /* a working directory would keep PATH from going, too */
    close(top);
}

/* --- events ---------------------------------------------------------------------------------------------------------------------- */

static _Alignas(struct inotify_event) char events[128 << 10];
static size_t events_at, events_end;

static bool read_events(int patience_ms) {
    struct pollfd wait = {inotify, POLLIN, 0};
    if (events_at) { /* room behind them */
        memmove(events, events + events_at, events_end - events_at);
        events_end -= events_at;
        events_at = 0;
    }
    if (sizeof events - events_end < 4096) return false;
    if (poll(&wait, 1, patience_ms) <= 0) return false;
    ssize_t got = read(inotify, events + events_end, sizeof events - events_end);
    if (got > 0) events_end += (size_t)got;
    return got > 0;
}

static struct inotify_event *event_at(size_t at) { return (void *)(events + at); }

static size_t after(size_t at) { return at + sizeof(struct inotify_event) + event_at(at)->len; }

/* Where a thing went: a directory and a name in it, which is taken out of the queue. False: out of the tree. */
static bool other_half(uint32_t cookie, const struct directory **to, char name[256]) {
    size_t looked = after(events_at);
    for (int round = 0; round < 2; round++) {
        for (; looked < events_end; looked = after(looked)) {
            struct inotify_event *event = event_at(looked);
            if (!(event->mask & IN_MOVED_TO) || event->cookie != cookie) continue;
            *to = *slot_of(event->wd);
            strncpy(name, event->name, 255);
            name[255] = 0;
            event->mask = 0;
            return *to != NULL;
        }
        looked -= events_at;
        if (round == 0 && !read_events(PAIR_MS)) return false;
    }
    return false;
}

static uint32_t late; /* the cookie of a WRITE's file whose other half hasn't come in time: whoever writes hasn't had the CPU since */
static bool late_fresh;

/* A WRITE puts its file in place. */
static void written(const char *path, bool fresh) {
    if (fresh) tell('c', false, path, NULL);
    tell('w', false, path, NULL);
}

static void moved(const struct directory *from, const char *name, bool directory, uint32_t cookie) {
    char before[MOST_PATH], path[MOST_PATH], to_name[256];
    const struct directory *to;
    bool fresh, temporary = is_temporary(name, &fresh), hidden;
    join(before, from->path, name);
    if (!other_half(cookie, &to, to_name)) {
        if (temporary) {
            late = cookie;
            late_fresh = fresh;
            return;
        }
        tell('r', directory, before, NULL);
        if (directory) relocate(before, NULL);
        return;
    }
    join(path, to->path, to_name);
    if (temporary) {
        written(path, fresh);
    } else if (is_temporary(to_name, &hidden)) {
        tell('r', directory, before, NULL);
    } else {
        tell('m', directory, path, before);
        if (directory && recursive) {
            relocate(before, path);
            follow(path, true); /* what was made in it meanwhile, under a path that we didn't know */
        }
    }
}

static void handle(const struct inotify_event *event) {
    char path[MOST_PATH];
    bool directory = event->mask & IN_ISDIR, fresh;
    if (event->mask & IN_Q_OVERFLOW) {
        tell('o', false, "", NULL);
        if (recursive) follow("", true);
        return;
    }
    const struct directory *in = *slot_of(event->wd);
    if (!in) return;
    if (event->wd == root_wd && event->mask & (IN_DELETE_SELF | IN_MOVE_SELF | IN_UNMOUNT | IN_IGNORED)) gone();
    if (event->mask & IN_IGNORED) {
        forget(event->wd);
        return;
    }
    if (event->len == 0) { /* about itself; what is below PATH is told by the directory above */
        if (event->wd == root_wd && event->mask & IN_ATTRIB) tell('a', true, "", NULL);
        return;
    }
    if (event->mask & IN_MOVED_FROM) {
        moved(in, event->name, directory, event->cookie);
        return;
    }
    if (is_temporary(event->name, &fresh)) return;
    join(path, in->path, event->name);
    if (event->mask & IN_MOVED_TO && late && event->cookie == late) {
        late = 0;
        written(path, late_fresh);
    } else if (event->mask & (IN_CREATE | IN_MOVED_TO)) {
        tell('c', directory, path, NULL);
        if (directory && recursive) follow(path, true);
    } else if (event->mask & IN_DELETE) {
        tell('r', directory, path, NULL);
    } else if (event->mask & (IN_MODIFY | IN_ATTRIB)) {
        tell(event->mask & IN_MODIFY ? 'w' : 'a', directory, path, NULL);
    }
}

void watch_tree(const struct request *request) {
    recursive = request->file_flags & FF_RECURSIVE;
    root_path = request->path;
    if (chdir("/")) file_fail(errno, "cannot enter the root");
    inotify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (inotify < 0) file_fail(errno, "the sandbox has no room for another watch");
    follow("", false);
    tell('b', false, "", NULL);
    for (;;) {
        tree_flush();
        if (!read_events(-1)) continue;
        while (events_at < events_end) {
            size_t size = after(events_at) - events_at;
            handle(event_at(events_at));
            events_at += size;
        }
        events_at = events_end = 0;
    }
}
