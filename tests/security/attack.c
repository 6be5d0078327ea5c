/* What an attacker inside a sandbox does, as one static program without a shell.
 *
 *   attack call NAME ARG... [-- NAME ARG...]...   system calls, one after the other in one process; prints "result errno" for each
 *   attack COMMAND ARG...                         see COMMANDS
 *
 * An ARG is a number, s:TEXT (pointer to it), x:HEX (pointer to these bytes), z:N (pointer to N zero bytes), $I (result of call I), or
 * @I (pointer to a u64 that holds the result of call I).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct {
    const char *name;
    long number;
} CALLS[] = {
#define CALL(n) {#n, SYS_##n}
    CALL(mount), CALL(umount2), CALL(pivot_root), CALL(chroot), CALL(unshare), CALL(setns), CALL(clone), CALL(openat), CALL(close),
    CALL(read), CALL(pread64), CALL(write), CALL(socket), CALL(socketpair), CALL(setsockopt), CALL(ioctl), CALL(bpf), CALL(perf_event_open),
    CALL(userfaultfd), CALL(keyctl), CALL(add_key), CALL(request_key), CALL(kexec_load), CALL(init_module), CALL(finit_module),
    CALL(delete_module), CALL(open_by_handle_at), CALL(name_to_handle_at), CALL(ptrace), CALL(kill), CALL(tgkill), CALL(process_vm_readv),
    CALL(process_vm_writev), CALL(pidfd_open), CALL(pidfd_send_signal), CALL(quotactl), CALL(swapon), CALL(swapoff), CALL(reboot), CALL(acct),
    CALL(vhangup), CALL(settimeofday), CALL(clock_settime), CALL(adjtimex), CALL(clock_adjtime), CALL(fanotify_init), CALL(personality),
    CALL(prctl), CALL(seccomp), CALL(syslog), CALL(mknodat), CALL(symlinkat), CALL(linkat), CALL(fchownat), CALL(fchmodat),
    CALL(mkdirat), CALL(renameat), CALL(setxattr), CALL(lsetxattr), CALL(unlinkat), CALL(getuid), CALL(geteuid), CALL(setuid), CALL(setresuid), CALL(setgroups), CALL(sethostname),
    CALL(setdomainname), CALL(setpriority), CALL(sched_setscheduler), CALL(ioprio_set), CALL(setrlimit), CALL(prlimit64), CALL(capset),
    CALL(memfd_create), CALL(fchmod), CALL(ftruncate), CALL(inotify_init1), CALL(pipe2), CALL(fcntl), CALL(bind), CALL(listen), CALL(connect), CALL(lookup_dcookie),
    CALL(kcmp), CALL(move_pages), CALL(getdents64), CALL(nfsservctl), CALL(mlock), CALL(dup), CALL(fchdir), CALL(sysinfo), CALL(chdir),
#ifdef __x86_64__
    CALL(iopl), CALL(ioperm), CALL(modify_ldt), CALL(uselib), CALL(_sysctl), CALL(sysfs), CALL(create_module), CALL(kexec_file_load),
#endif
    {"open_tree", 428}, {"move_mount", 429}, {"fsopen", 430}, {"fsconfig", 431}, {"fsmount", 432}, {"clone3", 435}, {"pidfd_getfd", 438},
    {"mount_setattr", 442}, {"quotactl_fd", 443}, {"memfd_secret", 447}, {"io_uring_setup", 425}, {"io_uring_enter", 426},
    {"io_uring_register", 427}, {"open_tree_attr", 467}, {"file_setattr", 469}, {"unknown", 480}, {"far", 4000},
};

static long results[64];
static int result_count;

static long find_call(const char *name) {
    for (size_t i = 0; i < sizeof CALLS / sizeof *CALLS; i++)
        if (!strcmp(CALLS[i].name, name)) return CALLS[i].number;
    fprintf(stderr, "no such call: %s\n", name);
    exit(64);
}

static long argument(const char *text) {
    if (text[0] == 's' && text[1] == ':') return (long)(text + 2);
    if (text[0] == 'z' && text[1] == ':') return (long)calloc(1, (size_t)atol(text + 2));
    if (text[0] == '$') return results[atoi(text + 1)];
    if (text[0] == '@') {
        uint64_t *cell = malloc(sizeof *cell);
        *cell = (uint64_t)results[atoi(text + 1)];
        return (long)cell;
    }
    if (text[0] == 'x' && text[1] == ':') {
        size_t size = strlen(text + 2) / 2;
        unsigned char *bytes = malloc(size + 1);
        for (size_t i = 0; i < size; i++) sscanf(text + 2 + 2 * i, "%2hhx", &bytes[i]);
        return (long)bytes;
    }
    return (long)strtoull(text, NULL, 0);
}

static int do_calls(int argc, char **argv) {
    for (int at = 0; at < argc;) {
        long number = find_call(argv[at++]), args[6] = {0};
        for (int i = 0; at < argc && strcmp(argv[at], "--"); at++)
            if (i < 6) args[i++] = argument(argv[at]);
        at++;
        errno = 0;
        long result = syscall(number, args[0], args[1], args[2], args[3], args[4], args[5]);
        if (number == SYS_clone && result == 0) _exit(0);
        if (number == 435 && result == 0) _exit(0);
        printf("%ld %d\n", result, result == -1 ? errno : 0);
        if (result_count < 64) results[result_count++] = result;
    }
    return 0;
}

static int say(long result) {
    printf("%ld %d\n", result, result < 0 ? errno : 0);
    return 0;
}

/* --- commands -------------------------------------------------------------------------------------------------------------------------- */

