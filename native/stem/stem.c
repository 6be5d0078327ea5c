/* Loaded into a VMM that stands still for good (LD_PRELOAD): a *stem*. On request it branches: a copy of the whole process, with all
 * its threads where they were, goes on as another machine's VMM. What the stem has done once (start, load its state, translate the
 * guest's code) no branch does again, and what none of them changes is there once.
 *
 * fork(2) copies one thread. So the others are first stopped in a signal handler, wherever they are; the copy has their stacks, and
 * makes each thread again on its own stack, where the handler returns as if nothing had been. Each has to be in a system call that waits
 * then: the C library notes by a thread's number who holds some locks, and the numbers are others in the copy.
 *
 * Before that a branch becomes somebody of its own, as `start` in vmm/launcher.py does for others: cgroups, namespaces, user, limits;
 * its disk and its sockets take the places of the stem's, and what would be shared with the stem beyond that is made new; so may another
 * machine's memory, whose state it is then told to load (translated.c: what it doesn't translate again). It is a child of the stem's parent. The stem has the capabilities that this needs in
 * a user namespace that has no others; a branch has none, unless it is to be a stem itself.
 *
 * Clones that are no stems have it loaded too, for what memory they give back (`fallocate64`) and random numbers.
 *
 * DSEC_STEM is the descriptor of a SOCK_SEQPACKET: `struct request` with descriptors -> i32 pid, or 0 and why not, in words. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/random.h>
#if __has_include(<sys/rseq.h>)
#include <sys/rseq.h>
#endif
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "translated.h"

#define MOST_THREADS 300
#define MOST_DESCRIPTORS 32
#define MOST_FILES 4
#define SMALL_STACK 16384
#define REST_TRIES 2000
#define PARK (SIGRTMAX - 2)
#define OWN_NAMESPACES (CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
#define THREAD (CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_SETTLS)

/* The descriptors are: `groups` of cgroup.procs, its output, `files` that take the place of the stem's, also where those are mapped, with a
 * `layer` one whose data lies over what is mapped so, for each of its `sockets` one that listens and one that is connected, and of a branch
 * that is a `stem` itself the one that its requests come by. */
struct request {
    uint32_t uid, groups, files, sockets, stem, layer;
    struct {
        uint64_t device, inode;
    } file[MOST_FILES]; /* the stem's */
};
static const char *const SOCKETS[] = {"/control", "/channel", "/console"};
#define MOST_SOCKETS (sizeof SOCKETS / sizeof *SOCKETS)

enum { FREE, BEGINS, RUNS, ENDS };
static struct thread {
    pthread_t self;
    pid_t *tid; /* where the C library keeps its number, which it must find right in the copy */
    pid_t number;
    void *context[5];
    _Atomic int state;
    _Atomic unsigned parked; /* the turn after which it was, so far the last time */
    bool rests;
} threads[MOST_THREADS];
static char stacks[MOST_THREADS][SMALL_STACK] __attribute__((aligned(16))); /* to begin on, in a branch */
static _Thread_local struct thread *me __attribute__((tls_model("initial-exec")));
static pthread_key_t at_end;
static _Atomic unsigned turn = 1, news, beginning;
static int commands = -1;
static ptrdiff_t tid_offset = -1;
static int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

static void futex(_Atomic unsigned *at, int operation, unsigned value) {
    static const struct timespec WAIT = {0, 1000000};
    syscall(SYS_futex, at, operation | FUTEX_PRIVATE_FLAG, value, operation == FUTEX_WAIT ? &WAIT : NULL);
}

/* --- the threads of the VMM ---------------------------------------------------------------------------------------------------------- */

/* It was interrupted in a system call, which says so or is made again. */
static bool in_a_call(const ucontext_t *where) {
    const greg_t *registers = where->uc_mcontext.gregs;
    const uint8_t *at = (const uint8_t *)registers[REG_RIP];
    return registers[REG_RAX] == -EINTR ? at[-2] == 0x0f && at[-1] == 0x05 : at[0] == 0x0f && at[1] == 0x05;
}

