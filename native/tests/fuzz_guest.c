/* Fuzzes the guest's core in one process: channel, requests, operations, streams. No process is ever started: spawn() is a fake that
 * makes the pipes and leaves the other ends to the script, which the input's bytes are read as: it writes output, reads stdin, ends
 * "processes", sends frames good and bad, cuts the channel, lets time pass. An edge checks what it hears: output in order, byte for
 * byte, within the window, ended once, by an EXIT that adds up. */
#include "driver.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../guest/guest.h"
#include "bytes.h"

#define MOST 48 /* operations in one input */

struct child { /* a fake process and what the edge knows of its operation */
    struct op *op;
    int out, err, in, report;
    bool started, failed, reaped, killed;
    uint64_t written[2], at_end[2], read;        /* by the process; until it ended */
    uint64_t heard[2];                           /* by the edge */
    bool known, ended, released, exited;         /* `exited`: EXIT was heard on this channel */
};

static struct child children[MOST];
static uint64_t child_count, clock_ns, fed[MOST];
static int edge = -1;
static bool greeted, lost;

static void require(bool condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "broken: %s\n", what);
    abort();
}

/* --- what main.c, spawn.c, cgroup.c and the kernel are otherwise ------------------------------------------------------------------- */

struct guest guest;
static void *doomed[4096];
static size_t doomed_count;

uint64_t now_ns(void) { return clock_ns; }

char *format_u64(char *end, uint64_t value) {
    (void)value;
    return end;
}

void watch(int fd, struct source *source, uint32_t events) {
    struct epoll_event event = {events | EPOLLET, {.ptr = source}};
    require(epoll_ctl(guest.epoll, EPOLL_CTL_ADD, fd, &event) == 0, "watched twice, or not a descriptor");
}

void drop(int *fd) {
    if (*fd < 0) return;
    epoll_ctl(guest.epoll, EPOLL_CTL_DEL, *fd, NULL);
    close(*fd);
    *fd = -1;
}

void free_later(void *memory) {
    require(doomed_count < sizeof doomed / sizeof *doomed, "too much to free in one turn");
    doomed[doomed_count++] = memory;
}

void shut_down(int status) {
    (void)status;
    abort();
}

int kill(pid_t pid, int number) { /* the guest's calls come here: nothing real is ever signalled */
    for (uint64_t i = 0; i < child_count; i++) {
        if (children[i].op && pid == (pid_t)(100 + i) && !children[i].reaped && (number == SIGKILL || number == SIGTERM)) {
            children[i].killed = true;
        }
    }
    return 0;
}

void kill_tree(pid_t leader) { kill(leader, SIGKILL); }
int group_kill(struct group *group) { return (void)group, -ENOENT; }
int group_end(struct group *group) { return (void)group, 0; }
int group_cpu_us(struct group *group, uint64_t *cpu_us) { return (void)group, (void)cpu_us, -ENOENT; }
void group_end_later(struct group *group) { (void)group; }
void groups_trim(bool all) { (void)all; }
void groups_sweep(void) {}

static void pipe_of(int *read_end, int *write_end) {
    int ends[2];
    require(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, "out of descriptors");
    *read_end = ends[0];
    *write_end = ends[1];
}

int spawn(struct op *op, struct request *request, enum dsec_stage *stage) {
    *stage = STAGE_FORK;
    (void)request;
    if (child_count == MOST) return -EAGAIN;
    struct child *child = &children[child_count];
    *child = (struct child){.op = op, .out = -1, .err = -1, .in = -1, .report = -1};
    pipe_of(&op->out.fd, &child->out);
    if (!(op->flags & EF_MERGE)) pipe_of(&op->err.fd, &child->err);
    if (op->flags & EF_STDIN) pipe_of(&child->in, &op->input);
    pipe_of(&op->report, &child->report);
    if (op->kind != DSEC_EXEC) child->started = true;
    op->pid = (pid_t)(100 + child_count++);
    return 0;
}

/* --- the fake process --------------------------------------------------------------------------------------------------------------- */

