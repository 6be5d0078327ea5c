/* Operations: from START to RELEASE. Their table, timeouts, kills, and ends. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bytes.h"
#include "guest.h"
#include "libc.h"

#define BUCKETS 256
#define RETRY_NS (2 * 1000000ull)   /* look again whether a killed command is gone */
#define GIVE_UP_NS (2 * NANOSECONDS) /* ... but no longer than this */
#define SWEEP_NS (50 * 1000000ull)
#define TRIM_NS (200 * 1000000ull)
#define PATIENCE_NS (DSEC_PATIENCE_MS * 1000000ull)
#define FILE_GRACE_NS (500 * 1000000ull) /* a file call gets SIGTERM first, to remove its temporary file */

static struct op *by_id[BUCKETS], *by_pid[BUCKETS];
static uint32_t released_count;
static uint64_t sweep_ns = UINT64_MAX, trim_ns = UINT64_MAX;

/* --- the table ------------------------------------------------------------------------------------------------------------------- */

struct op *op_find(uint64_t id) {
    struct op *op = by_id[id % BUCKETS];
    while (op && (op->id != id || op->released)) op = op->next_by_id;
    return op;
}

uint32_t ops_visible(void) { return guest.op_count - released_count; }

static void forget_pid(struct op *op) {
    struct op **at = &by_pid[(unsigned)op->pid % BUCKETS];
    while (*at && *at != op) at = &(*at)->next_by_pid;
    if (*at) *at = op->next_by_pid;
}

static void op_free(struct op *op) {
    struct op **at = &by_id[op->id % BUCKETS];
    while (*at != op) at = &(*at)->next_by_id;
    *at = op->next_by_id;
    guest.op_count--;
    released_count -= op->released;
    list_remove(&op->link);
    list_remove(&op->out.link);
    list_remove(&op->err.link);
    free(op->out.ring.data);
    free(op->err.ring.data);
    free(op->input_ring.data);
    free_later(op);
    trim_soon();
}

static void wake_at(uint64_t when) {
    if (when < guest.timer) guest.timer = when;
}

void trim_soon(void) {
    if (trim_ns != UINT64_MAX) return;
    trim_ns = now_ns() + TRIM_NS;
    wake_at(trim_ns);
}

/* --- killing --------------------------------------------------------------------------------------------------------------------- */

static void set_end(struct op *op, enum dsec_end end) {
    if (op->end_known) return;
    op->end_known = true;
    op->exit.end = (unsigned char)end;
}

void op_kill(struct op *op, enum dsec_end end, uint64_t now) {
    if (!op->reaped) set_end(op, end);
    op->deadline_ns = 0;
    if (op->kind == DSEC_EXEC) {
        if (op->killed) return;
        if (!op->group || group_kill(op->group)) kill_tree(op->pid);
        if (!op->reaped) kill(op->pid, SIGKILL); /* it may not have entered its cgroup yet */
    } else if (!op->reaped) {
        kill(op->pid, op->killed ? SIGKILL : SIGTERM);
        op->retry_ns = now + FILE_GRACE_NS;
        wake_at(op->retry_ns);
    }
    op->killed = true;
}

void ops_kill_all(void) {
    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct op *op = by_id[i]; op; op = op->next_by_id) {
            if (op->state == OP_ENDED) continue;
            if (op->group) group_kill(op->group);
            else if (!op->reaped && op->kind == DSEC_EXEC) kill_tree(op->pid);
            if (!op->reaped) kill(op->pid, SIGKILL);
        }
    }
}

void ops_remove_groups(void) {
    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct op *op = by_id[i]; op; op = op->next_by_id) {
            if (op->group && group_end(op->group) == 0) op->group = NULL;
        }
    }
}

/* --- the life of an operation ------------------------------------------------------------------------------------------------------ */

/* What the child said before execve or at the end of a file call: nothing, or where it failed. */
void report_read(struct op *op) {
    uint8_t report[8];
    if (op->report < 0) return;
    ssize_t got = read(op->report, report, sizeof report);
    if (got < 0 && errno == EAGAIN) return;
    if (got == (ssize_t)sizeof report) {
        op->failed_stage = get_u32(report);
        op->failed_errno = get_u32(report + 4);
    } else if (op->state == OP_STARTING) {
        op->state = OP_RUNNING;
        op->started = op->send_started = true;
        channel_notify(op);
        input_ready(&op->input_source, 0); /* a terminal's input has waited for this */
    }
    if (op->report_ns) { /* it isn't watched yet */
        close(op->report);
        op->report = -1;
        op->report_ns = 0;
    }
    drop(&op->report);
}

