/* Directory entries, and walks over trees: list and remove. A walk never follows a symbolic link: it holds a descriptor per level and
 * opens each directory by its name in the one above, so that a tree that changes under it can't lead it elsewhere. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "bytes.h"
#include "guest.h"

#define MOST_LEVELS 512
#define MOST_SHOWN 65535

static uint8_t out[65536];
static size_t out_size;

void tree_flush(void) {
    put_all(1, out, out_size);
    out_size = 0;
}

void tree_emit(const void *data, size_t size) {
    const uint8_t *at = data;
    while (size) {
        if (out_size == sizeof out) tree_flush();
        size_t part = MIN(size, sizeof out - out_size);
        memcpy(out + out_size, at, part);
        out_size += part;
        at += part;
        size -= part;
    }
}

static char letter(mode_t mode) {
    switch (mode & S_IFMT) {
    case S_IFDIR: return 'd';
    case S_IFLNK: return 'l';
    case S_IFIFO: return 'p';
    case S_IFSOCK: return 's';
    case S_IFCHR: return 'c';
    case S_IFBLK: return 'b';
    default: return 'f';
    }
}

/* Emits `name` in `dir` (or `dir` itself where the name is empty) under the name `shown`. One that vanished meanwhile is left out. */
void tree_entry(int dir, const char *name, const char *shown, size_t shown_size) {
    static char target[65536];
    uint8_t entry[DSEC_ENTRY_SIZE] = {0};
    struct stat status;
    ssize_t target_size = 0;
    if (fstatat(dir, name, &status, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH)) {
        if (errno == ENOENT && *name) return;
        file_fail(errno, "cannot look at an entry");
    }
    if (S_ISLNK(status.st_mode)) target_size = readlinkat(dir, name, target, sizeof target - 1);
    if (target_size < 0) target_size = 0;
    entry[0] = (uint8_t)letter(status.st_mode);
    put_u16(entry + 2, (uint16_t)shown_size);
    put_u16(entry + 4, (uint16_t)target_size);
    put_u32(entry + 8, status.st_mode & 07777);
    put_u32(entry + 12, status.st_uid);
    put_u32(entry + 16, status.st_gid);
    put_u32(entry + 20, (uint32_t)status.st_nlink);
    put_u64(entry + 24, (uint64_t)status.st_size);
    put_u64(entry + 32, (uint64_t)((int64_t)status.st_mtim.tv_sec * (int64_t)NANOSECONDS + status.st_mtim.tv_nsec));
    tree_emit(entry, sizeof entry);
    tree_emit(shown, shown_size);
    tree_emit(target, (size_t)target_size);
}

/* --- levels ------------------------------------------------------------------------------------------------------------------------ */

struct level {
    int fd;
    long at, size; /* of the entries in `buffer` */
    size_t prefix; /* of the path before this level's names */
    char *name;    /* in the level above; to remove it */
    char buffer[8192];
};

static struct level *levels[MOST_LEVELS];
static size_t level_count;

static void enter(int fd, size_t prefix, const char *name) {
    if (level_count == MOST_LEVELS) file_fail(ELOOP, "the tree is too deep");
    struct level *level = malloc(sizeof *level);
    if (!level) file_fail(ENOMEM, "out of memory");
    level->fd = fd;
    level->at = level->size = 0;
    level->prefix = prefix;
    level->name = strdup(name);
    levels[level_count++] = level;
}

static void leave(void) {
    struct level *level = levels[--level_count];
    close(level->fd);
    free(level->name);
    free(level);
}

/* The next entry but "." and "..", or NULL at the end. */
static const struct dirent64 *next_entry(struct level *level) {
    for (;;) {
        if (level->at >= level->size) {
            level->size = syscall(SYS_getdents64, level->fd, level->buffer, sizeof level->buffer);
            level->at = 0;
            if (level->size < 0 && errno != ENOENT) file_fail(errno, "cannot list a directory");
            if (level->size <= 0) return NULL;
        }
        const struct dirent64 *entry = (const void *)(level->buffer + level->at);
        level->at += entry->d_reclen;
        const char *name = entry->d_name;
        if (name[0] != '.' || (name[1] && (name[1] != '.' || name[2]))) return entry;
    }
}

static int open_level(int dir, const char *name) {
    return openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
}

/* `dir` becomes the walk's. Directories that can't be opened are shown, but not what is in them. */
void tree_list(int dir, uint64_t depth) {
    static char path[MOST_SHOWN + 1];
    if (depth == 0) return;
    enter(dir, 0, "");
    while (level_count) {
        struct level *level = levels[level_count - 1];
        const struct dirent64 *entry = next_entry(level);
        if (!entry) {
            leave();
            continue;
        }
        size_t size = strlen(entry->d_name);
        if (level->prefix + size + 1 > MOST_SHOWN) file_fail(ENAMETOOLONG, "a path in the tree is too long");
        memcpy(path + level->prefix, entry->d_name, size);
        tree_entry(level->fd, entry->d_name, path, level->prefix + size);
        bool maybe_directory = entry->d_type == DT_DIR || entry->d_type == DT_UNKNOWN;
        if (!maybe_directory || level_count >= depth) continue;
        int fd = open_level(level->fd, entry->d_name);
        if (fd < 0) continue;
        if (is_procfs(fd)) {
            close(fd);
            continue;
        }
        path[level->prefix + size] = '/';
        enter(fd, level->prefix + size + 1, entry->d_name);
    }
}

/* Removes the directory `name` in `dir` and everything in it. */
void tree_remove(int dir, const char *name) {
    int fd = open_level(dir, name);
    if (fd < 0) file_fail(errno, "cannot open the directory");
    refuse_procfs(fd);
    enter(fd, 0, name);
    while (level_count) {
        struct level *level = levels[level_count - 1];
        const struct dirent64 *entry = next_entry(level);
        if (!entry) {
            int above = level_count > 1 ? levels[level_count - 2]->fd : dir;
            if (unlinkat(above, level->name, AT_REMOVEDIR)) {
                /* Whether a directory's listing shows what was added behind its back is up to the file system. */
                if (errno != ENOENT) file_fail(errno, "cannot remove a directory");
            }
            leave();
            continue;
        }
        if (unlinkat(level->fd, entry->d_name, 0) == 0 || errno == ENOENT) continue;
        if (errno != EISDIR && errno != EPERM) file_fail(errno, "cannot remove an entry");
        int error = errno;
        fd = open_level(level->fd, entry->d_name);
        if (fd < 0) file_fail(errno == ENOTDIR ? error : errno, "cannot open a directory in the tree");
        enter(fd, 0, entry->d_name);
    }
}
