/* What programs in a machine may use of it, and what they use: limits and counts of the group that all commands are in. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <unistd.h>

#include "bytes.h"
#include "guest.h"
#include "vm.h"

#define RESERVE_LEAST (6u << 20) /* of memory, that programs leave to the machine's kernel: this and a share of it all */
#define RESERVE_SHARE 32
#define RESERVE_MOST (64u << 20)

/* The number behind `word` at the begin of a line. */
static bool number_after(const char *text, const char *word, uint64_t *number) {
    size_t size = strlen(word);
    for (const char *at = text; at; at = (at = strchr(at, '\n')) ? at + 1 : NULL) {
        if (strncmp(at, word, size) == 0) return *number = strtoull(at + size, NULL, 10), true;
    }
    return false;
}

static void set_number(const char *path, uint64_t number) {
    char text[24], *end = text + sizeof text - 1;
    *end = 0;
    vm_say_to(path, format_u64(end, number));
}

/* Programs that want more than there is end by their group's limit. It lies a little below what the machine has: at the very end of its memory
 * a kernel looks for pages to take back, minutes long, before it ends anything; in a group it gives up after some tries. What a group read
 * of files is taken back within it, so that reading ends nobody. */
static void limit_memory(void) {
    char text[512];
    uint64_t whole, available, own;
    if (!vm_read_text("/proc/meminfo", text, sizeof text) || !number_after(text, "MemTotal:", &whole) ||
        !number_after(text, "MemAvailable:", &available) || !vm_read_text(GROUPS_DIR "/memory.current", text, sizeof text))
        return;
    own = strtoull(text, NULL, 10);
    uint64_t reserve = MIN(RESERVE_LEAST + (whole << 10) / RESERVE_SHARE, RESERVE_MOST), most = (available << 10) + own;
    if (most > 2 * reserve) set_number(GROUPS_DIR "/memory.max", most - reserve);
}

void vm_limit_programs(uint64_t pids, bool no_new_privs) {
    if (pids) set_number(GROUPS_DIR "/pids.max", pids);
    if (no_new_privs) prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}

void vm_limit(uint64_t pids, bool no_new_privs) {
    static const struct rlimit files = {1024, 1 << 20}, none = {0, 0}, free_of = {RLIM_INFINITY, RLIM_INFINITY};
    vm_limit_programs(pids, no_new_privs);
    limit_memory();
    setrlimit(RLIMIT_NOFILE, &files);
    setrlimit(RLIMIT_CORE, &none);
    setrlimit(RLIMIT_NPROC, &free_of);
}

void vm_status(uint8_t status[DSEC_STATUS_SIZE]) {
    static int events = -1, refused = -1, used = -1, pids = -1;
    char text[512];
    uint64_t values[6] = {0};
    const struct {
        int *fd;
        const char *path, *word;
    } files[] = {
        {&events, GROUPS_DIR "/memory.events", "oom_kill "}, {&refused, GROUPS_DIR "/pids.events", "max "}, {&used, GROUPS_DIR "/memory.current", ""},
        {&pids, GROUPS_DIR "/pids.current", ""},
    };
    for (size_t i = 0; i < 4; i++) {
        if (*files[i].fd < 0) *files[i].fd = open(files[i].path, O_RDONLY | O_CLOEXEC);
        ssize_t size = *files[i].fd < 0 ? -1 : pread(*files[i].fd, text, sizeof text - 1, 0);
        text[size > 0 ? size : 0] = 0;
        number_after(text, files[i].word, &values[i]);
    }
    values[5] = values[3];
    struct statfs disk;
    if (statfs("/", &disk) == 0) {
        values[3] = (disk.f_blocks - disk.f_bfree) * (uint64_t)disk.f_bsize;
        values[4] = values[3] + disk.f_bavail * (uint64_t)disk.f_bsize; /* the file system keeps some for itself */
    }
    for (size_t i = 0; i < 6; i++) put_u64(status + 8 * i, values[i]);
}