static void park(int number, siginfo_t *info, void *where) {
    int error = errno;
    (void)number, (void)info;
    if (__builtin_setjmp(me->context) == 0) {
        unsigned now = atomic_load(&turn);
        me->rests = in_a_call(where);
        atomic_store(&me->parked, now);
        atomic_fetch_add(&news, 1);
        futex(&news, FUTEX_WAKE, 1);
        while (atomic_load(&turn) == now) futex(&turn, FUTEX_WAIT, now);
    } /* else: this is a branch, and the thread was made again */
    errno = error;
}

static int make_again(void *thread) {
#ifdef RSEQ_SIG
    syscall(SYS_rseq, (char *)__builtin_thread_pointer() + __rseq_offset, sizeof(struct rseq), 0, RSEQ_SIG);
#endif
    me = thread;
    __builtin_longjmp(me->context, 1);
}

static bool is_there(const struct thread *it) { return syscall(SYS_tgkill, getpid(), it->number, 0) == 0; }

static void ends(void *thread) { atomic_store(&((struct thread *)thread)->state, ENDS); } /* the C library still has to do with it */

static void enter(void) {
    char *self = (char *)pthread_self();
    sigset_t ours;
    for (ptrdiff_t at = 0; tid_offset < 0 && at < 4096; at += (ptrdiff_t)sizeof(pid_t)) {
        if (*(pid_t *)(self + at) == gettid()) tid_offset = at;
    }
    for (int i = 0; i < MOST_THREADS && !me; i++) {
        int none = FREE;
        if (atomic_load(&threads[i].state) == ENDS && !is_there(&threads[i])) atomic_store(&threads[i].state, FREE);
        if (atomic_compare_exchange_strong(&threads[i].state, &none, BEGINS)) me = &threads[i];
    }
    if (!me || tid_offset < 0 || *(pid_t *)(self + tid_offset) != gettid()) abort();
    me->self = pthread_self();
    me->tid = (pid_t *)(self + tid_offset);
    me->number = *me->tid;
    pthread_setspecific(at_end, me);
    atomic_store(&me->state, RUNS);
    sigemptyset(&ours);
    sigaddset(&ours, PARK);
    pthread_sigmask(SIG_UNBLOCK, &ours, NULL);
}

struct beginning {
    void *(*function)(void *);
    void *argument;
};

static void *begin(void *arg) {
    struct beginning with = *(struct beginning *)arg;
    free(arg);
    enter();
    atomic_fetch_sub(&beginning, 1);
    return with.function(with.argument);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*function)(void *), void *argument) {
    if (!create) create = dlsym(RTLD_NEXT, "pthread_create");
    if (commands < 0) return create(thread, attributes, function, argument);
    struct beginning *with = malloc(sizeof *with);
    if (!with) return ENOMEM;
    *with = (struct beginning){function, argument};
    atomic_fetch_add(&beginning, 1);
    int error = create(thread, attributes, begin, with);
    if (error) {
        atomic_fetch_sub(&beginning, 1);
        free(with);
    }
    return error;
}

/* A branch needs the machine's memory, and shares small pages better than large ones. */
int madvise(void *at, size_t size, int advice) {
    if (commands >= 0 && (advice == MADV_DONTFORK || advice == MADV_HUGEPAGE)) return 0;
    if (commands >= 0 && advice == MADV_DONTNEED) translated_gone(at, size);
    return (int)syscall(SYS_madvise, at, size, advice);
}

