/* File calls: read, write, stat, move, mkdir, and the beginnings of list and remove (tree.c). Runs in a forked child that is the named
 * user and has nothing of the guest's but its three streams and the report pipe; so the kernel decides what is allowed. Paths are
 * resolved without /proc's magic links, and nothing on procfs is touched. Devices, FIFOs and sockets are refused before they are
 * opened: opening one can block or act. */
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "guest.h"
#include "libc.h"

#define MOST_LINKS 40 /* as the kernel has it */
#define MOST_PATH 4096
#define PIECE 65536
#define MOVED (1u << 20)

static int report_fd;
static int temporary_dir = -1; /* with `temporary`: what is to be removed if the call fails or is ended */
static char temporary[32];
static uint8_t piece[PIECE];

static void remove_temporary(void) {
    if (temporary_dir >= 0) unlinkat(temporary_dir, temporary, 0);
    temporary_dir = -1;
}

void file_fail(int error, const char *what) {
    remove_temporary();
    put_all(2, what, strlen(what));
    put_all(2, "\n", 1);
    child_fail(report_fd, STAGE_FILE, error);
}

static void on_terminate(int signal) {
    remove_temporary();
    _exit(128 + signal);
}

void put_all(int fd, const void *data, size_t size) {
    const uint8_t *at = data;
    while (size) {
        ssize_t put = write(fd, at, size);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0 && fd > 2) file_fail(errno, "cannot write");
        if (put < 0) _exit(1); /* the guest is gone */
        at += put;
        size -= (size_t)put;
    }
}

/* At most `most` bytes from one to the other, one of which is a pipe, without copying them here; as many as were moved: less where the end
 * was reached, or they can't be moved so, which whoever copies what is left finds out. */
