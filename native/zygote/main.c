/* Start of the zygote: zygote --socket PATH --guest PATH --cells PATH [--net-pool N], or zygote --probe-network
 *
 * Returns 0 when the daemon listens, else says on stderr what is missing. The daemon has no terminal, no parent that waits for it, and
 * outlives whoever started it.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/keyctl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "edge.h"
#include "sys.h"
#include "zygote.h"

#ifndef MFD_EXEC
#define MFD_EXEC 0x10u
#endif

struct world world = {.host_mounts = -1, .tiny_mounts = -1, .proc = -1, .host_network = -1, .epoll = -1};
static int ready = -1; /* to the process that was started: one byte, or a message */

uint64_t now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

int fd_up(int fd) {
    if (fd < 0) return -errno;
    if (fd >= FD_LOW) return fd;
    int up = fcntl(fd, F_DUPFD_CLOEXEC, FD_LOW), error = errno;
    close(fd);
    return up < 0 ? -error : up;
}

static void __attribute__((noreturn)) stop(const char *what) {
    char text[300];
    int length = snprintf(text, sizeof text, "zygote: %s: %s\n", what, strerror(errno));
    if (write(ready, text, (size_t)length) < 0) _exit(72);
    _exit(71);
}

static void must(const char *what, long result) {
    if (result < 0) {
        if (result != -1) errno = (int)-result;
        stop(what);
    }
}

/* The guest as a sealed copy: nobody can replace or write what every sandbox executes. (Unreadable, mode 0111, would make the kernel keep its
 * memory out of reach by itself, but then its children couldn't raise their OOM score above its own; PR_SET_DUMPABLE does as well.) */
static void keep_program(const char *path, const char *name, int at) {
    struct stat st;
    int from = open(path, O_RDONLY | O_CLOEXEC);
    must("opening a program for inside", from);
    must("looking at a program for inside", fstat(from, &st));
    int to = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_EXEC);
    if (to < 0 && errno == EINVAL) to = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING); /* before Linux 6.3 */
    must("memfd_create", to);
    for (off_t left = st.st_size; left > 0;) {
        ssize_t n = sendfile(to, from, NULL, (size_t)left);
        if (n == 0) errno = EIO;
        must("copying a program for inside", n > 0 ? n : -1);
        left -= n;
    }
    must("fchmod", fchmod(to, 0555));
    must("sealing a program for inside", fcntl(to, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE));
    close(from);
    if (to != at) {
        must("dup3", dup3(to, at, O_CLOEXEC));
        close(to);
    }
}

static int open_up(const char *path) { return fd_up(open(path, O_RDONLY | O_CLOEXEC)); }

/* A proc of a pid namespace whose only process is gone: it shows nobody. A detached mount. */
static int proc_of_nobody(void) {
    pid_t pid = (pid_t)syscall(SYS_clone, CLONE_NEWPID | CLONE_FILES | SIGCHLD, NULL, NULL, NULL, NULL);
    must("clone into a pid namespace", pid);
    if (pid == 0) {
        int fs = x_fsopen("proc");
        int tree = fs < 0 || x_fsconfig(fs, X_FSCONFIG_CMD_CREATE, NULL, NULL) < 0
                       ? -1
                       : x_fsmount(fs, X_MOUNT_ATTR_NOSUID | X_MOUNT_ATTR_NODEV | X_MOUNT_ATTR_NOEXEC);
        close(fs);
        _exit(tree < 0 || tree > 127 ? 0 : tree); /* the table of descriptors is shared: its number is the answer */
    }
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    errno = EIO;
    return WIFEXITED(status) && WEXITSTATUS(status) ? WEXITSTATUS(status) : -1;
}

/* The mount namespace that sandboxes are cloned from: an unwritable tmpfs and one whole proc, without which no user namespace may mount
 * its own. */
static void make_tiny_mounts(void) {
    const unsigned still = X_MOUNT_ATTR_NOSUID | X_MOUNT_ATTR_NODEV | X_MOUNT_ATTR_NOEXEC;
    must("opening /proc", world.proc = fd_up(open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC)));
    must("opening the mount namespace", world.host_mounts = open_up("/proc/self/ns/mnt"));
    must("unshare(CLONE_NEWNS): is this root with CAP_SYS_ADMIN?", unshare(CLONE_NEWNS));
    must("making mounts private", mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL));
    int fs = x_fsopen("tmpfs");
    must("fsopen(tmpfs): Linux 5.12 or newer is needed", fs);
    must("tmpfs options", x_fsconfig(fs, X_FSCONFIG_SET_STRING, "size", "64k"));
    must("tmpfs mode", x_fsconfig(fs, X_FSCONFIG_SET_STRING, "mode", "0755"));
    must("making a tmpfs", x_fsconfig(fs, X_FSCONFIG_CMD_CREATE, NULL, NULL));
    int tree = x_fsmount(fs, still);
    must("mounting a tmpfs", tree);
    must("attaching a tmpfs", x_attach(tree, AT_FDCWD, "/proc"));
    must("chdir", chdir("/proc"));
    static const char *const DIRS[] = {"proc", "view", "mask", "mask/dir"};
    for (size_t i = 0; i < sizeof DIRS / sizeof *DIRS; i++) must("mkdir", mkdir(DIRS[i], 0755));
    int file = open("mask/file", O_CREAT | O_RDONLY | O_CLOEXEC, 0444);
    must("making an empty file", file);
    close(file);
    close(fs);
    close(tree);
    must("making a proc", tree = proc_of_nobody());
    must("mounting proc", x_attach(tree, AT_FDCWD, "proc"));
    close(tree);
    must("pivot_root", syscall(SYS_pivot_root, ".", "."));
    must("detaching the old root", umount2(".", MNT_DETACH));
    must("chdir", chdir("/"));
    struct x_mount_attr attr = {.attr_set = still | X_MOUNT_ATTR_RDONLY};
    must("mount_setattr: Linux 5.12 or newer is needed", x_mount_setattr(AT_FDCWD, "/", 0, &attr));
    must("opening the mount namespace", world.tiny_mounts = fd_up(openat(world.proc, "self/ns/mnt", O_RDONLY | O_CLOEXEC)));
}