/* Pages that the machine gives back: QEMU wants them out of its memory's file, and then unmapped. The file is its template's, and stays. */
int fallocate64(int fd, int mode, off_t at, off_t size) {
    int seals = fcntl(fd, F_GET_SEALS);
    bool fixed = (seals > 0 && (seals & F_SEAL_WRITE)) || (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY;
    if (fixed && (mode & FALLOC_FL_PUNCH_HOLE)) return 0;
    return (int)syscall(SYS_fallocate, fd, mode, at, size);
}

int fallocate(int fd, int mode, off_t at, off_t size) { return fallocate64(fd, mode, at, size); }

/* What makes random numbers for the machine (its CPU's and its device's) would go on in each branch as in its siblings: it hears of fork(2) alone. */
int gnutls_rnd(int level, void *data, size_t size) {
    (void)level;
    for (ssize_t got; size; data = (char *)data + got, size -= (size_t)got) {
        if ((got = getrandom(data, size, 0)) < 0) got = 0;
    }
    return 0;
}

static void go_on(void) {
    atomic_fetch_add(&turn, 1);
    futex(&turn, FUTEX_WAKE, INT32_MAX);
}

/* All are in their handlers, at rest, and none is about to begin or to end. */
static bool try_to_park(void) {
    unsigned now = atomic_load(&turn);
    bool rest = true;
    for (int i = 0; i < MOST_THREADS; i++) {
        if (atomic_load(&threads[i].state) == RUNS) syscall(SYS_tgkill, getpid(), threads[i].number, PARK);
    }
    for (int i = 0; i < MOST_THREADS; i++) {
        struct thread *it = &threads[i];
        for (unsigned seen; seen = atomic_load(&news), atomic_load(&it->state) == RUNS && atomic_load(&it->parked) != now;) futex(&news, FUTEX_WAIT, seen);
        int state = atomic_load(&it->state);
        rest &= state == RUNS ? it->rests : state == FREE || (state == ENDS && !is_there(it));
    }
    return rest && !atomic_load(&beginning);
}

static bool park_all(void) {
    for (int i = 0; i < REST_TRIES; i++) {
        if (try_to_park()) return true;
        go_on();
        usleep(1000);
    }
    return false;
}

/* --- a branch becomes somebody ------------------------------------------------------------------------------------------------------- */

static int report = -1, reports = -1; /* a pipe */

static _Noreturn void fail(const char *what) {
    char words[128];
    int size = snprintf(words, sizeof words, "%s: %s", what, strerror(errno));
    if (write(report, words, (size_t)size) < 0) { /* nobody hears it */
    }
    _exit(71);
}

static void must(const char *what, long result) {
    if (result < 0) fail(what);
}

static void replace(int fd, int with) { must("take the place of a descriptor", dup2(with, fd)); }

static void renew(int fd, int fresh) {
    must("make a descriptor anew", fresh);
    replace(fd, fresh);
    close(fresh);
}

static void renew_socket(int fd, const struct request *is, const int *with) {
    struct sockaddr_un name = {0};
    socklen_t size = sizeof name - 1, flag_size = sizeof(int);
    int listens = 0;
    if (getsockname(fd, (struct sockaddr *)&name, &size) || name.sun_family != AF_UNIX) return;
    getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &flag_size);
    const char *last = strrchr(name.sun_path, '/');
    for (uint32_t i = 0; last && i < is->sockets; i++) {
        if (strcmp(last, SOCKETS[i]) == 0) replace(fd, with[2 * i + !listens]);
    }
}

static uint64_t map_private(uint64_t start, uint64_t end, int fd, off_t offset) {
    void *got = mmap((void *)start, end - start, PROT_READ | PROT_WRITE, MAP_PRIVATE | (start ? MAP_FIXED : 0), fd, offset);
    must("map another memory", got == MAP_FAILED ? -1 : 0);
    return (uint64_t)got;
}

/* Where a file has data, it takes the place of what is mapped there, at the same offsets. */
static void lay_over(uint64_t start, uint64_t end, int fd, off_t offset) {
    off_t last = offset + (off_t)(end - start);
    for (off_t at = offset, stop; (at = lseek(fd, at, SEEK_DATA)) >= 0 && at < last; at = stop) {
        stop = lseek(fd, at, SEEK_HOLE);
        must("look at a layer of memory", stop);
        if (stop > last) stop = last;
        map_private(start + (uint64_t)(at - offset), start + (uint64_t)(stop - offset), fd, at);
    }
}