static void report_ready(struct source *source, uint32_t events) {
    (void)events;
    report_read(CONTAINER_OF(source, struct op, report_source));
}

static void op_end(struct op *op) {
    uint64_t cpu_us;
    const struct timeval *user = &op->usage.ru_utime, *system = &op->usage.ru_stime;
    struct dsec_exit *exit = &op->exit;
    uint64_t leader_us = (uint64_t)(user->tv_sec + system->tv_sec) * 1000000u + (uint64_t)(user->tv_usec + system->tv_usec);
    drop(&op->report);
    if (op->group) {
        if (group_cpu_us(op->group, &cpu_us) == 0) exit->cpu_us = cpu_us;
        if (group_end(op->group)) group_end_later(op->group);
        op->group = NULL;
    }
    if (exit->cpu_us < leader_us) exit->cpu_us = leader_us;
    exit->max_rss = (uint64_t)op->usage.ru_maxrss * 1024;
    exit->wall_us = (now_ns() - op->started_ns - op->stood_ns) / 1000;
    exit->stdout_end = op->out.ring.end;
    exit->stderr_end = op->err.ring.end;
    exit->dropped = op->dropped;
    input_close(op);
    stream_leave(&op->out);
    stream_leave(&op->err);
    op->state = OP_ENDED;
    if (op->released) {
        op_free(op);
        return;
    }
    op->send_exit = true;
    channel_notify(op);
}

/* Goes as far as it can from the leader's end to the operation's. */
void op_advance(struct op *op) {
    if (op->state == OP_EMPTYING) {
        uint64_t now = now_ns(), cpu_us;
        if (group_cpu_us(op->group, &cpu_us) == 0) op->exit.cpu_us = cpu_us;
        if (group_end(op->group) == 0) {
            op->group = NULL;
        } else if (now < op->give_up_ns) {
            op->retry_ns = now + RETRY_NS;
            wake_at(op->retry_ns);
            return;
        }
        op->retry_ns = 0;
        op->state = OP_DRAINING;
        stream_begin_drain(&op->out);
        stream_begin_drain(&op->err);
    }
    if (op->state == OP_DRAINING && stream_drained(&op->out) && stream_drained(&op->err)) op_end(op);
}

void ops_reaped(pid_t pid, int status, const struct rusage *usage) {
    struct op *op = by_pid[(unsigned)pid % BUCKETS];
    while (op && op->pid != pid) op = op->next_by_pid;
    if (!op) { /* an orphan: perhaps the last process of a cgroup that a command left behind */
        if (sweep_ns == UINT64_MAX) sweep_ns = now_ns() + SWEEP_NS;
        wake_at(sweep_ns);
        return;
    }
    forget_pid(op);
    report_read(op);
    op->reaped = true;
    op->wait_status = status;
    op->usage = *usage;
    op->deadline_ns = op->retry_ns = 0;
    if (op->failed_errno) {
        set_end(op, END_START_FAILED);
        if (op->exit.end == END_START_FAILED) {
            op->exit.stage = (unsigned char)op->failed_stage;
            op->exit.code = (int)op->failed_errno;
        }
    } else if (!op->end_known) {
        set_end(op, WIFEXITED(status) ? END_EXITED : END_SIGNALED);
        op->exit.code = WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status);
    }
    if ((op->flags & EF_KILL_LEFTOVERS) && !op->killed) op_kill(op, END_EXITED, now_ns());
    op->state = OP_EMPTYING;
    op->give_up_ns = now_ns() + GIVE_UP_NS;
    if (!op->group || !op->killed) { /* whoever lives on is welcome to */
        op->state = OP_DRAINING;
        stream_begin_drain(&op->out);
        stream_begin_drain(&op->err);
    }
    op_advance(op);
}

void ops_after_reaping(void) {
    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct op *op = by_id[i], *next; op; op = next) {
            next = op->next_by_id;
            if (op->state == OP_EMPTYING) op_advance(op);
        }
    }
}

