/* holder SOCKET MARKED_DIRECTORY DEADLINE_MS [GROUP TABLE]: see holder.h. The last two: descriptors of a predecessor's. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "holder.h"
#include "waits.h"

#ifndef FAN_PRE_ACCESS
#define FAN_PRE_ACCESS 0x00100000
#endif
#ifndef FAN_MARK_IGNORE_SURV
#define FAN_MARK_IGNORE_SURV (0x400 | FAN_MARK_IGNORED_SURV_MODIFY)
#endif
#ifndef FAN_MARK_IGNORE
#define FAN_MARK_IGNORE 0x400
#endif
#define INFO_RANGE 6
#define DENY_EIO ((uint32_t)EIO << 24 | FAN_DENY)
#define SLOT_BITS 15
_Static_assert(SLOTS == 1 << SLOT_BITS, "a token has the slot's number");
#define GROUP_FD 3
#define TABLE_FD 4
#define CLIENTS 32
#define SPARE 256
#define BLOBS 4096

struct range_info {
    uint8_t type, pad;
    uint16_t length;
    uint32_t zero;
    uint64_t offset, count;
};

_Static_assert(sizeof(struct fanotify_event_metadata) + sizeof(struct range_info) <= EVENT_SIZE &&
                   2 * sizeof(struct fanotify_event_metadata) + 2 * sizeof(struct range_info) > EVENT_SIZE, "one event");

struct blob {
    bool used;
    uint32_t chunk;
    int next;   /* in its bucket */
    int server; /* the client that serves it, or NOBODY: any that fills */
    uint64_t dev, ino, size, last_ms;
    const uint8_t *bits;
    size_t mapped;
};

struct client {
    int fd;
    bool fills;
};

static struct blob blobs[BLOBS];
static int buckets[BUCKETS];
static struct client clients[CLIENTS];
static uint64_t deadline_ms, by_itself, by_filler, failed;
static bool stuck; /* a filler's socket was full */

