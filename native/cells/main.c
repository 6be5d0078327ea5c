/* Which part this process has: the zygote executes this program as pid 1 and as pid 2 of the jail. */
#include "cells.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include "zygote/sys.h"

int landlock_abi;

int send_message(int to, const struct message *message, const void *text, size_t size, const int *fds, int count) {
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } control;
    struct iovec iov[2] = {{(void *)message, sizeof *message}, {(void *)text, size}};
    struct msghdr packet = {.msg_iov = iov, .msg_iovlen = size ? 2 : 1};
    if (count) {
        memset(&control, 0, sizeof control);
        packet.msg_control = &control;
        packet.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, (size_t)count * sizeof(int));
    }
    return sendmsg(to, &packet, MSG_NOSIGNAL) < 0 ? -1 : 0;
}

ssize_t receive_message(int from, struct message *message, char *text, size_t capacity, int *fds, int most, int *count) {
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } control;
    struct iovec iov[2] = {{message, sizeof *message}, {text, capacity}};
    struct msghdr packet = {.msg_iov = iov, .msg_iovlen = capacity ? 2 : 1};
    if (most) {
        packet.msg_control = &control;
        packet.msg_controllen = CMSG_SPACE((size_t)most * sizeof(int));
    }
    ssize_t n = recvmsg(from, &packet, MSG_CMSG_CLOEXEC);
    *count = 0;
    if (n < 0) return -1;
    struct cmsghdr *header = most ? CMSG_FIRSTHDR(&packet) : NULL;
    if (header && header->cmsg_type == SCM_RIGHTS) {
        *count = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds, CMSG_DATA(header), (size_t)*count * sizeof(int));
    }
    if (n == 0) errno = ECONNRESET;
    else if ((size_t)n < sizeof *message) errno = EPROTO;
    else return n - (ssize_t)sizeof *message;
    close_all(fds, *count);
    *count = 0;
    return -1;
}

void close_all(const int *fds, int count) {
    for (int i = 0; i < count; i++)
        if (fds[i] >= 0) close(fds[i]);
}

int main(int argc, char **argv) {
    (void)argc;
    long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, 1);
    landlock_abi = abi > 0 ? (int)abi : 0;
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0) return 70;
    if (argv[0] && !strcmp(argv[0], "dsec-source")) source_run();
    warden_run();
}
