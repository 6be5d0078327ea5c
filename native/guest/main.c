/* Set-up, the loop, the control socket, reaping. */
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"
#include "libc.h"

#define EVENTS 64
#define KEEP_HEAP (1 << 20) /* freed memory that is kept until ops_tick() gives it back */

struct guest guest = {.epoll = -1, .control = -1, .cgroup = -1, .null = -1, .oom_score_adj = -1, .timer = UINT64_MAX};

static void **doomed;
static size_t doomed_count, doomed_capacity;

uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * NANOSECONDS + (uint64_t)time.tv_nsec;
}

char *format_u64(char *end, uint64_t value) {
    do {
        *--end = (char)('0' + value % 10);
        value /= 10;
    } while (value);
    return end;
}

void watch(int fd, struct source *source, uint32_t events) {
    struct epoll_event event = {events | EPOLLET, {.ptr = source}};
    epoll_ctl(guest.epoll, EPOLL_CTL_ADD, fd, &event);
}

void drop(int *fd) {
    if (*fd < 0) return;
    epoll_ctl(guest.epoll, EPOLL_CTL_DEL, *fd, NULL);
    close(*fd);
    *fd = -1;
}

void free_later(void *memory) {
    if (doomed_count == doomed_capacity) {
        size_t capacity = doomed_capacity ? doomed_capacity * 2 : 64;
        void **grown = realloc(doomed, capacity * sizeof *doomed);
        if (!grown) return;
        doomed = grown;
        doomed_capacity = capacity;
    }
    doomed[doomed_count++] = memory;
}

void shut_down(int status) {
    ops_kill_all();
    groups_kill_left();
    if (guest.machine && !guest.service) vm_halt();
    if (getpid() == 1) _exit(status); /* takes the whole namespace with it */
    kill_tree(getpid());
    for (int i = 0; i < 1000; i++) { /* see them off, for a second */
        pid_t pid = waitpid(-1, NULL, WNOHANG);
        if (pid < 0) break;
        if (pid == 0) usleep(1000);
    }
    ops_remove_groups();
    groups_sweep();
    groups_trim(true);
    _exit(status);
}

/* --- children -------------------------------------------------------------------------------------------------------------------- */

static int signals = -1;
static bool children_ended;

static void signals_ready(struct source *source, uint32_t events) {
    (void)source, (void)events;
    children_ended = true;
}

/* After the events of a turn: pipes that were closed with their last holder are then known to be at their end. */
static void reap(void) {
    struct signalfd_siginfo info[8];
    struct rusage usage;
    int status;
    pid_t pid;
    children_ended = false;
    if (read(signals, info, sizeof info) < 0) return; /* level-triggered: what it left is told again */
    while ((pid = wait4(-1, &status, WNOHANG, &usage)) > 0) ops_reaped(pid, status, &usage);
    ops_after_reaping();
}

/* --- the control socket ------------------------------------------------------------------------------------------------------------ */

static void control_ready(struct source *source, uint32_t events) {
    char byte = 0;
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    (void)source, (void)events;
    ssize_t got = recvmsg(guest.control, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) shut_down(0); /* whoever made the sandbox is gone: nobody can reach it any more */
    int fd = -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof fd)) {
        memcpy(&fd, CMSG_DATA(header), sizeof fd);
    }
    if (fd >= 0 && byte == 'A') channel_open(fd);
    else if (fd >= 0) close(fd);
}

/* --- set-up ------------------------------------------------------------------------------------------------------------------------ */

static void read_oom_score_adj(void) {
    char text[16];
    int fd = open("/proc/self/oom_score_adj", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0) return;
    text[size] = 0;
    long value = strtol(text, NULL, 10);
    guest.oom_score_adj = value < 0 ? -1 : (int)value;
}

