#include "frame.h"

#include <errno.h>
#include <stdbool.h>

#include "bytes.h"

#define MAX_DATA_PAYLOAD (8 + DSEC_MAX_DATA)
#define MAX_ID 40

struct rule {
    uint8_t flags; /* allowed */
    bool known;
    uint32_t min, max; /* payload */
};

static const struct rule RULES[256] = {
    [DSEC_HELLO] = {0, true, 16, 16},
    [DSEC_START] = {DSEC_F_MORE, true, 0, DSEC_MAX_PAYLOAD},
    [DSEC_STDIN] = {DSEC_F_EOF, true, 8, MAX_DATA_PAYLOAD},
    [DSEC_ACK] = {0, true, 16, 16},
    [DSEC_SIGNAL] = {0, true, 8, 8},
    [DSEC_RELEASE] = {0, true, 0, 0},
    [DSEC_PING] = {0, true, 8, 8},
    [DSEC_RESIZE] = {0, true, 4, 4},
    [DSEC_HOLD] = {0, true, 8, 8},
    [DSEC_CONFIGURE] = {0, true, 0, DSEC_MAX_PAYLOAD},
    [DSEC_WARM] = {0, true, 0, DSEC_MAX_PAYLOAD},
    [DSEC_HALT] = {0, true, 0, 0},
    [DSEC_AGAIN] = {0, true, 0, 0},

    [DSEC_WELCOME] = {0, true, 24, 24},
    [DSEC_OPSTATE] = {0, true, 0, DSEC_MAX_PAYLOAD},
    [DSEC_SYNCED] = {0, true, 0, 0},
    [DSEC_STARTED] = {0, true, 8, 8},
    [DSEC_OUT] = {DSEC_F_STDERR, true, 8, MAX_DATA_PAYLOAD},
    [DSEC_STDIN_ACK] = {0, true, 8, 8},
    [DSEC_EXIT] = {0, true, DSEC_EXIT_SIZE, DSEC_EXIT_SIZE},
    [DSEC_REFUSED] = {0, true, 8, DSEC_MAX_PAYLOAD},
    [DSEC_PONG] = {0, true, 16, 16},
    [DSEC_READY] = {0, true, 8, 8},
    [DSEC_CONFIGURED] = {0, true, 8, 8},
    [DSEC_STATUS] = {0, true, DSEC_STATUS_SIZE, DSEC_STATUS_SIZE},

    [DSEC_Z_HELLO] = {0, true, 8, 8},
    [DSEC_Z_SPAWN] = {DSEC_F_MORE, true, 0, DSEC_MAX_PAYLOAD},
    [DSEC_Z_ATTACH] = {0, true, 1, MAX_ID},
    [DSEC_Z_FORGET] = {0, true, 1, MAX_ID},
    [DSEC_Z_SHUTDOWN] = {0, true, 0, 0},
    [DSEC_Z_NETWORK] = {0, true, 1, MAX_ID},

    [DSEC_Z_WELCOME] = {0, true, 24, 24},
    [DSEC_Z_SANDBOX] = {0, true, 9, 8 + MAX_ID},
    [DSEC_Z_EXITED] = {0, true, 9, 8 + MAX_ID},
    [DSEC_Z_SYNCED] = {0, true, 0, 0},
    [DSEC_Z_SPAWNED] = {0, true, 40, 40},
    [DSEC_Z_ATTACHED] = {0, true, 8, 8},
    [DSEC_Z_FAILED] = {0, true, 8, DSEC_MAX_PAYLOAD},
    [DSEC_Z_OK] = {0, true, 0, 0},
};

void dsec_put_header(uint8_t out[DSEC_HEADER_SIZE], const struct dsec_header *header) {
    put_u32(out, header->size);
    out[4] = header->type;
    out[5] = header->flags;
    put_u16(out + 6, 0);
    put_u64(out + 8, header->op);
}

int dsec_get_header(const uint8_t in[DSEC_HEADER_SIZE], struct dsec_header *header) {
    header->size = get_u32(in);
    header->type = in[4];
    header->flags = in[5];
    header->op = get_u64(in + 8);
    const struct rule *rule = &RULES[header->type];
    if (!rule->known || (header->flags & ~rule->flags) || get_u16(in + 6) != 0) return -EPROTO;
    if (header->size < rule->min || header->size > rule->max) return -EPROTO;
    return 0;
}

int dsec_get_packet(const uint8_t *packet, size_t size, struct dsec_header *header) {
    if (size < DSEC_HEADER_SIZE) return -EPROTO;
    int error = dsec_get_header(packet, header);
    if (error) return error;
    return size - DSEC_HEADER_SIZE == header->size ? 0 : -EPROTO;
}

void dsec_put_exit(uint8_t out[DSEC_EXIT_SIZE], const struct dsec_exit *exit) {
    out[0] = exit->end;
    out[1] = exit->stage;
    out[2] = exit->flags;
    out[3] = 0;
    put_u32(out + 4, (uint32_t)exit->code);
    put_u64(out + 8, exit->cpu_us);
    put_u64(out + 16, exit->wall_us);
    put_u64(out + 24, exit->max_rss);
    put_u64(out + 32, exit->stdout_end);
    put_u64(out + 40, exit->stderr_end);
    put_u64(out + 48, exit->dropped);
    put_u64(out + 56, 0);
}

void dsec_get_exit(const uint8_t in[DSEC_EXIT_SIZE], struct dsec_exit *exit) {
    exit->end = in[0];
    exit->stage = in[1];
    exit->flags = in[2];
    exit->zero = 0;
    exit->code = (int)get_u32(in + 4);
    exit->cpu_us = get_u64(in + 8);
    exit->wall_us = get_u64(in + 16);
    exit->max_rss = get_u64(in + 24);
    exit->stdout_end = get_u64(in + 32);
    exit->stderr_end = get_u64(in + 40);
    exit->dropped = get_u64(in + 48);
    exit->reserved = get_u64(in + 56);
}
