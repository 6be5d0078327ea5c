/* The inside of a spawn: what the cloned child does until it executes the guest. It starts with every capability in its new user
 * namespace and none outside, and ends with what CAPABILITIES names. Any failure is reported with its stage, and the child exits: its
 * namespaces, and with them all it made, go with it. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/landlock.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "sys.h"
#include "zygote.h"

#define BIT(n) (1ull << (n))
static const uint64_t CAPABILITIES =
    BIT(CAP_CHOWN) | BIT(CAP_DAC_OVERRIDE) | BIT(CAP_FOWNER) | BIT(CAP_FSETID) | BIT(CAP_KILL) | BIT(CAP_SETGID) | BIT(CAP_SETUID) |
    BIT(CAP_SETPCAP) | BIT(CAP_NET_BIND_SERVICE) | BIT(CAP_SYS_CHROOT) | BIT(CAP_SETFCAP) | BIT(CAP_AUDIT_WRITE);

/* The program that makes cells (cells/cells.h) mounts in them, asks which namespaces a process is in, and gives up the rest for what it
 * starts. Its source of workers joins cells, and cannot do more with it: the second filter. */
static const uint64_t WARDEN = BIT(CAP_DAC_OVERRIDE) | BIT(CAP_KILL) | BIT(CAP_SYS_ADMIN) | BIT(CAP_SYS_PTRACE);
static const uint64_t SOURCE = BIT(CAP_SETGID) | BIT(CAP_SETUID) | BIT(CAP_SETPCAP) | BIT(CAP_SYS_ADMIN) | BIT(CAP_SYS_CHROOT);

/* What /proc shows of the host and has no use inside. A file becomes an empty file, a directory an empty directory, both read-only. Each
 * mask costs 4 us a sandbox, so none is spent on what only the host's root may open: no id inside is his (plan.c sees to that). */
static const char *const MASKED[] = {
    "kcore", "kmsg", "kpagecount", "kpageflags", "kpagecgroup", "kallsyms", "keys", "key-users", "timer_list", "sched_debug",
    "sysrq-trigger", "latency_stats", "vmallocinfo", "slabinfo", "modules", "interrupts", "softirqs", "diskstats", "partitions", "mtrr",
    "schedstat", "cmdline", "bootconfig", "zoneinfo", "pagetypeinfo", "buddyinfo", "vmstat", "iomem", "ioports",
    "acpi", "scsi", "asound", "bus", "fs", "irq", "dynamic_debug", "pressure", "device-tree",
};
#define MASKS (sizeof MASKED / sizeof *MASKED)
#define PTS_OPTIONS "newinstance,ptmxmode=0666,mode=0620,max=256" /* the kernel counts terminals host-wide: none may use them all up */
static bool masked_here[MASKS], masked_is_dir[MASKS];

/* Namespaces that nobody inside may make: a nested user namespace would give back every capability (the others need one of those anyway).
 * And host-wide quotas that are counted
 * per user id: a limit of the sandbox's own keeps one from using up what its siblings of the same id range share. */
static const struct {
    const char *name, *value;
    bool but_cells;
} SYSCTLS[] = {
    {"max_user_namespaces", "0", false},     {"max_mnt_namespaces", "0", true},         {"max_net_namespaces", "0", false},
    {"max_inotify_instances", "128", false}, {"max_inotify_watches", "65536", false},
};

static int report_fd;
static uint64_t begin_ns;

static void report(enum stage stage, int error) {
    struct report message = {.stage = stage, .error = error, .setup_ns = now_ns() - begin_ns};
    send(report_fd, &message, sizeof message, MSG_NOSIGNAL);
}

static void __attribute__((noreturn)) die(enum stage stage, int error) {
    report(stage, error ? error : EIO);
    _exit(1);
}

static void must(enum stage stage, long result) {
    if (result < 0) die(stage, errno);
}

