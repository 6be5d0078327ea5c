/* copier LIBCRYPTO [HOLDER_SOCKET]: see copier.h. SHA-256 is libcrypto's, found when it runs: the one that Python's hashlib uses. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "../holder/holder.h"
#include "work.h"

#define DIGEST 32
#define PASSED 3 /* descriptors of a packet */

/* Of libcrypto, in all its versions from 1.1 on. */
static void *(*new_context)(void);
static const void *(*sha256)(void);
static int (*begin_digest)(void *context, const void *type, void *engine);
static int (*update_digest)(void *context, const void *data, size_t size);
static int (*end_digest)(void *context, unsigned char *digest, unsigned *size);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct worker *idle, *busy;
int holder = -1;
/* Of jobs that nobody waits for so many compute at the same time that half of the processors are left to others. Reading may take long and isn't
 * counted. */
static pthread_cond_t turn = PTHREAD_COND_INITIALIZER;
static int unhurried, most_unhurried;

union packet {
    struct copier_job job;
    char bytes[sizeof(struct copier_job) + COPIER_CHUNKS * sizeof(struct copier_chunk) + PATH_MAX];
};

bool write_at(int fd, const unsigned char *data, size_t size, uint64_t offset) {
    while (size) {
        ssize_t put = pwrite(fd, data, size, (off_t)offset);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return false;
        data += put, size -= (size_t)put, offset += (uint64_t)put;
    }
    return true;
}

bool start_digest(struct worker *w) {
    return begin_digest(w->context, sha256(), NULL);
}

bool add_digest(struct worker *w, const unsigned char *data, size_t size) {
    return update_digest(w->context, data, size);
}

static bool is_right(void *context, const struct copier_chunk *chunk) {
    unsigned char found[DIGEST];
    unsigned length = 0;
    return end_digest(context, found, &length) && length == DIGEST && memcmp(found, chunk->digest, DIGEST) == 0;
}

bool failed(struct copier_done *done, enum copier_where where, int error) {
    done->where = where;
    done->error = error;
    return false;
}

bool read_piece(int fd, unsigned char *data, size_t size, uint64_t offset, struct copier_done *done) {
    while (size) {
        ssize_t got = pread(fd, data, size, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return failed(done, COPIER_SOURCE, errno);
        if (got == 0) return failed(done, COPIER_SHORT, 0);
        data += got, size -= (size_t)got, offset += (uint64_t)got;
    }
    return true;
}

/* Returns whether `leave` is to be called. */
static bool enter(struct worker *w) {
    pthread_mutex_lock(&lock);
    while (w->nice >= 0 && unhurried >= most_unhurried) pthread_cond_wait(&turn, &lock);
    bool counted = w->nice >= 0;
    if (counted) unhurried++;
    pthread_mutex_unlock(&lock);
    return counted;
}

static void leave(void) {
    pthread_mutex_lock(&lock);
    unhurried--;
    pthread_cond_signal(&turn);
    pthread_mutex_unlock(&lock);
}

bool copy_chunk(const struct copier_chunk *chunk, uint64_t offset, int source, int target, struct worker *w, struct copier_done *done) {
    if (chunk->size > COPIER_PIECE) return failed(done, COPIER_REFUSED, EINVAL);
    if (!read_piece(source, w->data, chunk->size, offset, done)) return false;
    bool counted = enter(w);
    bool right = start_digest(w) && add_digest(w, w->data, chunk->size) && is_right(w->context, chunk);
    bool written = right && write_at(target, w->data, chunk->size, chunk->target);
    int error = errno;
    if (counted) leave();
    return right ? written || failed(done, COPIER_TARGET, error) : failed(done, COPIER_WRONG, 0);
}

/* Of the chunk what the source has. */
static bool cut_off(struct copier_chunk *chunk, uint64_t offset, int source, struct copier_done *done) {
    struct stat st;
    if (fstat(source, &st) < 0) return failed(done, COPIER_SOURCE, errno);
    uint64_t left = (uint64_t)st.st_size > offset ? (uint64_t)st.st_size - offset : 0;
    if (left < chunk->size) chunk->size = (uint32_t)left;
    return true;
}

static bool copy_whole(const struct copier_chunk *chunk, uint64_t offset, int source, int target, struct worker *w, struct copier_done *done) {
    return copy_digested(chunk, offset, source, target, w, done) && (is_right(w->context, chunk) || failed(done, COPIER_WRONG, 0));
}

static bool copy_telling(const struct copier_chunk *chunk, uint64_t offset, int source, int target, struct worker *w, struct copier_done *done) {
    struct copier_chunk there = *chunk;
    unsigned length = 0;
    if (!cut_off(&there, offset, source, done) || !copy_digested(&there, offset, source, target, w, done)) return false;
    return (end_digest(w->context, done->digest, &length) && length == DIGEST) || failed(done, COPIER_REFUSED, ENOMEM);
}

static bool carry_out(const union packet *packet, size_t size, int target, struct worker *w, struct copier_done *done) {
    const struct copier_job *job = &packet->job;
    const struct copier_chunk *chunks = (const void *)(job + 1);
    static bool (*const kinds[])(const struct copier_chunk *, uint64_t, int, int, struct worker *, struct copier_done *) = {
        [COPIER_COPY] = copy_chunk, [COPIER_WHOLE] = copy_whole, [COPIER_TELL] = copy_telling,
    };
    if (job->count > COPIER_CHUNKS || job->kind >= sizeof kinds / sizeof *kinds || !kinds[job->kind]) return failed(done, COPIER_REFUSED, EINVAL);
    const char *path = (const char *)(chunks + job->count);
    if (!job->path_bytes || size != (size_t)(path - packet->bytes) + job->path_bytes || path[job->path_bytes - 1]) return failed(done, COPIER_REFUSED, EINVAL);
    int source = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (source < 0) return failed(done, COPIER_SOURCE, errno);
    uint64_t offset = job->offset;
    while (done->copied < job->count && kinds[job->kind](&chunks[done->copied], offset, source, target, w, done)) offset += chunks[done->copied++].size;
    close(source);
    return done->where == COPIER_COPIED;
}

static bool tell(uint64_t token) {
    struct holder_message m = {.type = HOLDER_DONE, .token = token};
    return holder >= 0 && send(holder, &m, sizeof m, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof m;
}

struct worker *take(uint64_t job, int nice) {
    pthread_mutex_lock(&lock);
    struct worker *w = idle;
    if (w) idle = w->next;
    else if (!(w = malloc(sizeof *w)) || !(w->context = new_context())) _exit(1); /* the filler goes on without us */
    w->job = job, w->nice = nice, w->thread = (pid_t)syscall(SYS_gettid);
    w->next = busy, busy = w;
    pthread_mutex_unlock(&lock);
    return w;
}

int give(struct worker *w) {
    pthread_mutex_lock(&lock);
    struct worker **link = &busy;
    while (*link != w) link = &(*link)->next;
    *link = w->next;
    w->next = idle, idle = w;
    int nice = w->nice;
    pthread_mutex_unlock(&lock);
    return nice;
}

void hasten(uint64_t job, int nice) {
    pthread_mutex_lock(&lock);
    for (struct worker *w = busy; w; w = w->next)
        if (w->job == job && w->nice > nice && setpriority(PRIO_PROCESS, (id_t)w->thread, nice) == 0) {
            w->nice = nice;
            pthread_cond_broadcast(&turn);
        }
    pthread_mutex_unlock(&lock);
}

void start_thread(void *(*function)(void *)) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, function, NULL)) fprintf(stderr, "copier: no threads\n"), exit(1);
}

