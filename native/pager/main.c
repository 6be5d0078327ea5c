/* Serves the memory of a virtual machine page by page, from a file (a template's memory), where the VMM has it faulted in by userfaultfd.
 *
 *     pager PROGRAM [ARGUMENT...]     3: the machine's directory, 4: the file; PROGRAM runs as a child that inherits all
 *
 * Listens on `pages` in the directory. The VMM connects when it loads a snapshot, and sends a JSON list of regions
 * (base_host_virt_addr, size, offset, page_size) with a userfaultfd. From then on the pages that it touches are copied from the file, some
 * at once; what its balloon gives back (UFFD_EVENT_REMOVE) is zeros from then on, as the machine expects.
 *
 * It ends as the VMM does, with the same code. Where the launcher starts it, it is the first process of a pid namespace: when it ends for
 * whatever reason so does the VMM, which would wait for its pages for ever. */
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define DIRECTORY_FD 3
#define MEMORY_FD 4
#define PAGE 4096u
#define AHEAD 16u /* pages that are copied together */
#define REGIONS 16
#define MESSAGE 8192
#define EVENTS 64

struct region {
    uint64_t base, size, offset;
};

static struct {
    const uint8_t *bytes;
    uint64_t size;
} memory;
static struct region regions[REGIONS];
static size_t region_count;
static uint8_t *removed, *served; /* a bit for each page of the file */
static int uffd = -1;
static pid_t vmm;

static _Noreturn void fail(const char *what) {
    dprintf(2, "pager: %s: %s\n", what, strerror(errno));
    if (vmm > 0) kill(vmm, SIGKILL);
    _exit(70);
}

static bool bit(const uint8_t *map, uint64_t page) { return map[page / 8] >> (page % 8) & 1; }
static void set_bit(uint8_t *map, uint64_t page) { map[page / 8] |= (uint8_t)(1u << (page % 8)); }

/* --- what the VMM says ------------------------------------------------------------------------------------------------------------- */

/* The number of `"name":` in one object of the list. */
static bool number_of(const char *object, const char *end, const char *name, uint64_t *value) {
    char quoted[40];
    snprintf(quoted, sizeof quoted, "\"%s\"", name);
    const char *at = strstr(object, quoted);
    if (!at || at >= end) return false;
    at += strlen(quoted);
    at += strspn(at, " \t\r\n:");
    char *after;
    errno = 0;
    *value = strtoull(at, &after, 10);
    return after != at && errno == 0;
}

static void take_regions(const char *text) {
    for (const char *at = strchr(text, '{'); at; at = strchr(at + 1, '{')) {
        const char *end = strchr(at, '}');
        struct region found;
        uint64_t page = PAGE;
        errno = EINVAL;
        if (!end || region_count == REGIONS) fail("the regions can't be read");
        if (!number_of(at, end, "base_host_virt_addr", &found.base) || !number_of(at, end, "size", &found.size) ||
            !number_of(at, end, "offset", &found.offset))
            fail("a region lacks a number");
        number_of(at, end, "page_size", &page);
        errno = EINVAL;
        if (page != PAGE || (found.base | found.size | found.offset) % PAGE) fail("only pages of 4096 bytes are served");
        if (found.offset > memory.size || found.size > memory.size - found.offset) fail("a region lies outside of the memory");
        regions[region_count++] = found;
    }
    errno = EINVAL;
    if (!region_count) fail("there is no region");
}

static void take_message(int connection) {
    static char text[MESSAGE];
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    size_t size = 0;
    while (uffd < 0 || !memchr(text, ']', size)) {
        struct iovec piece = {text + size, sizeof text - 1 - size};
        struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        ssize_t got = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
        if (got < 0 && errno == EINTR) continue;
        errno = got < 0 ? errno : EPROTO;
        if (got <= 0) fail("the VMM did not say where its memory is");
        size += (size_t)got;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        if (rights && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS) memcpy(&uffd, CMSG_DATA(rights), sizeof uffd);
    }
    take_regions(text);
    fcntl(uffd, F_SETFL, fcntl(uffd, F_GETFL) | O_NONBLOCK);
}

/* --- pages ------------------------------------------------------------------------------------------------------------------------- */

static struct region *region_at(uint64_t address) {
    for (size_t i = 0; i < region_count; i++) {
        if (address >= regions[i].base && address - regions[i].base < regions[i].size) return regions + i;
    }
    return NULL;
}

static void on_remove(uint64_t start, uint64_t end) {
    for (uint64_t at = start; at < end; at += PAGE) {
        const struct region *region = region_at(at);
        if (region) set_bit(removed, (region->offset + at - region->base) / PAGE);
    }
}

