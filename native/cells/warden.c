/* Pid 1: lanes and their cells. One thread, one poll loop. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "cells.h"
#include "zygote/sys.h"

#define SPACES 4
static const struct { const char *name; unsigned long get; } SPACE[SPACES] = {
    {"pid", 0xff05}, {"mnt", 0xff03}, {"ipc", 0xff02}, {"uts", 0xff0a}, /* PIDFD_GET_..._NAMESPACE */
};

static struct lane {
    bool known, wanted, dying, mounted, forked, warm;
    int groups[MAX_GROUPS], group_count, call[3];
    uint32_t turn;
    uint64_t tmpfs_bytes, space;
    pid_t cell;
} lanes[LANES];

static int reports[2], signals, parent_socket = -1;
static bool parent_told;

static void tell(uint32_t type, uint32_t lane, int32_t value, const char *text) {
    struct message message = {type, lane, 0, value};
    if (send_message(DSEC_FD_CHANNEL, &message, text, strlen(text), NULL, 0) < 0) _exit(0);
}

static void tell_directory(uint32_t lane) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/root/tmp", lanes[lane].cell);
    int fd = lanes[lane].cell ? open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    const struct message message = {CELL_DIRECTORY, lane, 0, fd < 0 ? ESRCH : 0};
    if (send_message(DSEC_FD_CHANNEL, &message, NULL, 0, &fd, fd >= 0) < 0) _exit(0);
    close(fd);
}

/* A descriptor of a process's namespace; -1 and errno. Without /proc where the kernel can (Linux 6.11): what is looked up there has to be
 * forgotten again at the process's end. */
static int open_space(int pidfd, pid_t pid, int which) {
    char path[64];
    int fd = ioctl(pidfd, (int)SPACE[which].get, 0);
    if (fd >= 0 || errno == ESRCH) return fd;
    snprintf(path, sizeof path, "/proc/%d/ns/%s", pid, SPACE[which].name);
    return open(path, O_RDONLY | O_CLOEXEC);
}

/* Make the lane empty; what is to come next begins when the cell is reaped. */
static void end_cell(struct lane *lane) {
    if (!lane->cell || lane->dying) return;
    lane->dying = true;
    kill(lane->cell, SIGKILL);
}

static void give_up(struct lane *lane, int error, const char *what) {
    close_all(lane->call, 3);
    for (int i = 0; i < 3; i++) lane->call[i] = -1;
    lane->wanted = false;
    tell(CELL_FAILED, (uint32_t)(lane - lanes), error, what);
    end_cell(lane);
}

static void begin_cell(struct lane *lane) {
    int fds[SPACES + 3], count = 0, pidfd = -1;
    struct message message = {CELL_FORK, (uint32_t)(lane - lanes), ++lane->turn, 0};
    int source = lane->warm ? parent_socket : FD_SOURCE;
    lane->wanted = lane->mounted = lane->forked = lane->dying = false;
    pid_t pid = (pid_t)syscall(SYS_clone, CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_PIDFD | SIGCHLD, NULL, &pidfd, NULL, NULL);
    if (pid == 0) cell_run(reports[1], &message, lane->tmpfs_bytes);
    if (pid < 0) {
        give_up(lane, errno, "making namespaces");
        return;
    }
    lane->cell = pid;
    struct stat st = {0};
    for (; count < SPACES; count++)
        if ((fds[count] = open_space(pidfd, pid, count)) < 0) break;
    int error = count < SPACES || fstat(fds[0], &st) < 0 ? errno : 0;
    lane->space = st.st_ino;
    memcpy(fds + count, lane->call, sizeof lane->call);
    if (!error && send_message(source, &message, NULL, 0, fds, count + 3) < 0) error = errno;
    close_all(fds, count);
    close(pidfd);
    if (error) {
        give_up(lane, error, "asking for a worker");
        return;
    }
    close_all(lane->call, 3);
    for (int i = 0; i < 3; i++) lane->call[i] = -1;
}