void inside_prepare(void) {
    struct stat st;
    for (size_t i = 0; i < MASKS; i++) {
        masked_here[i] = fstatat(world.proc, MASKED[i], &st, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISLNK(st.st_mode) && (st.st_uid != 0 || st.st_gid != 0 || (st.st_mode & 077));
        masked_is_dir[i] = masked_here[i] && S_ISDIR(st.st_mode);
    }
}

/* A mount point in the image: made where it is missing, refused where it is a link, which could lead anywhere. */
static void mount_point(const char *name) {
    struct stat st;
    if (fstatat(AT_FDCWD, name, &st, AT_SYMLINK_NOFOLLOW) == 0) {
        if (!S_ISDIR(st.st_mode)) die(AT_ROOT, ENOTDIR);
    } else if (mkdir(name, 0755) < 0) {
        die(AT_ROOT, errno);
    }
}

static void bind_over(const char *from, const char *to, enum stage stage) { must(stage, mount(from, to, NULL, MS_BIND, NULL)); }

/* The sandbox's /proc, detached as yet. `pids_only`: nothing of the host is in it. */
static int make_proc(bool pids_only) {
    int fs = x_fsopen("proc");
    must(AT_PROC, fs);
    if (pids_only) must(AT_PROC, x_fsconfig(fs, X_FSCONFIG_SET_STRING, "subset", "pid"));
    must(AT_PROC, x_fsconfig(fs, X_FSCONFIG_CMD_CREATE, NULL, NULL));
    int tree = x_fsmount(fs, X_MOUNT_ATTR_NOSUID | X_MOUNT_ATTR_NODEV | X_MOUNT_ATTR_NOEXEC);
    must(AT_PROC, tree);
    return tree;
}

static void set_sysctl(int dir, const char *name, const char *value) {
    int fd = openat(dir, name, O_WRONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return; /* a kernel without it */
    must(AT_SYSCTL, fd);
    must(AT_SYSCTL, write(fd, value, strlen(value)));
    close(fd);
}

static void mask_proc(void) {
    char path[64];
    for (size_t i = 0; i < MASKS; i++) {
        if (!masked_here[i]) continue;
        snprintf(path, sizeof path, "proc/%s", MASKED[i]);
        bind_over(masked_is_dir[i] ? "/mask/dir" : "/mask/file", path, AT_MASK);
    }
}

static void seal_proc_sys(void) {
    struct x_mount_attr attr = {.attr_set = X_MOUNT_ATTR_RDONLY | X_MOUNT_ATTR_NOSUID | X_MOUNT_ATTR_NODEV | X_MOUNT_ATTR_NOEXEC};
    bind_over("proc/sys", "proc/sys", AT_MASK);
    must(AT_MASK, x_mount_setattr(AT_FDCWD, "proc/sys", 0, &attr));
}

/* Generated files over the host's: VIEW/proc/NAME over /proc/NAME, VIEW/sys over /sys. */
static void mount_views(int view) {
    char from[300], to[300];
    must(AT_MOUNT_VIEW, x_attach(view, AT_FDCWD, "/view"));
    DIR *dir = opendir("/view/proc");
    if (!dir && errno != ENOENT) die(AT_MOUNT_VIEW, errno);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        if (entry->d_name[0] == '.') continue;
        snprintf(from, sizeof from, "/view/proc/%s", entry->d_name);
        snprintf(to, sizeof to, "proc/%s", entry->d_name);
        if (mount(from, to, NULL, MS_BIND, NULL) < 0 && errno != ENOENT) die(AT_MOUNT_VIEW, errno);
    }
    if (dir) closedir(dir);
    if (faccessat(AT_FDCWD, "/view/sys", F_OK, 0) == 0) {
        mount_point("sys");
        bind_over("/view/sys", "sys", AT_MOUNT_VIEW);
    }
}

/* A devpts of its own: it belongs to the sandbox's user namespace (root there owns the terminals), and no terminal of another sandbox or of
 * the host is in it. Mounted always, so that programs that make terminals for themselves find it: 20 us, 3 KiB, and 1 KiB more for each 64
 * sandboxes that live (a superblock has a place in every memory cgroup). Group 5 is who may write to terminals; an id map without it has
 * root's only. */
static void mount_pts(void) {
    static const unsigned long flags = MS_NOSUID | MS_NOEXEC;
    if (mount("devpts", "dev/pts", "devpts", flags, PTS_OPTIONS ",gid=5") < 0)
        must(AT_MOUNT_PTS, mount("devpts", "dev/pts", "devpts", flags, PTS_OPTIONS ",gid=0"));
}

static void set_sysctls(int proc, bool cells) {
    int dir = openat(proc, "sys/user", O_PATH | O_DIRECTORY | O_CLOEXEC);
    must(AT_SYSCTL, dir);
    for (size_t i = 0; i < sizeof SYSCTLS / sizeof *SYSCTLS; i++)
        if (!cells || !SYSCTLS[i].but_cells) set_sysctl(dir, SYSCTLS[i].name, SYSCTLS[i].value);
    close(dir);
}

static void become_root(void) {
    must(AT_CREDENTIALS, setresgid(0, 0, 0));
    must(AT_CREDENTIALS, setgroups(0, NULL));
    must(AT_CREDENTIALS, setresuid(0, 0, 0));
    /* A session of its own: kill(0, ...) from inside must not reach the zygote or siblings through a shared process group. */
    must(AT_CREDENTIALS, setsid());
    umask(022);
}

static void set_limits(const struct plan *plan) {
    const struct rlimit none = {0, 0};
    must(AT_RLIMITS, setrlimit(RLIMIT_CORE, &none)); /* a core dump would run the host's helper, or fill the disk */
    if (plan->has_cpus) must(AT_AFFINITY, syscall(SYS_sched_setaffinity, 0, sizeof plan->cpus, plan->cpus));
}

static void drop_capabilities(uint64_t kept) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    for (int cap = 0; cap < 64; cap++) {
        if (kept & BIT(cap)) continue;
        if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0) {
            if (errno == EINVAL) break; /* the kernel's last */
            die(AT_CAPABILITIES, errno);
        }
    }
    must(AT_CAPABILITIES, prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0));
    for (int i = 0; i < 2; i++) {
        data[i].effective = data[i].permitted = (uint32_t)(kept >> (32 * i));
        data[i].inheritable = 0;
    }
    must(AT_CAPABILITIES, syscall(SYS_capset, &header, data));
}

