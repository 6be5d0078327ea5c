/* The channel to the edge: frames in, frames out, resync. The operations keep what must survive the channel; here is only what
 * goes with it. Sending is by demand: while the channel takes more, the next operation in turn is asked for one frame. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "bytes.h"
#include "guest.h"

#define TURN_FRAMES 64
#define MOST_ANSWERS (64u << 10) /* answers in the queue above which nothing is received: an edge that doesn't read can't fill us */
#define SMALL 4096               /* frames up to this size wait for the next one, to leave in one packet */
#define ACK_BYTES 65536          /* STDIN_ACK is sent for at least so much, or when nothing is left to write */

static struct {
    struct source source;
    int fd;
    bool packets; /* SOCK_SEQPACKET */
    bool seeking; /* the token, in a stream that is there for good: all before it is of an earlier channel */
    bool greeted, readable, writable;
    bool asked; /* epoll is to tell when there is room again */
    size_t received; /* in `input` */
    struct dsec_request request;
    enum { NO_REQUEST, COLLECTING, SKIPPING } request_state; /* skipping: the rest of one that was answered already */
    uint8_t *answers; /* whole frames at answers_at..answers_end */
    size_t answers_at, answers_end, answers_capacity;
    size_t rest_at, rest_end; /* of `rest`: frames that leave together, and what a byte stream didn't take yet */
} channel = {.fd = -1};

static uint8_t input[DSEC_HEADER_SIZE + DSEC_MAX_PAYLOAD + 1]; /* one more: request_parse */
static uint8_t rest[DSEC_HEADER_SIZE + DSEC_MAX_PAYLOAD];

/* A stream for good stays open, and what comes next begins with the token. */
static void channel_close(void) {
    struct source source = channel.source;
    bool asked = channel.asked;
    int stream = token_there() ? channel.fd : -1;
    if (stream < 0) drop(&channel.fd);
    dsec_request_free(&channel.request);
    free(channel.answers);
    while (list_pop(&guest.sending)) {}
    memset(&channel, 0, sizeof channel);
    channel.fd = stream;
    if (stream < 0) return;
    channel.source = source;
    channel.asked = asked;
    channel.seeking = channel.writable = channel.readable = true;
}

/* Room is asked for only when there was none: else every frame that the edge takes out would wake us. */
static void ask_for_room(bool ask) {
    if (channel.asked == ask) return;
    channel.asked = ask;
    struct epoll_event event = {EPOLLIN | EPOLLRDHUP | EPOLLET | (ask ? EPOLLOUT : 0u), {.ptr = &channel.source}};
    epoll_ctl(guest.epoll, EPOLL_CTL_MOD, channel.fd, &event);
}

static void channel_ready(struct source *source, uint32_t events) {
    (void)source; /* that a stream for good has nobody at its other end is told once, and so is that somebody came */
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) channel.readable = true;
    if (events & EPOLLOUT) {
        channel.writable = true;
        ask_for_room(false);
    }
}

static void channel_full(void) {
    channel.writable = false;
    ask_for_room(true);
}

void channel_open(int fd) {
    int type = 0;
    socklen_t size = sizeof type;
    channel_close();
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) && errno != ENOTSOCK) return; /* not even a descriptor */
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    channel.fd = fd;
    channel.packets = type == SOCK_SEQPACKET;
    channel.source.ready = channel_ready;
    channel.readable = channel.writable = true;
    watch(fd, &channel.source, EPOLLIN | EPOLLRDHUP);
}

void channel_replace(int fd) {
    channel_close();
    dup3(fd, channel.fd, O_CLOEXEC); /* the one before is closed, and watched no more */
    close(fd);
    channel.asked = false;
    watch(channel.fd, &channel.source, EPOLLIN | EPOLLRDHUP);
}

/* --- sending --------------------------------------------------------------------------------------------------------------------- */

/* Sends what waits in `rest`. False where some of it still waits: the channel is full or lost. */
static bool send_rest(void) {
    if (channel.rest_at == channel.rest_end) return true;
    size_t size = channel.rest_end - channel.rest_at;
    ssize_t sent = channel.packets ? send(channel.fd, rest, size, MSG_NOSIGNAL) : write(channel.fd, rest + channel.rest_at, size);
    if (sent < 0) {
        if (errno == EAGAIN) channel_full();
        else if (errno != EINTR && errno != ENOBUFS) channel_close(); /* those: again soon, nothing is going to tell us when */
        return false;
    }
    channel.rest_at += (size_t)sent;
    if (channel.rest_at < channel.rest_end) return false;
    channel.rest_at = channel.rest_end = 0;
    return true;
}