static void perhaps_ready(struct lane *lane) {
    if (lane->mounted && lane->forked && !lane->dying) tell(CELL_READY, (uint32_t)(lane - lanes), 0, "");
}

/* --- what comes in ------------------------------------------------------------------------------------------------------------------- */

static struct lane *current(const struct message *message) {
    if (message->lane >= LANES) return NULL;
    struct lane *lane = &lanes[message->lane];
    return lane->cell && !lane->dying && lane->turn == message->turn ? lane : NULL;
}

static void from_cell(void) {
    struct message message;
    int count;
    if (receive_message(reports[0], &message, NULL, 0, NULL, 0, &count) < 0) return;
    struct lane *lane = current(&message);
    if (!lane) return;
    if (message.value) {
        give_up(lane, message.value, "mounting in the cell");
        return;
    }
    lane->mounted = true;
    perhaps_ready(lane);
}

/* A worker was forked, as its source says: it must be in the cell, whoever says so. */
static void forked(struct lane *lane, int32_t pid) {
    char text[64];
    struct stat st;
    if (lane->forked) return;
    if (pid <= 0) {
        give_up(lane, -pid, "forking a worker");
        return;
    }
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0), space = pidfd < 0 ? -1 : open_space(pidfd, pid, 0);
    bool there = space >= 0 && fstat(space, &st) == 0 && st.st_ino == lane->space;
    close(space);
    close(pidfd);
    if (!there) {
        give_up(lane, ESRCH, "looking for the worker in its cell");
        return;
    }
    int length = snprintf(text, sizeof text, "%d", pid);
    for (int i = 0; i < lane->group_count; i++)
        if (write(lane->groups[i], text, (size_t)length) < 0) {
            give_up(lane, errno, "putting the worker into its cgroups");
            return;
        }
    lane->forked = true;
    perhaps_ready(lane);
}

/* Messages of the source, or of the warm parent, which may be anybody's code. */
static bool from_source(int from, bool warm) {
    static char text[MAX_TEXT + 1];
    struct message message;
    int count;
    ssize_t size = receive_message(from, &message, text, MAX_TEXT, NULL, 0, &count);
    if (size < 0) return errno == EINTR;
    text[size] = 0;
    if (!warm && message.type == CELL_PARENT_ENDED) {
        tell(CELL_PARENT_ENDED, 0, message.value, "");
        return true;
    }
    if (warm && message.type == CELL_PARENT_UP) {
        if (!parent_told) tell(CELL_PARENT_UP, 0, 0, text);
        parent_told = true;
        return true;
    }
    struct lane *lane = current(&message);
    if (!lane || lane->warm != warm) return true;
    if (message.type == CELL_FORKED) forked(lane, message.value);
    else if (message.type == CELL_ENDED) tell(CELL_ENDED, message.lane, message.value, "");
    return true;
}

static void start_parent(const char *text, ssize_t size, const int *fds, int count) {
    int pair[2];
    if (parent_socket >= 0 || count != 3 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) _exit(70);
    const struct message message = {CELL_PARENT, 0, 0, 0};
    const int passed[4] = {pair[1], fds[0], fds[1], fds[2]};
    if (send_message(FD_SOURCE, &message, text, (size_t)size, passed, 4) < 0) _exit(70);
    close(pair[1]);
    parent_socket = pair[0];
}

