/* A cell: the first process in new pid, mount, ipc and uts namespaces. It mounts, and then does nothing until it is killed, which ends all
 * that is in its pid namespace. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#include "cells.h"
#include "zygote/sys.h"

#define INODES "65536"

/* A new file system of a kind, detached; -1 and errno. */
static int make(const char *kind, const char *const options[][2], int count, unsigned flags) {
    int fs = x_fsopen(kind);
    if (fs < 0) return -1;
    int bad = 0;
    for (int i = 0; i < count && !bad; i++) bad = x_fsconfig(fs, X_FSCONFIG_SET_STRING, options[i][0], options[i][1]);
    int tree = bad < 0 || x_fsconfig(fs, X_FSCONFIG_CMD_CREATE, NULL, NULL) < 0 ? -1 : x_fsmount(fs, flags);
    int error = errno;
    close(fs);
    errno = error;
    return tree;
}

/* One tmpfs for all that can be written: links of the root's lead there (warden.c). */
static int mount_all(uint64_t tmpfs_bytes) {
    char size[32];
    snprintf(size, sizeof size, "%llu", (unsigned long long)tmpfs_bytes);
    const char *const options[][2] = {{"size", size}, {"nr_inodes", INODES}, {"mode", "1777"}};
    int tree = make("tmpfs", options, 3, X_MOUNT_ATTR_NOSUID | X_MOUNT_ATTR_NODEV);
    if (tree < 0 || x_attach(tree, AT_FDCWD, "/tmp") < 0) return -1;
    umask(0);
    if (mkdir(CELL_SHM, 01777) < 0) return -1;
    static const char *const PIDS[][2] = {{"subset", "pid"}};
    int proc = make("proc", PIDS, 1, X_MOUNT_ATTR_NOSUID | X_MOUNT_ATTR_NODEV | X_MOUNT_ATTR_NOEXEC);
    return proc < 0 ? -1 : x_attach(proc, AT_FDCWD, "/proc");
}

void cell_run(int report, struct message *message, uint64_t tmpfs_bytes) {
    const struct sigaction ignore = {.sa_handler = SIG_IGN, .sa_flags = SA_NOCLDWAIT};
    sigaction(SIGCHLD, &ignore, NULL); /* orphans are reaped by the kernel */
    prctl(PR_SET_NAME, "cell");
    setsid();
    message->value = mount_all(tmpfs_bytes) < 0 ? errno : 0;
    send_message(report, message, NULL, 0, NULL, 0);
    syscall(SYS_close_range, 0u, ~0u, 0u);
    for (;;) pause();
}
