/* Lists and bounded byte queues. */
#include <stdlib.h>
#include <string.h>

#include "guest.h"

#define SMALLEST 4096u

void list_init(struct link *list) { list->previous = list->next = list; }

bool list_empty(const struct link *list) { return list->next == list; }

void list_append(struct link *list, struct link *link) {
    if (link->next) return;
    link->previous = list->previous;
    link->next = list;
    list->previous->next = link;
    list->previous = link;
}

void list_remove(struct link *link) {
    if (!link->next) return;
    link->previous->next = link->next;
    link->next->previous = link->previous;
    link->previous = link->next = NULL;
}

struct link *list_pop(struct link *list) {
    if (list_empty(list)) return NULL;
    struct link *first = list->next;
    list_remove(first);
    return first;
}

static void pieces(const struct ring *ring, uint64_t from, size_t size, struct iovec out[2]) {
    size_t at = from & (ring->capacity - 1);
    size_t first = MIN(size, ring->capacity - at);
    out[0] = (struct iovec){ring->data + at, first};
    out[1] = (struct iovec){ring->data, size - first};
}

/* Out of memory ends the sandbox: pid 1 cannot keep its promises without it, and the edge then says why. */
static void reserve(struct ring *ring, size_t size) {
    size_t used = ring->end - ring->base;
    if (used + size <= ring->capacity) return;
    uint32_t capacity = ring->capacity ? ring->capacity : SMALLEST;
    while (capacity < used + size) capacity *= 2;
    struct ring grown = {malloc(capacity), capacity, ring->base, ring->base};
    if (!grown.data) shut_down(70);
    if (used) {
        struct iovec old[2];
        pieces(ring, ring->base, used, old);
        ring_put(&grown, old[0].iov_base, old[0].iov_len);
        ring_put(&grown, old[1].iov_base, old[1].iov_len);
    }
    free(ring->data);
    *ring = grown;
}

void ring_space(struct ring *ring, size_t size, struct iovec space[2]) {
    if (size == 0) {
        space[0] = space[1] = (struct iovec){0};
        return;
    }
    reserve(ring, size);
    pieces(ring, ring->end, size, space);
}

void ring_data(const struct ring *ring, uint64_t from, size_t size, struct iovec data[2]) { pieces(ring, from, size, data); }

void ring_put(struct ring *ring, const uint8_t *data, size_t size) {
    if (size == 0) return;
    struct iovec space[2];
    ring_space(ring, size, space);
    memcpy(space[0].iov_base, data, space[0].iov_len);
    if (space[1].iov_len) memcpy(space[1].iov_base, data + space[0].iov_len, space[1].iov_len);
    ring->end += size;
}

void ring_forget(struct ring *ring, uint64_t below) {
    if (below > ring->base) ring->base = below;
    if (ring->base != ring->end || !ring->data) return;
    trim_soon();
    free(ring->data);
    ring->data = NULL;
    ring->capacity = 0;
}
