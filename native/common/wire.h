/* The guest protocol and the zygote protocol, version 3. This file is their definition; src/dsec/wire/ mirrors it and a
 * test compares the two.
 *
 * FRAMES. Everything is little-endian. A frame is a 16 byte header and at most DSEC_MAX_PAYLOAD bytes:
 *
 *     u32 size      bytes of payload
 *     u8  type      enum dsec_frame
 *     u8  flags     meaning depends on the type
 *     u16 zero
 *     u64 op        operation (guest), request (zygote), or 0
 *
 * Frames follow each other on a byte stream (a VM's port). On a guest's SOCK_SEQPACKET a packet is one or more whole frames, together no
 * longer than the longest frame: what is said at the same time wakes the other side once. On a zygote's it is exactly one frame.
 * An unknown type, a nonzero `zero`, a short payload or an unknown flag is a protocol error: the receiver closes the channel
 * (the guest then waits on its control socket for a fresh one; operations go on). Before that the guest says why, if there is room:
 * REFUSED for operation 0.
 *
 * FIELDS. Requests (START, SPAWN) and OPSTATE carry a list of fields: u16 tag, u16 zero, u32 length, bytes. Integers in
 * fields are u64. Repeated tags make lists, in order. Unknown tags are refused (EPROTO): both sides ship together, the
 * version in HELLO says so. A request longer than one frame continues: all its frames but the last carry DSEC_F_MORE,
 * the payloads are concatenated; at most DSEC_MAX_REQUEST bytes in all. Between its frames no other request may begin (a protocol
 * error); frames of other types may come. A channel that is lost in the middle of a request loses the request.
 *
 * OPERATIONS. The edge numbers them (1 to 2^63 - 1), rising, unique within a sandbox's life (a later edge goes on above the highest that
 * the guest reports). START with a number that the guest knows is answered with OPSTATE and not run again; one at or below the
 * highest that it doesn't know (released) with REFUSED ESTALE. The guest keeps an operation, the output that was not acknowledged,
 * and its result, until RELEASE. A REFUSED for a START means that the guest doesn't know the operation; a malformed request is
 * refused (EPROTO, EINVAL, E2BIG), so is a KEY that another operation has (EEXIST); what fails later is an EXIT with
 * END_START_FAILED. Frames for an operation that the guest doesn't know: ACK and RELEASE are ignored, STDIN and SIGNAL get REFUSED
 * ESRCH; so does SIGNAL for one that ended.
 *
 * FLOW CONTROL. For each operation the guest holds at most DSEC_WINDOW bytes of output that were not acknowledged,
 * both streams together; then it stops reading the pipes. ACK carries absolute offsets. Towards the guest, the edge has at most
 * DSEC_WINDOW bytes of STDIN in flight that STDIN_ACK did not yet report as written to the process.
 * Offsets are counted in bytes from the start of the stream, so a duplicate or an overlap after a resync is harmless: the
 * receiver drops what it has. A gap, an ACK of bytes that were not sent, or more than the window are protocol errors.
 * TAG_STDIN_OFFSET is what the guest received: the edge goes on from there, with a whole window.
 *
 * RESYNC. Each edge incarnation gets a fresh channel and sends HELLO first. The guest answers WELCOME, an OPSTATE per
 * operation it knows, SYNCED, and then every unacknowledged OUT byte again, STARTED/EXIT where they happened, and goes on live.
 * A guest without a channel keeps running operations (their output waits in the window).
 *
 * STREAMS. A virtual machine's port is one byte stream for its whole life: an edge that goes may leave half a frame in it, in both directions,
 * and nothing else says where the next one begins. So each edge first sends the token that CONFIGURE told the guest, which nobody else
 * knows and whose first byte is none of its others, then HELLO, and no more until WELCOME came. Wherever the guest finds the token, the
 * channel before it is over, half a frame with it; after an end of the stream or an error it drops everything up to it. The edge drops what
 * comes before the WELCOME that has its own incarnation.
 *
 * FORKS. A machine that is copied while it runs goes on in its children as its parent's guest, token and all. Who makes a child sends that
 * token, then CONFIGURE as to a clone, with a random number as its op: CONFIGURED or REFUSED have the same, so that they can be told from
 * the rest of what the parent's guest had to say. Operations go on. A machine that nobody else is a copy of, a spare one, becomes another the
 * same way, and needs no SEED and no MACHINE_ID then. The new token and HELLO may follow at once. Instead of it HALT may come, before or after HELLO: the machine stops all
 * programs, writes everything to its disk and shuts down.
 */
