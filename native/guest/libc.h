/* What C libraries do differently. The guest is built with musl where its compiler is found: glibc's start-up asks the CPU what it
 * is (CPUID), which in a virtual machine traps ten times as long as all the rest of a small program's start takes.
 *
 * The heap: glibc keeps what is freed until it is told; musl gives large blocks back by itself and has no knobs. */
#ifndef DSEC_LIBC_H
#define DSEC_LIBC_H

#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif
static inline int x_renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    return (int)syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
}
/* Of the calling thread, and there is no other: the C library's own stop all signals to make sure of it, four calls each. */
static inline int x_setgroups(size_t count, const gid_t *groups) { return (int)syscall(SYS_setgroups, count, groups); }
static inline int x_setresgid(gid_t real, gid_t effective, gid_t saved) { return (int)syscall(SYS_setresgid, real, effective, saved); }
static inline int x_setresuid(uid_t real, uid_t effective, uid_t saved) { return (int)syscall(SYS_setresuid, real, effective, saved); }
static inline int x_close_from(unsigned first) { return (int)syscall(SYS_close_range, first, ~0u, 0u); }

#ifdef __GLIBC__
#include <malloc.h>
static inline void heap_tune(int keep) {
    mallopt(M_MMAP_THRESHOLD, 16 << 20);
    mallopt(M_TRIM_THRESHOLD, keep);
    mallopt(M_TOP_PAD, 16 << 10);
}
static inline void heap_trim(void) { malloc_trim(0); }
#else
static inline void heap_tune(int keep) { (void)keep; }
static inline void heap_trim(void) {}
#endif

#endif
