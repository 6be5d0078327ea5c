/* WAY_OUT: the way out of a virtual machine's programs (wire.h, WAYS OUT). The kernel hands over here (common/firewall.c) what they send to other
 * addresses than loopback; each connection is a flow of records, and so is each query. Who it leads to, and whether at all, is the edge's
 * business: nothing here decides anything.
 *
 * One thread, nothing blocks but the wait. Memory is bounded: a flow holds at most a window of what its program didn't take yet, what is said
 * to the edge waits in one buffer, and while that is nearly full nobody is listened to but the edge. What a flow owes the edge (credit, its end)
 * is a few numbers in it, said when there is room. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <linux/netlink.h>

#include "bytes.h"
#include "firewall.h"
#include "guest.h"
#include "libc.h"

#define NOBODY 65534
#define BACKLOG 1024
#define TABLE 2048             /* flows by number: a power of two above DSEC_MAX_FLOWS */
#define QUERIES 256            /* that wait for an answer; older ones are forgotten */
#define MAX_QUERY 4096
#define ACCEPTS_A_TURN 16
#define CREDIT_AT (DSEC_FLOW_WINDOW / 4)
#define RECORD_MAX (DSEC_FLOW_HEADER + DSEC_FLOW_DATA)
#define OUT_SIZE (8 * RECORD_MAX)

struct flow {
    struct flow *next; /* with the same place in the table */
    struct link link;  /* of those that owe the edge something */
    uint32_t id;
    int fd;
    uint32_t watched; /* events, as epoll has them; 0: it isn't there */
    uint32_t may_send, owed;
    uint8_t *held; /* what the program didn't take yet: held_size bytes; or NULL */
    uint32_t held_size;
    bool in_ended;   /* nothing more comes from the edge */
    bool in_done;    /* and the program was told so */
    bool out_ended;  /* the program has ended its direction */
    bool out_done;   /* and the edge was told so */
    bool reset;      /* it broke: the edge is to be told */
};

static struct flow *flows[TABLE];
static struct link owing;
static uint32_t flow_count, last_flow, last_query;
static int listener, questions, waits;

static struct query {
    uint32_t id; /* 0: none */
    struct sockaddr_in from;
    struct in_addr asked;
} queries[QUERIES];

static uint8_t out[OUT_SIZE], in[DSEC_FLOW_HEADER + 65535];
static size_t out_at, out_end, in_size;

/* --- to the edge ------------------------------------------------------------------------------------------------------------------- */

static bool roomy(size_t size) {
    if (out_at && out_end + size > sizeof out) {
        memmove(out, out + out_at, out_end - out_at);
        out_end -= out_at;
        out_at = 0;
    }
    return out_end + size <= sizeof out;
}

/* Where the bytes of a record go; there is room. */
static uint8_t *record(enum dsec_flow kind, uint32_t id, size_t size) {
    uint8_t *at = out + out_end;
    at[0] = (uint8_t)kind;
    at[1] = 0;
    put_u16(at + 2, (uint16_t)size);
    put_u32(at + 4, id);
    out_end += DSEC_FLOW_HEADER + size;
    return at + DSEC_FLOW_HEADER;
}

static void send_out(void) {
    while (out_at < out_end) {
        ssize_t put = write(1, out + out_at, out_end - out_at);
        if (put < 0 && errno == EAGAIN) return;
        if (put < 0 && errno != EINTR) _exit(1); /* the guest is gone */
        if (put > 0) out_at += (size_t)put;
    }
    out_at = out_end = 0;
}

/* --- flows ------------------------------------------------------------------------------------------------------------------------- */

static struct flow **place_of_flow(uint32_t id) {
    struct flow **at = &flows[id % TABLE];
    while (*at && (*at)->id != id) at = &(*at)->next;
    return at;
}

static void set_events(int fd, void *what, uint32_t *before, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = what};
    if (*before == events) return;
    epoll_ctl(waits, !*before ? EPOLL_CTL_ADD : events ? EPOLL_CTL_MOD : EPOLL_CTL_DEL, fd, &event);
    *before = events;
}

