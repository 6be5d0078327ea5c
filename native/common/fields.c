#include "fields.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"

int dsec_next_field(struct dsec_fields *list, struct dsec_field *field) {
    size_t left = (size_t)(list->end - list->at);
    if (left == 0) return 0;
    if (left < DSEC_FIELD_HEADER || get_u16(list->at + 2) != 0) return -EPROTO;
    uint32_t length = get_u32(list->at + 4);
    if (length > left - DSEC_FIELD_HEADER) return -EPROTO;
    field->tag = get_u16(list->at);
    field->length = length;
    field->data = list->at + DSEC_FIELD_HEADER;
    list->at = field->data + length;
    return 1;
}

int dsec_field_u64(const struct dsec_field *field, uint64_t *value) {
    if (field->length != 8) return -EPROTO;
    *value = get_u64(field->data);
    return 0;
}

int dsec_field_text(const struct dsec_field *field, char *out, size_t capacity) {
    if (field->length == 0 || memchr(field->data, 0, field->length)) return -EINVAL;
    if (field->length >= capacity) return -ENAMETOOLONG;
    memcpy(out, field->data, field->length);
    out[field->length] = 0;
    return 0;
}

void dsec_put_field(struct dsec_writer *writer, uint16_t tag, const void *data, size_t length) {
    size_t left = writer->capacity - writer->used;
    if (length > UINT32_MAX || left < DSEC_FIELD_HEADER || length > left - DSEC_FIELD_HEADER) {
        writer->overflow = true;
        return;
    }
    uint8_t *at = writer->buffer + writer->used;
    put_u16(at, tag);
    put_u16(at + 2, 0);
    put_u32(at + 4, (uint32_t)length);
    if (length) memcpy(at + DSEC_FIELD_HEADER, data, length);
    writer->used += DSEC_FIELD_HEADER + length;
}

void dsec_put_u64(struct dsec_writer *writer, uint16_t tag, uint64_t value) {
    uint8_t bytes[8];
    put_u64(bytes, value);
    dsec_put_field(writer, tag, bytes, sizeof bytes);
}

int dsec_request_add(struct dsec_request *request, const uint8_t *payload, size_t size) {
    int error = 0;
    if (size > DSEC_MAX_REQUEST - request->size) error = -E2BIG;
    if (!error && request->size + size + 1 > request->capacity) {
        size_t capacity = request->capacity * 2;
        if (capacity < request->size + size + 1) capacity = request->size + size + 1;
        uint8_t *grown = realloc(request->data, capacity);
        if (grown) {
            request->data = grown;
            request->capacity = capacity;
        } else {
            error = -ENOMEM;
        }
    }
    if (error) {
        dsec_request_free(request);
        return error;
    }
    if (size) memcpy(request->data + request->size, payload, size);
    request->size += size;
    return 0;
}

void dsec_request_free(struct dsec_request *request) {
    free(request->data);
    *request = (struct dsec_request){0};
}
