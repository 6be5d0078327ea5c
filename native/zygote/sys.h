/* System calls and constants that the oldest supported C library doesn't name. Numbers from 424 on are the same on all architectures. */
#ifndef DSEC_SYS_H
#define DSEC_SYS_H

#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_open_tree
#define SYS_open_tree 428
#define SYS_move_mount 429
#define SYS_fsopen 430
#define SYS_fsconfig 431
#define SYS_fsmount 432
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#define SYS_landlock_add_rule 445
#define SYS_landlock_restrict_self 446
#endif

#define X_OPEN_TREE_CLONE 1u
#define X_OPEN_TREE_CLOEXEC 02000000u
#define X_MOVE_MOUNT_F_EMPTY_PATH 4u
#define X_FSOPEN_CLOEXEC 1u
#define X_FSMOUNT_CLOEXEC 1u
#define X_FSCONFIG_SET_FLAG 0u
#define X_FSCONFIG_SET_STRING 1u
#define X_FSCONFIG_CMD_CREATE 6u
#define X_MOUNT_ATTR_RDONLY 1u
#define X_MOUNT_ATTR_NOSUID 2u
#define X_MOUNT_ATTR_NODEV 4u
#define X_MOUNT_ATTR_NOEXEC 8u
#define X_CLOSE_RANGE_UNSHARE 2u
#define X_CLONE_INTO_CGROUP 0x200000000ull
#define X_CLONE_PIDFD 0x1000u
#define X_CLONE_CLEAR_SIGHAND 0x100000000ull

struct x_mount_attr {
    uint64_t attr_set, attr_clr, propagation, userns_fd;
};

struct x_clone_args {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

static inline int x_fsopen(const char *fs) { return (int)syscall(SYS_fsopen, fs, X_FSOPEN_CLOEXEC); }
static inline int x_fsconfig(int fs, unsigned cmd, const char *key, const char *value) {
    return (int)syscall(SYS_fsconfig, fs, cmd, key, value, 0);
}
static inline int x_fsmount(int fs, unsigned attr) { return (int)syscall(SYS_fsmount, fs, X_FSMOUNT_CLOEXEC, attr); }
static inline int x_open_tree(int dir, const char *path, unsigned flags) {
    return (int)syscall(SYS_open_tree, dir, path, flags | X_OPEN_TREE_CLOEXEC);
}
/* Attach the detached mount `tree` at `path`. */
static inline int x_attach(int tree, int dir, const char *path) {
    return (int)syscall(SYS_move_mount, tree, "", dir, path, X_MOVE_MOUNT_F_EMPTY_PATH);
}
static inline int x_mount_setattr(int dir, const char *path, unsigned flags, const struct x_mount_attr *attr) {
    return (int)syscall(SYS_mount_setattr, dir, path, flags, attr, sizeof *attr);
}

#endif