/* All these threads take from one socket: whoever is free has the next job. */
static void *work(void *unused) {
    static _Thread_local union packet packet;
    int nice_now = getpriority(PRIO_PROCESS, 0); /* a thread's own */
    (void)unused;
    for (;;) {
        struct iovec part = {&packet, sizeof packet};
        union { char room[CMSG_SPACE(PASSED * sizeof(int))]; struct cmsghdr align; } control;
        struct msghdr h = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
        ssize_t got = recvmsg(FILLER, &h, MSG_CMSG_CLOEXEC);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) _exit(0); /* the filler is gone */
        int passed[PASSED] = {-1, -1, -1};
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        if (c && c->cmsg_type == SCM_RIGHTS) memcpy(passed, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
        struct copier_done done = {0};
        if ((size_t)got < sizeof packet.job) {
            failed(&done, COPIER_REFUSED, EINVAL);
        } else if (done.id = packet.job.id, packet.job.kind == COPIER_HASTEN) {
            hasten(packet.job.token, packet.job.nice);
        } else if (packet.job.kind == COPIER_PLAN) {
            if (!begin_plan((uint32_t)packet.job.token, passed)) failed(&done, COPIER_REFUSED, EINVAL);
        } else if (packet.job.kind == COPIER_WITHDRAW) {
            withdraw_plan((uint32_t)packet.job.token);
        } else {
            if (packet.job.nice != nice_now && setpriority(PRIO_PROCESS, 0, packet.job.nice) == 0) nice_now = packet.job.nice;
            struct worker *w = take(packet.job.id, packet.job.nice);
            if (carry_out(&packet, (size_t)got, passed[0], w, &done) && packet.job.token) done.told = tell(packet.job.token);
            int nice = give(w);
            if (nice != packet.job.nice) nice_now = nice;
        }
        for (int i = 0; i < PASSED; i++)
            if (passed[i] >= 0) close(passed[i]);
        if (send(FILLER, &done, sizeof done, MSG_NOSIGNAL) < 0) _exit(0);
    }
}

static int connect_to(const char *path) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof a.sun_path) return -1;
    memcpy(a.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

static bool find(void *library, const char *name, void *function, size_t size) {
    void *found = library ? dlsym(library, name) : NULL;
    memcpy(function, &found, size);
    return found;
}

int main(int argc, char **argv) {
    if (argc != 2 && argc != 3) return fprintf(stderr, "usage: copier LIBCRYPTO [HOLDER_SOCKET]\n"), 2;
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!find(library, "EVP_MD_CTX_new", &new_context, sizeof new_context) || !find(library, "EVP_sha256", &sha256, sizeof sha256) ||
        !find(library, "EVP_DigestInit_ex", &begin_digest, sizeof begin_digest) ||
        !find(library, "EVP_DigestUpdate", &update_digest, sizeof update_digest) ||
        !find(library, "EVP_DigestFinal_ex", &end_digest, sizeof end_digest))
        return fprintf(stderr, "copier: %s\n", dlerror()), 1;
    if (argc == 3 && (holder = connect_to(argv[2])) < 0) return perror("copier: the holder"), 1;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    most_unhurried = processors > 2 ? (int)processors / 2 : 1;
    for (int i = 1; i < COPIER_THREADS; i++) start_thread(work);
    start_helping();
    if (holder >= 0) start_serving();
    work(NULL);
}
