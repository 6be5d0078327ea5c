/* Field lists of requests (START, SPAWN) and OPSTATE, and the assembly of requests that span frames.
 *
 * Reading:   struct dsec_fields it = {data, data + size};
 *            while ((more = dsec_next_field(&it, &field)) > 0) ...
 * Writing:   struct dsec_writer w = {buffer, sizeof buffer};  dsec_put_u64(&w, TAG_PID, pid); ... if (w.overflow) ...
 * Assembly:  dsec_request_add() for each frame of a request; when its DSEC_F_MORE is clear, the fields are request.data.
 */
#ifndef DSEC_FIELDS_H
#define DSEC_FIELDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wire.h"

#define DSEC_FIELD_HEADER 8

struct dsec_field {
    uint16_t tag;
    uint32_t length;
    const uint8_t *data; /* points into the list */
};

struct dsec_fields {
    const uint8_t *at, *end;
};

/* 1 and the next field; 0 at the end; -EPROTO where the list is cut or malformed (it then stays at an error). */
int dsec_next_field(struct dsec_fields *list, struct dsec_field *field);

/* The value of an integer field; -EPROTO where it isn't 8 bytes. */
int dsec_field_u64(const struct dsec_field *field, uint64_t *value);

/* The value of a text field, copied with a NUL behind it into `out`; -ENAMETOOLONG where it doesn't fit, -EINVAL where it is empty or
 * holds a NUL (so that no later reader sees a shorter string than was checked). */
int dsec_field_text(const struct dsec_field *field, char *out, size_t capacity);

struct dsec_writer {
    uint8_t *buffer;
    size_t capacity, used;
    bool overflow; /* something did not fit: `used` stays as it was before it */
};

void dsec_put_field(struct dsec_writer *writer, uint16_t tag, const void *data, size_t length);
void dsec_put_u64(struct dsec_writer *writer, uint16_t tag, uint64_t value);

struct dsec_request {
    uint64_t op;
    uint8_t *data; /* NULL: none in the making */
    size_t size, capacity;
};

/* Append a frame's payload. -E2BIG beyond DSEC_MAX_REQUEST, -ENOMEM; the request is then freed. One byte behind the data is
 * allocated too, for whoever wants to end strings in place. */
int dsec_request_add(struct dsec_request *request, const uint8_t *payload, size_t size);
void dsec_request_free(struct dsec_request *request);

#endif
