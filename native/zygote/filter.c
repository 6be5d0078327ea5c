/* The seccomp filters. The first is loaded once, in the zygote, before any clone, and inherited by every sandbox. Never load a filter per sandbox: the
 * kernel frees BPF programs through one workqueue, and thousands of frees at once have wedged it for good. For the same reason
 * nothing inside may load one: SECCOMP_SET_MODE_FILTER and SO_ATTACH_*BPF are refused.
 *
 * The filter is a binary search tree over ranges of system call numbers; its leaves are answers or a few checks of arguments. Plain
 * answers are cached by the kernel per number, so they cost nothing. What the zygote's own children need (mounting, setns, unshare) is
 * allowed here and refused inside for want of capabilities.
 */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/netlink.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>

#include "sys.h"
#include "zygote.h"

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#else
#error "dsec's filter knows x86_64 and aarch64"
#endif

#define HIGHEST 469 /* file_setattr, Linux 6.17; what this filter was not written for does not exist inside */

enum leaf {
    ALLOW, PERM, NOSYS,
    IOCTL, SOCKET, SOCKETPAIR, SETSOCKOPT, PERSONALITY, PRCTL, SECCOMP, CLONE_FLAGS, NO_NAMESPACE, ONLY_UNIX,
};

#define MAX_PROGRAM 1024
struct program {
    unsigned length;
    struct sock_filter code[MAX_PROGRAM];
};

#define REFUSE(error) (SECCOMP_RET_ERRNO | (error))

static const struct rule {
    short number;
    unsigned char leaf;
} RULES[] = {
    /* kernel code, tracing, other processes' memory by the back door */
    {SYS_bpf, PERM}, {SYS_perf_event_open, PERM}, {SYS_userfaultfd, PERM}, {SYS_kexec_load, PERM}, {SYS_init_module, PERM},
    {SYS_finit_module, PERM}, {SYS_delete_module, PERM}, {SYS_syslog, PERM}, {447 /* memfd_secret */, NOSYS},
    {SYS_lookup_dcookie, NOSYS},
#ifdef SYS_kexec_file_load
    {SYS_kexec_file_load, PERM},
#endif
    /* keyrings are per uid, host-wide */
    {SYS_keyctl, PERM}, {SYS_add_key, PERM}, {SYS_request_key, PERM},
    /* io_uring: operations that no filter sees */
    {425, NOSYS}, {426, NOSYS}, {427, NOSYS},
    /* files by handle: the way around a root directory */
    {SYS_open_by_handle_at, PERM}, {SYS_fanotify_init, PERM},
    /* the host's switches */
    {SYS_quotactl, PERM}, {443 /* quotactl_fd */, PERM}, {SYS_swapon, PERM}, {SYS_swapoff, PERM}, {SYS_reboot, PERM}, {SYS_acct, PERM},
    {SYS_vhangup, PERM}, {SYS_settimeofday, PERM}, {SYS_clock_settime, PERM}, {SYS_adjtimex, PERM}, {SYS_clock_adjtime, PERM},
    {SYS_nfsservctl, NOSYS},
    /* like FS_IOC_FSSETXATTR, but a system call */
    {469 /* file_setattr */, PERM},
#if defined(__x86_64__)
    {SYS_iopl, PERM}, {SYS_ioperm, PERM}, {SYS_modify_ldt, NOSYS}, {SYS_uselib, NOSYS}, {SYS__sysctl, NOSYS}, {SYS_create_module, NOSYS},
    {SYS_get_kernel_syms, NOSYS}, {SYS_query_module, NOSYS}, {SYS_getpmsg, NOSYS}, {SYS_putpmsg, NOSYS}, {SYS_afs_syscall, NOSYS},
    {SYS_tuxcall, NOSYS}, {SYS_security, NOSYS}, {SYS_vserver, NOSYS}, {SYS_sysfs, NOSYS}, {SYS_epoll_ctl_old, NOSYS},
    {SYS_epoll_wait_old, NOSYS}, {SYS_set_thread_area, NOSYS}, {SYS_get_thread_area, NOSYS},
#endif
    /* looked at more closely */
    {SYS_ioctl, IOCTL}, {SYS_socket, SOCKET}, {SYS_socketpair, SOCKETPAIR}, {SYS_setsockopt, SETSOCKOPT}, {SYS_personality, PERSONALITY},
    {SYS_prctl, PRCTL}, {SYS_seccomp, SECCOMP}, {SYS_unshare, CLONE_FLAGS}, {SYS_clone, CLONE_FLAGS},
};

/* The second filter, on top of the first, for the source of a function environment and all that it starts: one a environment, never one
 * a call. Some of its processes hold CAP_SYS_ADMIN in their own user namespace, because joining a cell takes that; here is why they can
 * do nothing else with it. No internet, since the cells of an environment have one net namespace, and calls must not meet. */
