/* Frames of the protocol in wire.h: headers, the table of what each type may carry, and the EXIT record. No I/O, no allocation.
 *
 * Receiving: take DSEC_HEADER_SIZE bytes, dsec_get_header(); take header.size more bytes; the frame is then well formed as far as a
 * single frame can be: known type, allowed flags, payload within the type's bounds. Payloads are read with bytes.h, requests with
 * fields.h. Functions return 0 or a negative errno.
 */
#ifndef DSEC_FRAME_H
#define DSEC_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "wire.h"

struct dsec_header {
    uint32_t size;
    uint8_t type, flags;
    uint64_t op;
};

void dsec_put_header(uint8_t out[DSEC_HEADER_SIZE], const struct dsec_header *header);

/* -EPROTO for an unknown type, a flag the type doesn't have, a payload outside the type's bounds, or a nonzero reserved field.
 * *header is filled in even then, for messages. */
int dsec_get_header(const uint8_t in[DSEC_HEADER_SIZE], struct dsec_header *header);

/* A whole packet of `size` bytes (SOCK_SEQPACKET): the header as above, and -EPROTO where the packet isn't exactly one frame. */
int dsec_get_packet(const uint8_t *packet, size_t size, struct dsec_header *header);

#define DSEC_EXIT_SIZE 64
void dsec_put_exit(uint8_t out[DSEC_EXIT_SIZE], const struct dsec_exit *exit);
void dsec_get_exit(const uint8_t in[DSEC_EXIT_SIZE], struct dsec_exit *exit);

#endif
