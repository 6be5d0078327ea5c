/* What of the guest's code stays translated in a branch that goes on as another machine was. */
#ifndef DSEC_STEM_TRANSLATED_H
#define DSEC_STEM_TRANSLATED_H

#include <stdint.h>
#include <sys/types.h>

void translated_begin(void);

/* Memory of the machine's is given back: its content may be another now. */
void translated_gone(void *at, size_t size);

/* In a branch: its memory from `start` to `end` is about to be what `fresh` has, in which the data of the file `layer` (-1: none) from `offset` on
 * lies over what the stem began with. */
void translated_compare(uint64_t start, uint64_t end, const uint8_t *fresh, int layer, off_t offset);

/* In a branch: what didn't change stays when it reads its state. */
void translated_keep(void);

#endif