#ifndef DSEC_WIRE_H
#define DSEC_WIRE_H

#define DSEC_PROTOCOL_VERSION 3
#define DSEC_HEADER_SIZE 16
#define DSEC_MAX_PAYLOAD 65552            /* 64 KiB of data and the u64 offset before it, rounded up */
#define DSEC_MAX_DATA 65536               /* data bytes in one OUT or STDIN frame */
#define DSEC_MAX_REQUEST (4u << 20)
#define DSEC_WINDOW (256u << 10)
#define DSEC_MAX_OPS 1024                 /* live and unreleased operations of one guest; above: REFUSED EAGAIN */
#define DSEC_MAX_KEY 128
#define DSEC_MAX_TERMINAL 4096            /* columns, rows */
#define DSEC_MAX_WATCHES 8192             /* directories of one WATCH */
#define DSEC_TOKEN_SIZE 16
#define DSEC_STATUS_SIZE 48

enum dsec_frame {
    /* edge -> guest */
    DSEC_HELLO = 1,        /* u16 version, u16 0, u32 0, u64 incarnation (random) */
    DSEC_START = 2,        /* op; fields; DSEC_F_MORE */
    DSEC_STDIN = 3,        /* op; u64 offset, bytes; DSEC_F_EOF: no more after these bytes */
    DSEC_ACK = 4,          /* op; u64 stdout offset, u64 stderr offset: everything below may be forgotten */
    DSEC_SIGNAL = 5,       /* op; u32 signal, u32 scope: 0 the leader, 1 its process group, 2 everything the command started
                              (2 only with SIGKILL: cgroup.kill, double forks included) */
    DSEC_RELEASE = 6,      /* op: forget it. A running one is first killed whole. */
    DSEC_PING = 7,         /* u64 token */
    DSEC_RESIZE = 8,       /* op; u16 columns, u16 rows of a terminal (EF_PTY); SIGWINCH inside. 0: as it is; above DSEC_MAX_TERMINAL: that.
                              REFUSED ENOTTY for an operation without one */
    DSEC_HOLD = 9,         /* u64 CLOCK_MONOTONIC ns since when the sandbox stands still (said before it is frozen; the guest keeps it across
                              channels), 0: it goes on. No timeout passes meanwhile, and wall_us doesn't count that time. In a virtual
                              machine, whose clock is another, the number says only whether */
    DSEC_CONFIGURE = 10,   /* a virtual machine's first frame, before HELLO: fields TOKEN, CLOCK_NS, SEED, HOSTNAME, MACHINE_ID,
                              PIDS, SPAWN_FLAGS -> CONFIGURED, or REFUSED, of the same op. To a fork's child: see FORKS */

    DSEC_WARM = 11,        /* before CONFIGURE: PATH of a file that is to be in memory, any number -> READY */
    DSEC_HALT = 12,        /* a virtual machine: write everything down and shut down; see FORKS */
    DSEC_AGAIN = 13,       /* a virtual machine's, as its last frame: what came since CONFIGURE was a rehearsal -> READY, and it waits for
                              CONFIGURE as at first. Processes that run are killed */

