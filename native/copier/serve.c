/* Layers that the copier serves itself (copier.h says PLANS). One lock for all of them: under it things are decided, never done. A chunk is FLYING
 * while one thread brings it; others that want it wait for that thread. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../holder/holder.h"
#include "ahead.h"
#include "work.h"

#define BLOCK 4096u /* of a bit */
#define PACKED_CHUNK 36u
#define PACKED_PLACE 12u
#define AHEAD_NICE 0

enum state { FREE, QUEUED, FLYING };

struct plan {
    struct plan *next;
    uint32_t blob, count;
    unsigned users;    /* threads that do something for it */
    unsigned fetching; /* of those that fetch ahead */
    const struct copier_plan *head;
    const unsigned char *places, *digests;
    uint32_t *journal;
    const char **paths;
    uint64_t *offsets; /* of the chunks, and the end */
    unsigned char *states, *bits;
    size_t mapped, bits_size;
    int data;
    uint32_t left;
    uint32_t *row; /* a ring of what is to be fetched ahead; a chunk may stand in it twice */
    uint32_t row_size, row_first, row_count;
    struct ahead ahead;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t landed = PTHREAD_COND_INITIALIZER, queued = PTHREAD_COND_INITIALIZER;
static struct plan *plans;

static bool has(const struct plan *p, uint32_t i) {
    for (uint64_t b = p->offsets[i] / BLOCK; b < p->offsets[i + 1] / BLOCK; b++)
        if (!(__atomic_load_n(&p->bits[b / 8], __ATOMIC_RELAXED) >> (b % 8) & 1)) return false;
    return true;
}

static void note(struct plan *p, uint32_t i) {
    for (uint64_t b = p->offsets[i] / BLOCK; b < p->offsets[i + 1] / BLOCK; b++)
        __atomic_fetch_or(&p->bits[b / 8], (unsigned char)(1u << (b % 8)), __ATOMIC_RELEASE);
    uint32_t at = p->head->noted;
    if (at < p->count) { /* always, unless somebody else clears bits */
        p->journal[at] = i + 1;
        __atomic_store_n((uint32_t *)(uintptr_t)&p->head->noted, at + 1, __ATOMIC_RELEASE);
    }
    if (--p->left) return;
    struct copier_done done = {.where = COPIER_ALL, .copied = p->blob};
    send(FILLER, &done, sizeof done, MSG_NOSIGNAL | MSG_DONTWAIT); /* where it has no room, the filler looks from time to time */
}

/* Bring a chunk that is ours (FLYING). The lock is held before and after, and not while it comes. */
static bool bring(struct plan *p, uint32_t i, int nice) {
    struct copier_chunk chunk = {.target = p->offsets[i], .size = (uint32_t)(p->offsets[i + 1] - p->offsets[i])};
    struct copier_done done = {0};
    uint32_t pack;
    uint64_t offset;
    memcpy(chunk.digest, p->digests + (size_t)i * PACKED_CHUNK + sizeof(uint32_t), sizeof chunk.digest);
    memcpy(&pack, p->places + (size_t)i * PACKED_PLACE, sizeof pack);
    memcpy(&offset, p->places + (size_t)i * PACKED_PLACE + sizeof pack, sizeof offset);
    pthread_mutex_unlock(&lock);
    int source = open(p->paths[pack], O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    bool right = false;
    if (source >= 0) {
        struct worker *w = take(OF_PLANS | (uint64_t)p->blob << 32 | i, nice);
        right = copy_chunk(&chunk, offset, source, p->data, w, &done);
        int now = give(w);
        if (now != nice) setpriority(PRIO_PROCESS, 0, nice); /* it was hastened */
        close(source);
    }
    pthread_mutex_lock(&lock);
    if (right) note(p, i);
    p->states[i] = FREE;
    pthread_cond_broadcast(&landed);
    return right;
}

static struct plan *find(uint32_t blob) {
    struct plan *p = plans;
    while (p && p->blob != blob) p = p->next;
    return p;
}

static void release(struct plan *p) {
    if (--p->users == 0) pthread_cond_broadcast(&landed);
}

static void queue(struct plan *p, struct ahead_range range) {
    for (uint32_t i = range.begin; i < range.end; i++)
        if (p->states[i] == FREE && p->row_count < p->row_size && !has(p, i)) {
            p->states[i] = QUEUED;
            p->row[(p->row_first + p->row_count++) % p->row_size] = i;
            if (p->fetching + p->row_count <= p->head->streams) pthread_cond_signal(&queued); /* more threads than that have nothing to do */
        }
}

static bool chunks_of(const struct plan *p, uint64_t offset, uint64_t count, uint32_t *first, uint32_t *last) {
    uint64_t size = p->head->data_bytes;
    if (!count || offset >= size) return false;
    uint64_t end = count > size - offset ? size : offset + count;
    uint32_t low = 0, high = p->count - 1;
    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        if (p->offsets[middle] <= offset) low = middle;
        else high = middle - 1;
    }
    *first = *last = low;
    while (p->offsets[*last + 1] < end) ++*last;
    return true;
}

/* What this range needs is there. False: it can't be had by us. The lock is held, and let go of in between. */
static bool fill(struct plan *p, uint64_t offset, uint64_t count, int nice) {
    uint32_t first, last;
    if (!chunks_of(p, offset, count, &first, &last)) return true;
    bool decided = false;
    for (uint32_t i = first; i <= last;) {
        if (p->states[i] == FLYING) {
            hasten(OF_PLANS | (uint64_t)p->blob << 32 | i, nice);
            pthread_cond_wait(&landed, &lock);
            continue;
        }
        bool here = has(p, i);
        if (!here) p->states[i] = FLYING;
        if (!decided) { /* the reader's own is taken first */
            decided = true;
            queue(p, ahead_file(&p->ahead, first));
            queue(p, ahead_read(&p->ahead, first, last));
        }
        if (!here && !bring(p, i, nice)) return false;
        i++;
    }
    return true;
}

static void *answer(void *unused) {
    int nice = getpriority(PRIO_PROCESS, 0);
    struct holder_message m;
    (void)unused;
    for (;;) {
        ssize_t got = recv(holder, &m, sizeof m, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got != (ssize_t)sizeof m) return NULL; /* the holder is gone: the filler ends */
        if (m.type != HOLDER_REQUEST) continue;
        struct holder_message reply = {.type = HOLDER_PASS, .token = m.token};
        pthread_mutex_lock(&lock);
        struct plan *p = find(m.id);
        if (p) {
            p->users++;
            if (fill(p, m.offset, m.count, nice)) reply.type = HOLDER_DONE;
        }
        pthread_mutex_unlock(&lock);
        ssize_t sent = send(holder, &reply, sizeof reply, MSG_NOSIGNAL);
        if (p) { /* only now it may be withdrawn: what was just filled could be taken back then */
            pthread_mutex_lock(&lock);
            release(p);
            pthread_mutex_unlock(&lock);
        }
        if (sent < 0) return NULL;
    }
}

/* What nobody waits for, of all plans in turn. */
static void *fetch_ahead(void *unused) {
    (void)unused;
    setpriority(PRIO_PROCESS, 0, AHEAD_NICE); /* of this thread */
    pthread_mutex_lock(&lock);
    for (;;) {
        struct plan *p = plans;
        while (p && (!p->row_count || p->fetching >= p->head->streams)) p = p->next;
        if (!p) {
            pthread_cond_wait(&queued, &lock);
            continue;
        }
        uint32_t i = p->row[p->row_first];
        p->row_first = (p->row_first + 1) % p->row_size;
        p->row_count--;
        if (p->states[i] != QUEUED) continue; /* a reader was faster */
        p->states[i] = FLYING;
        p->users++, p->fetching++;
        bring(p, i, AHEAD_NICE);
        p->fetching--;
        release(p);
    }
    return NULL;
}

static void tell_holder(uint32_t blob, bool serves) {
    struct holder_message m = {.type = HOLDER_SERVE, .id = blob, .count = serves};
    send(holder, &m, sizeof m, MSG_NOSIGNAL); /* one that is gone is noticed elsewhere */
}

static void destroy(struct plan *p) {
    if (p->head != MAP_FAILED) munmap((void *)(uintptr_t)p->head, p->mapped);
    if (p->bits != MAP_FAILED) munmap(p->bits, p->bits_size);
    if (p->data >= 0) close(p->data);
    free(p->offsets), free(p->states), free(p->row), free(p->paths), free(p->ahead.touched);
    free(p);
}

static void *map(int fd, size_t *size) {
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size == 0) return MAP_FAILED;
    *size = (size_t)st.st_size;
    return mmap(NULL, *size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

/* Whether all that it names is inside of it. */
static bool read_plan(struct plan *p) {
    const struct copier_plan *head = p->head;
    if (p->mapped < sizeof *head || head->noted || !head->count || !head->streams || head->data_bytes % BLOCK) return false;
    uint64_t fixed = sizeof *head + 4ull * head->count + 4ull * head->ahead + (uint64_t)(PACKED_CHUNK + PACKED_PLACE) * head->count;
    if (fixed > p->mapped || p->bits_size * 8ull * BLOCK < head->data_bytes || head->packs > head->count) return false;
    p->count = p->left = head->count;
    p->journal = (uint32_t *)(uintptr_t)(head + 1);
    const uint32_t *wanted = p->journal + head->count;
    p->digests = (const unsigned char *)(wanted + head->ahead);
    p->places = p->digests + (size_t)PACKED_CHUNK * head->count;
    p->row_size = p->count + 1;
    p->offsets = malloc(((size_t)p->count + 1) * sizeof *p->offsets);
    p->states = calloc(p->count, 1);
    p->row = malloc((size_t)p->row_size * sizeof *p->row);
    p->paths = malloc(((size_t)head->packs + 1) * sizeof *p->paths);
    p->ahead = (struct ahead){.offsets = p->offsets, .count = p->count, .touched = calloc(p->count, 1)};
    if (!p->offsets || !p->states || !p->row || !p->paths || !p->ahead.touched) return false;
    const char *path = (const char *)p->places + (size_t)PACKED_PLACE * p->count, *end = (const char *)head + p->mapped;
    for (uint32_t i = 0; i < head->packs; i++) {
        const char *nul = memchr(path, 0, (size_t)(end - path));
        if (!nul) return false;
        p->paths[i] = path;
        path = nul + 1;
    }
    uint64_t at = 0;
    for (uint32_t i = 0; i < p->count; i++) {
        uint32_t size, pack;
        memcpy(&size, p->digests + (size_t)i * PACKED_CHUNK, sizeof size);
        memcpy(&pack, p->places + (size_t)i * PACKED_PLACE, sizeof pack);
        if (!size || size > COPIER_PIECE || size % BLOCK || pack >= head->packs) return false;
        p->offsets[i] = at;
        at += size;
    }
    p->offsets[p->count] = at;
    if (at != head->data_bytes) return false;
    for (uint32_t i = 0; i < p->count; i++) p->left -= has(p, i);
    for (uint32_t i = 0; i < head->ahead; i++)
        if (wanted[i] < p->count) queue(p, (struct ahead_range){wanted[i], wanted[i] + 1});
    return true;
}

bool begin_plan(uint32_t blob, int files[3]) {
    struct plan *p = calloc(1, sizeof *p);
    if (!p) return false;
    p->blob = blob;
    p->head = map(files[0], &p->mapped);
    p->bits = map(files[2], &p->bits_size);
    p->data = files[1];
    files[1] = -1;
    pthread_mutex_lock(&lock);
    bool good = holder >= 0 && p->head != MAP_FAILED && p->bits != MAP_FAILED && !find(blob) && read_plan(p);
    if (good) p->next = plans, plans = p;
    pthread_mutex_unlock(&lock);
    if (good) tell_holder(blob, true);
    else destroy(p);
    return good;
}

void withdraw_plan(uint32_t blob) {
    pthread_mutex_lock(&lock);
    struct plan **link = &plans;
    while (*link && (*link)->blob != blob) link = &(*link)->next;
    struct plan *p = *link;
    if (p) {
        *link = p->next; /* nobody finds it any more */
        tell_holder(blob, false);
        while (p->users) pthread_cond_wait(&landed, &lock);
        destroy(p);
    }
    pthread_mutex_unlock(&lock);
}

void start_serving(void) {
    for (int i = 0; i < COPIER_THREADS; i++) start_thread(answer);
    for (int i = 0; i < COPIER_STREAMS; i++) start_thread(fetch_ahead);
}
