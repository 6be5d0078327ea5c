#include <stdbool.h>
#include <string.h>

#include "ahead.h"

#define CHUNK (256u << 10)
#define FIRST_WINDOW (256ull << 10)
#define LAST_WINDOW (4ull << 20)
#define SMALL_FILE (2ull << 20)
#define FILE_MOST (16ull << 20)
#define ONCE 1
#define WHOLE 2

static const struct ahead_range nothing = {0, 0};

static bool full(const struct ahead *a, uint32_t i) {
    return a->offsets[i + 1] - a->offsets[i] == CHUNK;
}

struct ahead_range ahead_file(struct ahead *a, uint32_t index) {
    uint32_t first = index, last = index;
    while (first && full(a, first - 1) && last - first <= FILE_MOST / CHUNK) first--;
    while (full(a, last) && last + 1 < a->count && last - first <= FILE_MOST / CHUNK) last++;
    uint64_t size = a->offsets[last + 1] - a->offsets[first];
    if (first == last || size > FILE_MOST || (a->touched[first] & WHOLE)) return nothing;
    bool whole = (a->touched[first] & ONCE) || size <= SMALL_FILE;
    a->touched[first] |= whole ? WHOLE : ONCE;
    return whole ? (struct ahead_range){first, last + 1} : nothing;
}

struct ahead_range ahead_read(struct ahead *a, uint32_t first, uint32_t last) {
    int i = 0;
    for (; i < a->streams; i++) {
        const struct ahead_stream *s = &a->stream[i];
        if (s->after <= last + 1 && first <= (s->after > s->ahead ? s->after : s->ahead)) break;
    }
    bool fresh = i == a->streams;
    if (fresh && a->streams < AHEAD_STREAMS) a->streams++;
    else if (fresh) i = 0;
    struct ahead_stream found = fresh ? (struct ahead_stream){first, last + 1, last + 1} : a->stream[i];
    memmove(&a->stream[i], &a->stream[i + 1], (size_t)(a->streams - 1 - i) * sizeof found);
    struct ahead_stream *s = &a->stream[a->streams - 1];
    *s = found;
    if (fresh || last + 1 == s->after) return nothing;
    s->after = last + 1;
    if (s->after >= a->count) return nothing;
    uint64_t read = a->offsets[s->after] - a->offsets[s->first];
    uint64_t window = read < FIRST_WINDOW ? FIRST_WINDOW : read > LAST_WINDOW ? LAST_WINDOW : read;
    uint32_t begin = s->after > s->ahead ? s->after : s->ahead, end = s->after;
    while (end < a->count && a->offsets[end] < a->offsets[s->after] + window) end++;
    if (s->ahead > s->after && a->offsets[s->ahead] - a->offsets[s->after] > window / 2) return nothing;
    if (end > s->ahead) s->ahead = end;
    return begin < end ? (struct ahead_range){begin, end} : nothing;
}