static void die(const char *what) {
    fprintf(stderr, "holder: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static struct blob *find_blob(uint64_t dev, uint64_t ino) {
    for (int i = buckets[ino % BUCKETS]; i >= 0; i = blobs[i].next)
        if (blobs[i].ino == ino && blobs[i].dev == dev) return &blobs[i];
    return NULL;
}

static bool filled(const struct blob *b, uint64_t offset, uint64_t count) {
    if (!count || offset >= b->size) return true;
    if (count > b->size - offset) count = b->size - offset;
    uint64_t last = (offset + count - 1) / b->chunk;
    for (uint64_t i = offset / b->chunk; i <= last; i++)
        if (i / 8 >= b->mapped || !(__atomic_load_n(&b->bits[i / 8], __ATOMIC_ACQUIRE) >> (i % 8) & 1)) return false;
    return true;
}

static void respond(int fd, uint32_t response) {
    struct fanotify_response answer = {.fd = fd, .response = response};
    ssize_t done = write(GROUP_FD, &answer, sizeof answer);
    if (done < 0 && errno != ENOENT) die("write to the group"); /* ENOENT: its reader was killed and is gone */
}

static void finish(struct slot *s, int error) {
    int fd = s->fd;
    respond(fd, error ? ((uint32_t)error << 24 | FAN_DENY) : FAN_ALLOW);
    free_slot(s);
    close(fd);
    if (error) failed++;
    else by_filler++;
}

static bool send_message(int fd, const struct holder_message *m) {
    return send(fd, m, sizeof *m, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof *m;
}

/* Requests of one blob go to one filler, so that it sees which reads want the same chunk. */
static int choose(unsigned blob) {
    int fillers[CLIENTS], n = 0;
    for (int i = 0; i < CLIENTS; i++)
        if (clients[i].fd >= 0 && clients[i].fills) fillers[n++] = i;
    return n ? fillers[blob % (unsigned)n] : NOBODY;
}

/* Ask a filler for what a read in a row waits for, or let it go on. */
static void dispatch(struct slot *s) {
    struct blob *b = find_blob(s->dev, s->ino);
    if (!b) return; /* after a restart it is told again */
    if (filled(b, s->offset, s->count)) {
        finish(s, 0);
        return;
    }
    int to = b->server != NOBODY && !was_passed(s) ? b->server : choose((unsigned)(b - blobs));
    if (to == NOBODY) return;
    struct holder_message m = {
        .type = HOLDER_REQUEST, .id = (uint32_t)(b - blobs), .token = s->serial << SLOT_BITS | (uint64_t)(s - table->slots),
        .offset = s->offset, .count = s->count, .size = b->size,
    };
    if (send_message(clients[to].fd, &m)) asked(s, to);
    else stuck = true;
}

static void fail_late(void) {
    uint64_t now = now_ms();
    for (struct slot *s = table->slots; s < table->slots + highest; s++)
        if (s->fd >= 0 && now >= s->deadline_ms) finish(s, EIO), stuck = true;
}

/* Put the event in `arriving` into a slot, or answer it. */
static void accept_event(bool lost) {
    struct fanotify_event_metadata *event = (void *)table->arriving;
    int fd = event->fd;
    if (event->event_len == 0) return;
    struct stat st;
    const struct range_info *range = (const void *)(table->arriving + event->metadata_len);
    bool ranged = event->event_len >= event->metadata_len + sizeof *range && range->type == INFO_RANGE;
    if (fd >= 0 && (event->mask & FAN_PRE_ACCESS)) {
        /* `lost`: it was a predecessor's, whose descriptor is closed, so nobody knows which file: that reader fails. */
        if (lost || !ranged || fstat(fd, &st) < 0) {
            respond(fd, DENY_EIO);
            failed++;
        } else {
            struct blob *b = find_blob(st.st_dev, st.st_ino);
            if (b) b->last_ms = now_ms();
            if (b && filled(b, range->offset, range->count)) {
                respond(fd, FAN_ALLOW);
                by_itself++;
            } else {
                struct slot *s = new_slot(event->pid);
                if (s) {
                    *s = (struct slot){.fd = -1, .filler = NOBODY, .dev = st.st_dev, .ino = st.st_ino, .offset = range->offset,
                                       .count = range->count, .deadline_ms = now_ms() + deadline_ms, .serial = ++table->serial};
                    __atomic_store_n(&s->fd, fd, __ATOMIC_RELEASE);
                    event->event_len = 0;
                    advance(s, dispatch);
                    return;
                }
                respond(fd, DENY_EIO);
                failed++;
            }
        }
    }
    event->event_len = 0;
    if (fd >= 0) close(fd);
}

static void read_events(void) {
    /* One at a time: the buffer in shared memory is what a successor would find. */
    for (int i = 0; i < 256 && waiting < most_waiting; i++) {
        ssize_t got = read(GROUP_FD, table->arriving, sizeof table->arriving);
        if (got <= 0) {
            if (got < 0 && errno != EAGAIN && errno != EINTR && errno != EMFILE && errno != ENFILE) die("read from the group");
            return;
        }
        accept_event(false);
    }
}

static void forget_blob(struct blob *b) {
    int *link = &buckets[b->ino % BUCKETS];
    while (*link != b - blobs) link = &blobs[*link].next;
    *link = b->next;
    munmap((void *)(uintptr_t)b->bits, b->mapped);
    b->used = false;
}

static int add_blob(const struct holder_message *m, int bitmap) {
    struct stat st;
    if (m->id >= BLOBS || !m->chunk || bitmap < 0) return EINVAL;
    if (fstat(bitmap, &st) < 0) return errno;
    if ((uint64_t)st.st_size * 8 * m->chunk < m->size || st.st_size == 0) return EINVAL;
    void *bits = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, bitmap, 0);
    if (bits == MAP_FAILED) return errno;
    struct blob *b = &blobs[m->id];
    if (b->used) forget_blob(b);
    *b = (struct blob){.used = true, .chunk = m->chunk, .dev = m->dev, .ino = m->ino, .size = m->size, .bits = bits, .mapped = (size_t)st.st_size,
                       .next = buckets[m->ino % BUCKETS], .server = NOBODY};
    buckets[m->ino % BUCKETS] = (int)m->id;
    return 0;
}

/* Its reads need not ask any more (FAN_MARK_ADD), or must again (FAN_MARK_REMOVE). */
static int ignore_blob(const struct holder_message *m, int data, unsigned what) {
    char path[32];
    if (m->id >= BLOBS || !blobs[m->id].used || data < 0) return EINVAL;
    snprintf(path, sizeof path, "/proc/self/fd/%d", data);
    unsigned how = what == FAN_MARK_ADD ? FAN_MARK_IGNORE_SURV : FAN_MARK_IGNORE;
    if (fanotify_mark(GROUP_FD, what | how, FAN_PRE_ACCESS, AT_FDCWD, path) < 0 && (what == FAN_MARK_ADD || errno != ENOENT)) return errno;
    blobs[m->id].last_ms = now_ms();
    return 0;
}

static int remove_blob(uint32_t id) {
    if (id >= BLOBS || !blobs[id].used) return ENOENT;
    for (struct slot *s = table->slots; s < table->slots + highest; s++)
        if (s->fd >= 0 && s->dev == blobs[id].dev && s->ino == blobs[id].ino) finish(s, EIO), stuck = true;
    forget_blob(&blobs[id]);
    return 0;
}

static void drop_client(int i) {
    close(clients[i].fd);
    clients[i] = (struct client){.fd = -1};
    for (int id = 0; id < BLOBS; id++)
        if (blobs[id].server == i) blobs[id].server = NOBODY;
    for (struct slot *s = table->slots; s < table->slots + highest; s++)
        if (s->fd >= 0 && s->filler == i) not_asked(s);
    stuck = waiting; /* others are asked now */
}

static void answer(int i, int error) {
    struct holder_message m = {.type = error ? HOLDER_FAILED : HOLDER_OK, .error = error};
    if (!send_message(clients[i].fd, &m)) drop_client(i);
}

static void give(int i) {
    struct holder_message m = {.type = HOLDER_OK};
    struct iovec part = {&m, sizeof m};
    union { char room[CMSG_SPACE(2 * sizeof(int))]; struct cmsghdr align; } control = {0};
    struct msghdr h = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
    struct cmsghdr *c = CMSG_FIRSTHDR(&h);
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(2 * sizeof(int));
    memcpy(CMSG_DATA(c), (int[]){GROUP_FD, TABLE_FD}, 2 * sizeof(int));
    if (sendmsg(clients[i].fd, &h, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) drop_client(i);
}

/* NULL: it was too late. */
static struct slot *slot_of(uint64_t token) {
    struct slot *s = &table->slots[token & (SLOTS - 1)];
    return s->fd < 0 || s->serial != token >> SLOT_BITS ? NULL : s;
}

static void done(const struct holder_message *m) {
    struct slot *s = slot_of(m->token);
    if (!s) return;
    finish(s, m->error == 0 || m->error == ENOSPC || m->error == EDQUOT ? m->error : EIO); /* what the kernel takes */
    advance(s, dispatch); /* the next of that reader's */
}

static void serve_blob(int i, const struct holder_message *m) {
    if (m->id >= BLOBS || !blobs[m->id].used) return;
    if (m->count) blobs[m->id].server = i;
    else if (blobs[m->id].server == i) blobs[m->id].server = NOBODY;
}

static void pass_on(int i, uint64_t token) {
    struct slot *s = slot_of(token);
    if (!s || s->filler != i) return;
    pass_slot(s);
    advance(s, dispatch);
}

static void serve_client(int i) {
    for (int n = 0; n < 64 && clients[i].fd >= 0; n++) {
        struct holder_message m;
        struct iovec part = {&m, sizeof m};
        union { char room[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control;
        struct msghdr h = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
        ssize_t got = recvmsg(clients[i].fd, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
        int passed = -1;
        struct cmsghdr *c = got > 0 ? CMSG_FIRSTHDR(&h) : NULL;
        if (c && c->cmsg_type == SCM_RIGHTS) memcpy(&passed, CMSG_DATA(c), sizeof passed);
        if (got != (ssize_t)sizeof m) {
            if (passed >= 0) close(passed);
            drop_client(i);
            return;
        }
        switch (m.type) {
        case HOLDER_ADD:
            answer(i, add_blob(&m, passed));
            stuck = true; /* reads may wait for it */
            break;
        case HOLDER_COMPLETE: answer(i, ignore_blob(&m, passed, FAN_MARK_ADD)); break;
        case HOLDER_REOPEN: answer(i, ignore_blob(&m, passed, FAN_MARK_REMOVE)); break;
        case HOLDER_IDLE: {
            struct holder_message s = {.type = HOLDER_OK, .token = m.id < BLOBS && blobs[m.id].used ? now_ms() - blobs[m.id].last_ms : 0};
            if (!send_message(clients[i].fd, &s)) drop_client(i);
            break;
        }
        case HOLDER_REMOVE: answer(i, remove_blob(m.id)); break;
        case HOLDER_FILL: clients[i].fills = stuck = true; break;
        case HOLDER_DONE: done(&m); break;
        case HOLDER_SERVE: serve_blob(i, &m); break;
        case HOLDER_PASS: pass_on(i, m.token); break;
        case HOLDER_TAKE: give(i); break;
        case HOLDER_STATS: {
            struct holder_message s = {.type = HOLDER_OK, .token = by_itself, .offset = by_filler, .size = failed, .count = (uint64_t)waiting,
                                       .chunk = HOLDER_VERSION};
            if (!send_message(clients[i].fd, &s)) drop_client(i);
            break;
        }
        case HOLDER_STOP: answer(i, 0); exit(0);
        default: drop_client(i);
        }
        if (passed >= 0) close(passed);
    }
}

/* The group and the table get their numbers; everything else that was open goes. */
static void place(int group, int table_fd) {
    int high_group = fcntl(group, F_DUPFD, 5), high_table = fcntl(table_fd, F_DUPFD, 5);
    if (high_group < 0 || high_table < 0 || dup2(high_group, GROUP_FD) < 0 || dup2(high_table, TABLE_FD) < 0) die("descriptors");
    syscall(SYS_close_range, 5u, ~0u, 0u);
}

static int new_table(void) {
    int fd = memfd_create("dsec-holder", MFD_CLOEXEC);
    if (fd < 0) die("memfd_create");
    return fd;
}

/* A predecessor of another version has left a table that can't be read (it had more slots: a downgrade). Who waits in it fails; without that they
 * would wait for ever. Only their descriptors' numbers name them: all that can be are answered. */
static void give_up_table(void) {
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) < 0) die("descriptors");
    unsigned long most = 1 << 20; /* the kernel's own */
    FILE *f = fopen("/proc/sys/fs/nr_open", "re");
    if (f) {
        if (fscanf(f, "%lu", &most) != 1 || most > 1 << 24) most = 1 << 24;
        fclose(f);
    }
    if (files.rlim_max < most) most = files.rlim_max;
    for (unsigned long fd = 0; fd < most; fd++) respond((int)fd, DENY_EIO);
    fprintf(stderr, "holder: the table that was handed over is another version's: the reads that waited in it fail\n");
    int fresh = new_table();
    if (dup2(fresh, TABLE_FD) < 0) die("descriptors");
    close(fresh);
    if (!open_waits(TABLE_FD, true)) die("table");
}

static void open_table(bool inherited, int group, int table_fd) {
    if (!inherited) {
        table_fd = new_table();
        group = fanotify_init(FAN_CLASS_PRE_CONTENT | FAN_CLOEXEC | FAN_NONBLOCK | FAN_UNLIMITED_QUEUE | FAN_UNLIMITED_MARKS | FAN_REPORT_TID,
                              O_RDONLY | O_LARGEFILE | O_CLOEXEC | O_NOATIME);
        if (group < 0) die("fanotify_init");
    }
    place(group, table_fd);
    if (!open_waits(TABLE_FD, !inherited)) {
        if (!inherited || errno) die("table");
        give_up_table();
        return;
    }
    if (!inherited) return;
    /* Occupy the numbers first: a new event must not get the name of one that waits. */
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    uint64_t now = now_ms();
    for (struct slot *s = table->slots; s < table->slots + SLOTS; s++)
        if (s->fd >= 0) {
            if (null < 0 || (s->fd != null && dup3(null, s->fd, O_CLOEXEC) < 0)) die("descriptors of waiting reads");
            if (s->fd == null) null = dup(null);
            s->deadline_ms = now + deadline_ms;
            adopt_slot(s);
            struct fanotify_event_metadata *event = (void *)table->arriving;
            if (event->event_len && event->fd == s->fd) event->event_len = 0; /* it got into its slot just before the end */
        }
    accept_event(true);
    close(null);
}

static int listen_at(const char *path) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof a.sun_path) die("socket path is too long");
    memcpy(a.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    unlink(path);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) < 0 || chmod(path, 0600) < 0 || listen(fd, 16) < 0) die(path);
    return fd;
}