static bool key_in_use(const struct request *request) {
    for (size_t i = 0; i < BUCKETS; i++) {
        for (const struct op *op = by_id[i]; op; op = op->next_by_id) {
            if (op->released || op->key_size != request->key_size) continue;
            if (memcmp(op->key, request->key, op->key_size) == 0) return true;
        }
    }
    return false;
}

void op_start(uint64_t id, uint8_t *data, size_t size) {
    struct request request;
    const char *why;
    int error = request_parse(&request, data, size, &why);
    struct op *op = NULL;
    if (!error && guest.op_count >= DSEC_MAX_OPS) {
        error = -EAGAIN;
        why = "too many operations are live or unreleased";
    }
    if (!error && request.key_size && key_in_use(&request)) {
        error = -EEXIST;
        why = "an operation with this key exists";
    }
    if (!error && (request.kind == DSEC_WAY_OUT || request.kind == DSEC_LOOK) && !guest.machine) { /* elsewhere it is done from outside */
        error = -EOPNOTSUPP;
        why = "only a virtual machine's guest does this";
    }
    if (!error && !(op = calloc(1, sizeof *op + request.key_size))) {
        error = -ENOMEM;
        why = "out of memory";
    }
    if (error) {
        request_free(&request);
        channel_refuse(id, error, why);
        return;
    }
    guest.highest_op = id;
    op->id = id;
    op->kind = request.kind;
    bool takes = request.kind == DSEC_WRITE || request.kind == DSEC_CONNECT || request.kind == DSEC_WAY_OUT || request.flags & EF_PTY;
    op->flags = request.flags | (takes ? EF_STDIN : 0);
    op->output_cap = SEEN(&request, TAG_OUTPUT_CAP) ? request.output_cap : UINT64_MAX;
    op->key_size = request.key_size;
    if (request.key_size) memcpy(op->key, request.key, request.key_size);
    op->input = op->report = -1;
    op->out = (struct stream){.source = {stream_ready}, .op = op, .fd = -1};
    op->err = (struct stream){.source = {stream_ready}, .op = op, .fd = -1};
    op->input_source.ready = input_ready;
    op->report_source.ready = report_ready;
    op->started_ns = now_ns();
    op->next_by_id = by_id[id % BUCKETS];
    by_id[id % BUCKETS] = op;
    guest.op_count++;

    enum dsec_stage stage = STAGE_NONE;
    error = spawn(op, &request, &stage);
    if (error) {
        set_end(op, END_START_FAILED);
        op->exit.stage = (unsigned char)stage;
        op->exit.code = -error;
        op->reaped = true;
        request_free(&request);
        op_end(op);
        return;
    }
    op->next_by_pid = by_pid[(unsigned)op->pid % BUCKETS];
    by_pid[(unsigned)op->pid % BUCKETS] = op;
    if (request.timeout_ms && request.timeout_ms < UINT64_MAX / 2 / 1000000) {
        op->deadline_ns = op->started_ns + request.timeout_ms * 1000000;
        wake_at(op->deadline_ns);
    }
    if (op->out.fd >= 0) watch(op->out.fd, &op->out.source, EPOLLIN);
    if (op->err.fd >= 0) watch(op->err.fd, &op->err.source, EPOLLIN);
    if (op->kind == DSEC_EXEC && op->flags & EF_PATIENT) { /* most end sooner, and say it all at once */
        op->report_ns = op->started_ns + PATIENCE_NS;
        wake_at(op->report_ns);
    } else {
        watch(op->report, &op->report_source, EPOLLIN);
    }
    if (op->kind != DSEC_EXEC) { /* there is no execve to wait for */
        op->state = OP_RUNNING;
        op->started = op->send_started = true;
        channel_notify(op);
    }
    request_free(&request);
}