/* Landlock as a second line: within a domain that handles file access, the kernel refuses mount, umount, remount, pivot_root and
 * move_mount whatever the capabilities. It handles only device nodes (which nobody inside may make) and renames between directories
 * (which every domain denies unless they are granted, so they are granted from the root down). */
static void landlock(void) {
    struct {
        uint64_t fs, net, scoped;
    } ruleset = {LANDLOCK_ACCESS_FS_MAKE_CHAR | LANDLOCK_ACCESS_FS_MAKE_BLOCK | LANDLOCK_ACCESS_FS_REFER, 0, 3 /* abstract sockets, signals */};
    size_t size = world.landlock_abi >= 6 ? 24 : world.landlock_abi >= 4 ? 16 : 8;
    int fd = (int)syscall(SYS_landlock_create_ruleset, &ruleset, size, 0);
    must(AT_LANDLOCK, fd);
    struct landlock_path_beneath_attr rule = {LANDLOCK_ACCESS_FS_REFER, open("/", O_PATH | O_DIRECTORY | O_CLOEXEC)};
    must(AT_LANDLOCK, rule.parent_fd);
    must(AT_LANDLOCK, syscall(SYS_landlock_add_rule, fd, LANDLOCK_RULE_PATH_BENEATH, &rule, 0));
    must(AT_LANDLOCK, syscall(SYS_landlock_restrict_self, fd, 0));
}

/* Pid 2 of a function environment, under the second filter. Its socket to pid 1 becomes FD_GUEST on both sides, and has there the number
 * that the guest's program has for other sandboxes. */
