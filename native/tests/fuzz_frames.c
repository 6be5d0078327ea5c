/* Fuzzes the codec: what decodes must encode to the same bytes, and nothing may read beyond the input. */
#include "driver.h"

#include "bytes.h"
#include "fields.h"
#include "frame.h"

static void require(int condition) {
    if (!condition) abort();
}

static void fields(const uint8_t *data, size_t size) {
    struct dsec_fields list = {data, data + size};
    struct dsec_field field;
    struct dsec_writer writer = {malloc(size + 1), size, 0, false};
    char text[32];
    uint64_t number;
    int more;
    while ((more = dsec_next_field(&list, &field)) > 0) {
        dsec_put_field(&writer, field.tag, field.data, field.length);
        if (dsec_field_text(&field, text, sizeof text) == 0) require(strlen(text) == field.length);
        if (dsec_field_u64(&field, &number) == 0) require(number == get_u64(field.data));
    }
    require(!writer.overflow);
    require(more < 0 || writer.used == size);
    require(memcmp(writer.buffer, data, writer.used) == 0);
    free(writer.buffer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct dsec_header header;
    uint8_t again[DSEC_HEADER_SIZE];
    fields(data, size);
    if (dsec_get_packet(data, size, &header) == 0) {
        dsec_put_header(again, &header);
        require(memcmp(again, data, sizeof again) == 0);
        fields(data + DSEC_HEADER_SIZE, header.size);
    }
    struct dsec_request request = {0};
    for (size_t at = 0; at < size; at += 1 + data[at]) {
        size_t part = size - at < data[at] ? size - at : data[at];
        if (dsec_request_add(&request, data + at, part)) break;
    }
    dsec_request_free(&request);
    return 0;
}

#ifndef DSEC_LIBFUZZER
static size_t shape(uint8_t *out, size_t capacity) {
    size_t size = 0;
    if (below(2)) { /* a header in front */
        static const uint8_t TYPES[] = {1, 2, 3, 4, 5, 6, 7, 65, 66, 67, 68, 69, 70, 71, 72, 73, 129, 130, 131, 193, 195, 197, 199, 200};
        dsec_put_header(out, &(struct dsec_header){0, TYPES[below(sizeof TYPES)], (uint8_t)(1u << below(4)) & 7, random_u64()});
        size = DSEC_HEADER_SIZE;
    }
    for (uint64_t i = below(12); i > 0 && size + 300 < capacity; i--) {
        size_t length = below(3) ? 8 : below(200);
        put_u16(out + size, (uint16_t)below(90));
        put_u16(out + size + 2, below(20) == 0);
        put_u32(out + size + 4, below(20) ? (uint32_t)length : (uint32_t)random_u64());
        for (size_t at = 0; at < length; at++) out[size + 8 + at] = (uint8_t)random_u64();
        size += 8 + length;
    }
    if (size >= DSEC_HEADER_SIZE) put_u32(out, below(10) ? (uint32_t)(size - DSEC_HEADER_SIZE) : (uint32_t)random_u64());
    if (size && below(4) == 0) size -= below(size);
    if (size && below(4) == 0) out[below(size)] ^= (uint8_t)(1u << below(8));
    return size;
}
#endif
