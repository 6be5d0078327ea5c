/* Which chunks to fetch beyond those that a read needs: the decisions of `store/lazy/readahead.py`, which says why they are so. Each is the same as
 * its twin there, for which a test looks. */
#ifndef DSEC_COPIER_AHEAD_H
#define DSEC_COPIER_AHEAD_H
#include <stdint.h>

#define AHEAD_STREAMS 16

struct ahead_stream {
    uint32_t first, after, ahead;
};

/* Of one layer. */
struct ahead {
    const uint64_t *offsets; /* of its chunks, and the end */
    uint32_t count;
    unsigned char *touched; /* of each chunk, zeroes at first */
    int streams;
    struct ahead_stream stream[AHEAD_STREAMS]; /* the oldest first */
};

struct ahead_range {
    uint32_t begin, end;
};

/* The whole file of a chunk that is read, or nothing. */
struct ahead_range ahead_file(struct ahead *a, uint32_t index);
/* Ahead of a reader that goes on from where it was, or nothing. Both inclusive. */
struct ahead_range ahead_read(struct ahead *a, uint32_t first, uint32_t last);
#endif
