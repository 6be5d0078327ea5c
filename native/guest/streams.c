/* The streams of operations: pipes to rings and back, within the window and the cap. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "guest.h"

#define TURN_BYTES 65536            /* read from one pipe before the next one has its turn */
#define TURNS 32                    /* ... and so many of them before the loop looks at everything else */

#define INPUT_PIPE DSEC_WINDOW      /* for stdin that comes faster than it is read: fewer turns for everybody on its way */
#define TERMINAL_BYTES 65536        /* more than a terminal can hold of what its leader wrote */

static uint8_t scratch[16384]; /* for what is read to be dropped */

/* --- output ---------------------------------------------------------------------------------------------------------------------- */

/* A pipe whose operation has ended, held open by processes that live on: what they write is read and dropped, so that they
 * don't die of SIGPIPE. */
struct leftover {
    struct source source;
    int fd;
};

static void leftover_ready(struct source *source, uint32_t events) {
    struct leftover *leftover = CONTAINER_OF(source, struct leftover, source);
    (void)events;
    if (leftover->fd < 0) return;
    ssize_t got = read(leftover->fd, scratch, sizeof scratch); /* level-triggered: one piece a turn */
    if (got > 0 || (got < 0 && errno == EAGAIN)) return;
    drop(&leftover->fd);
    free_later(leftover);
}

static void stream_close(struct stream *stream) {
    drop(&stream->fd);
    stream->readable = false;
    list_remove(&stream->link);
}

void stream_leave(struct stream *stream) {
    if (stream->fd < 0) return;
    if (stream->op->pty_size) { /* hung up, as whoever closes a window does */
        stream_close(stream);
        return;
    }
    ssize_t got = read(stream->fd, scratch, sizeof scratch);
    struct leftover *leftover = got == 0 ? NULL : malloc(sizeof *leftover);
    if (!leftover) {
        stream_close(stream);
        return;
    }
    *leftover = (struct leftover){{leftover_ready}, stream->fd};
    struct epoll_event event = {EPOLLIN, {.ptr = &leftover->source}};
    epoll_ctl(guest.epoll, EPOLL_CTL_MOD, stream->fd, &event);
    list_remove(&stream->link);
    stream->fd = -1;
}

void stream_ready(struct source *source, uint32_t events) {
    struct stream *stream = CONTAINER_OF(source, struct stream, source);
    struct op *op = stream->op;
    if (stream->fd < 0) return;
    if (!(events & EPOLLIN) && !op->pty_size) { /* nobody writes any more, and nothing is left in it: no need to read that */
        stream_close(stream);
        if (op->reaped) op_advance(op);
        return;
    }
    stream->readable = true;
    list_append(&guest.reading, &stream->link);
}

static size_t window_left(const struct op *op) {
    uint64_t held = (op->out.ring.end - op->out.ring.base) + (op->err.ring.end - op->err.ring.base);
    return held < DSEC_WINDOW ? DSEC_WINDOW - held : 0;
}

static void over_cap(struct op *op, size_t bytes) {
    op->dropped += bytes;
    if (op->exit.flags & EXIT_TRUNCATED) return;
    op->exit.flags |= EXIT_TRUNCATED;
    op->output_cap = op->out.ring.end + op->err.ring.end;
    if (op->reaped) { /* it had ended, but not all of its output fits */
        op->end_known = true;
        op->exit.end = END_OUTPUT_LIMIT;
        op->exit.code = 0;
    }
    op_kill(op, END_OUTPUT_LIMIT, now_ns());
}

/* Most commands write little: a ring as large as the window would be memory mapped and unmapped for nothing. */
static ssize_t read_little(struct stream *stream, size_t most) {
    ssize_t got = read(stream->fd, scratch, MIN(most, sizeof scratch));
    if (got > 0) ring_put(&stream->ring, scratch, (size_t)got);
    return got;
}

/* Reads once. True if there may be more to read now; false where it must wait for data, for the window, or is done. */
static bool stream_read(struct stream *stream) {
    struct op *op = stream->op;
    uint64_t total = op->out.ring.end + op->err.ring.end;
    uint64_t most = op->state == OP_DRAINING ? MIN(stream->drain, TURN_BYTES) : TURN_BYTES;
    size_t keep = op->released ? 0 : MIN(most, op->output_cap - total);
    size_t drop = MIN(most - keep, sizeof scratch); /* beyond the cap, or released */
    size_t window = window_left(op);
    if (keep > window) {
        keep = window;
        drop = 0;
    }
    if (keep + drop == 0) return false;

    ssize_t got;
    bool little = keep && stream->ring.capacity < sizeof scratch;
    if (little) {
        got = read_little(stream, keep);
    } else {
        struct iovec space[3];
        ring_space(&stream->ring, keep, space);
        space[2] = (struct iovec){scratch, drop};
        got = readv(stream->fd, space, 3);
    }
    /* EIO: nobody has the terminal open. A leader that lives on may open it again. */
    if (got < 0 && (errno == EAGAIN || (errno == EIO && op->pty_size && !op->reaped))) {
        stream->readable = false;
        stream->drain = 0; /* somebody else read from the pipe */
        if (stream->ring.base == stream->ring.end) ring_forget(&stream->ring, stream->ring.end);
        return false;
    }
    if (got <= 0) {
        stream_close(stream);
        return false;
    }
    size_t kept = MIN((size_t)got, keep);
    if (!little) stream->ring.end += kept;
    stream->drain -= MIN((uint64_t)got, stream->drain);
    if ((size_t)got > kept && !op->released) over_cap(op, (size_t)got - kept);
    if (kept && !op->started) report_read(op); /* who writes has started */
    if (kept) channel_notify(op);
    return true;
}

