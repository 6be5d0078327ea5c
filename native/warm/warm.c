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
struct arena_allocator { /* PyObjectArenaAllocator */
    void *context;
    void *(*allocate)(void *, size_t);
    void (*give_back)(void *, void *, size_t);
};
extern void PyObject_SetArenaAllocator(struct arena_allocator *);

static long call6(long number, long a, long b, long c, long d, long e, long f) {
#if defined(__x86_64__)
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c, x3 __asm__("x3") = d,
                  x4 __asm__("x4") = e, x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#else
#error "dsec knows x86_64 and aarch64"
#endif
}

static long call(long number, long a, long b, long c, long d, long e) { return call6(number, a, b, c, d, e, 0); }

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

/* --- memory that a fork needn't copy the tables of -----------------------------------------------------------------------------------
 *
 * A fork copies the page tables of what a process has written, and a worker's end walks through them: a third of both. Those of a file it
 * leaves out. So what the imports have written goes into a file of memory, which is mapped privately in its place and then sealed: the same
 * bytes at the same addresses. Only where nobody can see a difference: MADV_DONTNEED brings zeros of anonymous memory, but what a file has
 * of such a mapping, and an allocator of an import's own may count on the zeros. The C library's heap, Python's arenas and the data
 * of programs have no such owner. */

#define PAGE 4096 /* where pages are larger this part does nothing, and a rehearsal finds less */
#define ARENAS 4096
#define FEW_PAGES 16 /* what lies between is taken along */
#define IN_FILE(entry) ((entry) >> 61 & 1) /* of /proc/self/pagemap */
#define THERE(entry) ((entry) >> 63)

static struct { uint64_t at, size; } arenas[ARENAS];
static int image = -1;
static uint64_t image_size;

static void *arena_allocate(void *context, size_t size) {
    (void)context;
    long at = call6(SYS_mmap, 0, (long)size, 3 /* PROT_READ, PROT_WRITE */, 0x22 /* MAP_PRIVATE, MAP_ANONYMOUS */, -1, 0);
    if (at < 0 && at > -4096) return NULL;
    for (int i = 0; i < ARENAS; i++)
        if (!arenas[i].size) {
            arenas[i].at = (uint64_t)at;
            arenas[i].size = size;
            break;
        }
    return (void *)at;
}

static void arena_give_back(void *context, void *at, size_t size) {
    (void)context;
    for (int i = 0; i < ARENAS; i++)
        if (arenas[i].at == (uint64_t)at) arenas[i].size = 0;
    call(SYS_munmap, (long)at, (long)size, 0, 0, 0);
}

/* Know Python's arenas from now on. */
void warm_arenas(void) {
    struct arena_allocator ours = {NULL, arena_allocate, arena_give_back};
    PyObject_SetArenaAllocator(&ours);
}

static void shed(uint64_t at, uint64_t size, int protection) {
    for (uint64_t done = 0; done < size;) {
        long n = call(SYS_pwrite64, image, (long)(at + done), (long)(size - done), (long)(image_size + done), 0);
        if (n <= 0) return; /* no memory for it: it stays as it is */
        done += (uint64_t)n;
    }
    call6(SYS_mmap, (long)at, (long)size, protection, 0x12 /* MAP_PRIVATE, MAP_FIXED */, image, (long)image_size);
    image_size += size; /* this variable may just have moved, too: only now */
}

/* Of one private mapping. Nothing else may run meanwhile. */
void warm_shed(uint64_t at, uint64_t end, int protection) {
    uint64_t entries[64], first = 0, last = 0; /* on the stack, which stays where it is */
    int map = (int)call(SYS_openat, -100, (long)"/proc/self/pagemap", 02000000, 0, 0);
    if (image < 0) image = (int)call(SYS_memfd_create, (long)"warm", 3 /* MFD_CLOEXEC, MFD_ALLOW_SEALING */, 0, 0, 0);
    for (uint64_t page = at; page < end && map >= 0 && image >= 0; page += PAGE) {
        uint64_t index = (page - at) / PAGE % 64;
        if (!index && call(SYS_pread64, map, (long)entries, sizeof entries, (long)(page / PAGE) * 8, 0) <= 0) break;
        if (!THERE(entries[index]) || IN_FILE(entries[index])) continue;
        if (first && page - last > FEW_PAGES * PAGE) {
            shed(first, last - first, protection);
            first = 0;
        }
        if (!first) first = page;
        last = page + PAGE;
    }
    if (first) shed(first, last - first, protection);
    call(SYS_close, map, 0, 0, 0, 0);
}