static unsigned long files_read, bytes_read, refused;

/* Read every file below a directory, at most `limit` bytes of each, without waiting for any: `grep -r` in short. */
static void walk(int dir, const char *name, int depth) {
    int fd = openat(dir, name, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC | O_NOCTTY);
    static char buffer[65536];
    if (fd < 0) {
        refused++;
        return;
    }
    struct stat st;
    if (fstat(fd, &st) == 0 && S_ISDIR(st.st_mode)) {
        DIR *d = depth < 12 ? fdopendir(fd) : NULL;
        if (!d) {
            close(fd);
            return;
        }
        for (struct dirent *e; (e = readdir(d));)
            if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) walk(dirfd(d), e->d_name, depth + 1);
        closedir(d);
        return;
    }
    struct pollfd ready = {fd, POLLIN, 0};
    ssize_t n, total = 0;
    while (total < 8 << 20 && poll(&ready, 1, 0) > 0 && (n = read(fd, buffer, sizeof buffer)) > 0) total += n;
    files_read++;
    bytes_read += (unsigned long)total;
    close(fd);
}

static int do_walk(char **argv) {
    alarm(60);
    walk(AT_FDCWD, argv[0], 0);
    printf("%lu %lu %lu\n", files_read, bytes_read, refused);
    return 0;
}

static int do_cat(char **argv) {
    char buffer[65536];
    int fd = open(argv[0], O_RDONLY);
    if (fd < 0) {
        fprintf(stderr, "%d\n", errno);
        return 1;
    }
    for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;)
        if (write(1, buffer, (size_t)n) < 0) return 1;
    return 0;
}

/* Write text into a file: "result errno" of open, or of write. */
static int do_put(char **argv) {
    int fd = open(argv[0], O_WRONLY);
    return say(fd < 0 ? -1 : write(fd, argv[1], strlen(argv[1])));
}

/* Make terminals until that fails. */
static int do_terminals(char **argv) {
    int count = 0, most = atoi(argv[0]);
    while (count < most && open("/dev/ptmx", O_RDWR | O_NOCTTY) >= 0) count++;
    printf("%d %d\n", count, errno);
    return 0;
}

static const char *wanted;
static int unread;

static void *read_page(void *number) {
    char page[4096];
    int fd = open(wanted, O_RDONLY);
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    if (pread(fd, page, sizeof page, (off_t)(intptr_t)number * (off_t)sizeof page) < 0) __atomic_add_fetch(&unread, 1, __ATOMIC_RELAXED);
    close(fd);
    return NULL;
}

/* PATH N: each page of a file in a thread of its own; prints how many could not be read. */
static int do_pages(char **argv) {
    int count = atoi(argv[1]), made = 0;
    pthread_t *threads = calloc((size_t)count, sizeof *threads);
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 32 << 10);
    wanted = argv[0];
    while (made < count && !pthread_create(&threads[made], &small, read_page, (void *)(intptr_t)made)) made++;
    for (int i = 0; i < made; i++) pthread_join(threads[i], NULL);
    printf("%d of %d\n", unread, made);
    return 0;
}

/* Create processes until that fails; they live until the parent ends. Prints how many and why it stopped. */
static int do_forks(char **argv) {
    int count = 0, most = atoi(argv[0]), gate[2];
    if (pipe(gate)) return 1;
    for (; count < most; count++) {
        pid_t pid = fork();
        if (pid < 0) break;
        if (pid == 0) {
            char byte;
            close(gate[1]);
            ssize_t n = read(gate[0], &byte, 1);
            _exit(n != 0);
        }
    }
    printf("%d %d\n", count, errno);
    return 0;
}

/* Fork without end, in every process. */
static int __attribute__((noreturn)) do_bomb(void) {
    for (;;)
        if (fork() < 0) usleep(1000);
}

static int do_eat(char **argv) {
    size_t left = (size_t)atol(argv[0]) << 20, step = 1 << 20;
    for (; left >= step; left -= step) {
        char *p = mmap(NULL, step, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) return say(-1);
        memset(p, 1, step);
    }
    puts("ate all");
    return 0;
}

/* Many small processes that each eat a little: none of them is a big target for the OOM killer. */
static int do_nibble(char **argv) {
    int count = atoi(argv[0]);
    for (int i = 0; i < count; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            char *p = mmap(NULL, 256 << 10, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (p != MAP_FAILED) memset(p, 1, 256 << 10);
            pause();
        }
    }
    sleep(1);
    kill(0, SIGKILL);
    return 0;
}

