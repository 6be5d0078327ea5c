/* The copier: brings chunks from files of a store into files of the cache, verified. A child of the filler, which decides what is fetched; it ends
 * with it. It keeps nothing: each job names the object's file and the chunks, and brings the target's descriptor along.
 *
 * A chunk is written only after its SHA-256 was found to be the one that the job says. A metadata image, whose file nobody else sees yet, is written as
 * it comes, in parts at the same time, and is worth nothing until all of it was digested.
 *
 * What nobody waits for is copied at a low priority and on half of the processors; when somebody begins to wait, the job is hastened.
 *
 * PLANS. A layer can be handed over whole: the copier then answers its reads itself, fetches ahead of them, and sets the bits of what
 * is filled, so that no reader waits for the filler's turn. While it has a plan nobody else writes that layer's data or bits; when COPIER_WITHDRAW is
 * answered nothing of it is on its way any more, and the filler may take data back. What can't be served (whatever the cause) is passed on by the
 * holder to the filler, which tries and tells. What came stands in the plan's journal, in shared memory, for the filler to read when it wants to know.
 *
 * SOCKET. SOCK_SEQPACKET at descriptor 0, native byte order (never leaves the host). To it a `copier_job`, `count` times `copier_chunk`, the path with
 * its NUL, and SCM_RIGHTS {target}; from it a `copier_done` for each packet, in any order.
 */
#ifndef DSEC_COPIER_H
#define DSEC_COPIER_H
#include <stdint.h>

#define COPIER_CHUNKS 256       /* of one job */
#define COPIER_PIECE (256 << 10)
#define COPIER_THREADS 16
#define COPIER_PARTS 16   /* of files that are copied whole */
#define COPIER_STREAMS 32 /* of all plans */

enum copier_kind {
    COPIER_COPY = 0,
    COPIER_WHOLE = 1, /* the one chunk, of any size, by `streams`; what is written is worth nothing where it isn't right */
    COPIER_TELL = 2,  /* the same, as far as the source goes, whatever it is: the digest is told */
    COPIER_HASTEN = 3, /* the job `token` is wanted at `nice` from now on. No chunks, no path */
    COPIER_PLAN = 4,   /* the holder's blob `token` is served from now on. SCM_RIGHTS {plan, data, bitmap}. No chunks, no path */
    COPIER_WITHDRAW = 5, /* it is no more. No chunks, no path */
};

enum copier_where {
    COPIER_COPIED = 0,
    COPIER_SOURCE = 1, /* it can't be opened or read: error */
    COPIER_SHORT = 2,  /* it ends too early */
    COPIER_WRONG = 3,  /* the chunk `copied` has another digest */
    COPIER_TARGET = 4, /* it can't be written: error */
    COPIER_REFUSED = 5, /* not a job */
    COPIER_ALL = 6,     /* no answer: nothing is missing any more of the plan of blob `copied` */
};

struct copier_job {
    uint64_t id;
    uint64_t token;  /* a read that waits for just this, which the holder is told of; 0: none */
    uint64_t offset; /* of the first chunk in the source; the others follow */
    uint32_t count, path_bytes;
    int32_t nice; /* of the thread while it does this; from 0 on: nobody waits for it */
    uint32_t kind;
};

struct copier_chunk {
    uint64_t target; /* offset */
    uint32_t size;
    uint32_t streams; /* of WHOLE and TELL: so many parts of it, 2 to COPIER_PARTS, are read at the same time */
    uint8_t digest[32];
};

/* At the start of a plan's memory, which has in this order: this; `count` times u32, the journal: chunks in the order in which they came, each plus 1; `ahead`
 * times u32: chunks to fetch before they are asked for; `count` times {u32 size, 32 bytes SHA-256}, as in the manifest; `count` times {u32 pack,
 * u64 offset}, packed, as in the placement; the packs' paths, each with its NUL. */
struct copier_plan {
    uint32_t noted; /* in the journal; the copier's to write, atomically */
    uint32_t count, ahead, packs;
    uint64_t data_bytes;
    uint32_t streams, zero; /* so many chunks are fetched ahead at the same time */
};

struct copier_done {
    uint64_t id;
    uint32_t where;
    int32_t error;
    uint32_t copied; /* chunks */
    uint32_t told;   /* the holder knows */
    uint8_t digest[32];
};
#endif
