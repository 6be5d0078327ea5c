/* The table of sandboxes, requests, and reaping.
 *
 * A sandbox is SETUP (cloned, its child reports), LIVE (the guest was executed), BROKEN (set-up failed, the child isn't reaped yet) or ENDED
 * (reaped; kept until FORGET, so that an edge that was away learns of it).
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "bytes.h"
#include "fields.h"
#include "frame.h"
#include "edge.h"
#include "sys.h"
#include "zygote.h"

#define BUCKETS 8192
#define KILLS_AT_ONCE 32 /* tearing down everything at once has wedged kernels */

enum state { SETUP, LIVE, BROKEN, ENDED };

struct sandbox {
    struct sandbox *by_id, *by_pid;
    char id[MAX_ID + 1];
    enum state state;
    pid_t pid;
    int control, status;
    struct network network; /* duplicates of the edge's sockets in it */
    /* while SETUP or BROKEN */
    uint64_t op, connection;
    struct child child;
    struct report report;
    bool reported;
};

static struct sandbox *ids[BUCKETS], *pids[BUCKETS];
static unsigned live, ended, killed;
static struct sandbox *garbage; /* freed after the batch of events that may still name it */

static uint64_t epoch, shutdown_op;
static bool closing, done;
static char signal_tag;
static int signals = -1;

/* --- tables -------------------------------------------------------------------------------------------------------------------------- */

static unsigned hash_id(const char *id) {
    unsigned h = 2166136261u;
    for (; *id; id++) h = (h ^ (unsigned char)*id) * 16777619u;
    return h % BUCKETS;
}

static struct sandbox *find(const char *id) {
    struct sandbox *s = ids[hash_id(id)];
    while (s && strcmp(s->id, id)) s = s->by_id;
    return s;
}

static void insert(struct sandbox *s) {
    s->by_id = ids[hash_id(s->id)];
    ids[hash_id(s->id)] = s;
    s->by_pid = pids[(unsigned)s->pid % BUCKETS];
    pids[(unsigned)s->pid % BUCKETS] = s;
}

static void unlink_pid(struct sandbox *s) {
    struct sandbox **at = &pids[(unsigned)s->pid % BUCKETS];
    while (*at && *at != s) at = &(*at)->by_pid;
    if (*at) *at = s->by_pid;
}

static void discard(struct sandbox *s) {
    struct sandbox **at = &ids[hash_id(s->id)];
    while (*at && *at != s) at = &(*at)->by_id;
    if (*at) *at = s->by_id;
    s->by_id = garbage;
    garbage = s;
}

static void tell(uint8_t type, const struct sandbox *s) {
    uint8_t payload[8 + MAX_ID];
    size_t length = strlen(s->id);
    put_u32(payload, (uint32_t)s->pid);
    put_u32(payload + 4, type == DSEC_Z_EXITED ? (uint32_t)s->status : 0);
    memcpy(payload + 8, s->id, length);
    answer(type, 0, payload, 8 + length, NULL, 0);
}

/* --- the life of a sandbox ----------------------------------------------------------------------------------------------------------- */

static void kill_some(void) {
    if (!closing) return;
    for (unsigned i = 0; i < BUCKETS && killed < KILLS_AT_ONCE; i++)
        for (struct sandbox *s = pids[i]; s && killed < KILLS_AT_ONCE; s = s->by_pid)
            if (s->status != -1) {
                s->status = -1; /* asked to die */
                killed++;
                kill(s->pid, SIGKILL);
            }
    if (live == 0 && !done) {
        if (setns(world.host_mounts, CLONE_NEWNS) == 0) unlink(edge_path); /* before the answer: who hears it may start another */
        answer(DSEC_Z_OK, shutdown_op, NULL, 0, NULL, 0);
        done = true;
    }
}

/* The child's end of its report closed: the guest was executed, or it failed. */
static void set_up(struct sandbox *s) {
    close(s->child.report);
    s->child.report = -1;
    bool mine = edge.fd >= 0 && edge.number == s->connection;
    int fds[2] = {s->child.channel, s->child.pidfd};
    int count = s->child.pidfd >= 0 ? 2 : 1;
    s->child.channel = s->child.pidfd = -1;
    if (!s->reported || s->report.error || !mine) {
        close_fds(fds, count);
        s->state = s->reported && !s->report.error ? LIVE : BROKEN;
        return;
    }
    s->state = LIVE;
    uint8_t payload[40] = {0};
    put_u32(payload, (uint32_t)s->pid);
    put_u64(payload + 8, s->child.mount_ns - s->child.begin_ns);
    put_u64(payload + 16, s->child.clone_ns - s->child.mount_ns);
    put_u64(payload + 24, s->report.setup_ns);
    put_u64(payload + 32, now_ns() - s->child.begin_ns);
    answer(DSEC_Z_SPAWNED, s->op, payload, sizeof payload, fds, count);
}

