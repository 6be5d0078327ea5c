/* Preloaded into the copier by the benchmarks: files of one file system are read as those of a remote store. A thread's reads of a file it has opened, or of
 * another's, are a stream: the first byte comes after the latency, and so does what is read anywhere else than where its last read ended; what follows comes
 * at the rate.
 *
 * DSEC_FAR="LATENCY_NS BYTES_PER_S DIRECTORY": a rate of 0 is none; whatever lies in the file system of the directory. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000ull

struct stream {
    ino_t file; /* 0: none */
    off_t next;
    uint64_t due_ns; /* the last byte's arrival */
};

static _Thread_local struct stream stream;
static uint64_t latency_ns, bytes_per_s;
static dev_t device;

__attribute__((constructor)) static void begin(void) {
    const char *told = getenv("DSEC_FAR");
    struct stat st;
    int at = 0;
    if (!told || sscanf(told, "%lu %lu %n", &latency_ns, &bytes_per_s, &at) != 2 || !at || stat(told + at, &st) < 0) fprintf(stderr, "far: not told how far\n"), exit(1);
    device = st.st_dev;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND_NS + (uint64_t)t.tv_nsec;
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags, va_arg(rest, unsigned));
    va_end(rest);
    stream.file = 0;
    return fd;
}

ssize_t pread(int fd, void *data, size_t size, off_t offset) {
    struct stat st;
    uint64_t asked_ns = now_ns();
    ssize_t got = syscall(SYS_pread64, fd, data, size, offset);
    if (got < 0 || fstat(fd, &st) < 0 || st.st_dev != device) return got;
    if (st.st_ino != stream.file || offset != stream.next) stream.due_ns = asked_ns + latency_ns;
    if (bytes_per_s) stream.due_ns += (uint64_t)got * SECOND_NS / bytes_per_s;
    stream.file = st.st_ino, stream.next = offset + got;
    struct timespec due = {(time_t)(stream.due_ns / SECOND_NS), (long)(stream.due_ns % SECOND_NS)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR) continue;
    return got;
}
