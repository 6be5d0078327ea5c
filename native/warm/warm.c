/* The warm parent's native part: a shared object without a C library of its own, which any Python loads by ctypes. It does in C what a call
 * costs in the parent and in a worker before its code runs, because there every object of Python's that is touched is a page to copy.
 *
 * It runs in the jail, in a process that may run anybody's code, so nothing outside relies on it. native/cells/cells.h has the messages.
 */
#include <linux/capability.h>
#include <linux/poll.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>

#define NAMESPACES 4
#define CALL_FDS 3
#define FD_PARENT 3 /* in the parent; in a worker the call's socket */
#define WORKERS 256

enum { CELL_FORK = 129, CELL_FORKED = 193, CELL_ENDED = 67 };
struct message {
    uint32_t type, lane, turn;
    int32_t value;
};

/* Of the process that loads this. */
extern int fork(void);
extern void PyOS_BeforeFork(void), PyOS_AfterFork_Parent(void), PyOS_AfterFork_Child(void);

static long call(long number, long a, long b, long c, long d, long e) {
#if defined(__x86_64__)
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c, x3 __asm__("x3") = d,
                  x4 __asm__("x4") = e;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
    return x0;
#else
#error "dsec knows x86_64 and aarch64"
#endif
}

struct iovec_ {
    void *base;
    size_t length;
};
struct packet { /* struct msghdr of the kernel */
    void *name;
    int name_length;
    struct iovec_ *iov;
    size_t iov_count;
    void *control;
    size_t control_length;
    unsigned flags;
};
struct rights { /* struct cmsghdr and what it carries */
    size_t length;
    int level, type;
    int fds[NAMESPACES + CALL_FDS + 1];
};

/* Their ends come by descriptors, not by a signal: one of the threads that an import may have started would get that. */
static struct {
    int pid, pidfd;
    uint32_t lane, turn;
} workers[WORKERS];
static int own_pids = -1;

#define WORDS 624
#define GENERATORS 4
/* Mersenne Twisters that were made before any call: each worker has states of its own. Seeding them in Python touches a hundred pages. */
static struct {
    uint32_t *words;
    int32_t *next;
} generators[GENERATORS];
static int generator_count;

/* Returns 0 where there is no room. */
int warm_generator(uint32_t *words, int32_t *next) {
    if (generator_count == GENERATORS) return 0;
    generators[generator_count].words = words;
    generators[generator_count++].next = next;
    return 1;
}

static void say(uint32_t type, uint32_t lane, uint32_t turn, int32_t value) {
    struct message message = {type, lane, turn, value};
    call(SYS_write, FD_PARENT, (long)&message, sizeof message, 0, 0);
}

/* --- pages that every call needs ------------------------------------------------------------------------------------------------------
 *
 * A worker that waits gets them ahead: those that it will write to copied, the rest mapped; else its call runs into them one by one. Which
 * these are shows a rehearsal: a child serves a call of ours, and then looks what it has. Its parent stands still meanwhile, in C, because
 * what that one writes to becomes the child's own, too. */

#define RANGES 2048
#define PAGE 4096 /* where pages are larger it finds less */
#define WAIT_NS 8000000
enum { POPULATE_READ = 22, POPULATE_WRITE = 23 };
struct range {
    uint64_t at, size, advice;
};
static struct range hot[RANGES], mappings[RANGES];
static int hot_count, mapping_count;

/* A private mapping: one that can be written to, or a file's that can't. Returns 0 where there is no room. */
int warm_mapping(uint64_t at, uint64_t end, int writable) {
    if (mapping_count == RANGES) return 0;
    mappings[mapping_count++] = (struct range){at, end - at, writable ? POPULATE_WRITE : POPULATE_READ};
    return 1;
}

/* 1 in the child, which is to serve the call from FD_PARENT and then to `warm_tell`; 0 in the parent, when it knows. `theirs` is the child's end
 * of `ours`. */