static void shut(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static uint8_t byte_at(uint64_t child, int stream, uint64_t offset) { return (uint8_t)(offset * 7 + offset / 251 + child * 31 + (uint64_t)stream); }

static void child_writes(uint64_t index, int stream, size_t size) {
    struct child *child = &children[index];
    static uint8_t buffer[65536];
    int fd = stream ? child->err : child->out;
    if (fd < 0) return;
    for (size_t i = 0; i < size; i++) buffer[i] = byte_at(index, stream, child->written[stream] + i);
    ssize_t put = write(fd, buffer, size);
    if (put > 0) child->written[stream] += (uint64_t)put;
}

static void child_execs(uint64_t index, bool fails) {
    struct child *child = &children[index];
    uint8_t report[8];
    if (child->report < 0) return;
    put_u32(report, STAGE_EXEC);
    put_u32(report + 4, ENOENT);
    if (fails) require(write(child->report, report, sizeof report) == 8, "the report pipe is full");
    child->failed |= fails;
    child->started = true;
    shut(&child->report);
}

static void child_reads(uint64_t index, size_t size) {
    struct child *child = &children[index];
    static uint8_t buffer[65536];
    ssize_t got = child->in < 0 ? 0 : read(child->in, buffer, size);
    for (ssize_t i = 0; i < got; i++) require(buffer[i] == byte_at(index, 2, child->read + (uint64_t)i), "stdin arrived differently");
    if (got > 0) child->read += (uint64_t)got;
}

static void child_ends(uint64_t index, int status, bool leftovers) {
    struct child *child = &children[index];
    struct rusage usage = {0};
    if (child->reaped) return;
    if (!child->started) child_execs(index, false);
    shut(&child->report);
    if (!leftovers || child->failed) {
        shut(&child->out);
        shut(&child->err);
        shut(&child->in);
    }
    child->reaped = true;
    memcpy(child->at_end, child->written, sizeof child->at_end);
    ops_reaped((pid_t)(100 + index), child->killed ? SIGKILL : status, &usage);
    ops_after_reaping();
}

/* --- the edge ------------------------------------------------------------------------------------------------------------------------ */

static struct child *child_of(uint64_t op) {
    for (uint64_t i = 0; i < child_count; i++) {
        if (children[i].known && children[i].op && op == i + 1) return &children[i];
    }
    return NULL;
}

static void send_edge(uint8_t type, uint8_t flags, uint64_t op, const uint8_t *payload, size_t size) {
    static uint8_t packet[DSEC_HEADER_SIZE + DSEC_MAX_PAYLOAD];
    dsec_put_header(packet, &(struct dsec_header){(uint32_t)size, type, flags, op});
    if (size) memcpy(packet + DSEC_HEADER_SIZE, payload, size);
    if (send(edge, packet, DSEC_HEADER_SIZE + size, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN) lost = true;
}

static void send_ack(uint64_t index) {
    uint8_t payload[16];
    put_u64(payload, children[index].heard[0]);
    put_u64(payload + 8, children[index].heard[1]);
    send_edge(DSEC_ACK, 0, index + 1, payload, sizeof payload);
}

static size_t hear(const uint8_t *packet, size_t size) {
    struct dsec_header header;
    require(size >= DSEC_HEADER_SIZE && dsec_get_header(packet, &header) == 0, "the guest sent no frame");
    require(header.size <= size - DSEC_HEADER_SIZE, "the guest cut a frame");
    const uint8_t *payload = packet + DSEC_HEADER_SIZE;
    size_t used = DSEC_HEADER_SIZE + header.size;
    struct child *child = child_of(header.op);
    uint64_t index = header.op - 1;
    if (index < child_count && children[index].released) return used; /* it crossed with the RELEASE */
    switch (header.type) {
    case DSEC_OUT: {
        int stream = header.flags & DSEC_F_STDERR ? 1 : 0;
        uint64_t offset = get_u64(payload), bytes = header.size - 8;
        require(child && child->started && bytes, "output of an operation that doesn't run, or none");
        require(offset <= child->heard[stream], "a gap in the output");
        require(offset + bytes <= child->written[stream], "output that was never written");
        for (uint64_t i = 0; i < bytes; i++) require(payload[8 + i] == byte_at(index, stream, offset + i), "output arrived differently");
        if (offset + bytes > child->heard[stream]) child->heard[stream] = offset + bytes;
        require(!child->exited, "output after EXIT");
        break;
    }
    case DSEC_EXIT: {
        struct dsec_exit exit;
        dsec_get_exit(payload, &exit);
        if (!child) break; /* it could not even be forked */
        require(!child->exited, "EXIT twice on one channel");
        require(child->reaped, "EXIT of what runs");
        require(exit.stdout_end == child->heard[0] && exit.stderr_end == child->heard[1], "EXIT that doesn't add up");
        bool whole = exit.end == END_EXITED || exit.end == END_SIGNALED;
        require(!whole || exit.stdout_end >= child->at_end[0], "output was lost");
        require(!whole || exit.stderr_end >= child->at_end[1], "errors were lost");
        child->ended = child->exited = true;
        break;
    }
    case DSEC_WELCOME: greeted = true; break;
    case DSEC_STDIN_ACK: require(!child || get_u64(payload) <= fed[index], "stdin acknowledged that was never sent"); break;
    default: break;
    }
    return used;
}

static void edge_reads(int frames) {
    static uint8_t packet[DSEC_HEADER_SIZE + DSEC_MAX_PAYLOAD];
    while (frames-- > 0) {
        ssize_t got = recv(edge, packet, sizeof packet, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN)) lost = true;
        if (got <= 0) return;
        for (size_t at = 0; at < (size_t)got;) at += hear(packet + at, (size_t)got - at);
    }
}

static void attach(void) {
    int ends[2];
    shut(&edge);
    require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, "no socket");
    edge = ends[0];
    channel_open(ends[1]);
    lost = greeted = false;
    for (uint64_t i = 0; i < child_count; i++) children[i].exited = false;
    uint8_t hello[16] = {DSEC_PROTOCOL_VERSION};
    send_edge(DSEC_HELLO, 0, 0, hello, sizeof hello);
}

