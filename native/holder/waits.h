/* The reads that wait: a table of slots that a successor inherits, and beside it, of this process alone, who waits for what.
 *
 * A READER is a pid namespace: one sandbox, or the host. One may have PER_READER reads that wait, further ones fail; ASKED of them are at the
 * fillers at a time, the others stand in a row of its own. So no sandbox takes the slots or the fillers from the others.
 */
#ifndef DSEC_WAITS_H
#define DSEC_WAITS_H
#include <stdbool.h>
#include <stdint.h>

#define SLOTS 32768
#define PER_READER 2048
#define ASKED 64
#define BUCKETS 4096
#define NOBODY (-1)

/* Room for one event with its range, and not for two: a read takes as many as fit. */
#define EVENT_SIZE 64

/* A read that waits. `fd` < 0: the slot is free. */
struct slot {
    int32_t fd, filler;
    uint64_t dev, ino, offset, count, deadline_ms, serial;
};

/* Shared with a successor. `arriving` holds an event from before the kernel hands it over until it is in a slot. */
struct table {
    uint64_t magic, serial;
    uint8_t arriving[EVENT_SIZE] __attribute__((aligned(8)));
    struct slot slots[SLOTS];
};

extern struct table *table;
extern int waiting;
/* As many may wait at most; one reader has half of them, or PER_READER. */
extern int most_waiting;
/* Slots beyond it were never used. */
extern int highest;

/* Map the table at `fd` (a new one, or a predecessor's). False: it is another version's, errno 0, or errno says. An older one that was smaller
 * is copied into `fd`. */
bool open_waits(int fd, bool fresh);
/* A slot for a read of `pid`, in its reader's row, still without a descriptor; NULL: the reader has too many. */
struct slot *new_slot(int pid);
/* A predecessor's slot is in nobody's row yet. */
void adopt_slot(struct slot *s);
/* It is answered. Its descriptor is closed by the caller. */
void free_slot(struct slot *s);
/* A filler has it / has it no more. */
void asked(struct slot *s, int filler);
void not_asked(struct slot *s);
/* Who serves its blob could not. A successor of this process forgets that. */
void pass_slot(struct slot *s);
bool was_passed(const struct slot *s);
/* Call `ask` for those in rows that may be asked now: of the reader of `s`, or of all. It calls `asked` or `free_slot`, or leaves the slot
 * where it is. */
void advance(const struct slot *s, void (*ask)(struct slot *));
void advance_all(void (*ask)(struct slot *));
#endif
