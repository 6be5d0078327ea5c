/* A worker that executes a program. Until it does it is our code and holds what joining a cell takes; what it reads comes from the edge. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/landlock.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "cells.h"
#include "fields.h"
#include "guest/libc.h"
#include "zygote/sys.h"

#define FD_CALL 3
#define MAX_CALL (4u << 20)
#define MAX_WORDS 4096

#ifndef LANDLOCK_ACCESS_FS_REFER
#define LANDLOCK_ACCESS_FS_REFER (1ull << 13)
#endif

static void __attribute__((noreturn)) fail(const char *what) {
    char text[200];
    uint32_t error = (uint32_t)errno;
    memcpy(text, &error, 4);
    strncpy(text + 4, what, sizeof text - 5);
    send(FD_CALL, text, 4 + strnlen(what, sizeof text - 5), MSG_NOSIGNAL);
    _exit(126);
}

/* Landlock as a second line behind the filter: no mounts, no device nodes; no abstract socket and no process outside of this domain. */
static int landlock(void) {
    if (landlock_abi < 2) return 0;
    struct {
        uint64_t fs, net, scoped;
    } ruleset = {LANDLOCK_ACCESS_FS_MAKE_CHAR | LANDLOCK_ACCESS_FS_MAKE_BLOCK | LANDLOCK_ACCESS_FS_REFER, 0, 3};
    size_t size = landlock_abi >= 6 ? 24 : landlock_abi >= 4 ? 16 : 8;
    int fd = (int)syscall(SYS_landlock_create_ruleset, &ruleset, size, 0);
    struct landlock_path_beneath_attr rule = {LANDLOCK_ACCESS_FS_REFER, open("/", O_PATH | O_DIRECTORY | O_CLOEXEC)};
    int bad = fd < 0 || rule.parent_fd < 0 || syscall(SYS_landlock_add_rule, fd, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) < 0 ||
              syscall(SYS_landlock_restrict_self, fd, 0) < 0;
    int error = errno;
    close(fd);
    close(rule.parent_fd);
    errno = error;
    return bad ? -1 : 0;
}

int lock_down(bool keep) {
    const uint32_t kept = keep ? 1u << CAP_SYS_ADMIN | 1u << CAP_SYS_CHROOT : 0;
    const struct rlimit none = {0, 0};
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{kept, kept, kept}, {0, 0, 0}};
    if (setrlimit(RLIMIT_CORE, &none) < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || landlock() < 0) return -1;
    if (prctl(PR_SET_KEEPCAPS, keep, 0, 0, 0) < 0 || x_setgroups(0, NULL) < 0) return -1;
    if (x_setresgid(NOBODY, NOBODY, NOBODY) < 0 || x_setresuid(NOBODY, NOBODY, NOBODY) < 0) return -1;
    if (syscall(SYS_capset, &header, data) < 0 || prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0) return -1;
    for (int cap = 0; cap < 32 && keep; cap++)
        if (kept & 1u << cap && prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, cap, 0, 0) < 0) return -1;
    return 0;
}

static void read_all(int fd, void *to, size_t size) {
    for (uint8_t *at = to; size;) {
        ssize_t n = read(fd, at, size);
        if (n <= 0) {
            errno = EIO;
            fail("reading what it is given");
        }
        at += n;
        size -= (size_t)n;
    }
}

/* The call's fields; its descriptors come with the first byte. */
static uint8_t *read_call(size_t *size, int fds[2]) {
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(2 * sizeof(int))];
    } control;
    uint32_t length;
    struct iovec iov = {&length, sizeof length};
    struct msghdr packet = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(FD_CALL, &packet, MSG_CMSG_CLOEXEC | MSG_WAITALL) != sizeof length) _exit(0); /* nobody wants anything */
    struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
    if (header && header->cmsg_type == SCM_RIGHTS) memcpy(fds, CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
    uint8_t *data = length > MAX_CALL ? NULL : malloc(length + 1);
    if (!data) errno = E2BIG, fail("reading the call");
    read_all(FD_CALL, data, length);
    *size = length;
    return data;
}

