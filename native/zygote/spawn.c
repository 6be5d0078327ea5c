/* The outside of a spawn: everything that needs the host's root. Then the child goes on alone (inside.c). */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "sys.h"
#include "zygote.h"

#define CHANNEL_BUFFER (1 << 20)
#define GROUP "g"

/* A spawn's descriptors, closed together however it ends. */
enum low { ROOT, DEV, VIEW, CGROUP2, NETWORK, REPORT, CONTROL, CHANNEL, CGROUPS, LOWS = CGROUPS + MAX_CGROUPS };
_Static_assert(FD_CELLS + 1 + LOWS + 8 < FD_LOW, "one spawn's descriptors, its pidfd and a few passing ones fit below FD_LOW");

static int fail(int fd_or_result) { return fd_or_result < 0 ? -errno : fd_or_result; }

int channel_pair(int pair[2]) {
    int size = CHANNEL_BUFFER;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0) return -errno;
    /* Without FORCE the host's net.core.wmem_max would decide; a frame of the protocol must fit. */
    for (int i = 0; i < 2; i++) setsockopt(pair[i], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size);
    pair[0] = fd_up(pair[0]);
    if (pair[0] < 0) close(pair[1]);
    return pair[0] < 0 ? pair[0] : 0;
}

static int set_lowers(int fs, const struct plan *plan) {
    for (unsigned i = 0; i < plan->lowers; i++)
        if (x_fsconfig(fs, X_FSCONFIG_SET_STRING, "lowerdir+", plan->lower[i]) < 0) return -errno;
    return 0;
}

/* Linux 6.8 and newer: layers one by one, nothing is attached anywhere. */
static int overlay_new(const struct plan *plan) {
    int fs = x_fsopen("overlay");
    if (fs < 0) return -errno;
    int tree = set_lowers(fs, plan);
    if (tree == 0) {
        tree = x_fsconfig(fs, X_FSCONFIG_SET_STRING, "upperdir", plan->upper) < 0 ||
                       x_fsconfig(fs, X_FSCONFIG_SET_STRING, "workdir", plan->work) < 0 ||
                       x_fsconfig(fs, X_FSCONFIG_SET_FLAG, "volatile", NULL) < 0 ||
                       x_fsconfig(fs, X_FSCONFIG_CMD_CREATE, NULL, NULL) < 0
                   ? -errno
                   : fail(x_fsmount(fs, X_MOUNT_ATTR_NODEV));
    }
    close(fs);
    return tree;
}

/* Before: one string of options, at most a page, and a mount point for a moment. */
static int overlay_old(const struct plan *plan) {
    static char options[4096];
    size_t used = (size_t)snprintf(options, sizeof options, "volatile,upperdir=%s,workdir=%s,lowerdir=", plan->upper, plan->work);
    for (unsigned i = 0; i < plan->lowers && used < sizeof options; i++)
        used += (size_t)snprintf(options + used, sizeof options - used, "%s%s", i ? ":" : "", plan->lower[i]);
    if (used >= sizeof options) return -ENAMETOOLONG;
    for (unsigned i = 0; i < plan->lowers; i++)
        if (strpbrk(plan->lower[i], ":,\\")) return -EINVAL; /* would mean another list of layers */
    if (strpbrk(plan->upper, ",\\") || strpbrk(plan->work, ",\\")) return -EINVAL;
    if (mkdir(world.scratch, 0700) < 0 && errno != EEXIST) return -errno;
    if (mount("overlay", world.scratch, "overlay", MS_NODEV, options) < 0) return -errno;
    int tree = fail(x_open_tree(AT_FDCWD, world.scratch, X_OPEN_TREE_CLONE));
    umount2(world.scratch, MNT_DETACH);
    return tree;
}

static int overlay(const struct plan *plan) {
    if (!world.legacy_overlay) {
        int tree = overlay_new(plan);
        if (tree != -ENOSYS && tree != -EINVAL) return tree;
        /* EINVAL may be the missing lowerdir+ or a fault of the request: the old way tells. */
        int old = overlay_old(plan);
        if (old >= 0) world.legacy_overlay = true;
        return old;
    }
    return overlay_old(plan);
}

/* A clone of a host directory: private, and nothing in it may be written or gain privileges. In /dev devices open, elsewhere not, however
 * the host has mounted them. */