    /* guest -> edge */
    DSEC_WELCOME = 65,     /* u16 version, u16 0, u32 operations that follow, u64 incarnation (echoed), u64 highest op ever seen */
    DSEC_OPSTATE = 66,     /* op; fields (TAG_KEY, TAG_KIND, TAG_STATE, TAG_PID, TAG_STDIN_OFFSET, TAG_*_BASE, TAG_*_END) */
    DSEC_SYNCED = 67,      /* empty */
    DSEC_STARTED = 68,     /* op; u32 pid (inside), u32 0: exec succeeded, or the file call's child runs */
    DSEC_OUT = 69,         /* op; flags: DSEC_F_STDERR; u64 offset, bytes */
    DSEC_STDIN_ACK = 70,   /* op; u64 offset: bytes below were written to the process (or dropped, as it closed its stdin) */
    DSEC_EXIT = 71,        /* op; struct below, 64 bytes. Comes after the last OUT was queued. */
    DSEC_REFUSED = 72,     /* op; u32 errno, u32 0, UTF-8 message: START or a later frame of this op was not accepted */
    DSEC_PONG = 73,        /* u64 token, u64 realtime ns in the guest */
    DSEC_READY = 74,       /* a virtual machine that waits for CONFIGURE: u64 ns since its kernel started */
    DSEC_CONFIGURED = 75,  /* u64 ns that it took. HELLO may follow */
    DSEC_STATUS = 76,      /* a virtual machine's counters, before each EXIT of a command: u64 processes killed for memory, forks refused, memory
                              in use, disk in use, disk there is (bytes), processes of commands that run */

    /* edge -> zygote (op is the request's number, echoed in the answer) */
    DSEC_Z_HELLO = 129,    /* u16 version, u16 0, u32 0 -> Z_WELCOME, then a Z_SANDBOX per live sandbox, a Z_EXITED per ended, Z_SYNCED */
    DSEC_Z_SPAWN = 130,    /* fields; DSEC_F_MORE -> Z_SPAWNED + SCM_RIGHTS {channel, pidfd}, or Z_FAILED */
    DSEC_Z_ATTACH = 131,   /* sandbox id, bytes -> Z_ATTACHED + SCM_RIGHTS {channel, pidfd}, or Z_FAILED */
    DSEC_Z_FORGET = 132,   /* sandbox id of an ended sandbox: its exit is on record -> Z_OK */
    DSEC_Z_SHUTDOWN = 133, /* kill all sandboxes, wait for them, exit -> Z_OK, then the socket closes */

    DSEC_Z_NETWORK = 135,  /* sandbox id: the sockets to which its way out leads, made if it has none yet -> Z_OK + SCM_RIGHTS {TCP, bound
                              but not listening before some edge made it; UDP for port 53}, or Z_FAILED. An accepted connection's own
                              address is the one that its program connected to */

    /* zygote -> edge */
    DSEC_Z_WELCOME = 193,  /* u16 version, u16 0, u32 pid, u64 epoch (random at start, never 0), u32 live, u32 ended */
    DSEC_Z_SANDBOX = 194,  /* u32 pid, u32 0, sandbox id */
    DSEC_Z_EXITED = 195,   /* u32 pid, u32 wait status, sandbox id: sent when it happens and again after each HELLO until FORGET */
    DSEC_Z_SYNCED = 196,
    DSEC_Z_SPAWNED = 197,  /* u32 pid, u32 0, then 4 x u64 ns: mount, clone, set-up inside, total */
    DSEC_Z_ATTACHED = 198, /* u32 pid, u32 0 */
    DSEC_Z_FAILED = 199,   /* u32 errno, u32 0, UTF-8: stage and what to do */
    DSEC_Z_OK = 200,
};

enum dsec_flag {
    DSEC_F_MORE = 1,       /* START, SPAWN: the request goes on in the next frame of this op */
    DSEC_F_EOF = 2,        /* STDIN */
    DSEC_F_STDERR = 4,     /* OUT */
};

/* START: what to do. The file calls run in a forked, unprivileged child of the guest as the named user, with the stream
 * semantics of a command: data on stdout or stdin, exit code 0, or start_failed with errno and a message. */