int warm_rehearse(int ours, int theirs) {
    PyOS_BeforeFork();
    int pid = fork();
    if (pid == 0) {
        call(SYS_dup3, theirs, FD_PARENT, 0, 0, 0);
        call(436 /* close_range */, FD_PARENT + 1, ~0u, 0, 0, 0);
        PyOS_AfterFork_Child();
        return 1;
    }
    call(SYS_close, theirs, 0, 0, 0, 0);
    struct range found;
    uint32_t answer = 0;
    char skipped[256];
    call(SYS_read, ours, (long)&answer, sizeof answer, 0, 0);
    if (answer <= sizeof skipped) call(SYS_read, ours, (long)skipped, answer, 0, 0);
    while (answer <= sizeof skipped && call(SYS_read, ours, (long)&found, sizeof found, 0, 0) == sizeof found && hot_count < RANGES)
        hot[hot_count++] = found;
    call(SYS_close, ours, 0, 0, 0, 0);
    if (pid > 0) call(SYS_wait4, pid, 0, 0, 0, 0);
    PyOS_AfterFork_Parent();
    return 0;
}

/* Of the child: what it has. Does not return. */
void warm_tell(void) {
    static uint64_t entries[1024];
    int map = (int)call(SYS_openat, -100, (long)"/proc/self/pagemap", 02000000, 0, 0);
    for (int i = 0; i < mapping_count && map >= 0; i++) {
        struct range run = {0, 0, mappings[i].advice};
        int bit = run.advice == POPULATE_WRITE ? 56 /* mapped by this process alone */ : 63; /* there: files' pages aren't inherited */
        for (uint64_t done = 0; done < mappings[i].size; done += PAGE) {
            uint64_t index = done / PAGE % 1024, first = (mappings[i].at + done) / PAGE;
            if (!index && call(SYS_pread64, map, (long)entries, sizeof entries, (long)first * 8, 0) <= 0) break;
            if (entries[index] >> 63 && entries[index] >> bit & 1) {
                if (!run.size) run.at = mappings[i].at + done;
                run.size += PAGE;
            }
            if (run.size && (done + PAGE >= mappings[i].size || run.at + run.size <= mappings[i].at + done)) {
                call(SYS_write, FD_PARENT, (long)&run, sizeof run, 0, 0);
                run.size = 0;
            }
        }
    }
    call(SYS_exit_group, 0, 0, 0, 0, 0);
}

/* Where calls follow one another there is no time ahead, and nothing to gain: it takes as long as running into them does. */
static void get_ready(void) {
    struct pollfd wait = {FD_PARENT, POLLIN, 0};
    const long time[2] = {0, WAIT_NS};
    if (!hot_count || call(SYS_ppoll, (long)&wait, 1, (long)time, 0, 0)) return;
    for (int i = 0; i < hot_count; i++) call(SYS_madvise, (long)hot[i].at, (long)hot[i].size, (long)hot[i].advice, 0, 0);
}

/* A landlock domain of its own: the cells of an environment have one net namespace, and with it one space of abstract sockets. Where the
 * kernel has none that can do this, the filter lets nobody make such sockets. */
static long alone(void) {
    struct {
        uint64_t fs, net, scoped;
    } ruleset = {0, 0, 3 /* abstract sockets, signals */};
    if (call(444 /* landlock_create_ruleset */, 0, 0, 1, 0, 0) < 6) return 0;
    long fd = call(444, (long)&ruleset, sizeof ruleset, 0, 0, 0);
    long bad = fd < 0 || call(446 /* landlock_restrict_self */, fd, 0, 0, 0, 0);
    call(SYS_close, fd, 0, 0, 0, 0);
    return bad;
}

static void limit(long resource, uint64_t value) {
    const uint64_t both[2] = {value, value};
    call(SYS_prlimit64, 0, resource, (long)both, 0, 0);
}