static void keep(const struct iovec *pieces, int count, size_t skip) {
    for (int i = 0; i < count; i++) {
        size_t cut = MIN(skip, pieces[i].iov_len);
        memcpy(rest + channel.rest_end, (uint8_t *)pieces[i].iov_base + cut, pieces[i].iov_len - cut);
        channel.rest_end += pieces[i].iov_len - cut;
        skip -= cut;
    }
}

/* Takes pieces that make one frame: a small one waits for others (send_rest). False where the channel is full or lost: then nothing of
 * the frame was taken. */
static bool transmit(struct iovec *pieces, int count) {
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
    size_t size = 0;
    for (int i = 0; i < count; i++) size += pieces[i].iov_len;
    if (size <= SMALL && channel.rest_end + size <= sizeof rest) {
        keep(pieces, count, 0);
        return true;
    }
    if (!send_rest()) return false;
    ssize_t sent = channel.packets ? sendmsg(channel.fd, &message, MSG_NOSIGNAL) : writev(channel.fd, pieces, count);
    if (sent < 0) {
        if (errno == EAGAIN) channel_full();
        else if (errno != EINTR && errno != ENOBUFS) channel_close();
        return false;
    }
    if ((size_t)sent < size) keep(pieces, count, (size_t)sent);
    return true;
}

static bool send_frame(uint8_t type, uint64_t op, const uint8_t *payload, size_t size) {
    uint8_t frame[DSEC_HEADER_SIZE + DSEC_EXIT_SIZE];
    dsec_put_header(frame, &(struct dsec_header){(uint32_t)size, type, 0, op});
    memcpy(frame + DSEC_HEADER_SIZE, payload, size);
    return transmit(&(struct iovec){frame, DSEC_HEADER_SIZE + size}, 1);
}

static bool send_output(struct op *op, struct stream *stream, uint8_t flags) {
    uint8_t head[DSEC_HEADER_SIZE + 8];
    size_t size = MIN(stream->ring.end - stream->sent, DSEC_MAX_DATA);
    struct iovec pieces[3] = {{head, sizeof head}};
    dsec_put_header(head, &(struct dsec_header){(uint32_t)(8 + size), DSEC_OUT, flags, op->id});
    put_u64(head + DSEC_HEADER_SIZE, stream->sent);
    ring_data(&stream->ring, stream->sent, size, pieces + 1);
    if (!transmit(pieces, pieces[2].iov_len ? 3 : 2)) return false;
    stream->sent += size;
    return true;
}

/* Adds a frame to the answers: what isn't tied to an operation that could be asked again. */
static void answer(uint8_t type, uint64_t op, const uint8_t *payload, size_t size) {
    size_t frame = DSEC_HEADER_SIZE + size;
    if (channel.fd < 0) return;
    if (channel.answers_end + frame > channel.answers_capacity) {
        size_t capacity = MIN(channel.answers_capacity * 2, channel.answers_capacity + MOST_ANSWERS) + frame + 256;
        uint8_t *grown = realloc(channel.answers, capacity);
        if (!grown) shut_down(70);
        channel.answers = grown;
        channel.answers_capacity = capacity;
    }
    uint8_t *at = channel.answers + channel.answers_end;
    dsec_put_header(at, &(struct dsec_header){(uint32_t)size, type, 0, op});
    if (size) memcpy(at + DSEC_HEADER_SIZE, payload, size);
    channel.answers_end += frame;
}

static bool send_answer(void) {
    uint8_t *frame = channel.answers + channel.answers_at;
    size_t size = DSEC_HEADER_SIZE + get_u32(frame);
    if (!transmit(&(struct iovec){frame, size}, 1)) return false;
    channel.answers_at += size;
    if (channel.answers_at == channel.answers_end) {
        free(channel.answers);
        channel.answers = NULL;
        channel.answers_at = channel.answers_end = channel.answers_capacity = 0;
    }
    return true;
}