static void unpack(int from) {
    struct {
        uint32_t name, mode;
        uint64_t size;
    } head;
    static char name[4097], block[65536];
    ssize_t n;
    while ((n = read(from, &head, sizeof head)) == sizeof head) {
        if (head.name >= sizeof name) errno = ENAMETOOLONG, fail("a file's name");
        read_all(from, name, head.name);
        name[head.name] = 0;
        for (char *slash = strchr(name + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
            *slash = 0;
            if (mkdir(name, 0755) < 0 && errno != EEXIST) fail(name);
            *slash = '/';
        }
        int to = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        if (to < 0) fail(name);
        for (uint64_t left = head.size; left;) {
            size_t part = left < sizeof block ? left : sizeof block;
            read_all(from, block, part);
            if (write(to, block, part) != (ssize_t)part) fail(name);
            left -= part;
        }
        if (fchmod(to, head.mode & 0777) < 0) fail(name);
        close(to);
    }
}

static void limit(int resource, uint64_t value) {
    struct rlimit limit = {value, value};
    if (setrlimit(resource, &limit) < 0) fail("setting a limit");
}

void worker_run(const int *namespaces, const int *call) {
    static char *argv[MAX_WORDS + 1], *env[MAX_WORDS + 1];
    static const int KINDS[3] = {CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUTS};
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int i = 0; i < 3; i++)
        if (setns(namespaces[i], KINDS[i]) < 0) _exit(71);
    int high = fcntl(call[0], F_DUPFD_CLOEXEC, 20), out = fcntl(call[1], F_DUPFD_CLOEXEC, 20), err = fcntl(call[2], F_DUPFD_CLOEXEC, 20);
    if (high < 0 || dup3(high, FD_CALL, O_CLOEXEC) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) _exit(71);
    syscall(SYS_close_range, FD_CALL + 1u, ~0u, 0u);
    setsid();

    size_t size;
    int fds[2] = {-1, -1}, more;
    uint8_t *data = read_call(&size, fds);
    struct dsec_fields fields = {data, data + size};
    struct dsec_field field;
    unsigned words = 0, variables = 0;
    const char *cwd = "/tmp";
    uint64_t cpu_s = 0, nofile = 1024, fsize = RLIM_INFINITY, stack = 0;
    while ((more = dsec_next_field(&fields, &field)) > 0) {
        char *text = strndup((const char *)field.data, field.length);
        if (!text || words == MAX_WORDS || variables == MAX_WORDS) errno = E2BIG, fail("reading the call");
        switch (field.tag) {
        case CALL_ARGV: argv[words++] = text; break;
        case CALL_ENV: env[variables++] = text; break;
        case CALL_CWD: cwd = text; break;
        case CALL_CPU_S: dsec_field_u64(&field, &cpu_s); break;
        case CALL_NOFILE: dsec_field_u64(&field, &nofile); break;
        case CALL_FSIZE: dsec_field_u64(&field, &fsize); break;
        case CALL_STACK: dsec_field_u64(&field, &stack); break;
        }
    }
    if (more < 0 || !words) errno = EPROTO, fail("reading the call");
    if (lock_down(false) < 0) fail("giving up privileges");
    umask(022);
    if (chdir(cwd) < 0) fail(cwd);
    if (fds[1] >= 0) unpack(fds[1]);
    if (fds[0] < 0 || dup2(fds[0], 0) < 0) fail("stdin");
    if (cpu_s) limit(RLIMIT_CPU, cpu_s);
    limit(RLIMIT_NOFILE, nofile);
    limit(RLIMIT_FSIZE, fsize);
    if (stack) limit(RLIMIT_STACK, stack);
    execvpe(argv[0], argv, env);
    fail(argv[0]);
}
