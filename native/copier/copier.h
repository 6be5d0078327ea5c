/* The copier: brings chunks from files of a store into files of the cache, verified. A child of the filler, which decides what is fetched; it ends
 * with it. It keeps nothing: each job names the object's file and the chunks, and brings the target's descriptor along.
 *
 * A chunk of up to COPIER_PIECE is written only after its SHA-256 was found to be the one that the job says; of a larger one (a metadata image, whose file
 * nobody else sees yet) each piece is written as it is read, and after an error what was written is worth nothing.
 *
 * SOCKET. SOCK_SEQPACKET at descriptor 0, native byte order (never leaves the host). To it a `copier_job`, `count` times `copier_chunk`, the path with
 * its NUL, and SCM_RIGHTS {target}; from it a `copier_done` for each job, in any order.
 */
#ifndef DSEC_COPIER_H
#define DSEC_COPIER_H
#include <stdint.h>

#define COPIER_CHUNKS 256       /* of one job */
#define COPIER_PIECE (256 << 10)
#define COPIER_THREADS 16

enum copier_where {
    COPIER_COPIED = 0,
    COPIER_SOURCE = 1, /* it can't be opened or read: error */
    COPIER_SHORT = 2,  /* it ends too early */
    COPIER_WRONG = 3,  /* the chunk `copied` has another digest */
    COPIER_TARGET = 4, /* it can't be written: error */
    COPIER_REFUSED = 5, /* not a job */
};

struct copier_job {
    uint64_t id;
    uint64_t token;  /* a read that waits for just this, which the holder is told of; 0: none */
    uint64_t offset; /* of the first chunk in the source; the others follow */
    uint32_t count, path_bytes;
    int32_t nice; /* of the thread while it does this; from 0 on: nobody waits for it */
    uint32_t zero;
};

struct copier_chunk {
    uint64_t target; /* offset */
    uint32_t size, zero;
    uint8_t digest[32];
};

struct copier_done {
    uint64_t id;
    uint32_t where;
    int32_t error;
    uint32_t copied; /* chunks */
    uint32_t told;   /* the holder knows */
};
#endif