static void wait_for_flow(struct flow *flow) {
    uint32_t events = (!flow->out_ended && flow->may_send ? (uint32_t)EPOLLIN : 0) | (flow->held_size ? (uint32_t)EPOLLOUT : 0);
    set_events(flow->fd, flow, &flow->watched, flow->reset ? 0 : events);
}

static void listen_on(void) {
    static uint32_t watched;
    set_events(listener, &listener, &watched, flow_count < DSEC_MAX_FLOWS ? EPOLLIN : 0);
}

static void end_flow(struct flow *flow, bool hard) {
    static const struct linger RST = {1, 0};
    if (hard) setsockopt(flow->fd, SOL_SOCKET, SO_LINGER, &RST, sizeof RST);
    close(flow->fd);
    *place_of_flow(flow->id) = flow->next;
    list_remove(&flow->link);
    free(flow->held);
    free(flow); /* no event of this turn names it: each turn asks for one at a time */
    flow_count--;
    listen_on();
}

/* Says what a flow owes, as far as there is room; true where it is over. */
static bool settle(struct flow *flow) {
    if (flow->in_ended && !flow->held_size && !flow->in_done) {
        shutdown(flow->fd, SHUT_WR);
        flow->in_done = true;
    }
    if (!roomy(2 * DSEC_FLOW_HEADER + 4)) return false;
    if (flow->reset) {
        record(FLOW_RESET, flow->id, 0);
        end_flow(flow, true);
        return true;
    }
    if (flow->owed >= CREDIT_AT && !flow->in_ended) {
        put_u32(record(FLOW_CREDIT, flow->id, 4), flow->owed);
        flow->owed = 0;
    }
    if (flow->out_ended && !flow->out_done) {
        record(FLOW_END, flow->id, 0);
        flow->out_done = true;
    }
    if (flow->out_done && flow->in_done) {
        end_flow(flow, false);
        return true;
    }
    return false;
}

static void owes(struct flow *flow) { list_append(&owing, &flow->link); }

static void give(struct flow *flow) {
    size_t sent = 0;
    while (sent < flow->held_size) {
        ssize_t put = send(flow->fd, flow->held + sent, flow->held_size - sent, MSG_NOSIGNAL);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0 && errno != EAGAIN) flow->reset = true;
        if (put <= 0) break;
        sent += (size_t)put;
    }
    flow->owed += (uint32_t)sent;
    flow->held_size -= (uint32_t)sent;
    memmove(flow->held, flow->held + sent, flow->held_size);
    if (!flow->held_size) {
        free(flow->held);
        flow->held = NULL;
    }
    owes(flow);
}

static void take(struct flow *flow) {
    size_t most = MIN(flow->may_send, (uint32_t)DSEC_FLOW_DATA);
    ssize_t got = recv(flow->fd, out + out_end + DSEC_FLOW_HEADER, most, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got > 0) {
        record(FLOW_DATA, flow->id, (size_t)got);
        flow->may_send -= (uint32_t)got;
        return;
    }
    if (got == 0) flow->out_ended = true;
    else flow->reset = true;
    owes(flow);
}

