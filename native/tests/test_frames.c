/* Unit tests of native/common. Exits with the number of failures. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "fields.h"
#include "frame.h"

static int failures;
#define CHECK(condition)                                                                                                       \
    do {                                                                                                                       \
        if (!(condition)) {                                                                                                    \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                    \
            failures++;                                                                                                        \
        }                                                                                                                      \
    } while (0)

static void integers(void) {
    uint8_t bytes[9];
    put_u16(bytes + 1, 0xfedc);
    CHECK(bytes[1] == 0xdc && bytes[2] == 0xfe && get_u16(bytes + 1) == 0xfedc);
    put_u32(bytes + 1, 0x89abcdef);
    CHECK(bytes[1] == 0xef && bytes[4] == 0x89 && get_u32(bytes + 1) == 0x89abcdef);
    put_u64(bytes + 1, 0xfedcba9876543210);
    CHECK(bytes[1] == 0x10 && bytes[8] == 0xfe && get_u64(bytes + 1) == 0xfedcba9876543210);
}

static int header_of(uint32_t size, uint8_t type, uint8_t flags) {
    uint8_t bytes[DSEC_HEADER_SIZE];
    struct dsec_header header = {size, type, flags, 0x1122334455667788}, back;
    dsec_put_header(bytes, &header);
    int error = dsec_get_header(bytes, &back);
    CHECK(back.size == size && back.type == type && back.flags == flags && back.op == header.op);
    return error;
}

static void headers(void) {
    CHECK(header_of(16, DSEC_HELLO, 0) == 0);
    CHECK(header_of(15, DSEC_HELLO, 0) == -EPROTO);
    CHECK(header_of(17, DSEC_HELLO, 0) == -EPROTO);
    CHECK(header_of(0, DSEC_START, DSEC_F_MORE) == 0);
    CHECK(header_of(DSEC_MAX_PAYLOAD, DSEC_START, 0) == 0);
    CHECK(header_of(DSEC_MAX_PAYLOAD + 1, DSEC_START, 0) == -EPROTO);
    CHECK(header_of(UINT32_MAX, DSEC_START, 0) == -EPROTO);
    CHECK(header_of(8 + DSEC_MAX_DATA, DSEC_OUT, DSEC_F_STDERR) == 0);
    CHECK(header_of(9 + DSEC_MAX_DATA, DSEC_OUT, 0) == -EPROTO);
    CHECK(header_of(8, DSEC_OUT, DSEC_F_EOF) == -EPROTO);
    CHECK(header_of(0, 0, 0) == -EPROTO);
    CHECK(header_of(0, 255, 0) == -EPROTO);

    uint8_t packet[DSEC_HEADER_SIZE + 9] = {0};
    struct dsec_header header;
    dsec_put_header(packet, &(struct dsec_header){8, DSEC_PING, 0, 0});
    for (size_t size = 0; size <= sizeof packet; size++) {
        CHECK(dsec_get_packet(packet, size, &header) == (size == DSEC_HEADER_SIZE + 8 ? 0 : -EPROTO));
    }
    packet[6] = 1; /* reserved */
    CHECK(dsec_get_packet(packet, DSEC_HEADER_SIZE + 8, &header) == -EPROTO);
}

static void exits(void) {
    struct dsec_exit out = {END_TIMEOUT, STAGE_FILE, EXIT_TRUNCATED, 0, -5, 1, 2, 3, 4, 5, 6, 0}, back;
    uint8_t bytes[DSEC_EXIT_SIZE];
    CHECK(sizeof out == DSEC_EXIT_SIZE);
    dsec_put_exit(bytes, &out);
    dsec_get_exit(bytes, &back);
    CHECK(memcmp(&out, &back, sizeof out) == 0);
}

static void fields(void) {
    uint8_t buffer[64];
    struct dsec_writer writer = {buffer, 0, 0, false};
    dsec_put_u64(&writer, TAG_MODE, 1);
    CHECK(writer.overflow && writer.used == 0);
    writer = (struct dsec_writer){buffer, 15, 0, false};
    dsec_put_u64(&writer, TAG_MODE, 1);
    CHECK(writer.overflow && writer.used == 0);
    writer = (struct dsec_writer){buffer, sizeof buffer, 0, false};
    dsec_put_u64(&writer, TAG_MODE, 0644);
    dsec_put_field(&writer, TAG_ARGV, "", 0);
    dsec_put_field(&writer, TAG_PATH, "/a", 2);
    CHECK(!writer.overflow && writer.used == 16 + 8 + 10);

    for (size_t size = 0; size <= writer.used; size++) {
        /* An exact copy, so that a sanitizer sees any step beyond the end. */
        uint8_t *exact = malloc(size ? size : 1);
        memcpy(exact, buffer, size);
        struct dsec_fields list = {exact, exact + size};
        struct dsec_field field;
        int count = 0, more;
        while ((more = dsec_next_field(&list, &field)) > 0) count++;
        bool whole = size == 0 || size == 16 || size == 24 || size == writer.used;
        CHECK(more == (whole ? 0 : -EPROTO));
        CHECK(whole || dsec_next_field(&list, &field) == -EPROTO);
        CHECK(count == (size < 16 ? 0 : size < 24 ? 1 : size < writer.used ? 2 : 3));
        free(exact);
    }

    struct dsec_field text = {TAG_PATH, 2, (const uint8_t *)"/a"};
    char out[3];
    uint64_t number;
    CHECK(dsec_field_text(&text, out, 3) == 0 && strcmp(out, "/a") == 0);
    CHECK(dsec_field_text(&text, out, 2) == -ENAMETOOLONG);
    text.data = (const uint8_t *)"/\0";
    CHECK(dsec_field_text(&text, out, 3) == -EINVAL);
    text.length = 0;
    CHECK(dsec_field_text(&text, out, 3) == -EINVAL);
    CHECK(dsec_field_u64(&text, &number) == -EPROTO);
}

static void requests(void) {
    struct dsec_request request = {0};
    static uint8_t part[DSEC_MAX_PAYLOAD];
    memset(part, 7, sizeof part);
    size_t total = 0;
    while (total + sizeof part <= DSEC_MAX_REQUEST) {
        CHECK(dsec_request_add(&request, part, sizeof part) == 0);
        total += sizeof part;
    }
    CHECK(dsec_request_add(&request, part, DSEC_MAX_REQUEST - total) == 0);
    CHECK(request.size == DSEC_MAX_REQUEST && request.data[DSEC_MAX_REQUEST - 1] == 7);
    request.data[request.size] = 0; /* the spare byte */
    CHECK(dsec_request_add(&request, part, 0) == 0);
    CHECK(dsec_request_add(&request, part, 1) == -E2BIG && request.data == NULL && request.size == 0);
    CHECK(dsec_request_add(&request, part, 0) == 0);
    dsec_request_free(&request);
}

int main(void) {
    integers();
    headers();
    exits();
    fields();
    requests();
    return failures;
}
