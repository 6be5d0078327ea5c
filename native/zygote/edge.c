/* The edge's connection: a queue of frames with their descriptors. An edge that doesn't read for long is dropped.
 *
 * One edge at a time: a connection that says HELLO replaces the one before; until then it is a candidate, so that looking whether somebody
 * serves here disturbs nobody.
 */
#include "edge.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "bytes.h"
#include "frame.h"

#define MAX_QUEUE 200000 /* frames: far above what a node can hold sandboxes */

struct outgoing {
    struct outgoing *next;
    int fds[2], fd_count;
    size_t size;
    uint8_t data[];
};

struct edge edge = {.fd = -1, .last = &edge.first};
const char *edge_path;
char listener_tag, candidate_tag;
static int listener = -1, candidate = -1;

int watch(int fd, void *tag) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = tag};
    return epoll_ctl(world.epoll, EPOLL_CTL_ADD, fd, &event);
}

void close_fds(int *fds, int count) {
    for (int i = 0; i < count; i++)
        if (fds[i] >= 0) close(fds[i]);
}

void drop_edge(void) {
    if (edge.fd >= 0) close(edge.fd);
    edge.fd = -1;
    edge.greeted = edge.writing = false;
    while (edge.first) {
        struct outgoing *out = edge.first;
        edge.first = out->next;
        close_fds(out->fds, out->fd_count);
        free(out);
    }
    edge.last = &edge.first;
    edge.queued = 0;
    dsec_request_free(&edge.request);
}

ssize_t send_packet(int to, const void *data, size_t size, const int *fds, int fd_count) {
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct iovec iov = {(void *)data, size};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd_count) {
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE((size_t)fd_count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN((size_t)fd_count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, (size_t)fd_count * sizeof(int));
    }
    return sendmsg(to, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void watch_edge(bool writing) {
    if (edge.writing == writing) return;
    edge.writing = writing;
    struct epoll_event event = {.events = EPOLLIN | (writing ? EPOLLOUT : 0), .data.ptr = &edge};
    epoll_ctl(world.epoll, EPOLL_CTL_MOD, edge.fd, &event);
}

void flush_edge(void) {
    while (edge.first) {
        struct outgoing *out = edge.first;
        if (send_packet(edge.fd, out->data, out->size, out->fds, out->fd_count) < 0) {
            if (errno == EAGAIN || errno == EINTR) break;
            drop_edge();
            return;
        }
        if (!(edge.first = out->next)) edge.last = &edge.first;
        edge.queued--;
        close_fds(out->fds, out->fd_count);
        free(out);
    }
    watch_edge(edge.first != NULL);
}

void answer(uint8_t type, uint64_t op, const void *payload, size_t size, int *fds, int fd_count) {
    struct outgoing *out = edge.fd < 0 ? NULL : malloc(sizeof *out + DSEC_HEADER_SIZE + size);
    if (!out || edge.queued >= MAX_QUEUE) {
        free(out);
        close_fds(fds, fd_count);
        if (edge.fd >= 0) drop_edge();
        return;
    }
    *out = (struct outgoing){.fd_count = fd_count, .size = DSEC_HEADER_SIZE + size};
    if (fd_count) memcpy(out->fds, fds, (size_t)fd_count * sizeof(int));
    struct dsec_header header = {.size = (uint32_t)size, .type = type, .op = op};
    dsec_put_header(out->data, &header);
    if (size) memcpy(out->data + DSEC_HEADER_SIZE, payload, size);
    *edge.last = out;
    edge.last = &out->next;
    edge.queued++;
    if (!edge.writing) flush_edge();
}

void failed(uint64_t op, int error, const char *text) {
    uint8_t payload[8 + 400];
    size_t length = strnlen(text, 400);
    put_u32(payload, (uint32_t)error);
    put_u32(payload + 4, 0);
    memcpy(payload + 8, text, length);
    answer(DSEC_Z_FAILED, op, payload, 8 + length, NULL, 0);
}

/* --- the door ------------------------------------------------------------------------------------------------------------------------ */

static void drop_candidate(void) {
    if (candidate >= 0) close(candidate);
    candidate = -1;
}

void accept_candidate(void) {
    int fd = fd_up(accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
    struct ucred peer;
    socklen_t length = sizeof peer;
    if (fd < 0) return;
    drop_candidate();
    candidate = fd;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) < 0 || peer.uid != 0 || watch(fd, &candidate_tag) < 0) drop_candidate();
}

bool read_candidate(struct dsec_header *header, uint8_t packet[CANDIDATE_PACKET]) {
    if (candidate < 0) return false;
    int size = 4 << 20;
    ssize_t n = recv(candidate, packet, CANDIDATE_PACKET, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0 || dsec_get_packet(packet, (size_t)n, header) < 0 || header->type != DSEC_Z_HELLO) {
        drop_candidate();
        return false;
    }
    drop_edge();
    edge.fd = candidate;
    edge.number++;
    candidate = -1;
    setsockopt(edge.fd, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &edge};
    epoll_ctl(world.epoll, EPOLL_CTL_MOD, edge.fd, &event);
    return true;
}

int edge_listen(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) return -ENAMETOOLONG;
    strcpy(address.sun_path, path);
    edge_path = path;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -errno;
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0) return -EADDRINUSE; /* another zygote serves there */
    close(fd);
    unlink(path);
    listener = fd_up(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (listener < 0) return listener;
    mode_t mask = umask(0177);
    int error = bind(listener, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener, 8) < 0 ? -errno : 0;
    umask(mask);
    return error;
}

int watch_door(void) { return watch(listener, &listener_tag); }