void channel_refuse(uint64_t op, int error, const char *why) {
    uint8_t payload[8 + 256];
    size_t size = MIN(strlen(why), 256);
    put_u32(payload, (uint32_t)-error);
    put_u32(payload + 4, 0);
    memcpy(payload + 8, why, size);
    answer(DSEC_REFUSED, op, payload, 8 + size);
}

static void answer_state(struct op *op) {
    uint8_t payload[512];
    struct dsec_writer writer = {payload, sizeof payload, 0, false};
    if (op->key_size) dsec_put_field(&writer, TAG_KEY, op->key, op->key_size);
    dsec_put_u64(&writer, TAG_KIND, op->kind);
    dsec_put_u64(&writer, TAG_STATE, op->state == OP_ENDED ? 2 : op->started ? 1 : 0);
    if (op->started) dsec_put_u64(&writer, TAG_PID, (uint64_t)op->pid);
    dsec_put_u64(&writer, TAG_STDIN_OFFSET, op->input_ring.end);
    dsec_put_u64(&writer, TAG_STDOUT_BASE, op->out.ring.base);
    dsec_put_u64(&writer, TAG_STDOUT_END, op->out.ring.end);
    dsec_put_u64(&writer, TAG_STDERR_BASE, op->err.ring.base);
    dsec_put_u64(&writer, TAG_STDERR_END, op->err.ring.end);
    if (op->pty_size) dsec_put_u64(&writer, TAG_PTY_SIZE, op->pty_size);
    dsec_put_u64(&writer, TAG_AGE_MS, (now_ns() - op->started_ns) / 1000000);
    answer(DSEC_OPSTATE, op->id, payload, writer.used);
}

static bool input_ack_due(const struct op *op) {
    uint64_t written = op->input_ring.base;
    if (op->input_acked == UINT64_MAX) return written > 0;
    return written - op->input_acked >= ACK_BYTES || (written != op->input_acked && written == op->input_ring.end);
}

static bool send_status(void) {
    uint8_t status[DSEC_STATUS_SIZE];
    vm_status(status);
    return send_frame(DSEC_STATUS, 0, status, sizeof status);
}

static bool exit_due(const struct op *op) { return op->send_exit && !op_has_output(op); }

/* One frame of what this operation has to say. False where the channel is full or lost. */
static bool send_next(struct op *op) {
    uint8_t payload[DSEC_EXIT_SIZE];
    if (op->send_started) {
        put_u32(payload, (uint32_t)op->pid);
        put_u32(payload + 4, 0);
        if (!send_frame(DSEC_STARTED, op->id, payload, 8)) return false;
        op->send_started = false;
    } else if (input_ack_due(op)) {
        put_u64(payload, op->input_ring.base);
        if (!send_frame(DSEC_STDIN_ACK, op->id, payload, 8)) return false;
        op->input_acked = op->input_ring.base;
        if (op->input_credit < op->input_acked) op->input_credit = op->input_acked;
    } else if (op->out.sent < op->out.ring.end) {
        return send_output(op, &op->out, 0);
    } else if (op->err.sent < op->err.ring.end) {
        return send_output(op, &op->err, DSEC_F_STDERR);
    } else if (exit_due(op)) {
        dsec_put_exit(payload, &op->exit);
        if (guest.machine && op->kind == DSEC_EXEC && !send_status()) return false;
        if (!send_frame(DSEC_EXIT, op->id, payload, DSEC_EXIT_SIZE)) return false;
        op->send_exit = false;
    }
    return true;
}

static bool has_something(const struct op *op) {
    return op->send_started || input_ack_due(op) || op_has_output(op) || exit_due(op);
}

void channel_notify(struct op *op) {
    if (channel.greeted && !op->released && has_something(op)) list_append(&guest.sending, &op->link);
}

static void send_some(void) {
    for (int frame = 0; frame < TURN_FRAMES && channel.fd >= 0 && channel.writable; frame++) {
        if (channel.answers_at < channel.answers_end) {
            send_answer();
            continue;
        }
        struct link *link = list_pop(&guest.sending);
        if (!link) break;
        struct op *op = CONTAINER_OF(link, struct op, link);
        send_next(op);
        channel_notify(op); /* behind the others; also where the channel was full: the frame is still to be sent */
    }
    if (channel.fd >= 0 && channel.writable) send_rest();
}

/* --- receiving ------------------------------------------------------------------------------------------------------------------- */

