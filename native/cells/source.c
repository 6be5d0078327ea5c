/* Pid 2: the source of workers that execute a program, and the starter of the warm parent. Under the second filter (zygote/filter.c), which
 * it and all that it starts inherit. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

#include "cells.h"
#include "zygote/sys.h"

#define FD_PARENT 3 /* the warm parent's end of its socket */
#define FD_WARM 4   /* its native part */

static struct { pid_t pid; uint32_t turn; } workers[LANES];
static pid_t parent;
static int own_pids;

static void say(uint32_t type, uint32_t lane, uint32_t turn, int32_t value) {
    struct message message = {type, lane, turn, value};
    if (send_message(FD_SOURCE, &message, NULL, 0, NULL, 0) < 0) _exit(0);
}

static void fork_worker(const struct message *message, const int *fds, int count) {
    if (count != 7 || message->lane >= LANES) _exit(70);
    pid_t pid = setns(fds[0], CLONE_NEWPID) < 0 ? -1 : fork();
    if (pid == 0) worker_run(fds + 1, fds + 4);
    int error = errno;
    setns(own_pids, CLONE_NEWPID);
    workers[message->lane].pid = pid;
    workers[message->lane].turn = message->turn;
    say(CELL_FORKED, message->lane, message->turn, pid < 0 ? -error : pid);
}

static void start_parent(const char *text, ssize_t size, const int *fds, int count) {
    if (parent || count != 4 || size < 2 || text[size - 1]) _exit(70);
    parent = fork();
    if (parent) return;
    /* Arguments, an end, environment, an end. */
    char *words[1024], **env = NULL;
    int used = 0;
    for (const char *at = text; at < text + size && used < 1022; at += strlen(at) + 1) {
        words[used++] = *at || env ? (char *)at : NULL;
        if (!*at && !env) env = words + used;
    }
    words[used] = NULL;
    if (!env) _exit(126);
    for (char **each = env; *each; each++)
        if (!strncmp(*each, "PATH=", 5)) setenv("PATH", *each + 5, 1);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int null = open("/dev/null", O_RDONLY);
    if (null < 0 || dup2(null, 0) < 0 || dup2(fds[1], 1) < 0 || dup2(fds[2], 2) < 0) _exit(126);
    int socket = fcntl(fds[0], F_DUPFD, 10), warm = fcntl(fds[3], F_DUPFD, 10);
    if (dup2(socket, FD_PARENT) < 0 || dup2(warm, FD_WARM) < 0) _exit(126);
    syscall(SYS_close_range, FD_WARM + 1u, ~0u, 0u);
    if (lock_down(true) < 0) _exit(125);
    execvpe(words[0], words, env);
    _exit(127);
}

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == parent) {
            say(CELL_PARENT_ENDED, 0, 0, status);
            continue;
        }
        for (uint32_t lane = 0; lane < LANES; lane++)
            if (workers[lane].pid == pid) {
                workers[lane].pid = 0;
                say(CELL_ENDED, lane, workers[lane].turn, status);
                break;
            }
    }
}

void source_run(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    own_pids = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
    prctl(PR_SET_NAME, "dsec-source");
    if (signals < 0 || own_pids < 0) _exit(71);
    static char text[MAX_TEXT];
    for (;;) {
        struct pollfd wait[2] = {{FD_SOURCE, POLLIN, 0}, {signals, POLLIN, 0}};
        if (poll(wait, 2, -1) < 0 && errno != EINTR) _exit(71);
        if (wait[1].revents) {
            struct signalfd_siginfo info;
            while (read(signals, &info, sizeof info) == sizeof info) {}
            reap();
        }
        if (!wait[0].revents) continue;
        struct message message;
        int fds[MAX_FDS], count;
        ssize_t size = receive_message(FD_SOURCE, &message, text, sizeof text, fds, MAX_FDS, &count);
        if (size < 0) _exit(0);
        if (message.type == CELL_FORK) fork_worker(&message, fds, count);
        else if (message.type == CELL_PARENT) start_parent(text, size, fds, count);
        close_all(fds, count);
    }
}