static void start_source(void) {
    static char *argv[] = {"dsec-source", NULL}, *envp[] = {NULL};
    int pair[2], error;
    must(AT_SOURCE, socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
    pid_t pid = fork();
    must(AT_SOURCE, pid);
    if (pid > 0) {
        must(AT_SOURCE, dup2(pair[0], FD_GUEST));
        close(pair[1]);
        return;
    }
    if ((error = filter_load_second()) < 0) die(AT_SOURCE, -error);
    must(AT_SOURCE, dup2(pair[1], FD_GUEST));
    drop_capabilities(SOURCE);
    syscall(SYS_execveat, FD_CELLS, "", argv, envp, AT_EMPTY_PATH);
    die(AT_SOURCE, errno);
}

static void hand_over(const struct inside *in) {
    /* Their numbers are above 7, so none overwrites another; dup2 clears close-on-exec. All else closes itself. */
    must(AT_EXEC, dup2(in->control, DSEC_FD_CONTROL));
    must(AT_EXEC, dup2(in->channel, DSEC_FD_CHANNEL));
    must(AT_EXEC, dup2(in->cgroup, DSEC_FD_CGROUP));
}

void inside_run(const struct plan *plan, const struct inside *in) {
    report_fd = in->report;
    begin_ns = now_ns();
    if (syscall(SYS_close_range, FD_LOW, ~0u, X_CLOSE_RANGE_UNSHARE) < 0) _exit(1); /* the table is still the parent's: touch nothing */
    must(AT_FILES, send(report_fd, "u", 1, MSG_NOSIGNAL));
    char go;
    int flags = fcntl(report_fd, F_GETFL);
    must(AT_RELEASE, fcntl(report_fd, F_SETFL, flags & ~O_NONBLOCK));
    if (recv(report_fd, &go, 1, 0) != 1) _exit(1);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);

    const bool cells = plan->flags & SF_CELLS;
    int proc = make_proc(false);
    set_sysctl(proc, "sys/net/ipv4/ip_unprivileged_port_start", "0"); /* while we still are the host's root, whose namespace it is */
    become_root();
    must(AT_CGROUP_NS, unshare(CLONE_NEWCGROUP)); /* before set_sysctls() forbids it */
    /* Stacked on the tiny root, not pivoted: detaching that would wait for RCU on all CPUs (0.07 ms idle, 2 ms and more on a busy node).
     * Nothing leads below: ".." stops at the root of the namespace whatever lies under it, and the tiny root holds an unwritable tmpfs and
     * a /proc of nobody. Until chroot() "/" still means the tiny root, and the working directory the new one. */
    must(AT_ROOT, x_attach(in->root, AT_FDCWD, "/"));
    must(AT_ROOT, fchdir(in->root));
    mount_point("proc");
    mount_point("dev");
    set_sysctls(proc, cells);
    must(AT_PROC, x_attach(cells ? make_proc(true) : proc, AT_FDCWD, "proc"));
    if (!cells) {
        mask_proc();
        seal_proc_sys();
    }
    must(AT_MOUNT_DEV, x_attach(in->dev, AT_FDCWD, "dev"));
    mount_pts();
    if (in->view >= 0 && !cells) mount_views(in->view);
    must(AT_PIVOT, chroot("."));
    must(AT_PIVOT, chdir("/"));
    must(AT_HOSTNAME, sethostname(plan->hostname, strlen(plan->hostname)));
    must(AT_HOSTNAME, setdomainname("", 0));
    set_limits(plan);
    if (cells) start_source();
    else if (world.landlock_abi >= 2) landlock();
    drop_capabilities(cells ? WARDEN : CAPABILITIES);
    if (plan->flags & SF_NO_NEW_PRIVS) must(AT_CAPABILITIES, prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    /* A second line to the guest's own watch on its control socket; after the last change of credentials, which would clear it. */
    must(AT_EXEC, prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0));
    hand_over(in);
    report(AT_EXEC, 0);
    static char *guest[] = {"dsec-guest", NULL}, *warden[] = {"dsec-cells", NULL}, *envp[] = {NULL};
    syscall(SYS_execveat, cells ? FD_CELLS : FD_GUEST, "", cells ? warden : guest, envp, AT_EMPTY_PATH);
    die(AT_EXEC, errno);
}