static int on_hello(const uint8_t *payload) {
    uint8_t welcome[24];
    if (channel.greeted) return -EPROTO;
    if (get_u16(payload) != DSEC_PROTOCOL_VERSION) return -EPROTONOSUPPORT;
    channel.greeted = true;
    put_u16(welcome, DSEC_PROTOCOL_VERSION);
    put_u16(welcome + 2, 0);
    put_u32(welcome + 4, ops_visible());
    put_u64(welcome + 8, get_u64(payload + 8));
    put_u64(welcome + 16, guest.highest_op);
    answer(DSEC_WELCOME, 0, welcome, sizeof welcome);
    ops_resync(answer_state);
    answer(DSEC_SYNCED, 0, NULL, 0);
    return 0;
}

/* Whether a request that begins is answered without looking at it. */
static bool known_already(uint64_t id) {
    struct op *op = op_find(id);
    if (op) answer_state(op);
    else if (id <= guest.highest_op) channel_refuse(id, -ESTALE, "an operation of this number was released");
    return op || id <= guest.highest_op;
}

static int on_start(const struct dsec_header *header, uint8_t *payload) {
    bool more = header->flags & DSEC_F_MORE;
    if (header->op == 0 || header->op > INT64_MAX || (channel.request_state != NO_REQUEST && channel.request.op != header->op)) return -EPROTO;
    if (channel.request_state == NO_REQUEST) {
        bool known = known_already(header->op);
        if (!more) { /* the usual: one frame */
            if (!known) op_start(header->op, payload, header->size);
            return 0;
        }
        channel.request_state = known ? SKIPPING : COLLECTING;
    }
    if (channel.request_state == COLLECTING) {
        int error = dsec_request_add(&channel.request, payload, header->size);
        if (error) {
            channel_refuse(header->op, error, "a request that is too large");
            channel.request_state = SKIPPING;
        }
    }
    channel.request.op = header->op;
    if (more) return 0;
    if (channel.request_state == COLLECTING) op_start(header->op, channel.request.data, channel.request.size);
    channel.request_state = NO_REQUEST;
    dsec_request_free(&channel.request);
    return 0;
}

static int on_stdin(const struct dsec_header *header, const uint8_t *payload) {
    struct op *op = op_find(header->op);
    uint64_t offset = get_u64(payload), size = header->size - 8;
    bool eof = header->flags & DSEC_F_EOF;
    if (!op) {
        channel_refuse(header->op, -ESRCH, "there is no such operation");
        return 0;
    }
    uint64_t known = op->input_ring.end;
    if (offset > known || offset + size < offset || offset + size > op->input_credit + DSEC_WINDOW) return -EPROTO;
    if (op->input_eof && offset + size > known) return -EPROTO;
    op_stdin(op, offset, payload + 8, size, eof && offset + size >= known);
    return 0;
}

static int on_configure(const struct dsec_header *header, const uint8_t *payload) {
    const char *what;
    uint8_t took[8];
    int error = vm_become(payload, header->size, took, &what);
    if (error) channel_refuse(header->op, error, what);
    else answer(DSEC_CONFIGURED, header->op, took, sizeof took);
    return 0;
}

static int on_frame(const struct dsec_header *header, uint8_t *payload) {
    bool to_copy = token_there() && (header->type == DSEC_CONFIGURE || header->type == DSEC_HALT);
    if (!channel.greeted && header->type != DSEC_HELLO && !to_copy) return -EPROTO;
    struct op *op = op_find(header->op);
    switch (header->type) {
    case DSEC_HELLO: return on_hello(payload);
    case DSEC_START: return on_start(header, payload);
    case DSEC_STDIN: return on_stdin(header, payload);
    case DSEC_ACK: return op ? op_ack(op, get_u64(payload), get_u64(payload + 8)) : 0;
    case DSEC_SIGNAL: op_signal(op, header->op, get_u32(payload), get_u32(payload + 4)); return 0;
    case DSEC_RESIZE: op_resize(op, header->op, get_u16(payload), get_u16(payload + 2)); return 0;
    case DSEC_HOLD: ops_hold(get_u64(payload)); return 0;
    case DSEC_CONFIGURE: return to_copy && !channel.greeted ? on_configure(header, payload) : -EPROTO;
    case DSEC_HALT: return to_copy ? vm_write_down() : -EPROTO;
    case DSEC_AGAIN: return vm_again();
    case DSEC_RELEASE:
        if (op) op_release(op);
        return 0;
    case DSEC_PING: {
        struct timespec time;
        uint8_t pong[16];
        clock_gettime(CLOCK_REALTIME, &time);
        memcpy(pong, payload, 8);
        put_u64(pong + 8, (uint64_t)time.tv_sec * NANOSECONDS + (uint64_t)time.tv_nsec);
        answer(DSEC_PONG, 0, pong, sizeof pong);
        return 0;
    }
    default: return -EPROTO; /* a frame of the other direction */
    }
}

