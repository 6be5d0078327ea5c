/* The guest: pid 1 of a sandbox. It runs commands and file calls for the edge that holds the other end of its channel.
 *
 *   main.c     set-up, the loop, timers, the control socket, reaping
 *   channel.c  frames in and out, resync; the only file that touches the channel
 *   request.c  START's fields, checked
 *   ops.c      operations: their life from START to RELEASE, timeouts, kills
 *   streams.c  their pipes, within the window and the cap
 *   spawn.c    the fork of a command or file call, and what the child does until execve
 *   cgroup.c   a child cgroup per command: kill, CPU time, removal
 *   ring.c     bounded byte queues, lists
 *   users.c    /etc/passwd and /etc/group
 *   terminal.c the terminal of a command that has one
 *   vm.c       what comes before all that where the guest is the first program of a virtual machine
 *   files.c, tree.c, inotify.c, connect.c  file calls, watching, connections, in a forked child that has become the named user
 *   wayout.c   the way out of a virtual machine's programs, in one too
 *
 * Invariants. One thread. Nothing blocks but epoll_wait: whatever might (paths, users, execve) is done in a forked child. Memory per
 * operation is bounded by the window. Every descriptor is close-on-exec. Structures that an epoll event may name are freed only at
 * the end of a turn of the loop. Edge-triggered readiness: a flag says "perhaps readable", and only EAGAIN clears it.
 */
#ifndef DSEC_GUEST_H
#define DSEC_GUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "fields.h"
#include "frame.h"

#define CONTAINER_OF(pointer, type, member) ((type *)((char *)(pointer) - offsetof(type, member)))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define NANOSECONDS 1000000000ull

/* --- ring.c: lists and byte queues --------------------------------------------------------------------------------------------- */

struct link {
    struct link *previous, *next; /* NULL: in no list */
};
void list_init(struct link *list);
bool list_empty(const struct link *list);
void list_append(struct link *list, struct link *link); /* nothing where it is in a list already */
void list_remove(struct link *link);
struct link *list_pop(struct link *list); /* NULL: empty */

/* Bytes base..end of a stream; grows in powers of two up to what is asked for. */
struct ring {
    uint8_t *data;
    uint32_t capacity;
    uint64_t base, end;
};
/* Two pieces of free space, `size` bytes in all (the caller bounds it); ring.end moves on when they have been filled. */
void ring_space(struct ring *ring, size_t size, struct iovec space[2]);
/* Two pieces that hold the bytes from..from+size. */
void ring_data(const struct ring *ring, uint64_t from, size_t size, struct iovec data[2]);
void ring_put(struct ring *ring, const uint8_t *data, size_t size);
void ring_forget(struct ring *ring, uint64_t below); /* gives memory back when it is empty */

/* --- the loop (main.c) --------------------------------------------------------------------------------------------------------- */

/* What an epoll event points at. */
struct source {
    void (*ready)(struct source *source, uint32_t events);
};

struct guest {
    int epoll, control, cgroup, null; /* cgroup: -1 where there is none; null: /dev/null, or -1 */
    struct rlimit nofile;             /* as inherited: what commands get by default */
    int oom_score_adj;                /* own; -1 unknown */
    bool machine;                     /* it is in a virtual machine, on whose port it talks (vm.c) */
    bool service;                     /* of a virtual machine that has booted by itself, whose first program is another */
    struct link sending;              /* operations that have something to send */
    struct link reading;              /* streams that may be readable */
    uint64_t timer;                   /* when ops_tick() wants to be called, monotonic ns; UINT64_MAX: never */
    uint64_t highest_op;
    uint32_t op_count;
};
extern struct guest guest;

uint64_t now_ns(void);
void watch(int fd, struct source *source, uint32_t events); /* edge-triggered */
/* Ends watching and closes; *fd becomes -1. Closing alone would not do: a child that was just forked holds a copy until its execve,
 * and so long epoll goes on to report a descriptor whose structure is gone. */
void drop(int *fd);
void free_later(void *memory);                /* at the end of this turn */
_Noreturn void shut_down(int status);         /* kills everything that runs */
char *format_u64(char *end, uint64_t value);  /* writes digits that end before `end` */

/* --- request.c ----------------------------------------------------------------------------------------------------------------- */

struct request {
    enum dsec_kind kind;
    uint64_t seen; /* bit per tag */
    char **argv, **env; /* NULL-terminated; env has ENV_ROOM slots to spare */
    size_t argc, envc;
    char *cwd, *user, *path, *path2;
    const uint8_t *key;
    uint32_t key_size;
    uint64_t flags, file_flags, timeout_ms, output_cap, mode, offset, length, depth, nofile, pty_size, port;
};
#define ENV_ROOM 5
#define SEEN(request, tag) (((request)->seen >> (tag)) & 1)