static const struct rule SECOND[] = {
    {SYS_mount, PERM}, {SYS_umount2, PERM}, {SYS_pivot_root, PERM}, {SYS_chroot, PERM}, {SYS_open_tree, PERM}, {SYS_move_mount, PERM},
    {SYS_fsopen, PERM}, {SYS_fsconfig, PERM}, {SYS_fsmount, PERM}, {433 /* fspick */, PERM}, {SYS_mount_setattr, PERM},
    {467 /* open_tree_attr */, PERM}, {SYS_unshare, PERM}, {SYS_sethostname, PERM}, {SYS_setdomainname, PERM},
    {SYS_clone3, NOSYS}, /* its flags can't be seen; C libraries fall back to clone */
    {SYS_clone, NO_NAMESPACE}, {SYS_socket, ONLY_UNIX},
};

static void emit(struct program *p, unsigned short code, unsigned k, unsigned char jt, unsigned char jf) {
    if (p->length < MAX_PROGRAM) p->code[p->length++] = (struct sock_filter){code, jt, jf, k};
}
static void load(struct program *p, size_t offset) { emit(p, BPF_LD | BPF_W | BPF_ABS, (unsigned)offset, 0, 0); }
/* The low half of an argument: all that we look at are ints to the kernel, which ignores the high half as well. */
static void load_arg(struct program *p, unsigned n) { load(p, offsetof(struct seccomp_data, args) + 8 * n); }
static void load_arg_high(struct program *p, unsigned n) { load(p, offsetof(struct seccomp_data, args) + 8 * n + 4); }
static void answer(struct program *p, unsigned value) { emit(p, BPF_RET | BPF_K, value, 0, 0); }
static void answer_if(struct program *p, unsigned k, unsigned value) {
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, k, 0, 1);
    answer(p, value);
}
static void answer_if_bits(struct program *p, unsigned k, unsigned value) {
    emit(p, BPF_JMP | BPF_JSET | BPF_K, k, 0, 1);
    answer(p, value);
}
/* Skip what is emitted until end_block() unless A == k. */
static unsigned begin_block(struct program *p, unsigned k) {
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, k, 0, 0);
    return p->length - 1;
}
static void end_block(struct program *p, unsigned at) { p->code[at].jf = (unsigned char)(p->length - at - 1); }

static void emit_ioctl(struct program *p) {
    static const unsigned TERMINAL[] = {
        0x5412 /* TIOCSTI: types into the terminal */, 0x541c /* TIOCLINUX */, 0x541d /* TIOCCONS */,
        0x5423 /* TIOCSETD: loads line disciplines */, 0x5437 /* TIOCVHANGUP */,
    };
    /* 0x12 block devices, 0x15 file system ids, 'K' 'V' consoles, 'L' loop, 'o' ocfs2, 0xfd device mapper, 0xbc bcachefs, 0xf5 f2fs */
    static const unsigned char NEVER[] = {0x12, 0x15, 0x4b, 0x4c, 0x56, 0x6f, 0xbc, 0xf5, 0xfd};
    static const struct {
        unsigned char type;
        unsigned allowed[2];
    } SOME[] = {
        {0x58, {0x801c581f /* FS_IOC_FSGETXATTR */, 0}}, /* 'X': XFS, whose extent swap reads and breaks others' files; freeze, trim */
        {0x66, {0x80086601 /* FS_IOC_GETFLAGS */, 0}},   /* 'f': ext4's extent moves, flags, fs-verity, fscrypt, fiemap */
        {0x76, {0x80087601 /* FS_IOC_GETVERSION */, 0}}, /* 'v' */
        {0x94, {0x40049409 /* FICLONE */, 0x4020940d /* FICLONERANGE */}}, /* btrfs: subvolumes, send, search, defragment, dedupe */
    };
    load_arg(p, 1);
    for (size_t i = 0; i < sizeof TERMINAL / sizeof *TERMINAL; i++) answer_if(p, TERMINAL[i], REFUSE(EPERM));
    answer_if(p, 1 /* FIBMAP */, REFUSE(EPERM));
    emit(p, BPF_ALU | BPF_RSH | BPF_K, 8, 0, 0);
    emit(p, BPF_ALU | BPF_AND | BPF_K, 0xff, 0, 0);
    for (size_t i = 0; i < sizeof NEVER; i++) answer_if(p, NEVER[i], REFUSE(ENOTTY));
    for (size_t i = 0; i < sizeof SOME / sizeof *SOME; i++) {
        unsigned block = begin_block(p, SOME[i].type);
        load_arg(p, 1);
        for (int j = 0; j < 2 && SOME[i].allowed[j]; j++) answer_if(p, SOME[i].allowed[j], SECCOMP_RET_ALLOW);
        answer(p, REFUSE(ENOTTY)); /* as a file system without it would say, so that programs fall back */
        end_block(p, block);
    }
    answer(p, SECCOMP_RET_ALLOW);
}

