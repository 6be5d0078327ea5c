/* The zygote: clones container sandboxes. One process, one thread, one epoll loop.
 *
 *   main.c      start: arguments, daemon, the guest's sealed copy, namespaces, the loop
 *   server.c    the table of sandboxes, requests, reaping
 *   edge.c      the edge's connection, and who becomes the edge
 *   plan.c      a SPAWN request, checked
 *   spawn.c     the outside of a spawn: overlay, clone, id maps, cgroups
 *   inside.c    the inside: what the cloned child does until it executes the guest
 *   filter.c    the seccomp filter, loaded once, inherited by everything
 *   network.c   the pool of net namespaces, and a sandbox's way out
 *   ../common/firewall.c  that way, as the kernel is told
 *
 * DESCRIPTORS. A child must not pay for the descriptors of its siblings (copying and closing them grows with the number of live
 * sandboxes). So the child is cloned with a shared table and first of all takes a copy of its lowest part, FD_LOW. There live only
 * 0..5 (/dev/null: place holders for what the guest gets), 6 and 7 (the guest's and the cells' program) and what one spawn needs; all that stays is
 * moved above. The parent doesn't touch its table until the child says that it has its copy.
 *
 * MOUNT NAMESPACES. Layers are mounted by the edge in the host's mount namespace. A clone copies every mount of its parent's, so
 * the zygote lives in a tiny one (`struct world`), enters the host's to make the overlay, and goes back to clone.
 */
#ifndef DSEC_ZYGOTE_H
#define DSEC_ZYGOTE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "wire.h"

#define FD_GUEST 6
#define FD_CELLS 7
#define FD_LOW 64
#define MAX_ID 40
#define MAX_LOWERS 500
#define MAX_CGROUPS 16
#define MAX_CPUS 8192
#define CPU_WORDS (MAX_CPUS / (8 * sizeof(unsigned long)))
#define MIN_ID_BASE 65536 /* an id range must never hold an id that the host uses, root above all */

/* Where a spawn stands: what a failure names. */
enum stage {
    AT_REQUEST, AT_CGROUP2, AT_OVERLAY, AT_DEV, AT_VIEW, AT_NETWORK, AT_SOCKETS, AT_CLONE, AT_ID_MAP, AT_OOM_SCORE, AT_CGROUP,
    /* inside */
    AT_FILES, AT_RELEASE, AT_CREDENTIALS, AT_ROOT, AT_PROC, AT_MASK, AT_MOUNT_DEV, AT_MOUNT_PTS, AT_MOUNT_VIEW, AT_PIVOT, AT_CGROUP_NS,
    AT_SYSCTL, AT_HOSTNAME, AT_RLIMITS, AT_AFFINITY, AT_CAPABILITIES, AT_LANDLOCK, AT_SOURCE, AT_EXEC,
    STAGES,
};
const char *stage_text(uint32_t stage);

/* What the child says: once before it executes the guest (stage AT_EXEC, error 0), or where it failed. */
struct report {
    uint32_t stage;
    int32_t error;
    uint64_t setup_ns;
};

/* A SPAWN request, checked. Strings live in `arena`. */
struct plan {
    char sandbox[MAX_ID + 1];
    char hostname[65];
    const char *lower[MAX_LOWERS];
    const char *cgroup[MAX_CGROUPS];
    const char *upper, *work, *cgroup2, *dev, *view;
    unsigned lowers, cgroups;
    uint64_t id_base, id_count, oom_score_adj, flags;
    bool has_cpus;
    unsigned long cpus[CPU_WORDS];
    size_t arena_used;
    char arena[64 << 10];
};

/* What the zygote holds for its whole life. */
struct world {
    int host_mounts;  /* mount namespace in which paths of requests are meant */
    int tiny_mounts;  /* the one that sandboxes are cloned from: a tmpfs with proc (of no processes), view/, mask/ */
    int proc;         /* the host's /proc, which the tiny namespace doesn't hold */
    int host_network;
    int landlock_abi; /* 0: none */
    int epoll;
    const char *scratch; /* directory for mounts of kernels without lowerdir+; NULL: none was needed so far */
    bool legacy_overlay;
};
extern struct world world;

/* 0, or -errno with `*why` set. */
int plan_read(struct plan *plan, const uint8_t *data, size_t size, const char **why);

/* A net namespace, and where it has a way out the sockets to which that leads; -1: none. */
struct network {
    int ns, tcp, udp;
};
#define NO_NETWORK ((struct network){-1, -1, -1})

/* What a started child is known by. */
struct child {
    pid_t pid;
    struct network network; /* its sockets; the namespace lives by its processes */
    int pidfd, control, channel, report;
    uint64_t begin_ns, mount_ns, clone_ns;
};
/* Clone a sandbox. 0, or -errno with `*stage`; then nothing is left. Success means that the child runs; `report` tells the rest. */
int spawn_child(const struct plan *plan, struct child *child, enum stage *stage);

/* A pair of SOCK_SEQPACKET with large buffers; [0] is moved above FD_LOW. -errno. */
int channel_pair(int pair[2]);

/* The inside; never returns. */
struct inside {
    int report, root, dev, view, control, channel, cgroup;
};
void inside_run(const struct plan *plan, const struct inside *in) __attribute__((noreturn));
/* Look once at what this kernel's /proc has, so that no child asks in vain. */
void inside_prepare(void);

/* Load the filter. 0 or -errno. */
int filter_load(void);
/* Load the second one, for code that may enter the cells of a function environment: no mounts, no namespaces, no internet sockets. */
int filter_load_second(void);
/* A NETLINK_NETFILTER socket, which the filter lets nobody else make; -1 and errno. */
int filter_netfilter_socket(void);


/* A net namespace with lo up, and a way out if asked for. 0 or -errno. Whose it becomes: the caller's. */
int network_take(bool way, struct network *network);
void network_close(struct network *network);
/* A way out for a sandbox that was made without: its pid 1 isn't reaped yet. 0 or -errno. */
int network_open_way(pid_t pid1, struct network *network);
/* Whether this host can make a way out. 0 or -errno. */
int network_probe(void);
/* Make the first one, to prove that this host can. 0 or -errno. */
int network_init(unsigned pool);
bool network_wants_refill(void);
void network_refill_one(void);

uint64_t now_ns(void);
/* Move a descriptor above FD_LOW; closes the old one. -errno. */
int fd_up(int fd);

/* server.c */
int server_run(void); /* until SHUTDOWN or SIGTERM; the exit code */

#endif
