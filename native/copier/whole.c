/* A file that is copied and digested as a whole: some threads read parts of it at the same time and write them, and who has the job digests them in their
 * order. */
#include <errno.h>
#include <pthread.h>
#include <sys/resource.h>

#include "work.h"

#define LEAST_PART (64u << 10)
#define PARTS COPIER_PARTS /* read and not digested yet */

struct whole {
    struct whole *next;
    uint64_t offset, to;
    int source, target, nice;
    uint32_t size, part, parts, given, digested; /* `size` and `part`: bytes */
    uint32_t most; /* parts that are read and not digested yet */
    unsigned wanted, inside; /* threads */
    pthread_cond_t moved;
    struct worker *ready[PARTS]; /* with parts, by their numbers */
    struct copier_done done;
    bool failed;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t called = PTHREAD_COND_INITIALIZER;
static struct whole *calling;

static uint32_t part_bytes(const struct whole *f, uint32_t number) {
    uint32_t left = f->size - number * f->part;
    return left < f->part ? left : f->part;
}

static void forget(struct whole *f) {
    struct whole **link = &calling;
    while (*link && *link != f) link = &(*link)->next;
    if (*link) *link = f->next;
}

/* The next part is digested. The lock is held. */
static void count(struct whole *f) {
    if (f->given - f->digested == f->most) pthread_cond_broadcast(&f->moved);
    f->digested++;
}

static bool bring_part(const struct whole *f, uint32_t number, struct worker *w, struct copier_done *done) {
    uint64_t at = (uint64_t)number * f->part;
    return read_piece(f->source, w->data, part_bytes(f, number), f->offset + at, done) &&
           (write_at(f->target, w->data, part_bytes(f, number), f->to + at) || failed(done, COPIER_TARGET, errno));
}

/* The lock is held before and after. */
static void bring_parts(struct whole *f) {
    while (!f->failed && f->given < f->parts) {
        if (f->given - f->digested == f->most) {
            pthread_cond_wait(&f->moved, &lock);
            continue;
        }
        uint32_t number = f->given++;
        pthread_mutex_unlock(&lock);
        struct copier_done done = {0};
        struct worker *w = take(0, f->nice);
        bool good = bring_part(f, number, w, &done);
        pthread_mutex_lock(&lock);
        f->ready[number % PARTS] = w; /* who digests gives it back */
        if (!good) f->failed = true, f->done = done;
        if (!good || number == f->digested) pthread_cond_broadcast(&f->moved);
    }
}

static void *help(void *unused) {
    int nice = getpriority(PRIO_PROCESS, 0); /* a thread's own */
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct whole *f = calling;
        if (!f) {
            pthread_cond_wait(&called, &lock);
            continue;
        }
        f->inside++;
        if (--f->wanted == 0) forget(f);
        if (f->nice != nice && setpriority(PRIO_PROCESS, 0, f->nice) == 0) nice = f->nice;
        bring_parts(f);
        if (--f->inside == 0) pthread_cond_broadcast(&f->moved);
    }
    return NULL;
}

bool copy_digested(const struct copier_chunk *chunk, uint64_t offset, int source, int target, struct worker *w, struct copier_done *done) {
    uint32_t streams = chunk->streams < 2 ? 2 : chunk->streams > COPIER_PARTS ? COPIER_PARTS : chunk->streams;
    uint32_t part = COPIER_PIECE;
    while (part > LEAST_PART && part / 2 >= chunk->size / streams) part /= 2;
    struct whole f = {.offset = offset, .to = chunk->target, .source = source, .target = target, .nice = w->nice, .size = chunk->size, .part = part,
                      .most = streams, .parts = chunk->size / part + (chunk->size % part != 0), .moved = PTHREAD_COND_INITIALIZER};
    if (!start_digest(w)) return failed(done, COPIER_REFUSED, ENOMEM);
    if (!f.parts) return true;
    f.given = 1; /* the first is brought here, so that nobody needs to be awake for it */
    f.wanted = (streams < f.parts ? streams : f.parts) - 1;
    pthread_mutex_lock(&lock);
    if (f.wanted) f.next = calling, calling = &f;
    for (unsigned i = f.wanted; i; i--) pthread_cond_signal(&called);
    pthread_mutex_unlock(&lock);
    bool first = bring_part(&f, 0, w, done) && (add_digest(w, w->data, part_bytes(&f, 0)) || failed(done, COPIER_REFUSED, ENOMEM));
    pthread_mutex_lock(&lock);
    if (!first && !f.failed) f.failed = true, f.done = *done;
    count(&f);
    while (!f.failed && f.digested < f.parts) {
        struct worker **ready = &f.ready[f.digested % PARTS];
        if (!*ready) {
            pthread_cond_wait(&f.moved, &lock);
            continue;
        }
        pthread_mutex_unlock(&lock);
        bool good = add_digest(w, (*ready)->data, part_bytes(&f, f.digested));
        give(*ready);
        pthread_mutex_lock(&lock);
        *ready = NULL;
        if (!good) f.failed = true, failed(&f.done, COPIER_REFUSED, ENOMEM);
        count(&f);
    }
    forget(&f);
    pthread_cond_broadcast(&f.moved);
    while (f.inside) pthread_cond_wait(&f.moved, &lock);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < PARTS; i++)
        if (f.ready[i]) give(f.ready[i]);
    return !f.failed || failed(done, f.done.where, f.done.error);
}

void start_helping(void) {
    for (int i = 0; i < COPIER_PARTS; i++) start_thread(help);
}