void op_signal(struct op *op, uint64_t id, uint32_t signal, uint32_t scope) {
    int error = 0;
    if (op && !op->started && op->state != OP_ENDED && op->reaped) return; /* it is about to say that it failed */
    if (signal < 1 || signal > 64 || scope > 2 || (scope == 2 && signal != SIGKILL)) {
        channel_refuse(id, -EINVAL, "no such signal or scope");
        return;
    }
    if (!op || op->state == OP_ENDED || (op->reaped && scope != 2)) {
        error = -ESRCH;
    } else if (scope == 2) {
        op_kill(op, END_KILLED, now_ns());
    } else if (kill(scope == 1 ? -op->pid : op->pid, (int)signal)) {
        error = -errno;
    }
    if (error) channel_refuse(id, error, "there is no such process");
}

void op_resize(struct op *op, uint64_t id, uint16_t cols, uint16_t rows) {
    if (!op || op->state == OP_ENDED) {
        channel_refuse(id, -ESRCH, "there is no such process");
        return;
    }
    if (!op->pty_size) {
        channel_refuse(id, -ENOTTY, "the operation has no terminal");
        return;
    }
    op->pty_size = terminal_size(op->pty_size, cols, rows);
    int error = terminal_resize(op);
    if (error) channel_refuse(id, error, "the terminal is gone");
}

void op_release(struct op *op) {
    if (op->state == OP_ENDED) {
        op_free(op);
        return;
    }
    op->released = true;
    released_count++;
    list_remove(&op->link);
    if (!op->reaped) op_kill(op, END_KILLED, now_ns());
    struct stream *streams[] = {&op->out, &op->err};
    for (int i = 0; i < 2; i++) { /* nobody is going to acknowledge anything: what comes is dropped */
        streams[i]->sent = streams[i]->ring.base = streams[i]->ring.end;
        ring_forget(&streams[i]->ring, 0);
        if (streams[i]->readable && streams[i]->fd >= 0) list_append(&guest.reading, &streams[i]->link);
    }
    input_close(op);
}

void ops_resync(void (*each)(struct op *op)) {
    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct op *op = by_id[i]; op; op = op->next_by_id) {
            if (op->released) continue;
            op->out.sent = op->out.ring.base;
            op->err.sent = op->err.ring.base;
            op->input_credit = op->input_ring.end;
            op->input_acked = UINT64_MAX; /* say it again */
            op->send_state = false;
            op->send_started = op->started;
            op->send_exit = op->state == OP_ENDED;
            each(op);
            channel_notify(op);
        }
    }
}

/* --- timers ------------------------------------------------------------------------------------------------------------------------ */

static uint64_t held_ns; /* since when the sandbox stands still, or 0 */

void ops_hold(uint64_t since) {
    uint64_t now = now_ns();
    if (since) {
        if (!held_ns) held_ns = since < now && !guest.machine ? since : now;
        return;
    }
    if (!held_ns) return;
    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct op *op = by_id[i]; op; op = op->next_by_id) {
            if (op->state == OP_ENDED) continue;
            uint64_t stood = now - (held_ns > op->started_ns ? held_ns : op->started_ns);
            op->stood_ns += stood;
            if (op->deadline_ns) {
                op->deadline_ns += stood;
                wake_at(op->deadline_ns);
            }
        }
    }
    held_ns = 0;
}

void ops_tick(uint64_t now) {
    guest.timer = UINT64_MAX;
    if (sweep_ns <= now) {
        sweep_ns = UINT64_MAX;
        groups_sweep();
    }
    if (trim_ns <= now) {
        trim_ns = UINT64_MAX;
        groups_trim(false);
        heap_trim();
    }
    wake_at(sweep_ns);
    wake_at(trim_ns);
    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct op *op = by_id[i], *next; op; op = next) {
            next = op->next_by_id;
            if (op->report_ns && op->report_ns <= now) {
                op->report_ns = 0;
                if (op->report >= 0) watch(op->report, &op->report_source, EPOLLIN);
            }
            if (op->report_ns) wake_at(op->report_ns);
            if (op->deadline_ns && !held_ns) {
                if (op->deadline_ns <= now) op_kill(op, END_TIMEOUT, now);
                if (op->deadline_ns) wake_at(op->deadline_ns);
            }
            if (op->retry_ns && op->retry_ns > now) {
                wake_at(op->retry_ns);
            } else if (op->retry_ns && op->state == OP_EMPTYING) {
                op_advance(op);
            } else if (op->retry_ns && !op->reaped) { /* a file call that didn't heed SIGTERM */
                op_kill(op, END_KILLED, now);
            }
        }
    }
}