/* Takes apart `size` bytes at `data`, which are written to (NULs are put in) together with the one byte behind them.
 * 0, or a negative errno and *why. request_free() in both cases. */
int request_parse(struct request *request, uint8_t *data, size_t size, const char **why);
void request_free(struct request *request);

/* --- ops.c --------------------------------------------------------------------------------------------------------------------- */

enum op_state {
    OP_STARTING, /* forked, not executed yet */
    OP_RUNNING,
    OP_EMPTYING, /* the leader was reaped; the rest was killed and is on its way out */
    OP_DRAINING, /* reading what was in the pipes when the leader ended */
    OP_ENDED,
};

struct stream {
    struct source source;
    struct link link; /* guest.reading */
    struct op *op;
    int fd; /* -1: closed */
    bool readable;
    uint64_t drain; /* OP_DRAINING: bytes still to be read */
    uint64_t sent;  /* on this channel; ring.base <= sent <= ring.end */
    struct ring ring;
};

struct op {
    struct op *next_by_id, *next_by_pid;
    struct link link; /* guest.sending */
    uint64_t id;
    enum dsec_kind kind;
    enum op_state state;
    pid_t pid; /* 0: none */
    uint64_t flags;
    uint32_t pty_size; /* columns << 16 | rows; 0: it has no terminal. Then out.fd and input are both its master */
    bool started, reaped, killed, released;
    struct group *group; /* NULL: none, or none any more */
    bool send_state, send_started, send_exit;
    struct stream out, err;

    struct source input_source;
    int input; /* write end of its stdin; -1 */
    bool input_watched, input_eof, input_in_line; /* in_line: the last byte that was written didn't end a line */
    struct ring input_ring;           /* base: written to the process */
    uint64_t input_acked, input_credit; /* input_credit: the edge may send up to this plus the window */

    struct source report_source;
    int report; /* the child says here where it failed; -1: it has been read */
    uint32_t failed_stage, failed_errno;

    uint64_t started_ns, deadline_ns, retry_ns, give_up_ns;
    uint64_t stood_ns; /* of its life, how long the sandbox stood still */
    uint64_t report_ns; /* EF_PATIENT: when to begin waiting for the report; 0 */
    uint64_t output_cap, dropped;
    int wait_status;
    struct rusage usage;
    struct dsec_exit exit; /* exit.end is set as soon as it is known why it will end */
    bool end_known;
    uint32_t key_size;
    uint8_t key[];
};

struct op *op_find(uint64_t id);
void op_start(uint64_t id, uint8_t *data, size_t size);
void op_signal(struct op *op, uint64_t id, uint32_t signal, uint32_t scope);
void op_resize(struct op *op, uint64_t id, uint16_t cols, uint16_t rows);
void op_release(struct op *op);
void ops_resync(void (*each)(struct op *op)); /* forget what was sent on an earlier channel, call `each` for every operation */
void ops_reaped(pid_t pid, int status, const struct rusage *usage);
void ops_after_reaping(void);
void ops_tick(uint64_t now);
void ops_hold(uint64_t since); /* timeouts stand still from then on; 0: they go on */
void trim_soon(void); /* memory was freed; idle sandboxes are many, so it goes back to the system */
void ops_kill_all(void);
void ops_remove_groups(void);

void report_read(struct op *op); /* what the child said by now of its start */
void op_kill(struct op *op, enum dsec_end end, uint64_t now); /* everything that it started; `end`: unless an earlier reason stands */
void op_advance(struct op *op); /* as far as it can go from the leader's end to the operation's */

/* --- streams.c ----------------------------------------------------------------------------------------------------------------- */

void stream_ready(struct source *source, uint32_t events);
void stream_begin_drain(struct stream *stream); /* the leader ended: what is in the pipe now is still its output */
bool stream_drained(const struct stream *stream);
void stream_leave(struct stream *stream); /* to the processes that live on */
bool op_has_output(const struct op *op);
int op_ack(struct op *op, uint64_t out, uint64_t err); /* -EPROTO: bytes that don't exist */
void input_ready(struct source *source, uint32_t events);
void input_close(struct op *op);
void op_stdin(struct op *op, uint64_t offset, const uint8_t *data, size_t size, bool eof);
void ops_read_some(void);

/* --- channel.c ----------------------------------------------------------------------------------------------------------------- */