/* Open as many of something as there may be: inotify instances, pipes with buffers of the largest size, files, timers. */
static int do_exhaust(char **argv) {
    int count = 0, most = atoi(argv[1]);
    for (errno = 0; count < most; count++) {
        if (!strcmp(argv[0], "inotify")) {
            if (inotify_init1(0) < 0) break;
        } else if (!strcmp(argv[0], "pipes")) {
            int fds[2];
            if (pipe(fds) < 0 || fcntl(fds[0], F_SETPIPE_SZ, 1 << 20) < 0) break;
        } else if (!strcmp(argv[0], "watches")) {
            static int fd = -1;
            char name[64];
            if (fd < 0 && (fd = inotify_init1(0)) < 0) break;
            snprintf(name, sizeof name, "/tmp/w%d", count);
            if (close(open(name, O_CREAT | O_WRONLY, 0600)) || inotify_add_watch(fd, name, IN_ALL_EVENTS) < 0) break;
        } else return 64;
    }
    printf("%d %d\n", count, count < most ? errno : 0);
    fflush(stdout);
    if (argv[2]) sleep((unsigned)atoi(argv[2]));
    return 0;
}

/* The classical way out of chroot(2): keep a directory above the new root and climb. Prints the inode of where it ends. */
static int do_climb(void) {
    struct stat st;
    if (mkdir("/tmp/jail", 0700) < 0 && errno != EEXIST) return say(-1);
    int above = open("/", O_RDONLY | O_DIRECTORY);
    if (above < 0 || chroot("/tmp/jail") < 0 || fchdir(above) < 0) return say(-1);
    for (int i = 0; i < 64; i++)
        if (chdir("..") < 0) return say(-1);
    if (chroot(".") < 0 || stat("/", &st) < 0) return say(-1);
    printf("%llu:%llu\n", (unsigned long long)st.st_dev, (unsigned long long)st.st_ino);
    return access("/bin/attack", X_OK) == 0 && access("/old_root", F_OK) < 0 ? 0 : 1;
}

static int connect_abstract(char **argv) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(argv[0]);
    memcpy(address.sun_path + 1, argv[0], length);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    return say(connect(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)));
}

/* Die with a core dump, if the limit can be raised for one. */
static int do_dump(void) {
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    printf("%d\n", setrlimit(RLIMIT_CORE, &limit));
    fflush(stdout);
    prctl(PR_SET_DUMPABLE, 1);
    abort();
}

static int do_ids(void) {
    uid_t r, e, s;
    getresuid(&r, &e, &s);
    printf("%u %u %u %d\n", r, e, s, prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
    return 0;
}

/* A system call by the 32 bit entry, which has other numbers. */
static int do_int80(void) {
#ifdef __x86_64__
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(20 /* getpid */) : "memory");
    return say(result);
#else
    return 77;
#endif
}

static int do_x32(void) {
#ifdef __x86_64__
    return say(syscall(0x40000000 + SYS_getpid));
#else
    return 77;
#endif
}

/* Stop a process and look into it with ptrace: what strace and gdb do. */
static int do_trace_child(void) {
    pid_t pid = fork();
    if (pid == 0) {
        ptrace(PTRACE_TRACEME, 0, 0, 0);
        raise(SIGSTOP);
        _exit(7);
    }
    int status;
    if (waitpid(pid, &status, 0) < 0 || !WIFSTOPPED(status) || ptrace(PTRACE_CONT, pid, 0, 0) < 0) return say(-1);
    waitpid(pid, &status, 0);
    printf("%d\n", WEXITSTATUS(status));
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) return 64;
    const char *command = argv[1];
    char **rest = argv + 2;
    if (!strcmp(command, "call")) return do_calls(argc - 2, rest);
    if (!strcmp(command, "walk") && argc == 3) return do_walk(rest);
    if (!strcmp(command, "cat") && argc == 3) return do_cat(rest);
    if (!strcmp(command, "put") && argc == 4) return do_put(rest);
    if (!strcmp(command, "pages") && argc == 4) return do_pages(rest);
    if (!strcmp(command, "forks") && argc == 3) return do_forks(rest);
    if (!strcmp(command, "bomb")) do_bomb();
    if (!strcmp(command, "eat") && argc == 3) return do_eat(rest);
    if (!strcmp(command, "nibble") && argc == 3) return do_nibble(rest);
    if (!strcmp(command, "exhaust") && argc >= 4) return do_exhaust(rest);
    if (!strcmp(command, "climb")) return do_climb();
    if (!strcmp(command, "abstract") && argc == 3) return connect_abstract(rest);
    if (!strcmp(command, "dump")) return do_dump();
    if (!strcmp(command, "ids")) return do_ids();
    if (!strcmp(command, "int80")) return do_int80();
    if (!strcmp(command, "x32")) return do_x32();
    if (!strcmp(command, "trace-child")) return do_trace_child();
    if (!strcmp(command, "terminals") && argc == 3) return do_terminals(rest);
    if (!strcmp(command, "sleep") && argc == 3) return (int)sleep((unsigned)atoi(rest[0]));
    if (!strcmp(command, "exit") && argc == 3) return atoi(rest[0]);
    fprintf(stderr, "no such command: %s\n", command);
    return 64;
}
