/* CONNECT: a connection to a port of the sandbox's loopback or to a unix socket, pumped between it and the streams of this forked child.
 * Each direction ends by itself. What is said about the connection goes to stderr as records (wire.h), so no text may. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "bytes.h"
#include "guest.h"

#define PATIENCE_MS 10000

/* One direction: bytes at..end of `buffer` are on their way. */
struct pump {
    bool open; /* there may be more to read */
    size_t at, end;
    uint8_t buffer[65536];
};
static struct pump in, out;

static int try_connect(int family, const struct sockaddr *address, socklen_t size, int *error) {
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
    socklen_t length = sizeof *error;
    *error = fd < 0 ? errno : 0;
    if (fd < 0) return -1;
    if (family != AF_UNIX) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(fd, address, size) == 0) return fd;
    *error = errno;
    if (*error == EINPROGRESS) {
        struct pollfd wait = {fd, POLLOUT, 0};
        *error = poll(&wait, 1, PATIENCE_MS) == 1 && getsockopt(fd, SOL_SOCKET, SO_ERROR, error, &length) == 0 ? *error : ETIMEDOUT;
        if (*error == 0) return fd;
    }
    close(fd);
    return -1;
}

static int open_connection(const struct request *request, int *error) {
    if (request->path) {
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        size_t size = strlen(request->path);
        *error = ENAMETOOLONG;
        if (size >= sizeof address.sun_path) return -1;
        memcpy(address.sun_path, request->path, size);
        return try_connect(AF_UNIX, (struct sockaddr *)&address, sizeof address, error);
    }
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)request->port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = four.sin_port, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int ignored, fd = try_connect(AF_INET, (struct sockaddr *)&four, sizeof four, error);
    if (fd < 0) fd = try_connect(AF_INET6, (struct sockaddr *)&six, sizeof six, &ignored);
    return fd;
}

/* Reads where there is room. 0, or an errno. */
static int take(struct pump *pump, int fd) {
    ssize_t got = read(fd, pump->buffer, sizeof pump->buffer);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (got < 0) return errno;
    pump->at = 0;
    pump->end = (size_t)got;
    pump->open = got > 0;
    return 0;
}

void connect_and_pump(const struct request *request, int report) {
    uint8_t record[9] = {'c'};
    uint64_t sent = 0;
    int error, fd = open_connection(request, &error);
    if (fd < 0) child_fail(report, STAGE_CONNECT, error);
    put_all(2, record, 1);
    fcntl(0, F_SETFL, fcntl(0, F_GETFL) | O_NONBLOCK);
    fcntl(1, F_SETFL, fcntl(1, F_GETFL) | O_NONBLOCK);
    in.open = out.open = true;
    bool in_ended = false, out_ended = false; /* and it was passed on */
    while (!in_ended || !out_ended) {
        bool in_full = in.at < in.end, out_full = out.at < out.end;
        short socket_events = (short)((in_full ? POLLOUT : 0) | (out.open && !out_full ? POLLIN : 0));
        struct pollfd waits[3] = {
            {in.open && !in_full ? 0 : -1, POLLIN, 0},
            {out_full ? 1 : -1, POLLOUT, 0},
            {socket_events ? fd : -1, socket_events, 0}, /* what has ended would report its hang-up without end */
        };
        if (poll(waits, 3, -1) < 0) continue;
        if (waits[0].revents && take(&in, 0)) in.open = false;
        if (waits[2].revents && !out_full && out.open && (error = take(&out, fd))) child_fail(report, STAGE_CONNECT, error);
        if (in.at < in.end) {
            ssize_t put = send(fd, in.buffer + in.at, in.end - in.at, MSG_NOSIGNAL);
            if (put > 0) in.at += (size_t)put;
            if (put < 0 && errno != EAGAIN && errno != EINTR) { /* it takes no more: what else comes is dropped by the guest */
                in.open = false;
                in.at = in.end;
            }
        }
        if (out.at < out.end) {
            ssize_t put = write(1, out.buffer + out.at, out.end - out.at);
            if (put > 0) out.at += (size_t)put, sent += (uint64_t)put;
            if (put < 0 && errno != EAGAIN && errno != EINTR) _exit(1); /* the guest is gone */
        }
        if (!in.open && in.at == in.end && !in_ended) {
            in_ended = true;
            close(0);
            shutdown(fd, SHUT_WR);
        }
        if (!out.open && out.at == out.end && !out_ended) {
            out_ended = true;
            record[0] = 'e';
            put_u64(record + 1, sent);
            put_all(2, record, sizeof record);
        }
    }
}