/* Says why before it hangs up, where there is room: an edge of another version, or one with a fault, should be able to tell. */
static void hang_up(int error) {
    channel_refuse(0, error, "protocol error: the channel is closed");
    while (channel.fd >= 0 && channel.writable && channel.answers_at < channel.answers_end && send_answer()) {}
    if (channel.fd >= 0 && channel.writable) send_rest();
    channel_close();
}

/* The frames of one packet. 0, or why the channel must be closed. */
static int on_packet(size_t size) {
    struct dsec_header header;
    for (size_t at = 0; at < size && channel.fd >= 0;) {
        if (size - at < DSEC_HEADER_SIZE) return -EPROTO;
        int error = dsec_get_header(input + at, &header);
        if (error) return error;
        at += DSEC_HEADER_SIZE;
        if (header.size > size - at) return -EPROTO;
        uint8_t *next = input + at + header.size, kept = *next; /* request_parse() writes there */
        error = on_frame(&header, input + at);
        if (error) return error;
        *next = kept;
        at += header.size;
    }
    return 0;
}

/* What a byte stream has of the next frame. 0, or why the channel must be closed. */
static int on_bytes(size_t size) {
    struct dsec_header header;
    channel.received += size;
    if (channel.received < DSEC_HEADER_SIZE) return 0;
    int error = dsec_get_header(input, &header);
    if (!error && channel.received < DSEC_HEADER_SIZE + header.size) return 0;
    channel.received = 0;
    return error ? error : on_frame(&header, input + DSEC_HEADER_SIZE);
}

/* The same of a stream for good. What was read goes no further than a frame, or than the HELLO behind a token. */
static int on_stream(size_t size) {
    uint8_t *fresh = input + channel.received;
    size_t end = token_find(fresh, size);
    if (!end) return channel.seeking ? 0 : on_bytes(size);
    channel_close();
    channel.seeking = false;
    memmove(input, fresh + end, size - end);
    return on_bytes(size - end);
}

/* Receives at most one packet, or a piece of the next frame. False where there is nothing to receive, or the channel is lost. */
static bool receive(void) {
    size_t want = sizeof input - 1;
    if (channel.seeking) {
        want = DSEC_TOKEN_SIZE;
    } else if (!channel.packets) {
        want = DSEC_HEADER_SIZE;
        if (channel.received >= DSEC_HEADER_SIZE) want += get_u32(input); /* checked before */
        want -= channel.received;
    }
    ssize_t got = channel.packets ? recv(channel.fd, input, want, MSG_TRUNC) : read(channel.fd, input + channel.received, want);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        channel.readable = errno == EINTR;
        return false;
    }
    if (got == 0 && token_there()) { /* nobody is there, or the news that somebody is comes behind what he sends: the token tells */
        channel.readable = false;
        return false;
    }
    if (got <= 0) {
        channel_close();
        return false;
    }
    int error = token_there() ? on_stream((size_t)got) : !channel.packets ? on_bytes((size_t)got) : (size_t)got > want ? -EPROTO : on_packet((size_t)got);
    if (error) hang_up(error);
    return !error;
}

static bool may_receive(void) {
    return channel.fd >= 0 && channel.readable && channel.answers_end - channel.answers_at < MOST_ANSWERS;
}

void channel_turn(void) {
    for (int frame = 0; frame < TURN_FRAMES && may_receive() && receive(); frame++) {}
    if (channel.fd >= 0) send_some();
}

bool channel_busy(void) {
    bool unsent = channel.rest_at < channel.rest_end || channel.answers_at < channel.answers_end || !list_empty(&guest.sending);
    return may_receive() || (channel.fd >= 0 && channel.writable && unsent);
}