static void flow_ready(struct flow *flow, uint32_t events) {
    int error = 0;
    socklen_t length = sizeof error;
    if (events & EPOLLERR && getsockopt(flow->fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error) flow->reset = true;
    if (flow->reset) owes(flow);
    if (!flow->reset && flow->held_size && events & (EPOLLOUT | EPOLLHUP)) give(flow);
    if (!flow->reset && !flow->out_ended && flow->may_send && events & (EPOLLIN | EPOLLHUP)) take(flow);
    wait_for_flow(flow);
}

static void accept_some(void) {
    for (int i = 0; i < ACCEPTS_A_TURN && flow_count < DSEC_MAX_FLOWS && roomy(DSEC_FLOW_HEADER + 8); i++) {
        struct sockaddr_in to;
        socklen_t length = sizeof to;
        int on = 1, fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) return;
        struct flow *flow = calloc(1, sizeof *flow);
        if (!flow || getsockname(fd, (struct sockaddr *)&to, &length)) {
            free(flow);
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        flow->id = ++last_flow;
        flow->fd = fd;
        flow->may_send = DSEC_FLOW_WINDOW;
        *place_of_flow(flow->id) = flow;
        flow_count++;
        uint8_t *at = record(FLOW_OPEN, flow->id, 6);
        memcpy(at, &to.sin_addr, 4);
        put_u16(at + 4, ntohs(to.sin_port));
        wait_for_flow(flow);
    }
    listen_on();
}

/* --- queries ----------------------------------------------------------------------------------------------------------------------- */

union ancillary {
    struct cmsghdr header;
    char space[CMSG_SPACE(sizeof(struct in_pktinfo))];
};

static void ask_edge(void) {
    struct sockaddr_in from;
    union ancillary control;
    struct iovec piece = {out + out_end + DSEC_FLOW_HEADER, MAX_QUERY};
    struct msghdr message = {.msg_name = &from, .msg_namelen = sizeof from, .msg_iov = &piece, .msg_iovlen = 1,
                             .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(questions, &message, 0);
    if (size <= 0 || message.msg_flags & MSG_TRUNC) return;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!header || header->cmsg_level != IPPROTO_IP || header->cmsg_type != IP_PKTINFO) return;
    struct in_pktinfo info;
    memcpy(&info, CMSG_DATA(header), sizeof info);
    if (!++last_query) last_query = 1;
    queries[last_query % QUERIES] = (struct query){last_query, from, info.ipi_addr};
    record(FLOW_QUERY, last_query, (size_t)size);
}

/* From the address that was asked: clients take an answer from no other. */
static void answer(uint32_t id, const uint8_t *data, size_t size) {
    struct query *query = &queries[id % QUERIES];
    if (!id || query->id != id) return;
    const struct in_pktinfo info = {.ipi_spec_dst = query->asked};
    union ancillary control = {.header = {.cmsg_level = IPPROTO_IP, .cmsg_type = IP_PKTINFO, .cmsg_len = CMSG_LEN(sizeof info)}};
    memcpy(CMSG_DATA(&control.header), &info, sizeof info);
    struct iovec piece = {(void *)(uintptr_t)data, size};
    struct msghdr message = {.msg_name = &query->from, .msg_namelen = sizeof query->from, .msg_iov = &piece, .msg_iovlen = 1,
                             .msg_control = &control, .msg_controllen = sizeof control};
    query->id = 0;
    if (sendmsg(questions, &message, MSG_NOSIGNAL) < 0) { /* as lost on the way: the program asks again */
    }
}

/* --- from the edge ----------------------------------------------------------------------------------------------------------------- */

static void hold(struct flow *flow, const uint8_t *data, size_t size) {
    if (flow->reset || flow->in_ended) return;
    if (flow->held_size + size > DSEC_FLOW_WINDOW) _exit(1); /* the edge doesn't do that */
    uint8_t *held = realloc(flow->held, flow->held_size + size);
    if (held) {
        memcpy(held + flow->held_size, data, size);
        flow->held = held;
        flow->held_size += (uint32_t)size;
        give(flow);
    } else {
        flow->reset = true;
        owes(flow);
    }
}

static void hear(enum dsec_flow kind, uint32_t id, const uint8_t *data, size_t size) {
    if (kind == FLOW_ANSWER) {
        answer(id, data, size);
        return;
    }
    struct flow *flow = *place_of_flow(id);
    if (!flow) return; /* it is over here, and what we said of it was on its way */
    switch (kind) {
    case FLOW_DATA: hold(flow, data, size); break;
    case FLOW_CREDIT: flow->may_send += size == 4 ? get_u32(data) : 0; break;
    case FLOW_END:
        flow->in_ended = true;
        owes(flow);
        break;
    case FLOW_RESET: end_flow(flow, true); return;
    default: _exit(1);
    }
    wait_for_flow(flow);
}

static void listen_to_edge(void) {
    ssize_t got = read(0, in + in_size, sizeof in - in_size);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) _exit(0);
    size_t at = 0;
    in_size += (size_t)got;
    while (in_size - at >= DSEC_FLOW_HEADER) {
        size_t size = get_u16(in + at + 2);
        if (in_size - at < DSEC_FLOW_HEADER + size) break;
        hear((enum dsec_flow)in[at], get_u32(in + at + 4), in + at + DSEC_FLOW_HEADER, size);
        at += DSEC_FLOW_HEADER + size;
    }
    memmove(in, in + at, in_size - at);
    in_size -= at;
}