void ops_read_some(void) {
    for (int turn = 0; turn < TURNS; turn++) {
        struct link *link = list_pop(&guest.reading);
        if (!link) return;
        struct stream *stream = CONTAINER_OF(link, struct stream, link);
        struct op *op = stream->op;
        if (stream_read(stream)) list_append(&guest.reading, &stream->link);
        if (op->reaped) op_advance(op);
    }
}

/* Never before STARTED has been said, though a pipe may be seen before the report is. */
bool op_has_output(const struct op *op) {
    return op->started && (op->out.sent < op->out.ring.end || op->err.sent < op->err.ring.end);
}

int op_ack(struct op *op, uint64_t out, uint64_t err) {
    if (out > op->out.ring.end || err > op->err.ring.end) return -EPROTO;
    struct stream *streams[] = {&op->out, &op->err};
    uint64_t below[] = {out, err};
    for (int i = 0; i < 2; i++) {
        struct stream *stream = streams[i];
        if (below[i] > stream->ring.base) stream->ring.base = below[i];
        if (below[i] > stream->sent) stream->sent = below[i]; /* an edge that had it before a resync */
        if (!stream->readable) ring_forget(&stream->ring, below[i]);
    }
    for (int i = 0; i < 2; i++) {
        if (streams[i]->readable && streams[i]->fd >= 0) list_append(&guest.reading, &streams[i]->link);
    }
    channel_notify(op);
    return 0;
}

bool stream_drained(const struct stream *stream) { return stream->fd < 0 || stream->drain == 0; }

void stream_begin_drain(struct stream *stream) {
    int bytes = 0;
    if (stream->fd >= 0 && stream->op->pty_size) {
        bytes = TERMINAL_BYTES; /* part of it is where FIONREAD doesn't look; a read does, so all of it has come at EAGAIN or EIO */
    } else if (stream->fd >= 0) {
        ioctl(stream->fd, FIONREAD, &bytes);
    }
    stream->drain = (uint64_t)bytes;
    if (bytes == 0 || stream->fd < 0) return;
    stream->readable = true;
    list_append(&guest.reading, &stream->link);
}

/* --- input ----------------------------------------------------------------------------------------------------------------------- */

void input_close(struct op *op) {
    drop(&op->input);
    ring_forget(&op->input_ring, op->input_ring.end); /* what nobody is going to read counts as written */
    channel_notify(op);
}

static void input_write(struct op *op) {
    if (op->pty_size && !op->started && !op->reaped) return; /* a ^C that comes before there is a foreground would be lost */
    while (op->input >= 0 && op->input_ring.base < op->input_ring.end) {
        struct iovec data[2];
        ring_data(&op->input_ring, op->input_ring.base, op->input_ring.end - op->input_ring.base, data);
        ssize_t put = writev(op->input, data, 2);
        if (put > 0) {
            if (op->pty_size) { /* where the last byte written stands in the ring's two pieces */
                size_t last = (size_t)put - 1;
                const uint8_t *bytes = last < data[0].iov_len ? data[0].iov_base : data[1].iov_base;
                op->input_in_line = bytes[last < data[0].iov_len ? last : last - data[0].iov_len] != '\n';
            }
            ring_forget(&op->input_ring, op->input_ring.base + (uint64_t)put);
        } else if (put < 0 && errno == EAGAIN) {
            if (!op->input_watched) {
                if (!op->pty_size) fcntl(op->input, F_SETPIPE_SZ, INPUT_PIPE); /* much is to come; it may be refused */
                watch(op->input, &op->input_source, EPOLLOUT);
            }
            op->input_watched = true;
            break;
        } else {
            input_close(op);
        }
    }
    if (op->input >= 0 && op->input_eof && op->input_ring.base == op->input_ring.end) {
        if (!op->pty_size || terminal_type_end(op)) {
            input_close(op);
        } else if (!op->input_watched) {
            watch(op->input, &op->input_source, EPOLLOUT);
            op->input_watched = true;
        }
    }
    channel_notify(op);
}

void input_ready(struct source *source, uint32_t events) {
    struct op *op = CONTAINER_OF(source, struct op, input_source);
    (void)events;
    if (op->input >= 0) input_write(op);
}

/* What a pipe takes at once needn't be kept: so many bytes. Errors are input_write's. */
static size_t input_write_through(struct op *op, const uint8_t *data, size_t size) {
    if (op->pty_size || op->input_ring.base < op->input_ring.end || !size) return 0;
    ssize_t put = write(op->input, data, size);
    if (put <= 0) return 0;
    op->input_ring.base = op->input_ring.end += (uint64_t)put;
    return (size_t)put;
}

/* The caller has checked the offset, the window and the end. */
void op_stdin(struct op *op, uint64_t offset, const uint8_t *data, size_t size, bool eof) {
    uint64_t known = op->input_ring.end - offset; /* bytes of it that were here before */
    if (known < size) {
        data += known;
        size -= known;
        if (op->input >= 0) {
            size_t put = input_write_through(op, data, size);
            ring_put(&op->input_ring, data + put, size - put);
        } else {
            op->input_ring.base = op->input_ring.end += size;
        }
    }
    op->input_eof |= eof;
    input_write(op);
}