/* Into the cell, with the call's descriptors as 3, 1 and 2 and no other; then without any privilege. */
static long join(const int *fds) {
    static const int KINDS[] = {CLONE_NEWPID, CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUTS};
    long bad = 0;
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0, 0, 0}, {0, 0, 0}};
    for (int i = 1; i < NAMESPACES; i++) bad |= call(SYS_setns, fds[i], KINDS[i], 0, 0, 0);
    limit(7 /* RLIMIT_NOFILE */, 1024);
    bad |= call(SYS_dup3, fds[NAMESPACES], FD_PARENT, 02000000 /* O_CLOEXEC */, 0, 0) < 0;
    bad |= call(SYS_dup3, fds[NAMESPACES + 1], 1, 0, 0, 0) < 0;
    bad |= call(SYS_dup3, fds[NAMESPACES + 2], 2, 0, 0, 0) < 0;
    bad |= call(436 /* close_range */, FD_PARENT + 1, ~0u, 0, 0, 0);
    bad |= call(SYS_prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    bad |= call(SYS_capset, (long)&header, (long)none, 0, 0, 0);
    bad |= call(SYS_setsid, 0, 0, 0, 0, 0) < 0;
    bad |= alone();
    for (int i = 0; i < generator_count; i++) {
        bad |= call(SYS_getrandom, (long)generators[i].words, WORDS * 4, 0, 0, 0) != WORDS * 4;
        *generators[i].next = WORDS;
    }
    return bad;
}

static void reap(int worker) {
    int status = 0;
    call(SYS_wait4, workers[worker].pid, (long)&status, 0, 0, 0);
    call(SYS_close, workers[worker].pidfd, 0, 0, 0, 0);
    workers[worker].pid = 0;
    say(CELL_ENDED, workers[worker].lane, workers[worker].turn, status);
}

/* 1 in a worker, 0 in the parent. */
static int fork_worker(const struct message *message, const int *fds) {
    int pid = -1;
    long bad = call(SYS_setns, fds[0], CLONE_NEWPID, 0, 0, 0);
    if (!bad) {
        PyOS_BeforeFork();
        pid = fork();
        if (pid == 0) {
            if (join(fds)) call(SYS_exit_group, 71, 0, 0, 0, 0);
            for (int i = 0; i < hot_count; i++) call(SYS_madvise, (long)hot[i].at, (long)hot[i].size, 23 /* MADV_POPULATE_WRITE */, 0, 0);
            get_ready();
            PyOS_AfterFork_Child();
            return 1;
        }
        PyOS_AfterFork_Parent();
    }
    call(SYS_setns, own_pids, CLONE_NEWPID, 0, 0, 0);
    for (int i = 0; i < WORKERS && pid > 0; i++)
        if (!workers[i].pid) {
            workers[i].pid = pid;
            workers[i].pidfd = (int)call(434 /* pidfd_open */, pid, 0, 0, 0, 0);
            workers[i].lane = message->lane;
            workers[i].turn = message->turn;
            break;
        }
    say(CELL_FORKED, message->lane, message->turn, pid > 0 ? pid : bad ? (int)bad : -11 /* EAGAIN */);
    return 0;
}

/* Serve the warden. Returns 1 in each worker, and 0 in the parent when the warden is gone. To be called with the interpreter's lock held. */
int warm_serve(void) {
    static struct pollfd wait[1 + WORKERS];
    static int whose[1 + WORKERS];
    own_pids = (int)call(SYS_openat, -100, (long)"/proc/self/ns/pid", 02000000, 0, 0);
    for (;;) {
        int count = 1;
        wait[0] = (struct pollfd){FD_PARENT, POLLIN, 0};
        for (int i = 0; i < WORKERS; i++)
            if (workers[i].pid) {
                wait[count] = (struct pollfd){workers[i].pidfd, POLLIN, 0};
                whose[count++] = i;
            }
        if (call(SYS_ppoll, (long)wait, count, 0, 0, 0) < 0) continue;
        for (int i = 1; i < count; i++)
            if (wait[i].revents) reap(whose[i]);
        if (!wait[0].revents) continue;
        struct message message;
        struct rights rights;
        struct iovec_ iov = {&message, sizeof message};
        struct packet packet = {0, 0, &iov, 1, &rights, sizeof rights, 0};
        if (call(SYS_recvmsg, FD_PARENT, (long)&packet, 0x40000000 /* MSG_CMSG_CLOEXEC */, 0, 0) != sizeof message) return 0;
        if (message.type != CELL_FORK || rights.length != 16 + sizeof(int) * (NAMESPACES + CALL_FDS)) return 0;
        if (fork_worker(&message, rights.fds)) return 1;
        for (int i = 0; i < NAMESPACES + CALL_FDS; i++) call(SYS_close, rights.fds[i], 0, 0, 0, 0);
    }
}
