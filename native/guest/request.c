/* START's fields, taken apart and checked as far as that is possible without looking at the sandbox. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "guest.h"

struct limit { /* numbers that are refused above it */
    uint16_t tag;
    uint64_t most;
};
static const struct limit LIMITS[] = {
    {TAG_KIND, DSEC_LOOK},
    {TAG_FLAGS, EF_STDIN | EF_KILL_LEFTOVERS | EF_MERGE | EF_PTY | EF_PATIENT},
    {TAG_FILE_FLAGS, FF_PARENTS | FF_RECURSIVE | FF_FOLLOW | FF_EXCL | FF_APPEND},
    {TAG_MODE, 07777},
    {TAG_OFFSET, INT64_MAX},
    {TAG_NOFILE, 1u << 30},
    {TAG_PTY_SIZE, UINT32_MAX},
    {TAG_PORT, UINT16_MAX},
};

static uint64_t *number_of(struct request *request, uint16_t tag) {
    switch (tag) {
    case TAG_FLAGS: return &request->flags;
    case TAG_FILE_FLAGS: return &request->file_flags;
    case TAG_TIMEOUT_MS: return &request->timeout_ms;
    case TAG_OUTPUT_CAP: return &request->output_cap;
    case TAG_MODE: return &request->mode;
    case TAG_OFFSET: return &request->offset;
    case TAG_LENGTH: return &request->length;
    case TAG_DEPTH: return &request->depth;
    case TAG_NOFILE: return &request->nofile;
    case TAG_PTY_SIZE: return &request->pty_size;
    case TAG_PORT: return &request->port;
    default: return NULL;
    }
}

static char **text_of(struct request *request, uint16_t tag) {
    switch (tag) {
    case TAG_ARGV: return &request->argv[request->argc++];
    case TAG_ENV: return &request->env[request->envc++];
    case TAG_CWD: return &request->cwd;
    case TAG_USER: return &request->user;
    case TAG_PATH: return &request->path;
    case TAG_PATH2: return &request->path2;
    default: return NULL;
    }
}

static int take_number(struct request *request, const struct dsec_field *field) {
    uint64_t value;
    if (dsec_field_u64(field, &value)) return -EPROTO;
    for (size_t i = 0; i < sizeof LIMITS / sizeof *LIMITS; i++) {
        if (LIMITS[i].tag == field->tag && value > LIMITS[i].most) return -EINVAL;
    }
    if (field->tag == TAG_KIND) {
        request->kind = (enum dsec_kind)value;
    } else {
        *number_of(request, field->tag) = value;
    }
    return 0;
}

/* Counts the list fields, so that their arrays can be made in one piece. */
static int count(const uint8_t *data, size_t size, size_t *argc, size_t *envc) {
    struct dsec_fields list = {data, data + size};
    struct dsec_field field;
    int more;
    *argc = *envc = 0;
    while ((more = dsec_next_field(&list, &field)) > 0) {
        if (field.tag < TAG_KIND || field.tag > TAG_PORT) return -EPROTO;
        *argc += field.tag == TAG_ARGV;
        *envc += field.tag == TAG_ENV;
    }
    return more;
}

static int complete(const struct request *request, const char **why) {
    *why = "a terminal is a command's";
    if (request->flags & EF_PTY ? request->kind != DSEC_EXEC : SEEN(request, TAG_PTY_SIZE)) return -EINVAL;
    if (request->kind == DSEC_EXEC) {
        *why = "ARGV is missing or its first is empty";
        if (request->argc == 0 || !*request->argv[0]) return -EINVAL;
        *why = "an ENV without a name";
        for (size_t i = 0; i < request->envc; i++) {
            const char *equals = strchr(request->env[i], '=');
            if (!equals || equals == request->env[i]) return -EINVAL;
        }
        return 0;
    }
    if (request->kind == DSEC_CONNECT) {
        *why = "one of PORT and PATH, please";
        return !request->path == !request->port ? -EINVAL : 0;
    }
    if (request->kind == DSEC_WAY_OUT) return 0;
    if (request->kind == DSEC_LOOK) {
        *why = "ARGV is missing";
        return request->argc ? 0 : -EINVAL;
    }
    *why = "PATH is missing";
    if (!request->path) return -EINVAL;
    *why = "PATH2 is missing";
    if (request->kind == DSEC_MOVE && !request->path2) return -EINVAL;
    return 0;
}

int request_parse(struct request *request, uint8_t *data, size_t size, const char **why) {
    *request = (struct request){0};
    size_t argc, envc;
    *why = "malformed or unknown fields";
    int error = count(data, size, &argc, &envc);
    if (error) return error;
    *why = "out of memory";
    request->argv = calloc(argc + 1, sizeof *request->argv);
    request->env = calloc(envc + 1 + ENV_ROOM, sizeof *request->env);
    if (!request->argv || !request->env) return -ENOMEM;

    struct dsec_fields list = {data, data + size};
    struct dsec_field field;
    uint8_t *end = NULL; /* of the string before: its NUL goes where this field's header began, now that it has been read */
    while (dsec_next_field(&list, &field) > 0) {
        if (end) *end = 0;
        end = NULL;
        bool repeated = SEEN(request, field.tag) && field.tag != TAG_ARGV && field.tag != TAG_ENV;
        *why = "a field that can come once came twice";
        if (repeated) return -EINVAL;
        request->seen |= 1ull << field.tag;
        if (field.tag == TAG_KEY) {
            *why = "KEY is empty or too long";
            if (field.length == 0 || field.length > DSEC_MAX_KEY) return -EINVAL;
            request->key = field.data;
            request->key_size = field.length;
            continue;
        }
        char **text = text_of(request, field.tag);
        if (!text) {
            *why = "a number that is malformed or out of its range";
            error = take_number(request, &field);
            if (error) return error;
            continue;
        }
        *why = "a string that holds a NUL, or an empty path or user";
        bool may_be_empty = field.tag == TAG_ARGV;
        if (memchr(field.data, 0, field.length) || (field.length == 0 && !may_be_empty)) return -EINVAL;
        uint8_t *start = data + (field.data - data);
        *text = (char *)start;
        end = start + field.length;
    }
    if (end) *end = 0;
    return complete(request, why);
}

void request_free(struct request *request) {
    free(request->argv);
    free(request->env);
    *request = (struct request){0};
}