enum dsec_kind {
    DSEC_EXEC = 0,         /* ARGV+, ENV*, CWD, USER, FLAGS, TIMEOUT_MS, OUTPUT_CAP, NOFILE */
    DSEC_READ = 1,         /* PATH, OFFSET, LENGTH (absent: to the end) -> bytes on stdout */
    DSEC_WRITE = 2,        /* PATH, MODE; bytes on stdin; a temporary file beside it, renamed over it at EOF (atomic; FF_PARENTS makes
                              missing directories; FF_APPEND appends instead; FF_EXCL fails with EEXIST) */
    DSEC_STAT = 3,         /* PATH, FILE_FLAGS(FF_FOLLOW) -> one entry on stdout */
    DSEC_LIST = 4,         /* PATH, DEPTH (1: the directory itself) -> entries on stdout, names relative to PATH */
    DSEC_MOVE = 5,         /* PATH, PATH2; FF_EXCL: fail when the target exists */
    DSEC_REMOVE = 6,       /* PATH; FF_RECURSIVE */
    DSEC_MKDIR = 7,        /* PATH, MODE; FF_PARENTS (then an existing directory is no error) */
    DSEC_WATCH = 8,        /* PATH of a directory; FF_RECURSIVE: all below it too, as it comes and goes -> event records on stdout, first
                              'b' when it watches. Ends with exit code 0 after 'r' of PATH itself: it doesn't lead there any more; start_failed with
                              ENOSPC above DSEC_MAX_WATCHES directories, or whatever it cannot go on after */
    DSEC_CONNECT = 9,      /* PORT: TCP at 127.0.0.1, then ::1; or PATH: a unix socket. stdin to it, from it to stdout; the end of stdin
                              closes that direction alone. Records on stderr: 'c' when it is connected; 'e' and the u64 number of bytes on
                              stdout when the other side has ended its direction. Ends with code 0 when both have, or with start_failed
                              (STAGE_CONNECT) */
    DSEC_WAY_OUT = 10,     /* of a virtual machine: the way out of its programs, served until RELEASE; see WAYS OUT. start_failed
                              (STAGE_WAY_OUT) where its kernel lacks what that takes */
    DSEC_LOOK = 11,        /* of a virtual machine: what its programs do with files, told until RELEASE; see LOOKING OUT. ARGV+: what for.
                              start_failed (STAGE_LOOK) where its kernel lacks what that takes */
};

enum dsec_tag {
    TAG_KIND = 1, TAG_ARGV = 2, TAG_ENV = 3, TAG_CWD = 4,
    TAG_USER = 5,          /* "name", "uid", "name:group" or "uid:gid"; names by /etc/passwd and /etc/group inside */
    TAG_TIMEOUT_MS = 6,    /* 0 or absent: none */
    TAG_OUTPUT_CAP = 7,    /* bytes, both streams together */
    TAG_KEY = 8,           /* idempotency key, opaque, at most DSEC_MAX_KEY bytes */
    TAG_FLAGS = 9,         /* enum dsec_exec_flag */
    TAG_PATH = 10, TAG_PATH2 = 11, TAG_MODE = 12, TAG_OFFSET = 13, TAG_LENGTH = 14, TAG_DEPTH = 15, TAG_FILE_FLAGS = 16,
    TAG_NOFILE = 17,       /* RLIMIT_NOFILE, soft and hard */
    TAG_PTY_SIZE = 18,     /* columns << 16 | rows, with EF_PTY; 0 (or absent): 80, 24; above DSEC_MAX_TERMINAL: that. In OPSTATE: its size */
    TAG_PORT = 19,         /* CONNECT: 1..65535 */

    TAG_STATE = 32,        /* 0 starting, 1 running, 2 ended (EXIT follows after SYNCED) */
    TAG_PID = 33, TAG_STDIN_OFFSET = 34, TAG_STDOUT_BASE = 35, TAG_STDOUT_END = 36, TAG_STDERR_BASE = 37, TAG_STDERR_END = 38,
    TAG_AGE_MS = 39,       /* since START */

    TAG_SANDBOX = 64,      /* SPAWN: sandbox id, [a-z0-9]{1,40} */
    TAG_HOSTNAME = 65,
    TAG_LOWER = 66,        /* a mounted read-only layer, already id-mapped; top first */
    TAG_UPPER = 67, TAG_WORK = 68,
    TAG_ID_BASE = 69, TAG_ID_COUNT = 70,  /* inside 0..count-1 is outside base..base+count-1, uids and gids */
    TAG_CGROUP2 = 71,      /* directory in a v2 hierarchy, made outside; the guest gets it as a descriptor, owned by inside root */
    TAG_CGROUP = 72,       /* v1 directories, one a controller: the sandbox is attached to each */
    TAG_DEV = 73,          /* shared /dev tree to bind */
    TAG_VIEW = 74,         /* directory with generated files: proc/{meminfo,cpuinfo,stat,loadavg,...} bound over /proc/NAME, sys/ over /sys */
    TAG_CPUS = 75,         /* affinity, one CPU a field */
    TAG_OOM_SCORE_ADJ = 76,/* u64, 0..1000 */
    TAG_SPAWN_FLAGS = 77,  /* enum dsec_spawn_flag */
    TAG_MEMORY = 78,       /* reserved */

