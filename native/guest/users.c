/* Users and groups by the sandbox's own /etc/passwd and /etc/group, which whoever is root inside may have written: regular files only,
 * long lines are skipped, and no more than MOST_BYTES is looked at. Runs in a forked child, so that it may block. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "guest.h"
#include "libc.h"

#define MOST_BYTES (4u << 20)

struct lines {
    int fd;
    size_t at, have, total;
    char buffer[16384];
};

static int lines_open(struct lines *lines, const char *path) {
    struct stat status;
    lines->at = lines->have = lines->total = 0;
    lines->fd = openat(AT_FDCWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (lines->fd < 0) return -errno;
    if (fstat(lines->fd, &status) || !S_ISREG(status.st_mode)) {
        close(lines->fd);
        return -EINVAL;
    }
    return 0;
}

static void lines_close(struct lines *lines) { close(lines->fd); }

/* The next line without its newline, or NULL at the end. */
static char *lines_next(struct lines *lines) {
    bool skip = false;
    for (;;) {
        char *start = lines->buffer + lines->at;
        char *newline = memchr(start, '\n', lines->have - lines->at);
        if (newline) {
            *newline = 0;
            lines->at = (size_t)(newline - lines->buffer) + 1;
            if (!skip) return start;
            skip = false;
            continue;
        }
        size_t rest = lines->have - lines->at;
        memmove(lines->buffer, start, rest);
        lines->at = 0;
        lines->have = rest;
        if (lines->have == sizeof lines->buffer - 1) { /* a line longer than the buffer */
            lines->have = 0;
            skip = true;
        }
        ssize_t got = lines->total < MOST_BYTES ? read(lines->fd, lines->buffer + lines->have, sizeof lines->buffer - 1 - lines->have) : 0;
        if (got <= 0) {
            if (skip || lines->have == 0) return NULL;
            lines->buffer[lines->have] = 0; /* the last line has no newline */
            lines->at = lines->have = 0;
            lines->total = MOST_BYTES;
            return lines->buffer;
        }
        lines->have += (size_t)got;
        lines->total += (size_t)got;
    }
}

/* Cuts the line at colons; how many fields it has. */
static size_t split(char *line, char *fields[], size_t most) {
    size_t count = 0;
    while (count < most) {
        fields[count++] = line;
        line = strchr(line, ':');
        if (!line) break;
        *line++ = 0;
    }
    return count;
}

static bool number(const char *text, uint32_t *value) {
    uint64_t sum = 0;
    if (!*text) return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9') return false;
        sum = sum * 10 + (uint64_t)(*text - '0');
        if (sum >= UINT32_MAX) return false; /* -1 means "leave as it is" to setresuid */
    }
    *value = (uint32_t)sum;
    return true;
}

static void copy(char *out, size_t capacity, const char *text) {
    size_t size = strlen(text);
    if (size >= capacity) size = 0;
    memcpy(out, text, size);
    out[size] = 0;
}

/* By name, or by number where `name` is NULL. 0 if found. */
static int find_user(struct lines *lines, const char *name, struct identity *identity) {
    int error = lines_open(lines, "/etc/passwd");
    if (error) return error;
    char *line, *fields[7];
    error = -ENOENT;
    while (error && (line = lines_next(lines))) {
        uint32_t uid, gid;
        if (split(line, fields, 7) < 6 || !number(fields[2], &uid) || !number(fields[3], &gid)) continue;
        if (name ? strcmp(fields[0], name) != 0 : uid != identity->uid) continue;
        identity->uid = uid;
        identity->gid = gid;
        copy(identity->name, sizeof identity->name, fields[0]);
        copy(identity->home, sizeof identity->home, fields[5]);
        error = 0;
    }
    lines_close(lines);
    return error;
}

static int find_group(struct lines *lines, const char *name, gid_t *gid) {
    int error = lines_open(lines, "/etc/group");
    if (error) return error;
    char *line, *fields[4];
    error = -ENOENT;
    while (error && (line = lines_next(lines))) {
        uint32_t value;
        if (split(line, fields, 4) < 3 || strcmp(fields[0], name) != 0 || !number(fields[2], &value)) continue;
        *gid = value;
        error = 0;
    }
    lines_close(lines);
    return error;
}

static bool member(const char *list, const char *name) {
    size_t size = strlen(name);
    for (;;) {
        if (strncmp(list, name, size) == 0 && (list[size] == ',' || list[size] == 0)) return true;
        list = strchr(list, ',');
        if (!list) return false;
        list++;
    }
}

static void find_groups(struct lines *lines, struct identity *identity) {
    identity->groups[identity->group_count++] = identity->gid;
    if (!*identity->name || lines_open(lines, "/etc/group")) return;
    char *line, *fields[4];
    while (identity->group_count < MAX_GROUPS && (line = lines_next(lines))) {
        uint32_t gid;
        if (split(line, fields, 4) < 4 || !number(fields[2], &gid) || gid == identity->gid) continue;
        if (member(fields[3], identity->name)) identity->groups[identity->group_count++] = gid;
    }
    lines_close(lines);
}

/* A number that no line names still works: its group is the same number (not 0, so that nobody is in root's group by accident). */
int user_resolve(const char *spec, struct identity *identity) {
    static struct lines lines;
    char user[256];
    *identity = (struct identity){0};
    if (!spec) spec = "0";
    const char *colon = strchr(spec, ':');
    size_t size = colon ? (size_t)(colon - spec) : strlen(spec);
    if (size == 0 || size >= sizeof user) return -EINVAL;
    memcpy(user, spec, size);
    user[size] = 0;

    /* Root is 0 whatever the image's files say: who breaks them, as an agent may, must not lock the sandbox's own commands out. */
    if (number(user, &identity->uid) || strcmp(user, "root") == 0) {
        if (find_user(&lines, NULL, identity)) {
            identity->gid = identity->uid;
            copy(identity->name, sizeof identity->name, identity->uid ? "" : "root");
            copy(identity->home, sizeof identity->home, identity->uid ? "" : "/root");
        }
    } else {
        int error = find_user(&lines, user, identity);
        if (error) return error;
    }
    if (colon && !number(colon + 1, &identity->gid)) {
        int error = find_group(&lines, colon + 1, &identity->gid);
        if (error) return error;
    }
    find_groups(&lines, identity);
    if (!*identity->name) copy(identity->name, sizeof identity->name, user);
    if (!*identity->home) copy(identity->home, sizeof identity->home, "/");
    return 0;
}

/* Groups first: they can't be changed without privileges. setresuid takes the capabilities away where the user isn't root. */
int user_become(const struct identity *identity) {
    if (x_setgroups(identity->group_count, identity->groups)) return -errno;
    if (x_setresgid(identity->gid, identity->gid, identity->gid)) return -errno;
    if (x_setresuid(identity->uid, identity->uid, identity->uid)) return -errno;
    return 0;
}