/* As much as we may: without CAP_SYS_RESOURCE that is the hard limit that we were started with. */
static void raise_limit(int resource, rlim_t want) {
    struct rlimit limit = {want, want};
    if (setrlimit(resource, &limit) == 0 || getrlimit(resource, &limit) < 0) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(resource, &limit);
}

static void set_self(void) {
    const struct rlimit none = {0, 0};
    prctl(PR_SET_NAME, "dsec-zygote");
    must("PR_SET_DUMPABLE", prctl(PR_SET_DUMPABLE, 0, 0, 0, 0));
    must("RLIMIT_CORE", setrlimit(RLIMIT_CORE, &none));
    raise_limit(RLIMIT_NPROC, RLIM_INFINITY); /* a user namespace takes its own limit from its creator's */
    raise_limit(RLIMIT_NOFILE, 1 << 20);      /* one descriptor a live sandbox, and what the guest may give a command */
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t n = write(fd, "-900", 4); /* every sandbox of the node hangs on this process */
        (void)n;                          /* best effort: in a container it may be refused */
        close(fd);
    }
    syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL); /* not the starter's; the filter then refuses every use */
}

static void place_holders(void) {
    int null = open("/dev/null", O_RDWR);
    must("opening /dev/null", null);
    for (int fd = 0; fd < FD_GUEST; fd++)
        if (fd != null) must("dup2", dup2(null, fd));
    if (null >= FD_GUEST) close(null);
}

static int serve(const char *socket_path, const char *guest, const char *cells, unsigned pool) {
    static char scratch[200];
    snprintf(scratch, sizeof scratch, "%s.mount", socket_path);
    world.scratch = scratch;
    must("setsid", setsid());
    umask(022);
    must("chdir", chdir("/"));
    ready = fd_up(ready);
    place_holders();
    keep_program(guest, "dsec-guest", FD_GUEST);
    keep_program(cells, "dsec-cells", FD_CELLS);
    set_self();
    must("epoll_create1", world.epoll = fd_up(epoll_create1(EPOLL_CLOEXEC)));
    must("opening the net namespace", world.host_network = open_up("/proc/self/ns/net"));
    must("listening on the socket (does another zygote serve there?)", edge_listen(socket_path));
    make_tiny_mounts();
    inside_prepare();
    long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, 1);
    world.landlock_abi = abi > 0 ? (int)abi : 0;
    must("loading the seccomp filter", filter_load());
    must("making a net namespace", network_init(pool));
    if (write(ready, "+", 1) != 1) return 72; /* whoever started us is gone: then nobody wants us */
    close(ready);
    return server_run();
}

/* Wait for the daemon's word. */
static int await_daemon(int from) {
    char text[400];
    size_t used = 0;
    ssize_t n;
    while (used < sizeof text && (n = read(from, text + used, sizeof text - used)) > 0) used += (size_t)n;
    if (used == 1 && *text == '+') return 0;
    if (used == 0) fputs("zygote: it ended while it started\n", stderr);
    else fwrite(text, 1, used, stderr);
    return 71;
}

static int usage(void) {
    fputs("usage: zygote --socket PATH --guest PATH --cells PATH [--net-pool N]\n       zygote --probe-network\n", stderr);
    return 64;
}

/* Whether this host can give sandboxes a network: an errno as the exit code, 0 for yes. */
static int probe_network(void) {
    world.host_network = open_up("/proc/self/ns/net");
    return world.host_network < 0 ? -world.host_network : -network_probe();
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "--probe-network")) return probe_network();
    const char *socket_path = NULL, *guest = NULL, *cells = NULL;
    unsigned pool = 32;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc) return usage();
        if (!strcmp(argv[i], "--socket")) socket_path = argv[i + 1];
        else if (!strcmp(argv[i], "--guest")) guest = argv[i + 1];
        else if (!strcmp(argv[i], "--cells")) cells = argv[i + 1];
        else if (!strcmp(argv[i], "--net-pool")) pool = (unsigned)atoi(argv[i + 1]);
        else return usage();
    }
    if (!socket_path || !guest || !cells || *socket_path != '/' || *guest != '/' || *cells != '/') return usage();
    /* Whatever our starter left open would stay open for as long as we live: its ends of pipes, of other people's too. */
    syscall(SYS_close_range, 3u, ~0u, 0u);
    int pipes[2];
    if (pipe2(pipes, O_CLOEXEC) < 0) return 71;
    pid_t pid = fork();
    if (pid < 0) return 71;
    if (pid == 0) {
        close(pipes[0]);
        ready = pipes[1];
        exit(serve(socket_path, guest, cells, pool));
    }
    close(pipes[1]);
    return await_daemon(pipes[0]);
}