    TAG_TOKEN = 96,        /* CONFIGURE: DSEC_TOKEN_SIZE secret bytes; see STREAMS */
    TAG_CLOCK_NS = 97,     /* what time it is, since 1970 */
    TAG_SEED = 98,         /* 1..64 random bytes for the kernel's generator */
    TAG_MACHINE_ID = 99,   /* 32 hexadecimal digits for /etc/machine-id, where the image has one */
    TAG_PIDS = 100,        /* processes that commands may be, together */
};

enum dsec_exec_flag {
    EF_STDIN = 1,          /* keep stdin open and take STDIN frames; else it is /dev/null */
    EF_KILL_LEFTOVERS = 2, /* when the leader exits, end everything it started; else background processes live on, and output that they
                              write afterwards is read and dropped */
    EF_MERGE = 4,          /* stderr into stdout */
    EF_PTY = 8,            /* on a terminal of its own, as the leader of its session: all output is stdout, STDIN is what is typed, its end
                              types the terminal's end-of-file character. The terminal is hung up when the
                              leader has ended and its output was read */
    EF_PATIENT = 16,       /* the result is what counts: STARTED may wait for the first output or the end, but for DSEC_PATIENCE_MS at most */
};
#define DSEC_PATIENCE_MS 20
enum dsec_file_flag { FF_PARENTS = 1, FF_RECURSIVE = 2, FF_FOLLOW = 4, FF_EXCL = 8, FF_APPEND = 16 };
enum dsec_spawn_flag {
    SF_NO_NEW_PRIVS = 1,
    SF_NETWORK = 2,        /* a net namespace from the pool of those with a way out, so that Z_NETWORK needs to make none */
    SF_CELLS = 4,          /* not the guest but the program that makes cells for function calls (cells/cells.h); the channel speaks its messages */
};

/* EXIT. */
enum dsec_end {
    END_EXITED = 0,        /* code: 0..255 */
    END_SIGNALED = 1,      /* code: signal */
    END_START_FAILED = 2,  /* code: errno; stage says where */
    END_TIMEOUT = 3,       /* killed whole by TIMEOUT_MS; code: 0 */
    END_OUTPUT_LIMIT = 4,  /* killed whole at OUTPUT_CAP */
    END_KILLED = 5,        /* by DSEC_SIGNAL scope 2 or RELEASE */
};
enum dsec_stage {
    STAGE_NONE = 0, STAGE_USER = 1, STAGE_CWD = 2, STAGE_EXEC = 3, STAGE_FORK = 4, STAGE_CGROUP = 5, STAGE_FILE = 6, STAGE_REQUEST = 7,
    STAGE_TERMINAL = 8, STAGE_CONNECT = 9, STAGE_WAY_OUT = 10, STAGE_LOOK = 11,
};
#define EXIT_TRUNCATED 1   /* flags: output was lost to the cap */

struct dsec_exit {
    unsigned char end, stage, flags, zero;
    int code;
    unsigned long long cpu_us;      /* user + system of everything the command ran, from its cgroup (else rusage) */
    unsigned long long wall_us;
    unsigned long long max_rss;     /* bytes, largest process */
    unsigned long long stdout_end, stderr_end;   /* bytes delivered on each stream */
    unsigned long long dropped;     /* bytes read beyond the cap */
    unsigned long long reserved;
};