static void accept_client(int listener) {
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    for (int i = 0; i < CLIENTS; i++)
        if (clients[i].fd < 0) {
            clients[i].fd = fd;
            return;
        }
    close(fd);
}

/* Sandboxes wait for this process: it must not wait for those that compute. Where the kernel groups sessions, nice counts only inside one. */
static void be_prompt(void) {
    int fd = open("/proc/self/autogroup", O_WRONLY | O_CLOEXEC);
    setpriority(PRIO_PROCESS, 0, -10);
    if (fd < 0) return;
    if (write(fd, "-10", 3) < 0) perror("holder: autogroup");
    close(fd);
}

/* Each read that waits has a descriptor: as many as may be had, and some are left for connections. */
static void raise_descriptors(void) {
    struct rlimit files = {2 * SLOTS, 2 * SLOTS}, now;
    if (setrlimit(RLIMIT_NOFILE, &files) == 0) return;
    if (getrlimit(RLIMIT_NOFILE, &now) < 0) die("descriptors");
    now.rlim_cur = now.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &now) < 0) die("descriptors");
    if (now.rlim_cur < SLOTS + SPARE) most_waiting = (int)now.rlim_cur - SPARE;
}

int main(int argc, char **argv) {
    if (argc != 4 && argc != 6) return fprintf(stderr, "usage: holder SOCKET MARKED_DIRECTORY DEADLINE_MS [GROUP TABLE]\n"), 2;
    deadline_ms = strtoull(argv[3], NULL, 10);
    signal(SIGPIPE, SIG_IGN);
    be_prompt();
    raise_descriptors();
    for (int i = 0; i < CLIENTS; i++) clients[i].fd = -1;
    for (int i = 0; i < BUCKETS; i++) buckets[i] = -1;
    open_table(argc == 6, argc == 6 ? atoi(argv[4]) : -1, argc == 6 ? atoi(argv[5]) : -1);
    if (fanotify_mark(GROUP_FD, FAN_MARK_ADD | FAN_MARK_MOUNT, FAN_PRE_ACCESS, AT_FDCWD, argv[2]) < 0) die("fanotify_mark");
    int listener = listen_at(argv[1]);
    uint64_t checked = now_ms();
    for (;;) {
        struct pollfd polled[CLIENTS + 2] = {{.fd = listener, .events = POLLIN}, {.fd = waiting < most_waiting ? GROUP_FD : -1, .events = POLLIN}};
        for (int i = 0; i < CLIENTS; i++) polled[i + 2] = (struct pollfd){.fd = clients[i].fd, .events = POLLIN};
        poll(polled, CLIENTS + 2, waiting ? 100 : -1);
        for (int i = 0; i < CLIENTS; i++)
            if (polled[i + 2].revents) serve_client(i);
        if (polled[1].revents) read_events();
        if (polled[0].revents) accept_client(listener);
        if (stuck) stuck = false, advance_all(dispatch);
        uint64_t now = now_ms();
        if (waiting && now - checked >= 100) fail_late(), checked = now;
    }
}