/* socket() takes ints: the kernel ignores the high halves of its arguments, and the filter sees them. */
static unsigned password[2];

/* Allow who has the password in the high halves of the first two arguments, which only the zygote does, and its children before they
 * execute anything. */
static void emit_password(struct program *p, unsigned refusal) {
    for (unsigned i = 0; i < 2; i++) {
        load_arg_high(p, i);
        emit(p, BPF_JMP | BPF_JEQ | BPF_K, password[i], 1, 0);
        answer(p, refusal);
    }
    answer(p, SECCOMP_RET_ALLOW);
}

static void emit_socket(struct program *p) {
    load_arg(p, 0);
    answer_if(p, 1 /* AF_UNIX */, SECCOMP_RET_ALLOW);
    unsigned netlink = begin_block(p, 16 /* AF_NETLINK: reading addresses and routes is all that is left */);
    load_arg(p, 2);
    answer_if(p, NETLINK_ROUTE, SECCOMP_RET_ALLOW);
    unsigned netfilter = begin_block(p, NETLINK_NETFILTER);
    emit_password(p, REFUSE(EPROTONOSUPPORT));
    end_block(p, netfilter);
    answer(p, REFUSE(EPROTONOSUPPORT));
    end_block(p, netlink);
    /* Everything but the internet: the rest is rarely used kernel code, some of it loaded on demand (VSOCK reaches the host, ALG, PACKET,
     * XDP, KEY, RDS, TIPC, CAN, ...). */
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 2 /* AF_INET */, 2, 0);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 10 /* AF_INET6 */, 1, 0);
    answer(p, REFUSE(EAFNOSUPPORT));
    load_arg(p, 1);
    emit(p, BPF_ALU | BPF_AND | BPF_K, 0xf, 0, 0);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 1 /* SOCK_STREAM */, 2, 0);
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, 2 /* SOCK_DGRAM */, 1, 0);
    answer(p, REFUSE(EPERM)); /* raw, packet, ... */
    load_arg(p, 2);
    static const unsigned PROTOCOLS[] = {0, 1 /* ICMP */, 6 /* TCP */, 17 /* UDP */, 58 /* ICMPv6 */};
    for (size_t i = 0; i < sizeof PROTOCOLS / sizeof *PROTOCOLS; i++) answer_if(p, PROTOCOLS[i], SECCOMP_RET_ALLOW);
    answer(p, REFUSE(EPROTONOSUPPORT)); /* SCTP, DCCP, MPTCP, ...: loaded on demand */
}

static void emit_leaf(struct program *p, enum leaf leaf) {
    switch (leaf) {
    case ALLOW: answer(p, SECCOMP_RET_ALLOW); return;
    case PERM: answer(p, REFUSE(EPERM)); return;
    case NOSYS: answer(p, REFUSE(ENOSYS)); return;
    case IOCTL: emit_ioctl(p); return;
    case SOCKET: emit_socket(p); return;
    case SOCKETPAIR:
        load_arg(p, 0);
        answer_if(p, 1 /* AF_UNIX */, SECCOMP_RET_ALLOW);
        answer(p, REFUSE(EAFNOSUPPORT));
        return;
    case SETSOCKOPT: {
        load_arg(p, 1);
        unsigned block = begin_block(p, 1 /* SOL_SOCKET */);
        load_arg(p, 2);
        answer_if(p, 26 /* SO_ATTACH_FILTER */, REFUSE(EPERM));
        answer_if(p, 50 /* SO_ATTACH_BPF */, REFUSE(EPERM));
        answer_if(p, 51 /* SO_ATTACH_REUSEPORT_CBPF */, REFUSE(EPERM));
        answer_if(p, 52 /* SO_ATTACH_REUSEPORT_EBPF */, REFUSE(EPERM));
        end_block(p, block);
        answer(p, SECCOMP_RET_ALLOW);
        return;
    }
    case PERSONALITY:
        load_arg(p, 0);
        answer_if(p, 0xffffffff /* ask */, SECCOMP_RET_ALLOW);
        answer_if(p, 0, SECCOMP_RET_ALLOW);
        answer_if(p, 8 /* PER_LINUX32: uname */, SECCOMP_RET_ALLOW);
        answer_if(p, 0x40000 /* ADDR_NO_RANDOMIZE: debuggers */, SECCOMP_RET_ALLOW);
        answer(p, REFUSE(EPERM));
        return;
    case PRCTL: {
        load_arg(p, 0);
        unsigned block = begin_block(p, PR_SET_SECCOMP);
        load_arg(p, 1);
        answer_if(p, SECCOMP_MODE_FILTER, REFUSE(EINVAL)); /* as a kernel without it */
        end_block(p, block);
        answer(p, SECCOMP_RET_ALLOW);
        return;
    }
    case SECCOMP: {
        load_arg(p, 0);
        unsigned block = begin_block(p, SECCOMP_SET_MODE_FILTER);
        emit_password(p, REFUSE(EINVAL));
        end_block(p, block);
        answer(p, SECCOMP_RET_ALLOW);
        return;
    }
    case CLONE_FLAGS: /* clone3's can't be seen: user.max_user_namespaces = 0 refuses that one */
        load_arg(p, 0);
        answer_if_bits(p, 0x10000000 /* CLONE_NEWUSER */, REFUSE(EPERM));
        answer(p, SECCOMP_RET_ALLOW);
        return;
    case NO_NAMESPACE:
        load_arg(p, 0);
        answer_if_bits(p, 0x7e020000 /* all CLONE_NEW* that clone takes */, REFUSE(EPERM));
        answer(p, SECCOMP_RET_ALLOW);
        return;
    case ONLY_UNIX:
        load_arg(p, 0);
        if (world.landlock_abi >= 6) answer_if(p, 1 /* AF_UNIX: landlock keeps abstract ones apart */, SECCOMP_RET_ALLOW);
        answer(p, REFUSE(EAFNOSUPPORT));
        return;
    }
}