static int bind_tree(const char *path, bool devices) {
    int tree = x_open_tree(AT_FDCWD, path, X_OPEN_TREE_CLONE);
    if (tree < 0) return -errno;
    struct x_mount_attr attr = {.attr_set = X_MOUNT_ATTR_RDONLY | X_MOUNT_ATTR_NOSUID | X_MOUNT_ATTR_NOEXEC, .propagation = MS_PRIVATE};
    if (devices) attr.attr_clr = X_MOUNT_ATTR_NODEV;
    else attr.attr_set |= X_MOUNT_ATTR_NODEV;
    if (x_mount_setattr(tree, "", AT_EMPTY_PATH, &attr) < 0) {
        int error = -errno;
        close(tree);
        return error;
    }
    return tree;
}

/* The sandbox's own group, in the directory that the edge named. That one is used again for another sandbox, after a cgroup.kill; and
 * Linux up to at least 6.18 kills whatever is cloned from one group into another of which only one was ever killed (it compares the
 * wrong counters). A fresh group for each sandbox is never the killed one. */
static int make_group(const struct plan *plan) {
    int slot = open(plan->cgroup2, O_PATH | O_DIRECTORY | O_CLOEXEC), group = -1;
    if (slot < 0) return -errno;
    bool made = mkdirat(slot, GROUP, 0755) == 0 || (errno == EEXIST && unlinkat(slot, GROUP, AT_REMOVEDIR) == 0 && mkdirat(slot, GROUP, 0755) == 0);
    if (made) group = openat(slot, GROUP, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int error = group < 0 ? -errno : 0;
    close(slot);
    if (error) return error;
    /* Delegation: inside root makes groups below and moves processes of its own between them, nothing else. */
    uid_t root = (uid_t)plan->id_base;
    if (fchown(group, root, root) < 0 || fchownat(group, "cgroup.procs", root, root, 0) < 0) {
        error = -errno;
        close(group);
        return error;
    }
    return group;
}

static void remove_group(const struct plan *plan) {
    char path[4200];
    snprintf(path, sizeof path, "%s/" GROUP, plan->cgroup2);
    rmdir(path);
}

/* All that is named by a path: done in the host's mount namespace. */
static int open_paths(const struct plan *plan, int low[LOWS], enum stage *stage) {
    *stage = AT_CGROUP2;
    if ((low[CGROUP2] = make_group(plan)) < 0) return low[CGROUP2];
    *stage = AT_CGROUP;
    for (unsigned i = 0; i < plan->cgroups; i++) {
        char path[4200];
        snprintf(path, sizeof path, "%s/cgroup.procs", plan->cgroup[i]);
        if ((low[CGROUPS + i] = open(path, O_WRONLY | O_CLOEXEC)) < 0) return -errno;
    }
    *stage = AT_OVERLAY;
    if ((low[ROOT] = overlay(plan)) < 0) return low[ROOT];
    *stage = AT_DEV;
    if ((low[DEV] = bind_tree(plan->dev, true)) < 0) return low[DEV];
    *stage = AT_VIEW;
    if (plan->view && (low[VIEW] = bind_tree(plan->view, false)) < 0) return low[VIEW];
    return 0;
}

static int write_at(int dir, const char *name, const char *text) {
    int fd = openat(dir, name, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    int error = write(fd, text, strlen(text)) < 0 ? -errno : 0;
    close(fd);
    return error;
}

/* What the child can't do for itself: id maps, a floor under its OOM score, its cgroups. */
static int settle(const struct plan *plan, const int low[LOWS], pid_t pid, enum stage *stage) {
    char text[64];
    snprintf(text, sizeof text, "%d", pid);
    int proc = openat(world.proc, text, O_PATH | O_DIRECTORY | O_CLOEXEC), error;
    if (proc < 0) return -errno;
    snprintf(text, sizeof text, "0 %llu %llu", (unsigned long long)plan->id_base, (unsigned long long)plan->id_count);
    *stage = AT_ID_MAP;
    error = write_at(proc, "uid_map", text);
    if (!error) error = write_at(proc, "gid_map", text);
    if (!error) {
        /* Written with CAP_SYS_RESOURCE, this also is the least that anyone inside may set. */
        *stage = AT_OOM_SCORE;
        snprintf(text, sizeof text, "%u", (unsigned)plan->oom_score_adj);
        error = write_at(proc, "oom_score_adj", text);
    }
    close(proc);
    if (error) return error;
    *stage = AT_CGROUP;
    int length = snprintf(text, sizeof text, "%d", pid);
    for (unsigned i = 0; i < plan->cgroups; i++)
        if (write(low[CGROUPS + i], text, (size_t)length) < 0) return -errno;
    return 0;
}

/* Wait for the child's word that it has its own descriptors. */
static int await_copy(int report, int pidfd) {
    char byte;
    for (;;) {
        ssize_t n = recv(report, &byte, 1, MSG_DONTWAIT);
        if (n == 1) return 0;
        if (n == 0 || (errno != EAGAIN && errno != EINTR)) return -EPIPE;
        struct pollfd wait[2] = {{report, POLLIN, 0}, {pidfd, POLLIN, 0}};
        if (poll(wait, 2, -1) > 0 && wait[1].revents && !wait[0].revents) return -ECHILD;
    }
}

static int clone_child(const struct plan *plan, const int low[LOWS], struct child *child) {
    /* No CLONE_NEWCGROUP: that would take the zygote's cgroup as its root. The child unshares it when it is in its own. */
    struct x_clone_args args = {
        .flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_FILES | X_CLONE_PIDFD |
                 X_CLONE_INTO_CGROUP | X_CLONE_CLEAR_SIGHAND,
        .pidfd = (uint64_t)(uintptr_t)&child->pidfd,
        .exit_signal = SIGCHLD,
        .cgroup = (uint64_t)low[CGROUP2],
    };
    if (setns(low[NETWORK], CLONE_NEWNET) < 0) return -errno;
    long pid = syscall(SYS_clone3, &args, sizeof args);
    if (pid == 0) {
        const struct inside in = {low[REPORT], low[ROOT], low[DEV], low[VIEW], low[CONTROL], low[CHANNEL], low[CGROUP2]};
        inside_run(plan, &in);
    }
    int error = pid < 0 ? -errno : 0;
    if (setns(world.host_network, CLONE_NEWNET) < 0) _exit(70);
    if (error) return error;
    child->pid = (pid_t)pid;
    child->clone_ns = now_ns();
    return 0;
}

static void close_all(int *fds, int count) {
    for (int i = 0; i < count; i++)
        if (fds[i] >= 0) close(fds[i]);
}

int spawn_child(const struct plan *plan, struct child *child, enum stage *stage) {
    int low[LOWS], up[3] = {-1, -1, -1}, pair[2], error;
    for (int i = 0; i < LOWS; i++) low[i] = -1;
    *child = (struct child){.network = NO_NETWORK, .pid = -1, .pidfd = -1, .control = -1, .channel = -1, .report = -1, .begin_ns = now_ns()};

    if (setns(world.host_mounts, CLONE_NEWNS) < 0) return -errno;
    error = open_paths(plan, low, stage);
    if (setns(world.tiny_mounts, CLONE_NEWNS) < 0) _exit(70); /* a clone of the host's mounts must not become a sandbox */
    child->mount_ns = now_ns();
    if (!error) {
        *stage = AT_NETWORK;
        error = network_take(plan->flags & SF_NETWORK, &child->network);
        low[NETWORK] = child->network.ns;
        child->network.ns = -1;
    }
    const enum low ends[3] = {REPORT, CONTROL, CHANNEL};
    for (int i = 0; i < 3 && error >= 0; i++) {
        *stage = AT_SOCKETS;
        if ((error = channel_pair(pair)) == 0) {
            up[i] = pair[0];
            low[ends[i]] = pair[1];
        }
    }
    if (error >= 0) {
        *stage = AT_CLONE;
        error = clone_child(plan, low, child);
    }
    if (error >= 0) {
        error = settle(plan, low, child->pid, stage);
        int copied = await_copy(up[0], child->pidfd);
        if (!error && copied < 0) {
            *stage = AT_FILES;
            error = copied;
        }
        if (!error && send(up[0], "g", 1, MSG_NOSIGNAL) < 0) error = -errno;
        if (error) {
            kill(child->pid, SIGKILL);
            while (waitpid(child->pid, NULL, 0) < 0 && errno == EINTR) {}
        }
    }
    close_all(low, LOWS);
    if (error < 0) {
        close_all(up, 3);
        network_close(&child->network);
        if (child->pidfd >= 0) close(child->pidfd);
        if (setns(world.host_mounts, CLONE_NEWNS) < 0) return error;
        remove_group(plan);
        if (setns(world.tiny_mounts, CLONE_NEWNS) < 0) _exit(70);
        return error;
    }
    if ((child->pidfd = fd_up(child->pidfd)) < 0) child->pidfd = -1; /* the edge can make its own from the pid */
    child->report = up[0];
    child->control = up[1];
    child->channel = up[2];
    return 0;
}
