/* Net namespaces: made when the zygote is idle, used once. They belong to the host's user namespace, so root inside a sandbox has no
 * power over its own: no interface, route or firewall rule can be added from inside. The child opens low ports (inside.c): a write through
 * the host's /proc would leave a directory entry for each namespace, all in one chain that every later write has to walk. */
#include <errno.h>
#include <net/if.h>
#include <linux/sockios.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "sys.h"
#include "zygote.h"

#define POOL_MAX 1024

static int pool[POOL_MAX];
static unsigned have, want;
static int last_error; /* don't spin on a host that can't */

/* lo up; the namespace's descriptor from the same socket, without a path. */
static int finish(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -errno;
    int ns = ioctl(fd, SIOCSIFFLAGS, &request) < 0 ? -errno : fd_up(ioctl(fd, SIOCGSKNS));
    close(fd);
    return ns;
}

/* The zygote itself leaves its own net namespace for a moment. */
static int make(void) {
    if (unshare(CLONE_NEWNET) < 0) return -errno;
    int fd = finish();
    if (setns(world.host_network, CLONE_NEWNET) < 0) _exit(70); /* being in a sandbox's network would be worse than dying */
    return fd;
}

int network_take(void) {
    if (have) return pool[--have];
    int fd = make();
    last_error = fd < 0 ? fd : 0;
    return fd;
}

int network_init(unsigned size) {
    want = size < POOL_MAX ? size : POOL_MAX;
    int fd = make();
    if (fd < 0) return fd;
    if (want) pool[have++] = fd;
    else close(fd);
    return 0;
}

bool network_wants_refill(void) { return have < want && !last_error; }

void network_refill_one(void) {
    int fd = make();
    last_error = fd < 0 ? fd : 0;
    if (fd >= 0) pool[have++] = fd;
}