/* A turn of the loop, as main() has it. */
static void turn(void) {
    struct epoll_event events[64];
    int count = epoll_wait(guest.epoll, events, 64, 0);
    for (int i = 0; i < count; i++) ((struct source *)events[i].data.ptr)->ready(events[i].data.ptr, events[i].events);
    if (guest.timer <= clock_ns) ops_tick(clock_ns);
    ops_read_some();
    channel_turn();
    while (doomed_count) free(doomed[--doomed_count]);
    for (uint64_t i = 0; i < child_count; i++) {
        if (children[i].op && (children[i].released || !op_find(i + 1))) children[i].op = NULL;
    }
}

/* --- the script ---------------------------------------------------------------------------------------------------------------------- */

static const uint8_t *input_at, *input_end;

static unsigned take(void) { return input_at < input_end ? *input_at++ : 0; }

static void start(void) {
    uint8_t payload[512];
    struct dsec_writer writer = {payload, sizeof payload, 0, false};
    unsigned what = take();
    static const enum dsec_kind KINDS[] = {DSEC_WRITE, DSEC_CONNECT, DSEC_WATCH, DSEC_READ};
    uint64_t kind = what & 8 ? KINDS[take() % 4] : DSEC_EXEC;
    if (child_count == MOST) return;
    dsec_put_u64(&writer, TAG_KIND, kind);
    dsec_put_field(&writer, TAG_ARGV, "x", 1);
    if (kind == DSEC_CONNECT) dsec_put_u64(&writer, TAG_PORT, 1 + take());
    else dsec_put_field(&writer, TAG_PATH, "/x", 2);
    dsec_put_u64(&writer, TAG_FLAGS, what & 7);
    if (what & 16) dsec_put_u64(&writer, TAG_OUTPUT_CAP, take() * 1024u);
    if (what & 32) dsec_put_u64(&writer, TAG_TIMEOUT_MS, take());
    uint64_t before = child_count, id = before + 1;
    size_t half = what & 64 ? writer.used / 2 : 0;
    if (half) send_edge(DSEC_START, DSEC_F_MORE, id, payload, half);
    send_edge(DSEC_START, 0, id, payload + half, writer.used - half);
    turn();
    if (child_count > before) {
        children[before].known = true;
        fed[before] = 0;
    }
}

static void feed(uint64_t index, size_t size, bool eof) {
    static uint8_t payload[8 + DSEC_MAX_DATA];
    struct op *op = op_find(index + 1);
    if (!op || op->input_eof) return;
    uint64_t room = op->input_credit + DSEC_WINDOW - op->input_ring.end;
    fed[index] = op->input_ring.end;
    if (size > room) size = room;
    put_u64(payload, fed[index]);
    for (size_t i = 0; i < size; i++) payload[8 + i] = byte_at(index, 2, fed[index] + i);
    send_edge(DSEC_STDIN, eof ? DSEC_F_EOF : 0, index + 1, payload, 8 + size);
    fed[index] += size;
    turn();
}