/* Of all arenas that are known; and then nobody can write to the file any more. */
void warm_shed_arenas(void) {
    for (int i = 0; i < ARENAS; i++)
        if (arenas[i].size) warm_shed(arenas[i].at, arenas[i].at + arenas[i].size, 3);
    call(SYS_fcntl, image, 1033 /* F_ADD_SEALS */, 15 /* F_SEAL_SEAL, SHRINK, GROW, WRITE */, 0, 0);
    call(SYS_close, image, 0, 0, 0, 0);
    image = -1;
}

/* --- pages that every call needs ------------------------------------------------------------------------------------------------------
 *
 * A worker that waits gets them ahead: those that it will write to copied, the rest mapped; else its call runs into them one by one. Which
 * these are shows a rehearsal: a child serves a call of ours, and then looks what it has. Its parent stands still meanwhile, in C, because
 * what that one writes to becomes the child's own, too. */

#define RANGES 2048
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

/* What of a page a call needs: 0 nothing that it didn't get from its parent anyway. */
static uint64_t needed(uint64_t entry, uint64_t advice) {
    if (!THERE(entry)) return 0;
    if (IN_FILE(entry)) return POPULATE_READ;
    return advice == POPULATE_WRITE && entry >> 56 & 1 /* mapped by this process alone */ ? POPULATE_WRITE : 0;
}

/* Of the child: what it has. Does not return. */
void warm_tell(void) {
    static uint64_t entries[1024];
    int map = (int)call(SYS_openat, -100, (long)"/proc/self/pagemap", 02000000, 0, 0);
    for (int i = 0; i < mapping_count && map >= 0; i++) {
        struct range run = {0, 0, 0};
        for (uint64_t done = 0; done < mappings[i].size; done += PAGE) {
            uint64_t index = done / PAGE % 1024, at = mappings[i].at + done;
            if (!index && call(SYS_pread64, map, (long)entries, sizeof entries, (long)(at / PAGE) * 8, 0) <= 0) break;
            uint64_t advice = needed(entries[index], mappings[i].advice);
            if (!advice) continue;
            uint64_t between = advice == POPULATE_READ ? FEW_PAGES * PAGE : 0; /* the kernel maps a file's neighbours, too */
            if (run.size && (run.advice != advice || at - (run.at + run.size) > between)) {
                call(SYS_write, FD_PARENT, (long)&run, sizeof run, 0, 0);
                run.size = 0;
            }
            if (!run.size) run = (struct range){at, 0, advice};
            run.size = at + PAGE - run.at;
        }
        if (run.size) call(SYS_write, FD_PARENT, (long)&run, sizeof run, 0, 0);
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

static uint64_t mixed(uint64_t value) { /* splitmix64 */
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
    value = (value ^ value >> 27) * 0x94d049bb133111eb;
    return value ^ value >> 31;
}

/* 128 bits from the kernel, spread over each generator: twice 2.5 KiB from it would take as long as all else here. */
static long seed(void) {
    uint64_t from[2];
    if (call(SYS_getrandom, (long)from, sizeof from, 0, 0, 0) != sizeof from) return 1;
    for (int i = 0; i < generator_count; i++) {
        for (int word = 0; word < WORDS; word++) {
            from[0] += 0x9e3779b97f4a7c15;
            generators[i].words[word] = (uint32_t)(mixed(from[0]) ^ mixed(from[1] - from[0]));
        }
        *generators[i].next = WORDS;
    }
    return 0;
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
    return bad | seed();
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