/* The machine's memory becomes another one that began with the same; what is translated of it stays where that can be. */
static void compare(uint64_t start, uint64_t end, int fd, int layer, off_t offset) {
    uint64_t fresh = map_private(0, end - start, fd, offset);
    if (layer >= 0) lay_over(fresh, fresh + (end - start), layer, offset);
    translated_compare(start, end, (const uint8_t *)fresh, layer, offset);
    munmap((void *)fresh, end - start);
}

/* Private mappings of a file of the stem's become such of what takes its place. */
static void map_again(const struct request *is, const int *with) {
    static char text[1 << 18];
    size_t size = 0;
    bool alike = false;
    struct stat st;
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC), layer = is->layer ? with[is->files] : -1;
    for (ssize_t got; (got = read(fd, text + size, sizeof text - 1 - size)) != 0; size += (size_t)got) must("read its mappings", got);
    close(fd);
    for (char *line = text; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        char *at;
        uint64_t start = strtoull(line, &at, 16), end = strtoull(at + 1, &at, 16);
        bool private = at[4] == 'p';
        uint64_t offset = strtoull(at + 5, &at, 16), major = strtoull(at, &at, 16), minor = strtoull(at + 1, &at, 16), inode = strtoull(at, &at, 10);
        for (uint32_t i = 0; private && i < is->files; i++) {
            if (inode != is->file[i].inode || makedev(major, minor) != is->file[i].device) continue;
            alike = fstat(with[i], &st) == 0 && st.st_dev == is->file[i].device && st.st_ino == inode;
            if (alike) compare(start, end, with[i], layer, (off_t)offset);
            map_private(start, end, with[i], (off_t)offset);
            if (is->layer) lay_over(start, end, layer, (off_t)offset);
        }
    }
    if (alike) translated_keep();
}

