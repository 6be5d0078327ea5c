/* Net namespaces: made when the zygote is idle, used once. They belong to the host's user namespace, so root inside a sandbox has no
 * power over its own: no interface, route or firewall rule can be added from inside. */
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "sys.h"
#include "zygote.h"

#define POOL_MAX 1024

static int pool[POOL_MAX];
static unsigned have, want;
static int last_error; /* don't spin on a host that can't */

/* Write a sysctl of the current net namespace; absent ones (no IPv6, older kernel) need no write. */
static int set_sysctl(const char *path, const char *value) {
    int fd = openat(world.proc, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT ? 0 : -errno;
    int error = write(fd, value, strlen(value)) < 0 ? -errno : 0;
    close(fd);
    return error;
}

static int loopback_up(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -errno;
    int error = ioctl(fd, SIOCSIFFLAGS, &request) < 0 ? -errno : 0;
    close(fd);
    return error;
}

/* The zygote itself leaves its own net namespace for a moment. */
static int make(void) {
    if (unshare(CLONE_NEWNET) < 0) return -errno;
    int error = loopback_up();
    if (!error) error = set_sysctl("sys/net/ipv4/ip_unprivileged_port_start", "0");
    int fd = error ? error : fd_up(openat(world.proc, "self/ns/net", O_RDONLY | O_CLOEXEC));
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