struct range {
    unsigned first;
    enum leaf leaf;
};

/* The tree over ranges[0..count): A holds the number. */
static void emit_tree(struct program *p, const struct range *ranges, unsigned count) {
    if (count == 1) {
        emit_leaf(p, ranges->leaf);
        return;
    }
    static struct program spare[12]; /* one a level: the left side is made first, to know how far to jump */
    static unsigned depth;
    struct program *left = &spare[depth++];
    left->length = 0;
    emit_tree(left, ranges, count / 2);
    if (left->length <= 255) {
        emit(p, BPF_JMP | BPF_JGE | BPF_K, ranges[count / 2].first, (unsigned char)left->length, 0);
    } else {
        emit(p, BPF_JMP | BPF_JGE | BPF_K, ranges[count / 2].first, 0, 1);
        emit(p, BPF_JMP | BPF_JA, left->length, 0, 0);
    }
    for (unsigned i = 0; i < left->length; i++) emit(p, left->code[i].code, left->code[i].k, left->code[i].jt, left->code[i].jf);
    depth--;
    emit_tree(p, ranges + count / 2, count - count / 2);
}

static void build(struct program *p, const struct rule *rules, size_t rule_count) {
    static unsigned char leaf_of[HIGHEST + 2];
    static struct range ranges[HIGHEST + 2];
    unsigned count = 0;
    memset(leaf_of, ALLOW, sizeof leaf_of);
    leaf_of[HIGHEST + 1] = NOSYS;
    for (size_t i = 0; i < rule_count; i++)
        if (rules[i].number <= HIGHEST) leaf_of[rules[i].number] = rules[i].leaf;
    for (unsigned number = 0; number <= HIGHEST + 1; number++)
        if (!count || ranges[count - 1].leaf != leaf_of[number]) ranges[count++] = (struct range){number, leaf_of[number]};
    load(p, offsetof(struct seccomp_data, arch));
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0);
    answer(p, SECCOMP_RET_KILL_PROCESS); /* 32 bit calls have other numbers, so nothing above would hold */
    load(p, offsetof(struct seccomp_data, nr)); /* x32's numbers are above the highest */
    emit_tree(p, ranges, count);
}

int filter_netfilter_socket(void) {
    return (int)syscall(SYS_socket, AF_NETLINK | (unsigned long)password[0] << 32, (SOCK_RAW | SOCK_CLOEXEC) | (unsigned long)password[1] << 32,
                        NETLINK_NETFILTER);
}

static int load_rules(const struct rule *rules, size_t count) {
    static struct program program;
    program.length = 0;
    build(&program, rules, count);
    if (program.length >= MAX_PROGRAM) return -E2BIG;
    struct sock_fprog prog = {(unsigned short)program.length, program.code};
    /* Without no_new_privs, which CAP_SYS_ADMIN allows: set-uid programs shall work inside. */
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER | (unsigned long)password[0] << 32, (unsigned long)password[1] << 32, &prog) < 0 ? -errno : 0;
}

int filter_load(void) {
    if (getrandom(password, sizeof password, 0) != sizeof password) return -EIO;
    return load_rules(RULES, sizeof RULES / sizeof *RULES);
}

int filter_load_second(void) { return load_rules(SECOND, sizeof SECOND / sizeof *SECOND); }