static uint64_t move_all(int from, int to, uint64_t most) {
    uint64_t moved = 0;
    while (moved < most) {
        ssize_t got = splice(from, NULL, to, NULL, MIN(most - moved, MOVED), 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        moved += (uint64_t)got;
    }
    return moved;
}

/* --- paths ------------------------------------------------------------------------------------------------------------------------- */

static int try_open(int dir, const char *path, uint64_t flags, uint64_t mode) {
    struct open_how how = {.flags = flags | O_CLOEXEC, .mode = mode, .resolve = RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, dir, path, &how, sizeof how);
}

int open_path(int dir, const char *path, uint64_t flags) {
    int fd = try_open(dir, path, flags, 0);
    if (fd < 0) file_fail(errno, "cannot open the path");
    return fd;
}

bool is_procfs(int fd) {
    struct statfs file_system;
    return fstatfs(fd, &file_system) == 0 && file_system.f_type == PROC_SUPER_MAGIC;
}

void refuse_procfs(int fd) {
    if (is_procfs(fd)) file_fail(EACCES, "file calls don't go into /proc");
}

/* Splits off the last component: *directory is what is before it ("." or "/" where there is nothing). Slashes at the end are dropped.
 * False where there is no such component ("/", "..", "a/."). */
static bool split_path(const char *path, char directory[MOST_PATH], char name[256], bool *slash_at_end) {
    size_t end = strlen(path);
    *slash_at_end = end && path[end - 1] == '/';
    while (end && path[end - 1] == '/') end--;
    size_t start = end;
    while (start && path[start - 1] != '/') start--;
    size_t size = end - start;
    if (size > 255 || start >= MOST_PATH) file_fail(ENAMETOOLONG, "the path is too long");
    memcpy(name, path + start, size);
    name[size] = 0;
    memcpy(directory, path, start);
    directory[start] = 0;
    if (start == 0) memcpy(directory, ".", 2);
    return size && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

void place_of(const char *path, struct place *place) {
    char directory[MOST_PATH];
    bool slash;
    if (!split_path(path, directory, place->name, &slash)) file_fail(EBUSY, "the path doesn't name an entry of a directory");
    place->dir = open_path(AT_FDCWD, directory, O_PATH | O_DIRECTORY);
    refuse_procfs(place->dir);
}

/* Where a write to `path` ends up: as place_of, but a symbolic link at the end is followed, as a shell's redirection would. */
static void place_followed(const char *path, struct place *place, bool follow) {
    char directory[MOST_PATH], target[MOST_PATH];
    int at = AT_FDCWD;
    for (int links = 0;; links++) {
        bool slash, named = split_path(path, directory, place->name, &slash);
        if (!named || slash) file_fail(EISDIR, "the path names a directory");
        place->dir = open_path(at, directory, O_PATH | O_DIRECTORY);
        refuse_procfs(place->dir);
        if (!follow) return;
        ssize_t size = readlinkat(place->dir, place->name, target, sizeof target - 1);
        if (size < 0) return; /* no link: a file, nothing, or an error that opening is going to tell */
        if (links == MOST_LINKS) file_fail(ELOOP, "too many symbolic links");
        target[size] = 0;
        at = place->dir;
        path = target;
    }
}

/* Makes the directories on the way to the last component of `path`, or to all of it. */
static void make_parents(const char *path, bool all) {
    char part[MOST_PATH];
    size_t size = strlen(path);
    if (size >= sizeof part) file_fail(ENAMETOOLONG, "the path is too long");
    memcpy(part, path, size + 1);
    while (size > 1 && part[size - 1] == '/') part[--size] = 0;
    for (size_t i = 1; i <= size; i++) {
        if (part[i] != '/' && !(all && i == size)) continue;
        part[i] = 0;
        if (mkdir(part, 0755) && errno != EEXIST && errno != EROFS && errno != EACCES) file_fail(errno, "cannot make a directory");
        if (i < size) part[i] = '/';
    }
}

static void refuse_special(const struct stat *status) {
    if (S_ISDIR(status->st_mode)) file_fail(EISDIR, "the path names a directory");
    if (!S_ISREG(status->st_mode)) file_fail(EINVAL, "not a regular file: devices, FIFOs and sockets are neither read nor written");
}

/* --- the calls ------------------------------------------------------------------------------------------------------------------- */

static void do_read(const struct request *request) {
    struct stat status;
    int path = open_path(AT_FDCWD, request->path, O_PATH);
    refuse_procfs(path);
    if (fstat(path, &status)) file_fail(errno, "cannot look at the file");
    refuse_special(&status);
    close(path);
    int fd = open_path(AT_FDCWD, request->path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (fstat(fd, &status)) file_fail(errno, "cannot look at the file");
    refuse_special(&status); /* it may be another one by now */
    refuse_procfs(fd);
    uint64_t left = SEEN(request, TAG_LENGTH) ? request->length : UINT64_MAX;
    if (request->offset && lseek(fd, (off_t)request->offset, SEEK_SET) < 0) file_fail(errno, "cannot seek");
    if (status.st_size > PIECE) left -= move_all(fd, 1, left);
    while (left) {
        ssize_t got = read(fd, piece, MIN(left, sizeof piece));
        if (got < 0) file_fail(errno, "cannot read");
        if (got == 0) break;
        put_all(1, piece, (size_t)got);
        left -= (uint64_t)got;
    }
}

/* Streams stdin into `fd` until its end. */
static void take_input(int fd) {
    move_all(0, fd, UINT64_MAX);
    for (;;) {
        ssize_t got = read(0, piece, sizeof piece);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) file_fail(errno, "cannot read the data");
        if (got == 0) return;
        put_all(fd, piece, (size_t)got);
    }
}

static void do_append(const struct request *request) {
    struct stat status;
    struct place place;
    uint64_t excl = request->file_flags & FF_EXCL ? O_EXCL : 0;
    place_followed(request->path, &place, !excl);
    if (fstatat(place.dir, place.name, &status, AT_SYMLINK_NOFOLLOW) == 0 && !excl) refuse_special(&status);
    uint64_t mode = SEEN(request, TAG_MODE) ? request->mode : 0644;
    int fd = try_open(place.dir, place.name, O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW | excl, mode);
    if (fd < 0) file_fail(errno, "cannot open the file");
    if (fstat(fd, &status)) file_fail(errno, "cannot look at the file");
    refuse_special(&status);
    take_input(fd);
}

bool is_temporary(const char *name, bool *fresh) {
    if (strncmp(name, ".dsec-", 6) != 0 || strlen(name) != 30 || strspn(name + 7, "0123456789abcdef") != 23) return false;
    *fresh = name[6] == 'n';
    return *fresh || name[6] == 'o';
}

static int make_temporary(int dir, bool fresh) {
    static const char DIGITS[] = "0123456789abcdef";
    uint8_t random[12];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) file_fail(errno, "no random numbers");
    memcpy(temporary, ".dsec-", 6);
    for (size_t i = 0; i < sizeof random; i++) {
        temporary[6 + 2 * i] = DIGITS[random[i] >> 4];
        temporary[7 + 2 * i] = DIGITS[random[i] & 15];
    }
    temporary[6] = fresh ? 'n' : 'o'; /* for whoever watches: see inotify.c */
    temporary_dir = dir; /* before it is there: a signal may come between */
    int fd = openat(dir, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd >= 0) return fd;
    temporary_dir = -1;
    file_fail(errno, "cannot make a temporary file in the directory, which an atomic write needs");
}

static void do_write(const struct request *request) {
    struct stat old, made;
    struct place place;
    bool excl = request->file_flags & FF_EXCL;
    if (request->file_flags & FF_PARENTS) make_parents(request->path, false);
    if (request->file_flags & FF_APPEND) {
        do_append(request);
        return;
    }
    place_followed(request->path, &place, !excl);
    bool exists = fstatat(place.dir, place.name, &old, AT_SYMLINK_NOFOLLOW) == 0;
    if (!exists && errno != ENOENT) file_fail(errno, "cannot look at the file");
    if (exists && excl) file_fail(EEXIST, "the file exists");
    if (exists) {
        refuse_special(&old);
        /* Replacing asks for a writable directory only; a shell's redirection asks for a writable file. */
        if (faccessat(place.dir, place.name, W_OK, AT_EACCESS)) file_fail(errno, "the file is not writable");
    }
    int fd = make_temporary(place.dir, !exists);
    take_input(fd);
    if (exists && fstat(fd, &made) == 0 && (made.st_uid != old.st_uid || made.st_gid != old.st_gid)) {
        if (fchown(fd, old.st_uid, old.st_gid)) { /* only root can keep the owner */
        }
    }
    mode_t mode = SEEN(request, TAG_MODE) ? (mode_t)request->mode : exists ? old.st_mode & 07777 : 0644;
    if (fchmod(fd, mode)) file_fail(errno, "cannot set the mode");
    if (close(fd)) file_fail(errno, "cannot write");
    if (x_renameat2(place.dir, temporary, place.dir, place.name, excl ? RENAME_NOREPLACE : 0)) file_fail(errno, "cannot put the file in place");
    temporary_dir = -1;
}

static void do_stat(const struct request *request) {
    struct place place;
    char directory[MOST_PATH];
    bool slash, follow = request->file_flags & FF_FOLLOW;
    if (!split_path(request->path, directory, place.name, &slash) && request->path[0] == '/' && !*place.name) memcpy(place.name, "/", 2);
    int fd = open_path(AT_FDCWD, request->path, (uint64_t)O_PATH | (follow ? 0 : O_NOFOLLOW));
    refuse_procfs(fd);
    tree_entry(fd, "", place.name, strlen(place.name));
    tree_flush();
}

static void do_move(const struct request *request) {
    struct place from, to;
    place_of(request->path, &from);
    place_of(request->path2, &to);
    unsigned flags = request->file_flags & FF_EXCL ? RENAME_NOREPLACE : 0;
    if (x_renameat2(from.dir, from.name, to.dir, to.name, flags)) file_fail(errno, "cannot move");
}

static void do_mkdir(const struct request *request) {
    struct place place;
    struct stat status;
    bool parents = request->file_flags & FF_PARENTS;
    mode_t mode = SEEN(request, TAG_MODE) ? (mode_t)request->mode : 0755;
    if (parents) {
        int there = try_open(AT_FDCWD, request->path, O_PATH | O_DIRECTORY, 0);
        if (there >= 0) {
            refuse_procfs(there);
            return;
        }
        make_parents(request->path, false);
    }
    place_of(request->path, &place);
    umask(0);
    if (mkdirat(place.dir, place.name, mode) == 0) {
        if (mode & 07000 && fchmodat(place.dir, place.name, mode, 0)) file_fail(errno, "cannot set the mode");
        return;
    }
    int error = errno;
    bool there = error == EEXIST && fstatat(place.dir, place.name, &status, 0) == 0 && S_ISDIR(status.st_mode);
    if (!there || !parents) file_fail(error, "cannot make the directory");
}

static void do_list(const struct request *request) {
    int fd = open_path(AT_FDCWD, request->path, O_RDONLY | O_DIRECTORY | O_NONBLOCK);
    refuse_procfs(fd);
    tree_list(fd, SEEN(request, TAG_DEPTH) ? request->depth : 1);
    tree_flush();
}

static void do_remove(const struct request *request) {
    struct place place;
    place_of(request->path, &place);
    if (unlinkat(place.dir, place.name, 0) == 0) return;
    if (errno != EISDIR && errno != EPERM) file_fail(errno, "cannot remove");
    if (unlinkat(place.dir, place.name, AT_REMOVEDIR) == 0) return;
    bool full = errno == ENOTEMPTY || errno == EEXIST;
    if (!full || !(request->file_flags & FF_RECURSIVE)) file_fail(errno, "cannot remove the directory");
    tree_remove(place.dir, place.name);
}

void file_call(const struct request *request, int report) {
    static void (*const CALLS[])(const struct request *) = {
        [DSEC_READ] = do_read, [DSEC_WRITE] = do_write,   [DSEC_STAT] = do_stat,  [DSEC_LIST] = do_list,
        [DSEC_MOVE] = do_move, [DSEC_REMOVE] = do_remove, [DSEC_MKDIR] = do_mkdir, [DSEC_WATCH] = watch_tree,
    };
    sigset_t none;
    report_fd = report;
    struct sigaction terminate = {.sa_handler = on_terminate};
    sigaction(SIGTERM, &terminate, NULL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (request->kind == DSEC_CONNECT) connect_and_pump(request, report);
    else if (request->kind == DSEC_WAY_OUT) serve_way_out(report);
    else if (request->kind == DSEC_LOOK) look_out(request, report);
    else CALLS[request->kind](request);
    _exit(0);
}
