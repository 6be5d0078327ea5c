/* The program in a function environment's jail: pid 1 (the warden) makes cells, pid 2 (the source) forks plain workers into them.
 *
 *   main.c     which of both this process is
 *   warden.c   pid 1: lanes, their cells, the edge's requests
 *   cell.c     a cell: what its first process mounts, and then waits for
 *   source.c   pid 2: forks workers that execute a program; starts the warm parent
 *   worker.c   such a worker: reads what it shall run, gives up all power, executes it
 *
 * A *lane* is a place for one call after another: a set of cgroups that the edge made. For each call it holds a fresh *cell* (pid, mount,
 * ipc and uts namespace; a tmpfs; a /proc) and in it one *worker*, which its source (this program, or a warm parent: an interpreter
 * with libraries imported, which obeys the same messages) has forked into the cell. A worker waits on its call's socket before it does
 * anything. A cell's end ends all that is in it.
 *
 * Messages are packets of `struct message`, descriptors beside it. The warden trusts the edge and the source; of the warm parent it
 * believes nothing but that a worker ended.
 */
#ifndef DSEC_CELLS_H
#define DSEC_CELLS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "wire.h"

#define LANES 256
#define MAX_GROUPS 6  /* cgroups of a lane */
#define MAX_FDS 8     /* with one message */
#define MAX_TEXT 49152
#define NOBODY 65534
#define CELL_SHM "/tmp/.shm" /* where /dev/shm leads */
#define FD_SOURCE 6   /* the warden's and the source's ends of what is between them */

enum message_type {
    /* edge -> warden */
    CELL_LANE = 1,     /* fds: cgroup.procs of the lane's groups. value: MiB of its tmpfs */
    CELL_PARENT = 2,   /* fds: the warm parent's stdout and stderr, its native part. text: its arguments, each ended by NUL,
                        * an empty one, its environment */
    CELL_NEXT = 3,     /* fds: call socket, stdout, stderr. value: 0 a plain worker, 1 one of the warm parent. Ends what is in the lane */
    CELL_STOP = 4,     /* end what is in the lane -> CELL_EMPTY */
    CELL_OPEN = 5,     /* -> CELL_DIRECTORY */
    /* warden -> edge */
    CELL_READY = 65,   /* the worker is in its cell and its cgroups, and reads from its socket */
    CELL_FAILED = 66,  /* value: errno; text: at what. The lane is empty */
    CELL_ENDED = 67,   /* the worker has ended. value: wait status */
    CELL_EMPTY = 68,
    CELL_PARENT_UP = 69,    /* text: "" or why it can't serve */
    CELL_PARENT_ENDED = 70, /* value: wait status */
    CELL_DIRECTORY = 71,    /* value: 0 and the descriptor of the cell's /tmp, or an errno */
    /* warden -> source or warm parent */
    CELL_FORK = 129,   /* fds: pid, mount, ipc and uts namespace, then the call's three */
    /* source or warm parent -> warden */
    CELL_FORKED = 193, /* value: the worker's pid, or -errno */
};

struct message {
    uint32_t type, lane;
    uint32_t turn;     /* which cell of the lane: a late word about an earlier one is ignored */
    int32_t value;
};

/* What a plain worker reads from its call's socket (a stream): u32 length, fields. With the first byte the descriptor of its stdin and,
 * optionally, of a file of files. (A warm worker reads u32 length and what its own Python makes of the rest.) */
enum call_tag {
    CALL_ARGV = 1, CALL_ENV = 2, CALL_CWD = 3,
    CALL_CPU_S = 4, CALL_NOFILE = 5, CALL_FSIZE = 6, CALL_STACK = 7,
};
/* The file of files: for each u32 name length, u32 mode, u64 size, name, content. Names are relative to the working directory. */

/* Call socket, worker -> edge, when it can't execute: u32 errno, text. */

/* Blocking, whole or not at all. 0 or -1 and errno. */
int send_message(int to, const struct message *message, const void *text, size_t size, const int *fds, int count);
/* The size of the text behind the message, or -1 and errno (ECONNRESET where the other side is gone). `*count` descriptors come; what is
 * beyond `most` is closed by the kernel. */
ssize_t receive_message(int from, struct message *message, char *text, size_t capacity, int *fds, int most, int *count);
void close_all(const int *fds, int count);

int warden_run(void) __attribute__((noreturn));
void source_run(void) __attribute__((noreturn));
/* In a fresh child in new namespaces: mount, tell `report` (a struct message, value an errno), wait for the end. */
void cell_run(int report, struct message *message, uint64_t tmpfs_bytes) __attribute__((noreturn));
void worker_run(const int *namespaces, const int *call) __attribute__((noreturn));
/* No privilege any more but, where `keep` says so, the two that joining a cell takes. 0 or -1 and errno. */
int lock_down(bool keep);
extern int landlock_abi;

#endif
