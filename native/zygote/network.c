/* Net namespaces: made when the zygote is idle, used once. They belong to the host's user namespace, so root inside a sandbox has no
 * power over its own: no interface, route or firewall rule can be added from inside. The child opens low ports (inside.c): a write through
 * the host's /proc would leave a directory entry for each namespace, all in one chain that every later write has to walk.
 *
 * A namespace *with a way out* has two sockets besides, which are the edge's though they live inside: a TCP listener and a UDP socket, to
 * which the kernel hands over (common/firewall.c) what programs send to other addresses than loopback. So no program inside serves or sees it,
 * and nothing is copied through the guest. The zygote keeps duplicates: an edge's death loses no connection that waits, and nobody
 * inside can take the ports. They are bound to an address that nothing else is reached by, so that they can't be connected to as themselves.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "firewall.h"
#include "sys.h"
#include "zygote.h"

#define POOL_MAX 1024

struct pool {
    struct network have[POOL_MAX];
    unsigned count;
    bool wanted; /* somebody has taken one */
    int error;   /* of the last attempt: don't spin on a host that can't */
};
static struct pool pools[2]; /* without, with a way out */
static unsigned want;

static int bind_one(int type, uint16_t *port) {
    int fd = firewall_bind(type, port);
    return fd < 0 ? fd : fd_up(fd);
}

static int netfilter(void) {
    int fd = filter_netfilter_socket();
    return fd < 0 ? -errno : fd;
}

/* A way out for the net namespace that this thread is in. The listener doesn't listen yet: until an edge makes it, connections are refused. */
static int open_way(struct network *network) {
    uint16_t tcp_port = 0, udp_port = 0;
    int error = network->tcp = bind_one(SOCK_STREAM, &tcp_port);
    if (error >= 0) error = network->udp = bind_one(SOCK_DGRAM, &udp_port);
    if (error >= 0) error = firewall_make(tcp_port, udp_port, netfilter());
    if (error < 0) network_close(network);
    return error < 0 ? error : 0;
}

/* lo up; the namespace's descriptor from the same socket, without a path. */
static int finish(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -errno;
    int ns = ioctl(fd, SIOCSIFFLAGS, &request) < 0 ? -errno : fd_up(ioctl(fd, SIOCGSKNS));
    close(fd);
    return ns;
}

static void go_home(void) {
    if (setns(world.host_network, CLONE_NEWNET) < 0) _exit(70); /* being in a sandbox's network would be worse than dying */
}

/* The zygote itself leaves its own net namespace for a moment. */
static int make(bool way, struct network *network) {
    *network = NO_NETWORK;
    if (unshare(CLONE_NEWNET) < 0) return -errno;
    int error = network->ns = finish();
    if (error >= 0 && way) error = open_way(network);
    go_home();
    if (error < 0) network_close(network);
    return error < 0 ? error : 0;
}

void network_close(struct network *network) {
    const int fds[] = {network->ns, network->tcp, network->udp};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        if (fds[i] >= 0) close(fds[i]);
    *network = NO_NETWORK;
}

int network_take(bool way, struct network *network) {
    struct pool *pool = &pools[way];
    pool->wanted = true;
    if (pool->count) {
        *network = pool->have[--pool->count];
        return 0;
    }
    return pool->error = make(way, network);
}

int network_open_way(pid_t pid1, struct network *network) {
    char path[40];
    *network = NO_NETWORK;
    snprintf(path, sizeof path, "%d/ns/net", pid1);
    int ns = openat(world.proc, path, O_RDONLY | O_CLOEXEC);
    if (ns < 0) return -errno;
    int error = setns(ns, CLONE_NEWNET) < 0 ? -errno : 0;
    close(ns);
    if (error) return error;
    error = open_way(network);
    go_home();
    return error;
}

int network_init(unsigned size) {
    struct network first;
    want = size < POOL_MAX ? size : POOL_MAX;
    int error = make(false, &first);
    if (error) return error;
    pools[false].wanted = true;
    if (want) pools[false].have[pools[false].count++] = first;
    else network_close(&first);
    return 0;
}

static struct pool *short_one(void) {
    for (int way = 0; way < 2; way++)
        if (pools[way].wanted && pools[way].count < want && !pools[way].error) return &pools[way];
    return NULL;
}

bool network_wants_refill(void) { return short_one() != NULL; }

void network_refill_one(void) {
    struct pool *pool = short_one();
    if (pool && (pool->error = make(pool == &pools[true], &pool->have[pool->count])) == 0) pool->count++;
}

int network_probe(void) {
    struct network network;
    int error = make(true, &network);
    if (!error) network_close(&network);
    return error;
}
