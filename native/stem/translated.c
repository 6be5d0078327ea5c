/* Code of the guest's that the stem has translated is code of each machine that has the same in the same page of its memory. Reading a state,
 * QEMU (`cpu_common_post_load`) throws all of it away, for the memory may be another then. But the memory of a machine that began with the
 * stem's template differs from the stem's in few pages of code, and which may differ is known: what the stem has written to, what is in the
 * machine's layer. So what was translated of these goes, page by page, as if the machine had been written to by a device, and the rest stays.
 *
 * It takes names that QEMU has for its own modules, of the version that it knows, and looks whether the function that throws away calls what it
 * should; else nothing stays, and everything is translated again (which `xen-load-devices-state` doesn't survive: vmm/qemu.py, `reloads`). */
#define _GNU_SOURCE
#include "translated.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096ull
#define NOWHERE UINT64_MAX
#define IS_FILE (1ull << 61)
#define IS_THERE (3ull << 62) /* present, or swapped */
#define ENTRIES 4096ull /* of pagemap, at a time */
#define MORE 1024
#define CALL 0xe8
#define RETURN 0xc3
#define MOST_CODE 40

/* QEMU's, as its 7.2 has them: how the state of CPUs is read (`VMStateDescription`), and what forgets. */
typedef int after_t(void *cpu, int version);
static struct kind {
    const char *name;
    int numbers[4];
    int (*before)(void *cpu);
    after_t *after;
} *kind;
static after_t *forget_all;
static void (*forget_addresses)(void *cpu);
static void (*forget)(uint64_t start, uint64_t end);
static uint64_t (*find)(const void *memory);
static bool (*begins)(const void *what, void **error);
static const uint32_t READING[4] = {2}; /* a migration, as what can be broken off (`YankInstance`) */

static struct range {
    uint64_t start, end;
} *stale; /* addresses of the machine's memory in this process */
static size_t count, room;
static bool unknown; /* there is no room for them */

static bool is_known(void) {
    struct {
        struct {
            int64_t major, minor, micro;
        } *qemu;
        char *package;
    } *(*ask)(void **error), *version;
    *(void **)&ask = dlsym(RTLD_DEFAULT, "qmp_query_version");
    return ask && (version = ask(NULL)) && version->qemu->major == 7 && version->qemu->minor == 2;
}

static bool calls(after_t *function, const void *what) {
    const uint8_t *code = (const uint8_t *)function;
    for (int i = 0; i < MOST_CODE && code[i] != RETURN; i++) {
        int32_t by;
        memcpy(&by, code + i + 1, sizeof by);
        if (code[i] == CALL && code + i + 5 + by == (const uint8_t *)what) return true;
    }
    return false;
}

void translated_begin(void) {
    void *flush = dlsym(RTLD_DEFAULT, "tb_flush"), *addresses = dlsym(RTLD_DEFAULT, "tlb_flush");
    kind = dlsym(RTLD_DEFAULT, "vmstate_cpu_common");
    *(void **)&forget = dlsym(RTLD_DEFAULT, "tb_invalidate_phys_range");
    *(void **)&find = dlsym(RTLD_DEFAULT, "qemu_ram_addr_from_host");
    *(void **)&begins = dlsym(RTLD_DEFAULT, "yank_register_instance");
    *(void **)&forget_addresses = addresses;
    if (!flush || !addresses || !kind || !forget || !find || !begins || !is_known() || !kind->after) return;
    if (calls(kind->after, flush) && calls(kind->after, addresses)) forget_all = kind->after;
}

static void forget_memory(uint64_t start, uint64_t end) {
    uint64_t at = find((void *)start);
    if (at != NOWHERE) forget(at, at + (end - start));
}

void translated_gone(void *at, size_t size) {
    if (forget_all) forget_memory((uint64_t)at, (uint64_t)at + size);
}

/* --- in a branch ----------------------------------------------------------------------------------------------------------------------- */

static void note(uint64_t page) {
    if (count && stale[count - 1].end == page) {
        stale[count - 1].end += PAGE;
        return;
    }
    if (count == room) {
        struct range *more = realloc(stale, (room += MORE) * sizeof *stale);
        if (!more) {
            unknown = true;
            return;
        }
        stale = more;
    }
    stale[count++] = (struct range){page, page + PAGE};
}

/* Pages that are in the layer. */
static void mark(uint8_t *changed, uint64_t pages, int layer, off_t offset) {
    off_t last = offset + (off_t)(pages * PAGE);
    for (off_t at = offset, stop; (at = lseek(layer, at, SEEK_DATA)) >= 0 && at < last; at = stop) {
        stop = lseek(layer, at, SEEK_HOLE);
        if (stop < 0 || stop > last) stop = last;
        memset(changed + (uint64_t)(at - offset) / PAGE, 1, ((uint64_t)(stop - at) + PAGE - 1) / PAGE);
    }
}

void translated_compare(uint64_t start, uint64_t end, const uint8_t *fresh, int layer, off_t offset) {
    static uint64_t entries[ENTRIES];
    uint64_t pages = (end - start) / PAGE;
    uint8_t *changed = calloc(pages, 1);
    int own = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    unknown |= !forget_all || !changed || own < 0;
    if (!unknown && layer >= 0) mark(changed, pages, layer, offset);
    for (uint64_t at = 0; at < pages && !unknown; at += ENTRIES) {
        size_t size = (pages - at < ENTRIES ? pages - at : ENTRIES) * sizeof *entries;
        unknown |= pread(own, entries, size, (off_t)((start / PAGE + at) * sizeof *entries)) != (ssize_t)size;
        for (uint64_t i = at; i < at + size / sizeof *entries && !unknown; i++) {
            if (entries[i - at] & IS_THERE && !(entries[i - at] & IS_FILE)) changed[i] = memcmp((uint8_t *)start + i * PAGE, fresh + i * PAGE, PAGE) != 0;
            if (changed[i]) note(start + i * PAGE);
        }
    }
    if (own >= 0) close(own);
    free(changed);
}

/* In place of `cpu_common_post_load`, once for each CPU. */
static int keep(void *cpu, int version) {
    static void *first;
    if (cpu == first) kind->after = forget_all; /* another state, of which nothing is known */
    if (kind->after == forget_all) return forget_all(cpu, version);
    if (!first) {
        first = cpu;
        begins(READING, NULL); /* QEMU says that it is over, and had not said that it began (`xen-load-devices-state`) */
        for (size_t i = 0; i < count; i++) forget_memory(stale[i].start, stale[i].end);
    }
    forget_addresses(cpu);
    return 0;
}

void translated_keep(void) {
    uint64_t page = (uint64_t)&kind->after & ~(PAGE - 1);
    if (unknown || !forget_all || mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE)) return; /* it is read-only once QEMU is linked */
    kind->after = keep;
}