/* False where memory that is being given back stands in the way: its event has to be read first. */
static bool serve(uint64_t address) {
    const struct region *region = region_at(address &= ~(uint64_t)(PAGE - 1));
    if (!region) {
        errno = EFAULT;
        fail("a page was asked for outside of the memory");
    }
    uint64_t offset = region->offset + address - region->base, page = offset / PAGE, count = 1;
    if (bit(removed, page)) {
        struct uffdio_zeropage zero = {.range = {address, PAGE}};
        if (ioctl(uffd, UFFDIO_ZEROPAGE, &zero) == 0 || errno == EEXIST || errno == ESRCH) return true;
        if (errno == EAGAIN) return false;
        fail("a page can't be cleared");
    }
    uint64_t most = (region->size - (address - region->base)) / PAGE;
    while (count < most && (page + count) % AHEAD && !bit(served, page + count) && !bit(removed, page + count)) count++;
    struct uffdio_copy copy = {.dst = address, .src = (uintptr_t)(memory.bytes + offset), .len = count * PAGE};
    int error = ioctl(uffd, UFFDIO_COPY, &copy) ? errno : 0;
    for (int64_t done = copy.copy / PAGE; done > 0; done--) set_bit(served, page + (uint64_t)done - 1);
    if (!error || copy.copy > 0 || error == ESRCH) return true; /* what is left is asked for again */
    if (error == EAGAIN) return false;
    errno = error;
    if (error != EEXIST) fail("a page can't be copied");
    set_bit(served, page);
    struct uffdio_range range = {address, PAGE};
    ioctl(uffd, UFFDIO_WAKE, &range);
    return true;
}

static void on_events(void) {
    static uint64_t waiting[EVENTS];
    static size_t waits;
    struct uffd_msg events[EVENTS];
    ssize_t got;
    do {
        got = read(uffd, events, sizeof *events * (EVENTS - waits));
        if (got < 0 && errno != EAGAIN && errno != EINTR) fail("faults can't be read");
        size_t count = got > 0 ? (size_t)got / sizeof *events : 0;
        for (size_t i = 0; i < count; i++) {
            if (events[i].event == UFFD_EVENT_PAGEFAULT) waiting[waits++] = events[i].arg.pagefault.address;
            else if (events[i].event == UFFD_EVENT_REMOVE) on_remove(events[i].arg.remove.start, events[i].arg.remove.end);
        }
        size_t left = 0;
        for (size_t i = 0; i < waits; i++) {
            if (!serve(waiting[i])) waiting[left++] = waiting[i];
        }
        waits = left;
        if (waits && got <= 0) usleep(100); /* the event that is in the way comes at once */
    } while (waits);
}

/* --- the program ------------------------------------------------------------------------------------------------------------------- */

static int listen_for_vmm(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/pages", DIRECTORY_FD);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 1)) fail("listen on `pages`");
    return fd;
}

static void map_memory(void) {
    struct stat st;
    if (fstat(MEMORY_FD, &st)) fail("the memory's file");
    memory.size = (uint64_t)st.st_size;
    memory.bytes = mmap(NULL, memory.size, PROT_READ, MAP_PRIVATE | MAP_NORESERVE, MEMORY_FD, 0);
    removed = calloc(1, memory.size / PAGE / 8 + 1);
    served = calloc(1, memory.size / PAGE / 8 + 1);
    if (memory.bytes == MAP_FAILED || !removed || !served) fail("map the memory");
}

int main(int argc, char **argv) {
    sigset_t signals;
    int status;
    if (argc < 2) return 64;
    map_memory();
    int listening = listen_for_vmm();
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    int ended = signalfd(-1, &signals, SFD_CLOEXEC);
    vmm = fork();
    if (vmm < 0) fail("fork");
    if (vmm == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        sigprocmask(SIG_UNBLOCK, &signals, NULL);
        execv(argv[1], argv + 1);
        fail(argv[1]);
    }
    for (;;) {
        struct pollfd ready[2] = {{ended, POLLIN, 0}, {uffd < 0 ? listening : uffd, POLLIN, 0}};
        if (poll(ready, 2, -1) < 0 && errno != EINTR) fail("poll");
        if (ready[0].revents && waitpid(vmm, &status, WNOHANG) == vmm) return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        if (!ready[1].revents) continue;
        if (uffd >= 0) {
            on_events();
            continue;
        }
        int connection = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
        if (connection < 0) continue;
        take_message(connection); /* it stays open: some VMMs look whether it is */
        close(listening);
    }
}