/* --- the loop ---------------------------------------------------------------------------------------------------------------------- */

static void set_up(int report) {
    uint16_t tcp_port = 0, udp_port = 0;
    int on = 1, error;
    listener = firewall_bind(SOCK_STREAM, &tcp_port);
    questions = firewall_bind(SOCK_DGRAM, &udp_port);
    error = listener < 0 ? listener : questions < 0 ? questions : 0;
    if (!error && (setsockopt(questions, IPPROTO_IP, IP_PKTINFO, &on, sizeof on) || listen(listener, BACKLOG))) error = -errno;
    /* For the accepted ones, which hold the port that was asked for: a program may listen on it all the same. */
    if (!error) setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (!error) {
        int netfilter = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_NETFILTER);
        error = firewall_make(tcp_port, udp_port, netfilter < 0 ? -errno : netfilter);
    }
    waits = epoll_create1(EPOLL_CLOEXEC);
    if (!error && waits < 0) error = -errno;
    if (!error && (x_setgroups(0, NULL) || x_setresgid(NOBODY, NOBODY, NOBODY) || x_setresuid(NOBODY, NOBODY, NOBODY))) error = -errno; /* it takes no power to go on */
    if (error) child_fail(report, STAGE_WAY_OUT, -error);
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
}

static void settle_all(void) {
    struct link later, *link;
    list_init(&later);
    while ((link = list_pop(&owing))) {
        struct flow *flow = CONTAINER_OF(link, struct flow, link);
        if (settle(flow)) continue;
        wait_for_flow(flow);
        bool more = flow->reset || (flow->owed >= CREDIT_AT && !flow->in_ended) || (flow->out_ended && !flow->out_done);
        if (more) list_append(&later, link);
    }
    while ((link = list_pop(&later))) list_append(&owing, link);
}

void serve_way_out(int report) {
    static int edge_in, edge_out;
    uint32_t in_watched = 0, out_watched = 0, questions_watched = 0;
    set_up(report);
    list_init(&owing);
    fcntl(0, F_SETFL, fcntl(0, F_GETFL) | O_NONBLOCK);
    fcntl(1, F_SETFL, fcntl(1, F_GETFL) | O_NONBLOCK);
    record(FLOW_READY, 0, 0);
    listen_on();
    set_events(0, &edge_in, &in_watched, EPOLLIN);
    set_events(questions, &questions, &questions_watched, EPOLLIN);
    for (;;) {
        settle_all();
        send_out();
        if (!roomy(RECORD_MAX)) { /* what else happens would have something to say */
            struct pollfd edge[2] = {{0, POLLIN, 0}, {1, POLLOUT, 0}};
            if (poll(edge, 2, -1) > 0 && edge[0].revents) listen_to_edge();
            continue;
        }
        set_events(1, &edge_out, &out_watched, out_at < out_end ? EPOLLOUT : 0);
        struct epoll_event event;
        if (epoll_wait(waits, &event, 1, -1) != 1) continue;
        if (event.data.ptr == &edge_in) listen_to_edge();
        else if (event.data.ptr == &listener) accept_some();
        else if (event.data.ptr == &questions) ask_edge();
        else if (event.data.ptr != &edge_out) flow_ready(event.data.ptr, event.events);
    }
}
