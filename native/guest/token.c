/* The token that begins each edge's stream, where a channel is one stream for the whole life of a machine (wire.h, STREAMS). */
#include <string.h>

#include "bytes.h"
#include "guest.h"

static struct {
    bool there; /* the channel is one stream for the whole life of this machine */
    uint8_t bytes[DSEC_TOKEN_SIZE];
    size_t matched; /* so much of it were the last bytes received */
} token;

bool token_there(void) { return token.there; }

void channel_token(const uint8_t bytes[DSEC_TOKEN_SIZE]) {
    memcpy(token.bytes, bytes, DSEC_TOKEN_SIZE);
    token.there = true;
}

/* Where the token ends in what was received; 0: not in it. It may have begun in what was received before. */
size_t token_find(const uint8_t *data, size_t size) {
    for (size_t at = 0; at < size;) {
        if (token.matched == 0) {
            const uint8_t *first = memchr(data + at, token.bytes[0], size - at);
            if (!first) return 0;
            at = (size_t)(first - data) + 1;
            token.matched = 1;
        } else if (data[at] != token.bytes[token.matched]) {
            token.matched = 0; /* its first byte is none of its others, so that it begins here or later */
        } else if (at++, ++token.matched == DSEC_TOKEN_SIZE) {
            token.matched = 0;
            return at;
        }
    }
    return 0;
}