static void noise(void) {
    uint8_t packet[300];
    size_t size = take();
    for (size_t i = 0; i < size; i++) packet[i] = (uint8_t)take();
    if (size >= DSEC_HEADER_SIZE && take() & 1) { /* a good header before bad contents; START only of numbers that are taken, so that the
                                                     model keeps count */
        static const uint8_t TYPES[] = {DSEC_START, DSEC_STDIN, DSEC_ACK, DSEC_SIGNAL, DSEC_PING, DSEC_HELLO, DSEC_OUT, DSEC_RESIZE, DSEC_HOLD};
        uint8_t type = TYPES[take() % sizeof TYPES];
        uint64_t op = type == DSEC_START ? 1 : take() % (child_count + 2);
        if (type == DSEC_START && child_count == 0) return;
        if (type == DSEC_STDIN || type == DSEC_ACK) op = MOST + 7; /* they would change what the model believes */
        dsec_put_header(packet, &(struct dsec_header){(uint32_t)(size - DSEC_HEADER_SIZE), type, 0, op});
    } else if (size >= 5 && packet[4] == DSEC_START) {
        return;
    }
    if (send(edge, packet, size, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN) lost = true;
}

static void step(void) {
    uint8_t payload[8];
    unsigned action = take();
    uint64_t index = child_count ? take() % child_count : 0;
    if (child_count == 0 && action % 16 < 11) action = 0;
    switch (action % 16) {
    case 0: start(); break;
    case 1: case 2: child_writes(index, action >> 7, take() * 257u); break;
    case 3: child_reads(index, take() * 257u); break;
    case 4: child_execs(index, take() % 8 == 0 && children[index].written[0] + children[index].written[1] == 0); break;
    case 5: child_ends(index, (int)take() << 8, action & 32); break;
    case 6: send_ack(index); break;
    case 7: feed(index, take() * 257u, action & 64); break;
    case 8:
        put_u32(payload, take() % 70);
        put_u32(payload + 4, take() % 4);
        send_edge(DSEC_SIGNAL, 0, index + 1, payload, 8);
        break;
    case 9:
        if (!(action & 64)) break;
        children[index].released = true;
        send_edge(DSEC_RELEASE, 0, index + 1, NULL, 0);
        break;
    case 10: shut(action & 32 ? &children[index].out : action & 64 ? &children[index].in : &children[index].err); break;
    case 11: edge_reads((int)take() % 8); break;
    case 12: clock_ns += take() * 1000000ull; break;
    case 13:
        if (action & 64) attach();
        break;
    case 14: noise(); break;
    default: edge_reads(64); break;
    }
}

static void finish(void) {
    for (int round = 0; round < 2000; round++) {
        bool waiting = false;
        clock_ns += NANOSECONDS / 10;
        if (lost) attach();
        for (uint64_t i = 0; i < child_count; i++) {
            child_reads(i, 65536);
            child_ends(i, 0, false);
            shut(&children[i].out); /* leftovers end too */
            shut(&children[i].err);
            shut(&children[i].in);
            if (children[i].op) send_ack(i);
            waiting |= children[i].op && children[i].known && !children[i].ended;
        }
        turn();
        edge_reads(64);
        if (!waiting) break;
        require(round < 1999, "an operation never ended");
    }
    for (uint64_t id = 1; id <= MOST + 1; id++) send_edge(DSEC_RELEASE, 0, id, NULL, 0);
    for (int i = 0; i < 20; i++) {
        turn();
        edge_reads(64);
        if (lost) break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (guest.epoll <= 0) {
        guest = (struct guest){.epoll = epoll_create1(EPOLL_CLOEXEC), .control = -1, .cgroup = -1, .null = -1, .timer = UINT64_MAX};
        list_init(&guest.sending);
        list_init(&guest.reading);
        signal(SIGPIPE, SIG_IGN);
    }
    input_at = data;
    input_end = data + size;
    child_count = 0;
    clock_ns = NANOSECONDS;
    guest.highest_op = 0;
    attach();
    while (input_at < input_end) {
        step();
        turn();
        if (lost) attach();
    }
    finish();
    if (lost) { /* a noisy end: once more, without noise */
        attach();
        finish();
    }
    require(guest.op_count == 0 && ops_visible() == 0, "operations are left");
    require(list_empty(&guest.reading), "streams are left");
    shut(&edge);
    for (int i = 0; i < 3; i++) turn();
    clock_ns += NANOSECONDS;
    ops_tick(clock_ns);
    return 0;
}

#ifndef DSEC_LIBFUZZER
static size_t shape(uint8_t *out, size_t capacity) {
    size_t size = 20 + below(below(4) ? 300 : 4000);
    if (size > capacity) size = capacity;
    for (size_t i = 0; i < size; i++) out[i] = (uint8_t)random_u64();
    return size;
}
#endif