static void read_report(struct sandbox *s) {
    while (s->state == SETUP) {
        struct report report;
        ssize_t n = recv(s->child.report, &report, sizeof report, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n == sizeof report) {
            s->report = report;
            s->reported = true;
        } else {
            set_up(s);
        }
    }
}

static void ended_as(struct sandbox *s, int status) {
    s->state = ENDED;
    s->status = status;
    ended++;
    if (edge.greeted) tell(DSEC_Z_EXITED, s);
}

static void reaped(pid_t pid, int status) {
    struct sandbox *s = pids[(unsigned)pid % BUCKETS];
    while (s && s->pid != pid) s = s->by_pid;
    if (!s) return;
    if (s->state == SETUP) read_report(s); /* its end is closed by now: this leaves SETUP */
    if (s->state == SETUP) set_up(s);
    unlink_pid(s);
    close(s->control);
    s->control = -1;
    network_close(&s->network);
    live--;
    if (s->status == -1) killed--;
    if (s->state == LIVE || s->connection != edge.number) {
        ended_as(s, status); /* a broken one that its edge has never heard of is told as ended */
    } else {
        char text[400];
        int error = s->reported ? s->report.error : EIO;
        snprintf(text, sizeof text, "%s (%s)", s->reported ? stage_text(s->report.stage) : "it was killed while it was set up", strerror(error));
        failed(s->op, error, text);
        discard(s);
    }
    kill_some();
}

static void reap(void) {
    struct signalfd_siginfo info;
    while (read(signals, &info, sizeof info) == sizeof info)
        if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT) closing = true;
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) reaped(pid, status);
    kill_some();
}

/* --- requests ------------------------------------------------------------------------------------------------------------------------ */

static void spawn(uint64_t op, const uint8_t *data, size_t size) {
    static struct plan plan;
    const char *why = "";
    int error = plan_read(&plan, data, size, &why);
    if (!error && closing) error = -ESHUTDOWN, why = "the zygote is shutting down";
    if (!error && find(plan.sandbox)) error = -EEXIST, why = "a sandbox of this id exists or was not forgotten";
    if (error) {
        failed(op, -error, why);
        return;
    }
    struct sandbox *s = calloc(1, sizeof *s);
    enum stage stage = AT_REQUEST;
    error = s ? spawn_child(&plan, &s->child, &stage) : -ENOMEM;
    if (error) {
        char text[400];
        snprintf(text, sizeof text, "%s (%s)", stage_text(stage), strerror(-error));
        failed(op, -error, text);
        free(s);
        return;
    }
    memcpy(s->id, plan.sandbox, sizeof s->id);
    s->state = SETUP;
    s->pid = s->child.pid;
    s->control = s->child.control;
    s->network = s->child.network;
    s->op = op;
    s->connection = edge.number;
    insert(s);
    live++;
    if (watch(s->child.report, s) < 0) kill(s->pid, SIGKILL); /* then reaped() tells */
}

static void attach(uint64_t op, const char *id) {
    struct sandbox *s = find(id);
    if (!s || s->state == BROKEN || s->state == ENDED) {
        failed(op, ENOENT, "no such sandbox");
        return;
    }
    int pair[2], error = channel_pair(pair);
    if (!error && send_packet(s->control, "A", 1, &pair[1], 1) < 0) {
        error = -errno;
        close(pair[0]);
    }
    if (error != 0) {
        if (error == -EMFILE) failed(op, EMFILE, "out of descriptors");
        else failed(op, -error, "the guest takes no new channel");
        if (pair[1] >= 0 && error != -EMFILE) close(pair[1]);
        return;
    }
    close(pair[1]);
    uint8_t payload[8] = {0};
    put_u32(payload, (uint32_t)s->pid);
    int fds[2] = {pair[0], (int)syscall(SYS_pidfd_open, s->pid, 0)};
    answer(DSEC_Z_ATTACHED, op, payload, sizeof payload, fds, fds[1] >= 0 ? 2 : 1);
}

static void give_network(uint64_t op, const char *id) {
    struct sandbox *s = find(id);
    if (!s || s->state != LIVE) {
        failed(op, ENOENT, "no such sandbox");
        return;
    }
    int error = s->network.tcp >= 0 ? 0 : network_open_way(s->pid, &s->network);
    if (error) {
        char text[200];
        snprintf(text, sizeof text, "%s (%s)", stage_text(AT_NETWORK), strerror(-error));
        failed(op, -error, text);
        return;
    }
    int fds[2] = {fcntl(s->network.tcp, F_DUPFD_CLOEXEC, FD_LOW), fcntl(s->network.udp, F_DUPFD_CLOEXEC, FD_LOW)};
    if (fds[0] >= 0 && fds[1] >= 0) {
        answer(DSEC_Z_OK, op, NULL, 0, fds, 2);
        return;
    }
    close_fds(fds, 2);
    failed(op, EMFILE, "out of descriptors");
}

