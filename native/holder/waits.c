#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "waits.h"

#define TABLE_MAGIC 0x31444c4f48ull
#define UNKNOWN 0

/* `first`, `last`: its row, of slots that nobody was asked for. `next`: in its bucket, or among the free. */
struct reader {
    uint64_t key;
    int waiting, asked, first, last, next;
};

/* Beside a slot. `next`: in its reader's row, or among the free. */
struct beside {
    int reader, next;
    bool passed;
};

struct table *table;
int waiting, highest, most_waiting = SLOTS;
static struct reader readers[SLOTS];
static struct beside beside[SLOTS];
static int buckets[BUCKETS], spare_reader, spare_slot;

static int number(const struct slot *s) {
    return (int)(s - table->slots);
}

/* The reader's pid namespace: processes inside can't leave it, and can't make another. */
static uint64_t key_of(int pid) {
    char path[48];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%d/ns/pid", pid);
    return pid > 0 && stat(path, &st) == 0 ? (uint64_t)st.st_ino : UNKNOWN;
}

static struct reader *reader_of(uint64_t key) {
    int *bucket = &buckets[key % BUCKETS];
    for (int i = *bucket; i >= 0; i = readers[i].next)
        if (readers[i].key == key) return &readers[i];
    struct reader *r = &readers[spare_reader]; /* there are as many as slots */
    spare_reader = r->next;
    *r = (struct reader){.key = key, .first = -1, .last = -1, .next = *bucket};
    *bucket = (int)(r - readers);
    return r;
}

static void drop_reader(struct reader *r) {
    int *link = &buckets[r->key % BUCKETS];
    while (*link != r - readers) link = &readers[*link].next;
    *link = r->next;
    r->next = spare_reader;
    spare_reader = (int)(r - readers);
}

static void append(struct reader *r, int i) {
    beside[i].next = -1;
    if (r->last >= 0) beside[r->last].next = i;
    else r->first = i;
    r->last = i;
}

static void take_out(struct reader *r, int i) {
    int before = -1;
    for (int at = r->first; at != i; at = beside[at].next) before = at;
    if (before >= 0) beside[before].next = beside[i].next;
    else r->first = beside[i].next;
    if (r->last == i) r->last = before;
}

static void add_to(struct reader *r, int i) {
    beside[i].reader = (int)(r - readers);
    beside[i].passed = false;
    append(r, i);
    r->waiting++;
    waiting++;
    if (i >= highest) highest = i + 1;
}

bool open_waits(int fd, bool fresh) {
    struct stat st;
    if (fstat(fd, &st) < 0) return false;
    size_t had = fresh ? 0 : (size_t)st.st_size;
    if (had > sizeof *table || (!fresh && had < sizeof *table - sizeof table->slots)) return errno = 0, false;
    if (had < sizeof *table && ftruncate(fd, sizeof *table) < 0) return false; /* an older one had fewer slots */
    table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (table == MAP_FAILED) return false;
    if (fresh) table->magic = TABLE_MAGIC;
    if (table->magic != TABLE_MAGIC) return errno = 0, false;
    spare_reader = spare_slot = -1;
    for (int i = 0; i < BUCKETS; i++) buckets[i] = -1;
    for (int i = SLOTS - 1; i >= 0; i--) {
        if ((size_t)((char *)(&table->slots[i] + 1) - (char *)table) > had) table->slots[i] = (struct slot){.fd = -1, .filler = NOBODY};
        readers[i].next = spare_reader, spare_reader = i;
        if (table->slots[i].fd < 0) beside[i].next = spare_slot, spare_slot = i;
    }
    return true;
}

struct slot *new_slot(int pid) {
    struct reader *r = reader_of(key_of(pid));
    if (r->waiting >= PER_READER || r->waiting >= most_waiting / 2) return NULL;
    int i = spare_slot; /* the caller left one free */
    spare_slot = beside[i].next;
    add_to(r, i);
    return &table->slots[i];
}

void adopt_slot(struct slot *s) {
    s->filler = NOBODY;
    add_to(reader_of(UNKNOWN), number(s));
}

void free_slot(struct slot *s) {
    int i = number(s);
    struct reader *r = &readers[beside[i].reader];
    if (s->filler == NOBODY) take_out(r, i);
    else r->asked--;
    __atomic_store_n(&s->fd, -1, __ATOMIC_RELEASE);
    s->filler = NOBODY;
    beside[i].next = spare_slot, spare_slot = i;
    waiting--;
    if (!--r->waiting) drop_reader(r);
}

void asked(struct slot *s, int filler) {
    struct reader *r = &readers[beside[number(s)].reader];
    take_out(r, number(s));
    s->filler = filler;
    r->asked++;
}

void not_asked(struct slot *s) {
    struct reader *r = &readers[beside[number(s)].reader];
    s->filler = NOBODY;
    r->asked--;
    append(r, number(s));
}

void pass_slot(struct slot *s) {
    beside[number(s)].passed = true;
    not_asked(s);
}

bool was_passed(const struct slot *s) {
    return beside[number(s)].passed;
}

static void advance_reader(int reader, void (*ask)(struct slot *)) {
    for (int i = readers[reader].first, next; i >= 0 && readers[reader].asked < ASKED; i = next) {
        next = beside[i].next;
        ask(&table->slots[i]);
    }
}

void advance(const struct slot *s, void (*ask)(struct slot *)) {
    advance_reader(beside[number(s)].reader, ask);
}

void advance_all(void (*ask)(struct slot *)) {
    for (int i = 0; i < BUCKETS; i++)
        for (int reader = buckets[i], next; reader >= 0; reader = next) {
            next = readers[reader].next;
            advance_reader(reader, ask);
        }
}