static void renew_files(const struct request *is, const int *fds, int count) {
    const int output = fds[is->groups], *files = fds + is->groups + 1, *sockets = files + is->files + is->layer;
    char path[40], target[64];
    struct stat st;
    map_again(is, files);
    for (int fd = 3; fd < 1024; fd++) {
        int ours = fd == report;
        for (int i = 0; i < count; i++) ours |= fds[i] == fd;
        if (ours || fstat(fd, &st)) continue;
        for (uint32_t i = 0; i < is->files; i++) {
            if (st.st_dev == is->file[i].device && st.st_ino == is->file[i].inode) replace(fd, files[i]);
        }
        if (fd == commands && is->stem) replace(fd, fds[count - 1]);
        else if (fd == commands || fd == reports) close(fd);
        else if (S_ISSOCK(st.st_mode)) renew_socket(fd, is, sockets);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t size = readlink(path, target, sizeof target - 1);
        target[size > 0 ? size : 0] = 0;
        if (strcmp(target, "anon_inode:[eventfd]") == 0) renew(fd, eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        if (strcmp(target, "anon_inode:[eventpoll]") == 0) renew(fd, epoll_create1(EPOLL_CLOEXEC));
    }
    replace(1, output);
    replace(2, output);
    for (int i = 0; i < count; i++) close(fds[i]);
}

/* Limits it has of the stem. */
static void become(const struct request *is, const int *fds, int count) {
    for (uint32_t i = 0; i < is->groups; i++) must("enter its cgroups", write(fds[i], "0", 1));
    must("have a cgroup namespace", unshare(CLONE_NEWCGROUP));
    must("start a session", setsid());
    renew_files(is, fds, count);
    must("end with its parent", prctl(PR_SET_PDEATHSIG, SIGKILL));
    if (is->stem) return;
    must("mount /proc", mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL));
    must("give up its groups", syscall(SYS_setgroups, 0, NULL)); /* by system calls: the other threads aren't there yet */
    must("change its group", syscall(SYS_setresgid, is->uid, is->uid, is->uid));
    must("change its user", syscall(SYS_setresuid, is->uid, is->uid, is->uid));
    must("give up privileges", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    must("end with its parent", prctl(PR_SET_PDEATHSIG, SIGKILL)); /* forgotten with a change of user */
}

static void be_a_branch(const struct request *is, const int *fds, int count) {
    become(is, fds, count);
    atomic_fetch_add(&turn, 1);
    int flags = THREAD | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;
    for (int i = 0; i < MOST_THREADS; i++) {
        struct thread *it = &threads[i];
        if (atomic_load(&it->state) != RUNS) continue;
        it->number = clone(make_again, stacks[i] + SMALL_STACK, flags, it, it->tid, it->self, it->tid);
        must("make a thread again", it->number);
    }
    close(report);
    while (!is->stem) pause(); /* what forked is the process's first thread */
}

/* --- requests -------------------------------------------------------------------------------------------------------------------------- */

static void answer(int32_t pid, const char *why) {
    char message[4 + 160] = {0};
    memcpy(message, &pid, sizeof pid);
    snprintf(message + 4, sizeof message - 4, "%s", why);
    send(commands, message, 4 + strlen(message + 4), MSG_NOSIGNAL);
}

/* Whether this is the branch, which has closed the descriptors. */
static bool branch(const struct request *is, const int *fds, int count) {
    int pipe_ends[2];
    char why[128];
    pid_t *tid = (pid_t *)((char *)pthread_self() + tid_offset);
    if (pipe2(pipe_ends, O_CLOEXEC)) return answer(0, strerror(errno)), false;
    reports = pipe_ends[0];
    report = pipe_ends[1];
    if (!park_all()) {
        close(report);
        close(reports);
        return answer(0, "its threads don't come to rest"), false;
    }
    /* the first in a pid namespace can't have its parent's children */
    long pid = syscall(SYS_clone, (is->stem ? OWN_NAMESPACES & ~CLONE_NEWPID : OWN_NAMESPACES) | CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD, NULL, NULL, tid, 0);
    if (pid == 0) {
        be_a_branch(is, fds, count);
        return true;
    }
    int error = errno;
    go_on();
    close(report);
    ssize_t size = pid < 0 ? 0 : read(reports, why, sizeof why - 1);
    why[size > 0 ? size : 0] = 0;
    close(reports);
    if (pid < 0) answer(0, strerror(error));
    else answer(size == 0 ? (int32_t)pid : 0, why);
    return false;
}

static void *serve(void *nothing) {
    for (;;) {
        struct request is;
        int fds[MOST_DESCRIPTORS], count = 0;
        union {
            struct cmsghdr header;
            char space[CMSG_SPACE(sizeof fds)];
        } control;
        struct iovec piece = {&is, sizeof is};
        struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        ssize_t got = recvmsg(commands, &message, MSG_CMSG_CLOEXEC);
        if (got <= 0) _exit(0); /* the launcher is gone */
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
            count = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(fds, CMSG_DATA(header), (size_t)count * sizeof(int));
        }
        bool fits = got == sizeof is && is.groups <= MOST_DESCRIPTORS && is.files <= MOST_FILES && is.layer <= 1 && is.sockets <= MOST_SOCKETS;
        if (!fits || count != (int)(is.groups + 1 + is.files + is.layer + 2 * is.sockets + (is.stem != 0))) answer(0, "a request that can't be understood");
        else if (branch(&is, fds, count)) continue;
        for (int i = 0; i < count; i++) close(fds[i]);
    }
    return nothing;
}

__attribute__((constructor)) static void load(void) {
    const char *number = getenv("DSEC_STEM");
    struct sigaction action = {.sa_sigaction = park, .sa_flags = SA_RESTART | SA_SIGINFO};
    sigset_t all, before;
    pthread_t server;
    if (!number) return;
    create = dlsym(RTLD_NEXT, "pthread_create");
    translated_begin();
    sigfillset(&action.sa_mask);
    if (!create || pthread_key_create(&at_end, ends) || sigaction(PARK, &action, NULL)) abort();
    enter();
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    commands = atoi(number);
    close(commands - 1); /* this library */
    if (create(&server, NULL, serve, NULL)) abort();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}
