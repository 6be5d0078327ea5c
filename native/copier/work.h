/* What the copier's two parts share: jobs of the filler's (main.c, whole.c), and layers that are served without it (serve.c). */
#ifndef DSEC_COPIER_WORK_H
#define DSEC_COPIER_WORK_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "copier.h"

#define FILLER 0
#define OF_PLANS (1ull << 63) /* jobs with it are ours, not the filler's */

/* What a job needs while it is done. The one that was used last is used next: it is in the processor's cache. */
struct worker {
    struct worker *next;
    void *context;
    uint64_t job;
    int nice;
    pid_t thread;
    unsigned char data[COPIER_PIECE];
};

/* The holder's socket; -1: there is none. */
extern int holder;

struct worker *take(uint64_t job, int nice);
/* Returns the priority that the thread has now. */
int give(struct worker *w);
/* One that isn't begun, or is done, is left as it is. */
void hasten(uint64_t job, int nice);
/* Verified, then written. False: `done` says why. */
bool copy_chunk(const struct copier_chunk *chunk, uint64_t offset, int source, int target, struct worker *w, struct copier_done *done);
/* The whole of the chunk, of any size; the digest is in the worker's context then. */
bool copy_digested(const struct copier_chunk *chunk, uint64_t offset, int source, int target, struct worker *w, struct copier_done *done);
void start_helping(void);
void start_thread(void *(*function)(void *));

bool start_digest(struct worker *w);
bool add_digest(struct worker *w, const unsigned char *data, size_t size);
bool read_piece(int fd, unsigned char *data, size_t size, uint64_t offset, struct copier_done *done);
bool write_at(int fd, const unsigned char *data, size_t size, uint64_t offset);
/* Always false. */
bool failed(struct copier_done *done, enum copier_where where, int error);

/* Begin to serve. */
void start_serving(void);
/* `files`: plan, data, bitmap; what is kept of them is taken out. False: it isn't a plan. */
bool begin_plan(uint32_t blob, int files[3]);
/* Returns when nothing of it is on its way. */
void withdraw_plan(uint32_t blob);
#endif