/* An entry of STAT (its name: the last component of PATH, "/" for the root) and LIST on stdout:
 *   u8 type ('f' 'd' 'l' 'p' 's' 'c' 'b'), u8 0, u16 name length, u16 link length, u16 0, u32 mode (12 bits), u32 uid, u32 gid, u32 nlink,
 *   u64 size, i64 mtime ns, name bytes, link target bytes. 40 bytes and the names. */
#define DSEC_ENTRY_SIZE 40

/* An event of WATCH on stdout:
 *   u8 kind, u8 1 for a directory, u16 path length, u16 length of the path before, u16 0, path bytes, bytes of the path before (kind 'm').
 *   8 bytes and the paths. Paths are relative to PATH; empty: PATH itself. Kinds: 'b' watching begins, 'c' created (or moved in), 'w'
 *   written, 'r' removed (or moved out), 'm' moved within the tree, 'a' mode, owner or times changed, 'o' events were lost, look again.
 *   A file that appears in a directory which itself just appeared may be told as created twice. An atomic WRITE shows as 'c' and 'w' of
 *   its target (a new file), or 'w' alone. */
#define DSEC_EVENT_SIZE 8

/* WAYS OUT. A container's edge has sockets inside the sandbox's net namespace; a machine's guest has them instead, and tells. Each side writes
 * records to the streams of WAY_OUT (the guest to stdout, the edge to stdin):
 *   u8 kind, u8 0, u16 size of what follows (at most DSEC_FLOW_DATA), u32 flow; bytes
 * A flow is a TCP connection of a program's. The guest numbers them, rising, never twice; a record for one that is over is ignored. Each
 * side may send DSEC_FLOW_WINDOW bytes in each flow, and as many more as the other's CREDIT says that were taken. Everything that the
 * guest says is a wish. Of QUERY and ANSWER the number is the query's. */
#define DSEC_FLOW_HEADER 8
#define DSEC_FLOW_DATA 16384
#define DSEC_FLOW_WINDOW 65536
#define DSEC_MAX_FLOWS 1024      /* of one machine at once; more wait in its kernel */
enum dsec_flow {
    FLOW_READY = 1,              /* the guest's first: from here on programs reach it. Flow 0 */
    FLOW_OPEN = 2,               /* from the guest: 4 bytes IPv4 address, u16 port: whom the program believes to be connected to */
    FLOW_DATA = 3,               /* at least one byte */
    FLOW_END = 4,                /* no more data from this side; a flow with both is over */
    FLOW_RESET = 5,              /* the flow is over; the program, or who it spoke to, sees a reset */
    FLOW_CREDIT = 6,             /* u32: at least 1 */
    FLOW_QUERY = 7,              /* from the guest: a DNS query */
    FLOW_ANSWER = 8,             /* from the edge: the answer to it */
};

/* LOOKING OUT. What a machine's own kernel (fanotify) says that programs do, as records on stdout. Whoever is root inside can forge or
 * stop them. Each ARGV is a letter and a path: F a file that is told of whoever opens or changes it, by whatever name; r, w, m, s patterns of
 * files that are read, written (or created, or renamed to), removed, started. In a pattern * and ? stay within a name, a name that is ** is
 * any number of directories, also none; at the end also the directory itself. A record:
 *   u8 kind, u8 words, u16 size of the text, u32 pid, u32 uid; text: path, program, then as many words of its command line, then its parents
 *   ("PID PROGRAM", the nearest first), each with a NUL. An empty program: it had ended.
 * The guest's own work for the edge isn't told of. */
#define DSEC_LOOK_HEADER 12
#define DSEC_LOOK_TEXT 12288
#define DSEC_LOOK_WORDS 64
enum dsec_look {
    LOOK_READY = 1,              /* the first: from here on it is told */
    LOOK_READ = 2, LOOK_WRITE = 3, LOOK_REMOVE = 4, LOOK_START = 5,
    LOOK_LOST = 6,               /* more happened than could be told */
};

/* Descriptors that the zygote hands to the guest by execve:
 *   3 control socket (SEQPACKET; each message carries one fresh channel), 4 the first channel, 5 the sandbox's cgroup v2 directory. */
#define DSEC_FD_CONTROL 3
#define DSEC_FD_CHANNEL 4
#define DSEC_FD_CGROUP 5

#endif
