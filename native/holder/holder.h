/* The holder: owns the fanotify group of lazily loaded layers, the reads that wait, and their answers. One process, one thread. It knows no
 * store: fillers fetch, and may die at any moment; what they had not answered goes to the next one.
 *
 * A cache directory is bound to a second path, whose mount is marked for pre-content events: EROFS opens data blobs there, so each of its
 * reads asks first. Fillers open the same files at the first path and raise no events. A blob has a bitmap of chunks that are filled (bit 0
 * of byte 0 is chunk 0), mapped shared: a filler sets a bit when the data is written, and reads of filled chunks are allowed here at once.
 *
 * DEATH. Without a listener, holes would read as zeros. So whoever keeps this program running asks for TAKE and holds duplicates of the
 * group and of the table; readers then wait, and a successor is started with both. The table is shared memory: an
 * event is read into it, and stays in it until its answer is given. The number of an event's descriptor is its name towards the
 * kernel; a successor occupies the numbers that are open in the table before it reads new events. A table of a later version is given up: the reads
 * that wait in it fail, all others go on.
 *
 * SOCKET. SOCK_SEQPACKET, one struct a packet, native byte order (never leaves the host).
 */
#ifndef DSEC_HOLDER_H
#define DSEC_HOLDER_H
#include <stdint.h>

#define HOLDER_VERSION 3

enum holder_type {
    /* to the holder; each but FILL, DONE, SERVE and PASS is answered with OK or FAILED */
    HOLDER_ADD = 1,    /* a blob: id, dev, ino, size, chunk; SCM_RIGHTS {bitmap}. The same id again replaces it */
    HOLDER_REMOVE = 2, /* id: its waiting reads fail */
    HOLDER_FILL = 3,   /* this connection serves requests from now on */
    HOLDER_DONE = 4,   /* token, error (0, or the errno that the reader gets) */
    HOLDER_TAKE = 5,   /* answered with SCM_RIGHTS {group, table} */
    HOLDER_STATS = 6,
    HOLDER_STOP = 7,   /* exit: only when nothing is mounted from the marked path */
    HOLDER_COMPLETE = 8, /* id; SCM_RIGHTS {data}: all of it is there, its reads raise no events from now on */
    HOLDER_IDLE = 9,   /* id: milliseconds since a read of it asked, in `token` */
    HOLDER_REOPEN = 10, /* id; SCM_RIGHTS {data}: the opposite of COMPLETE; counts as a read of now (since version 2) */
    HOLDER_SERVE = 11, /* id: this connection, and no other, gets the requests of this blob from now on; count 0: no more (since version 3) */
    HOLDER_PASS = 12,  /* token: can't be served by who has the blob; a connection that said FILL is asked */

    /* from it */
    HOLDER_OK = 64,      /* STATS: token = reads answered without a filler, offset = by fillers, size = failed, count = waiting, chunk = HOLDER_VERSION */
    HOLDER_FAILED = 65,  /* error */
    HOLDER_REQUEST = 66, /* token, id, offset, count: fill this range, then DONE */
};

struct holder_message {
    uint32_t type, id;
    uint64_t token;
    uint64_t dev, ino;
    uint64_t offset, count, size;
    uint32_t chunk;
    int32_t error;
};
#endif