void channel_open(int fd);
void channel_replace(int fd); /* the stream for good goes on at a connection of a later edge */
void channel_turn(void);          /* receive and send some */
bool channel_busy(void);          /* it could go on without waiting */
void channel_refuse(uint64_t op, int error, const char *why);
void channel_notify(struct op *op); /* it may have something to send */
uint32_t ops_visible(void);
void channel_token(const uint8_t token[DSEC_TOKEN_SIZE]); /* of a channel that is one stream for good (wire.h, STREAMS) */

/* --- spawn.c ------------------------------------------------------------------------------------------------------------------- */

/* Starts op's process: fills in pid, input, out.fd, err.fd, report, group. 0, or a negative errno and the stage. */
int spawn(struct op *op, struct request *request, enum dsec_stage *stage);
_Noreturn void child_fail(int report, enum dsec_stage stage, int error);

/* --- terminal.c ---------------------------------------------------------------------------------------------------------------- */

/* A terminal: op->out.fd and op->input become its master, *slave is for the child. 0 or a negative errno. */
int terminal_make(struct op *op, uint64_t size, int *slave);
uint32_t terminal_size(uint32_t before, uint64_t cols, uint64_t rows); /* bounded; 0 is as before */
int terminal_resize(const struct op *op);
bool terminal_type_end(struct op *op); /* false: again when the input takes more */
int terminal_take(uid_t owner);        /* in the child, the leader of a new session, whose stdin it is */

/* --- token.c ------------------------------------------------------------------------------------------------------------------- */

bool token_there(void);
size_t token_find(const uint8_t *data, size_t size);

/* --- vm.c ---------------------------------------------------------------------------------------------------------------------- */

void vm_serve(bool again); /* the same as a service of a machine that has booted by itself */
void vm_boot(bool again); /* the whole machine, up to its channel at DSEC_FD_CHANNEL and its groups at DSEC_FD_CGROUP; `again`: its end */
int vm_again(void);     /* AGAIN: this program anew, which forgets all that came since CONFIGURE. -EPROTO, or doesn't return */
void port_listen(void); /* for later edges, where each makes a connection of its own */
void vm_status(uint8_t status[DSEC_STATUS_SIZE]);
int vm_become(const uint8_t *payload, size_t size, uint8_t took[8], const char **what); /* CONFIGURE of one that is somebody. 0, or a negative errno at `what` */
int vm_write_down(void); /* HALT: doesn't return */
_Noreturn void vm_halt(void);

/* --- cgroup.c ------------------------------------------------------------------------------------------------------------------ */

struct group;
int group_take(uint64_t op, struct group **group); /* for a command; or a negative errno */
int group_directory(const struct group *group);    /* a descriptor to clone into */
void group_entered(struct group *group);           /* the clone is done */
int group_kill(struct group *group);
int group_cpu_us(struct group *group, uint64_t *cpu_us); /* of its command */
int group_end(struct group *group);                /* 0: it is gone, and so is the pointer; -EBUSY: something lives in it */
void group_end_later(struct group *group);         /* when it is empty */
void groups_sweep(void);
void groups_kill_left(void);
void groups_trim(bool all);                        /* those that are kept for later commands; not `all`: a machine's last one stays */
void kill_tree(pid_t leader);                /* where there is no cgroup: what can be found by session, group and parent */

/* --- users.c ------------------------------------------------------------------------------------------------------------------- */

#define MAX_GROUPS 256
struct identity {
    uid_t uid;
    gid_t gid;
    size_t group_count;
    gid_t groups[MAX_GROUPS];
    char name[256], home[1024];
};
int user_resolve(const char *spec, struct identity *identity); /* spec NULL: root; blocking: for the child */
int user_become(const struct identity *identity);

/* --- files.c, tree.c, inotify.c, connect.c, wayout.c, lookout.c ------------------------------------------------------------------------------------------------------- */

struct place { /* a directory and a name in it */
    int dir;
    char name[256];
};
_Noreturn void file_call(const struct request *request, int report);
_Noreturn void file_fail(int error, const char *what);
void watch_tree(const struct request *request);
void connect_and_pump(const struct request *request, int report);
_Noreturn void serve_way_out(int report);
_Noreturn void look_out(const struct request *request, int report);
bool is_temporary(const char *name, bool *fresh); /* of a WRITE under way; fresh: its target didn't exist */
int open_path(int dir, const char *path, uint64_t flags); /* a descriptor; ends the call where it fails */
void refuse_procfs(int fd);
bool is_procfs(int fd);
void place_of(const char *path, struct place *place);
void put_all(int fd, const void *data, size_t size);
void tree_entry(int dir, const char *name, const char *shown, size_t shown_size);
void tree_emit(const void *data, size_t size);
void tree_flush(void);
void tree_list(int dir, uint64_t depth);
void tree_remove(int dir, const char *name);

#endif
