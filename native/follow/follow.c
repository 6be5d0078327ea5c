/* Reads large files of a lazy layer into the page cache while their data arrives: `src/dsec/store/lazy/large.py` says why, and calls it. In C because it
 * looks at hundreds of names while a sandbox starts: in Python each call of the system would pass the interpreter's lock around. Loaded into the server. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/openat2.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096u /* of a bit */
#define CHUNK (256u << 10)

/* Of the caller's, for as long as the call lasts. */
struct follow {
    int root;            /* the layer's, as it is mounted */
    int bits;            /* of what is filled: a file */
    const char *names;   /* each with its NUL */
    uint32_t count, at_once; /* so many of the first are read at once */
    uint64_t least, most; /* bytes of a file: smaller ones and larger ones than `least` and `most` are left alone */
    uint32_t soon_ms, soon_every_us, watch_ms, every_us;
    const int *stop; /* not 0: come back */
};

struct large {
    const char *name;
    uint64_t offset, size; /* in the layer's data */
    uint64_t read;         /* of it */
    int fd;                /* -1: not begun */
};

static bool stopped(const struct follow *f) {
    return __atomic_load_n(f->stop, __ATOMIC_RELAXED);
}

/* As who has `root` for its root directory would: no link leads out of it. */
static int open_inside(int root, const char *name) {
    struct open_how how = {.flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, root, name, &how, sizeof how);
}

/* Where a file's data lies, if it is a large one. Whoever made the layer made up the names, and the places. */
static bool look(const struct follow *f, uint64_t data_bytes, const char *name, struct large *found) {
    struct stat st;
    union {
        struct fiemap map;
        char room[sizeof(struct fiemap) + sizeof(struct fiemap_extent)];
    } extents = {.map = {.fm_extent_count = 1}};
    int fd = open_inside(f->root, name);
    if (fd < 0) return false;
    bool good = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (uint64_t)st.st_size >= f->least && (uint64_t)st.st_size <= f->most;
    if (good) {
        extents.map.fm_length = (uint64_t)st.st_size;
        good = ioctl(fd, FS_IOC_FIEMAP, &extents) == 0 && extents.map.fm_mapped_extents;
    }
    close(fd);
    if (!good) return false;
    const struct fiemap_extent *extent = &extents.map.fm_extents[0];
    *found = (struct large){name, extent->fe_physical, extent->fe_length, 0, -1};
    return found->size >= (uint64_t)st.st_size && found->size <= data_bytes && found->offset <= data_bytes - found->size;
}

/* Whether the next piece is there, and the one behind it, which the kernel reads ahead. A chunk's bits are set in order. */
static bool next_is_there(const unsigned char *bits, const struct large *large) {
    for (uint64_t end, at = large->read; at < large->size && at < large->read + 2 * CHUNK; at = end) {
        end = at + CHUNK < large->size ? at + CHUNK : large->size;
        uint64_t block = (large->offset + end - 1) / BLOCK;
        if (!(__atomic_load_n(&bits[block / 8], __ATOMIC_ACQUIRE) >> (block % 8) & 1)) return false;
    }
    return true;
}

/* Read on as far as the data is there. Returns whether the file is done with. */
static bool read_on(const struct follow *f, const unsigned char *bits, struct large *large, char *room, int64_t *total) {
    while (!stopped(f) && next_is_there(bits, large)) {
        if (large->fd < 0) {
            struct stat st;
            large->fd = open_inside(f->root, large->name);
            if (large->fd < 0 || fstat(large->fd, &st) < 0 || !S_ISREG(st.st_mode)) return true;
            posix_fadvise(large->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
        }
        ssize_t got = read(large->fd, room, CHUNK);
        if (got <= 0) return true; /* whoever needs what can't be had hears of it */
        *total += got;
        large->read += CHUNK;
        if (large->read >= large->size) return true;
    }
    return false;
}

/* Whether it comes or not. */
static int64_t read_whole(const struct follow *f, const char *name, char *room) {
    struct stat st;
    int64_t total = 0;
    ssize_t got;
    int fd = open_inside(f->root, name);
    if (fd < 0) return 0;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (uint64_t)st.st_size <= f->most)
        while (!stopped(f) && (got = read(fd, room, CHUNK)) > 0) total += got;
    close(fd);
    return total;
}

static uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static int64_t watch(const struct follow *f, const unsigned char *bits, uint64_t data_bytes, struct large *left, char *room) {
    int64_t total = 0;
    uint32_t count = 0;
    const char *name = f->names;
    for (uint32_t i = 0; i < f->count && !stopped(f); i++, name += strlen(name) + 1) {
        if (i < f->at_once) {
            total += read_whole(f, name, room);
            continue;
        }
        if (!look(f, data_bytes, name, &left[count])) continue;
        uint32_t same = 0;
        while (left[same].offset != left[count].offset) same++;
        if (same == count) count++; /* else it was there, by another name */
    }
    uint64_t passed, start = now_ms();
    while (count && !stopped(f) && (passed = now_ms() - start) < f->watch_ms) {
        uint32_t pause_us = passed < f->soon_ms ? f->soon_every_us : f->every_us;
        for (uint32_t i = 0; i < count;) {
            if (read_on(f, bits, &left[i], room, &total)) {
                if (left[i].fd >= 0) close(left[i].fd);
                left[i] = left[--count];
            } else if (left[i++].fd >= 0) {
                pause_us = f->soon_every_us / 4;
            }
        }
        nanosleep(&(struct timespec){pause_us / 1000000, pause_us % 1000000 * 1000}, NULL);
    }
    for (uint32_t i = 0; i < count; i++)
        if (left[i].fd >= 0) close(left[i].fd);
    return total;
}

/* Returns the bytes that were read. Blocks, for as long as a read may wait after it was stopped. */
int64_t follow(const struct follow *f) {
    struct stat st;
    if (fstat(f->bits, &st) < 0 || st.st_size == 0) return 0;
    void *bits = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, f->bits, 0);
    struct large *left = malloc((f->count + 1) * sizeof *left);
    char *room = malloc(CHUNK);
    int64_t total = bits != MAP_FAILED && left && room ? watch(f, bits, (uint64_t)st.st_size * 8 * BLOCK, left, room) : 0;
    if (bits != MAP_FAILED) munmap(bits, (size_t)st.st_size);
    free(left);
    free(room);
    return total;
}