static void from_edge(void) {
    static char text[MAX_TEXT];
    struct message message;
    int fds[MAX_FDS], count;
    ssize_t size = receive_message(DSEC_FD_CHANNEL, &message, text, sizeof text, fds, MAX_FDS, &count);
    if (size < 0 && errno == EINTR) return;
    if (size < 0 || message.lane >= LANES) _exit(0); /* the edge is gone: nobody wants results any more */
    struct lane *lane = &lanes[message.lane];
    switch (message.type) {
    case CELL_LANE:
        if (lane->known || count > MAX_GROUPS) _exit(70);
        lane->known = true;
        memcpy(lane->groups, fds, (size_t)count * sizeof(int));
        lane->group_count = count;
        lane->tmpfs_bytes = (uint64_t)message.value << 20;
        return;
    case CELL_PARENT: start_parent(text, size, fds, count); break;
    case CELL_NEXT:
        if (!lane->known || count != 3 || lane->wanted || (message.value && parent_socket < 0)) _exit(70);
        memcpy(lane->call, fds, sizeof lane->call);
        lane->warm = message.value;
        lane->wanted = true;
        if (lane->cell) end_cell(lane);
        else begin_cell(lane);
        return;
    case CELL_OPEN: tell_directory(message.lane); break;
    case CELL_STOP:
        if (lane->cell) end_cell(lane);
        else tell(CELL_EMPTY, message.lane, 0, "");
        break;
    }
    close_all(fds, count);
}

static void reap(void) {
    struct signalfd_siginfo info;
    while (read(signals, &info, sizeof info) == sizeof info) {}
    pid_t pid;
    while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
        for (uint32_t i = 0; i < LANES; i++) {
            struct lane *lane = &lanes[i];
            if (lane->cell != pid) continue;
            bool asked = lane->dying;
            lane->cell = 0;
            lane->dying = false;
            if (lane->wanted) begin_cell(lane);
            else tell(asked ? CELL_EMPTY : CELL_FAILED, i, ECHILD, asked ? "" : "the cell was ended from outside");
            break;
        }
}

/* The root is the same for all calls, so nothing in it may change. */
static void seal_root(void) {
    struct x_mount_attr attr = {.attr_set = X_MOUNT_ATTR_RDONLY | X_MOUNT_ATTR_NOSUID};
    static const char *const LINKS[][2] = {{"/run/shm", CELL_SHM}, {"/var/tmp", "/tmp"}};
    struct stat st;
    if (lstat("/tmp", &st) == 0 && !S_ISDIR(st.st_mode)) unlink("/tmp"); /* a link would lead out of the cell, seen from here */
    mkdir("/tmp", 01777);
    mkdir("/run", 0755);
    for (size_t i = 0; i < sizeof LINKS / sizeof *LINKS; i++)
        if (rmdir(LINKS[i][0]) == 0 || errno == ENOENT) (void)!symlink(LINKS[i][1], LINKS[i][0]); /* else it stays unwritable */
    if (x_mount_setattr(AT_FDCWD, "/", 0, &attr) < 0) _exit(72);
}

int warden_run(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, reports) < 0) _exit(71);
    fcntl(DSEC_FD_CHANNEL, F_SETFL, 0);
    fcntl(DSEC_FD_CHANNEL, F_SETFD, FD_CLOEXEC);
    for (int fd = 0; fd <= FD_SOURCE; fd++) fcntl(fd, F_SETFD, FD_CLOEXEC);
    seal_root();
    for (;;) {
        struct pollfd wait[] = {{signals, POLLIN, 0}, {reports[0], POLLIN, 0}, {FD_SOURCE, POLLIN, 0}, {parent_socket, POLLIN, 0},
                                {DSEC_FD_CHANNEL, POLLIN, 0}, {DSEC_FD_CONTROL, POLLIN, 0}};
        if (poll(wait, 6, -1) < 0 && errno != EINTR) _exit(71);
        if (wait[0].revents) reap();
        if (wait[1].revents) from_cell();
        /* What the warm parent and its workers said before they ended comes before the source's word that they did. */
        if (wait[3].revents && !from_source(parent_socket, true)) {
            close(parent_socket);
            parent_socket = -1;
        }
        if (wait[2].revents && !from_source(FD_SOURCE, false)) _exit(0);
        if (wait[4].revents) from_edge();
        if (wait[5].revents) _exit(0); /* the zygote is gone; no other channel is ever taken */
    }
}