static void set_up(bool cgroups) {
    static struct source control = {control_ready}, children = {signals_ready};
    struct statfs file_system;
    sigset_t all;

    for (int fd = 0; fd < 3; fd++) { /* so that no descriptor of ours gets these numbers */
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) open("/", O_PATH);
    }
    x_close_from(DSEC_FD_CGROUP + 1);
    if (!guest.machine) guest.control = DSEC_FD_CONTROL;
    if (cgroups && fstatfs(DSEC_FD_CGROUP, &file_system) == 0 && file_system.f_type == CGROUP2_SUPER_MAGIC) {
        guest.cgroup = DSEC_FD_CGROUP;
        fcntl(guest.cgroup, F_SETFD, FD_CLOEXEC);
    } else {
        close(DSEC_FD_CGROUP);
    }
    fcntl(guest.control, F_SETFD, FD_CLOEXEC);

    heap_tune(KEEP_HEAP);
    prctl(PR_SET_DUMPABLE, 0);
    if (getpid() != 1) prctl(PR_SET_CHILD_SUBREAPER, 1);
    umask(022);
    if (chdir("/")) _exit(71);
    guest.null = open("/dev/null", O_RDWR | O_CLOEXEC);
    read_oom_score_adj();
    if (getrlimit(RLIMIT_NOFILE, &guest.nofile) == 0) {
        setrlimit(RLIMIT_NOFILE, &(struct rlimit){guest.nofile.rlim_max, guest.nofile.rlim_max});
    }

    /* "Ignore" survives execve. By system call: the C library keeps two of the numbers to itself. */
    static const uint64_t standard[4];
    for (int number = 1; number <= 64; number++) syscall(SYS_rt_sigaction, number, standard, NULL, 8);
    sigfillset(&all);
    if (guest.service) sigdelset(&all, SIGTERM); /* whoever started us may end us so, and knows that it was he */
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigemptyset(&all);
    sigaddset(&all, SIGCHLD);
    signals = signalfd(-1, &all, SFD_NONBLOCK | SFD_CLOEXEC);
    guest.epoll = epoll_create1(EPOLL_CLOEXEC);
    if (signals < 0 || guest.epoll < 0) _exit(71);
    list_init(&guest.sending);
    list_init(&guest.reading);
    struct epoll_event event = {EPOLLIN, {.ptr = &children}};
    epoll_ctl(guest.epoll, EPOLL_CTL_ADD, signals, &event);
    event.data.ptr = &control;
    if (guest.control >= 0 && epoll_ctl(guest.epoll, EPOLL_CTL_ADD, guest.control, &event)) _exit(71);
    channel_open(DSEC_FD_CHANNEL);
    port_listen();
}

static int wait_ms(void) {
    if (channel_busy() || !list_empty(&guest.reading)) return 0;
    if (guest.timer == UINT64_MAX) return -1;
    uint64_t now = now_ns();
    if (guest.timer <= now) return 0;
    uint64_t ms = (guest.timer - now + 999999) / 1000000;
    return ms > 3600000 ? 3600000 : (int)ms;
}

int main(int argc, char **argv) {
    const char *word = argc < 2 ? "" : argv[1];
    if (strcmp(word, "--nothing") == 0) return 0; /* a command for a rehearsal */
    if (strcmp(word, "--service") == 0) vm_serve(argc == 3);
    else if (getpid() == 1 && fcntl(DSEC_FD_CONTROL, F_GETFD) < 0) vm_boot(strcmp(word, "--again") == 0); /* the kernel started us, not the zygote */
    set_up(strcmp(word, "--no-cgroup") != 0);
    for (;;) {
        struct epoll_event events[EVENTS];
        int count = epoll_wait(guest.epoll, events, EVENTS, wait_ms());
        if (count < 0) continue; /* thawed */
        for (int i = 0; i < count; i++) {
            struct source *source = events[i].data.ptr;
            source->ready(source, events[i].events);
        }
        if (children_ended) reap();
        ops_read_some();
        channel_turn(); /* before timeouts: after a thaw the edge has said that they stood still */
        if (guest.timer != UINT64_MAX && guest.timer <= now_ns()) ops_tick(now_ns());
        while (doomed_count) free(doomed[--doomed_count]);
    }
}