static void forget(uint64_t op, const char *id) {
    struct sandbox *s = find(id);
    if (s && s->state != ENDED) {
        failed(op, EBUSY, "it runs");
        return;
    }
    if (s) {
        ended--;
        discard(s);
    }
    answer(DSEC_Z_OK, op, NULL, 0, NULL, 0);
}

static void hello(uint64_t op, const uint8_t *payload) {
    if (get_u16(payload) != DSEC_PROTOCOL_VERSION) {
        failed(op, EPROTO, "another protocol version: the edge and the zygote must be of one release");
        return;
    }
    uint8_t welcome[24] = {0};
    put_u16(welcome, DSEC_PROTOCOL_VERSION);
    put_u32(welcome + 4, (uint32_t)getpid());
    put_u64(welcome + 8, epoch);
    put_u32(welcome + 16, live);
    put_u32(welcome + 20, ended);
    edge.greeted = true;
    answer(DSEC_Z_WELCOME, op, welcome, sizeof welcome, NULL, 0);
    for (unsigned i = 0; i < BUCKETS; i++)
        for (struct sandbox *s = ids[i]; s; s = s->by_id) tell(s->state == ENDED ? DSEC_Z_EXITED : DSEC_Z_SANDBOX, s);
    answer(DSEC_Z_SYNCED, op, NULL, 0, NULL, 0);
}

static void handle(const struct dsec_header *header, const uint8_t *payload) {
    char id[MAX_ID + 1] = "";
    if (edge.request.data && (header->type != DSEC_Z_SPAWN || header->op != edge.request.op)) {
        drop_edge(); /* a request's frames come one after the other */
        return;
    }
    switch (header->type) {
    case DSEC_Z_HELLO: hello(header->op, payload); return;
    case DSEC_Z_SPAWN:
        if (!edge.greeted) break;
        if (!edge.request.data && !(header->flags & DSEC_F_MORE)) {
            spawn(header->op, payload, header->size);
            return;
        }
        edge.request.op = header->op;
        if (dsec_request_add(&edge.request, payload, header->size) < 0) break;
        if (!(header->flags & DSEC_F_MORE)) {
            spawn(header->op, edge.request.data, edge.request.size);
            dsec_request_free(&edge.request);
        }
        return;
    case DSEC_Z_ATTACH:
    case DSEC_Z_NETWORK:
    case DSEC_Z_FORGET:
        if (!edge.greeted) break;
        memcpy(id, payload, header->size); /* at most MAX_ID by the table of frames */
        if (header->type == DSEC_Z_ATTACH) attach(header->op, id);
        else if (header->type == DSEC_Z_NETWORK) give_network(header->op, id);
        else forget(header->op, id);
        return;
    case DSEC_Z_SHUTDOWN:
        closing = true;
        shutdown_op = header->op;
        kill_some();
        return;
    }
    drop_edge();
}

static void read_edge(void) {
    static uint8_t packet[DSEC_HEADER_SIZE + DSEC_MAX_PAYLOAD + 1];
    struct dsec_header header;
    ssize_t n = recv(edge.fd, packet, sizeof packet, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0 || dsec_get_packet(packet, (size_t)n, &header) < 0) drop_edge();
    else handle(&header, packet + DSEC_HEADER_SIZE);
}

int server_run(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signals = fd_up(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (signals < 0 || watch_door() < 0 || watch(signals, &signal_tag) < 0) return 71;
    do {
        if (getrandom(&epoch, sizeof epoch, 0) < 0) return 71;
    } while (!epoch);

    while (!done) {
        struct epoll_event events[64];
        int count = epoll_wait(world.epoll, events, 64, network_wants_refill() ? 0 : -1);
        if (count < 0 && errno != EINTR) return 71;
        if (count == 0) network_refill_one();
        for (int i = 0; i < count; i++) {
            void *tag = events[i].data.ptr;
            struct dsec_header header;
            uint8_t packet[CANDIDATE_PACKET];
            if (tag == &listener_tag) accept_candidate();
            else if (tag == &candidate_tag) {
                if (read_candidate(&header, packet)) hello(header.op, packet + DSEC_HEADER_SIZE);
            } else if (tag == &signal_tag) reap();
            else if (tag == &edge) {
                if (edge.fd >= 0 && events[i].events & EPOLLOUT) flush_edge();
                if (edge.fd >= 0 && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_edge();
            } else read_report(tag); /* nothing to do for one that left SETUP in this batch */
        }
        while (garbage) {
            struct sandbox *s = garbage;
            garbage = s->by_id;
            free(s);
        }
    }
    drop_edge();
    return 0;
}
