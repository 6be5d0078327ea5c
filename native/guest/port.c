/* The port of a virtual machine, and its first frames: a port of virtio-serial, which is there for good; or, where the kernel's command line
 * has `dsec.vsock=PORT`, vsock connections, of which each edge makes its own, and each clone's first one is new too. */
#include <errno.h>
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bytes.h"
#include "guest.h"
#include "vm.h"

#define PORT_NAME "dsec"
#define PORT_WAIT_MS 10000

static int port = -1;
static int listener = -1; /* of vsock */

static void listen_for_port(const char *number) {
    struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = (unsigned)atoi(number)};
    listener = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1)) vm_give_up("listen for the channel", errno);
}

static void accept_port(void) {
    do port = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    while (port < 0 && errno == EINTR);
    if (port < 0) vm_give_up("accept the channel", errno);
}

void port_open(void) {
    char path[80];
    if (vm_command_line("dsec.vsock=", path, sizeof path)) {
        listen_for_port(path);
        return;
    }
    for (int i = 0; port < 0 && i < PORT_WAIT_MS; i++) {
        if (vm_find_device("/sys/class/virtio-ports", "name", PORT_NAME, path, sizeof path)) port = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
        if (port < 0) usleep(1000);
    }
    if (port < 0) vm_give_up("the port of the channel is missing", ENODEV);
}

bool port_stays(void) { return listener < 0; }

void port_again(void) { port = fcntl(DSEC_FD_CHANNEL, F_DUPFD_CLOEXEC, DSEC_FD_CGROUP + 1); }

static int arrivals = -1; /* epoll */

void port_wait(void) {
    struct epoll_event event;
    epoll_wait(arrivals, &event, 1, -1); /* edge-triggered: that nobody is connected is told once */
}

static void watch_port(void) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET};
    if (epoll_ctl(arrivals, EPOLL_CTL_ADD, port, &event)) vm_give_up("wait for the port", errno);
}

/* A connection that is over gives way to the next one: a template's ends with it, each clone gets another. */
static void lost_port(void) {
    if (listener < 0) {
        port_wait();
        return;
    }
    close(port);
    accept_port();
    watch_port();
}

void port_take(uint8_t *data, size_t size) {
    for (size_t have = 0; have < size;) {
        ssize_t got = read(port, data + have, size - have);
        if (got > 0) {
            have += (size_t)got;
        } else if (got < 0 && errno == EAGAIN) {
            port_wait();
        } else {
            lost_port();
            if (listener >= 0) have = 0; /* half a frame of an earlier one */
        }
    }
}

void port_put(uint8_t type, uint64_t op, const uint8_t *payload, size_t size) {
    uint8_t frame[DSEC_HEADER_SIZE + 8 + 256];
    dsec_put_header(frame, &(struct dsec_header){(uint32_t)size, type, 0, op});
    memcpy(frame + DSEC_HEADER_SIZE, payload, size);
    for (size_t sent = 0, whole = DSEC_HEADER_SIZE + size; sent < whole;) {
        ssize_t put = write(port, frame + sent, whole - sent);
        if (put > 0) sent += (size_t)put;
        else if (listener < 0 || errno == EAGAIN) port_wait();
        else return; /* a connection that is over: the next one is heard first */
    }
}

void port_begin(void) {
    arrivals = epoll_create1(EPOLL_CLOEXEC);
    if (arrivals < 0) vm_give_up("wait for the port", errno);
    if (listener >= 0) accept_port();
    watch_port();
}

int port_end(int least) {
    close(arrivals);
    if (listener >= 0) listener = fcntl(listener, F_DUPFD_CLOEXEC, least);
    return fcntl(port, F_DUPFD_CLOEXEC, least);
}

static void arrived(struct source *source, uint32_t events) {
    (void)source, (void)events;
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;) channel_replace(fd);
}

void port_listen(void) {
    static struct source arrivals_later = {.ready = arrived};
    if (listener < 0) return;
    fcntl(listener, F_SETFL, O_NONBLOCK);
    watch(listener, &arrivals_later, EPOLLIN);
}
