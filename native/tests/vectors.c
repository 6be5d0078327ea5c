/* The C codec as a filter, so that another one can be compared with it. A line in, a line out; bytes are in hex, "-" is none.
 *
 *   packet HEX                   -> ok TYPE FLAGS OP PAYLOAD, or error
 *   fields HEX                   -> ok TAG:BYTES ..., or error
 *   exit HEX                     -> the record, decoded and encoded again
 *   frame TYPE FLAGS OP PAYLOAD  -> HEX
 *   field TAG HEX                -> HEX
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fields.h"
#include "frame.h"

static uint8_t *unhex(const char *text, size_t *size) {
    *size = text && strcmp(text, "-") != 0 ? strlen(text) / 2 : 0;
    uint8_t *bytes = malloc(*size ? *size : 1);
    for (size_t i = 0; i < *size; i++) {
        unsigned value;
        if (sscanf(text + 2 * i, "%2x", &value) != 1) exit(2);
        bytes[i] = (uint8_t)value;
    }
    return bytes;
}

static void hex(const uint8_t *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) printf("%02x", bytes[i]);
    if (size == 0) printf("-");
}

static void packet(const uint8_t *bytes, size_t size) {
    struct dsec_header header;
    if (dsec_get_packet(bytes, size, &header)) {
        printf("error");
        return;
    }
    printf("ok %u %u %" PRIu64 " ", header.type, header.flags, header.op);
    hex(bytes + DSEC_HEADER_SIZE, header.size);
}

static void fields(const uint8_t *bytes, size_t size) {
    struct dsec_fields list = {bytes, bytes + size}, again = list;
    struct dsec_field field;
    int more;
    while ((more = dsec_next_field(&list, &field)) > 0) {}
    printf(more ? "error" : "ok");
    while (!more && dsec_next_field(&again, &field) > 0) {
        printf(" %u:", field.tag);
        hex(field.data, field.length);
    }
}

static void exit_record(const uint8_t *bytes, size_t size) {
    struct dsec_exit record;
    uint8_t out[DSEC_EXIT_SIZE];
    if (size != DSEC_EXIT_SIZE) exit(2);
    dsec_get_exit(bytes, &record);
    dsec_put_exit(out, &record);
    hex(out, sizeof out);
}

int main(void) {
    char *line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, stdin) > 0) {
        line[strcspn(line, "\n")] = 0;
        char *word[5] = {0};
        size_t count = 0, size;
        for (char *at = strtok(line, " "); at && count < 5; at = strtok(NULL, " ")) word[count++] = at;
        if (count < 2) return 2;
        uint8_t *bytes = unhex(word[count - 1], &size);
        if (strcmp(word[0], "packet") == 0) {
            packet(bytes, size);
        } else if (strcmp(word[0], "fields") == 0) {
            fields(bytes, size);
        } else if (strcmp(word[0], "exit") == 0) {
            exit_record(bytes, size);
        } else if (strcmp(word[0], "frame") == 0 && count == 5) {
            uint8_t head[DSEC_HEADER_SIZE];
            struct dsec_header header = {(uint32_t)size, (uint8_t)atoi(word[1]), (uint8_t)atoi(word[2]), strtoull(word[3], NULL, 10)};
            dsec_put_header(head, &header);
            hex(head, sizeof head);
            if (size) hex(bytes, size);
        } else if (strcmp(word[0], "field") == 0 && count == 3) {
            struct dsec_writer writer = {malloc(size + DSEC_FIELD_HEADER), size + DSEC_FIELD_HEADER, 0, false};
            dsec_put_field(&writer, (uint16_t)atoi(word[1]), bytes, size);
            hex(writer.buffer, writer.used);
            free(writer.buffer);
        } else {
            return 2;
        }
        printf("\n");
        free(bytes);
    }
    free(line);
    return 0;
}
