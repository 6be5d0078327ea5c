/* A sandbox's way to the edge, as the kernel is told: one address, one route and one chain, by netlink, in the net namespace that this thread is in.
 * The zygote does so for a container; in a virtual machine the guest does, and holds the sockets itself (guest/wayout.c).
 *
 * The route makes every IPv4 address a local one, so that whatever a program connects to arrives on lo; it speaks as 127.0.0.1. 127.0.0.0/8
 * has its own, more specific route and stays as it is, but for a second address, 127.0.0.2. The chain hands over (TPROXY) what arrives for
 * an address that isn't loopback's to the edge's sockets: they keep the address and port that were asked for, nothing is translated, and so
 * nothing is tracked: connection tracking has one table for the whole host, which one sandbox could fill. IPv6 has no route: ENETUNREACH at
 * once.
 *
 *   1  tcp, not to 127.0.0.0/8                        -> the listener
 *   2  to 127.0.0.0/8 port 53, and somebody is there  -> leave it: a name server of the sandbox's own
 *   3  udp port 53                                    -> the DNS socket
 *   4  tcp port 53                                    -> the listener
 *   5  udp from the DNS socket                        -> from port 53, which the DNS socket doesn't occupy: a sandbox may serve there
 *
 * What TPROXY finds no listener for goes on as if there were no chain: to nobody, which refuses it.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_addr.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/rtnetlink.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "firewall.h"

#define FIRST_PORT 61053 /* above those that the kernel gives to clients, so that few programs want it */
#define PORTS 1024       /* that are tried: a program that holds them all keeps the network from its own sandbox */
#define LOOPBACK_INDEX 1
#define LOOPBACK_NET 127
#define MANGLE (-150)
#define PORT_OFFSET_FROM 0 /* in a TCP or UDP header */
#define PORT_OFFSET_TO 2
#define ADDRESS_OFFSET_TO 16 /* in an IPv4 header */

/* Messages one after the other, each a header and attributes. The size is checked where it is sent. */
struct message {
    size_t used;
    struct nlmsghdr *last;
    _Alignas(struct nlmsghdr) uint8_t data[4096];
};

static void *put(struct message *m, const void *data, size_t size) {
    void *at = m->data + m->used;
    size_t padded = NLMSG_ALIGN(size);
    if (m->used + padded > sizeof m->data) {
        m->used = sizeof m->data + 1;
        return NULL;
    }
    memset(at, 0, padded);
    if (data) memcpy(at, data, size);
    m->used += padded;
    return at;
}

static void begin(struct message *m, unsigned type, unsigned flags, const void *family, size_t size) {
    static uint32_t sequence;
    const struct nlmsghdr header = {.nlmsg_type = (uint16_t)type, .nlmsg_flags = (uint16_t)(NLM_F_REQUEST | flags), .nlmsg_seq = ++sequence};
    m->last = put(m, &header, sizeof header);
    put(m, family, size);
}

static void end(struct message *m) {
    if (m->last) m->last->nlmsg_len = (uint32_t)(m->data + m->used - (uint8_t *)m->last);
}

static void attribute(struct message *m, unsigned type, const void *data, size_t size) {
    const struct nlattr header = {.nla_type = (uint16_t)type, .nla_len = (uint16_t)(sizeof header + size)};
    put(m, &header, sizeof header);
    put(m, data, size);
}
static void text(struct message *m, unsigned type, const char *value) { attribute(m, type, value, strlen(value) + 1); }
static void number(struct message *m, unsigned type, uint32_t value) {
    value = htonl(value);
    attribute(m, type, &value, sizeof value);
}
static struct nlattr *open_nest(struct message *m, unsigned type) {
    const struct nlattr header = {.nla_type = (uint16_t)(type | NLA_F_NESTED)};
    return put(m, &header, sizeof header);
}
static void close_nest(struct message *m, struct nlattr *nest) {
    if (nest) nest->nla_len = (uint16_t)(m->data + m->used - (uint8_t *)nest);
}

/* Send, and hear what the kernel thinks of it. 0 or -errno. */
static int ask(int fd, const struct message *m) {
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    if (m->used > sizeof m->data) return -EMSGSIZE;
    if (sendto(fd, m->data, m->used, 0, (struct sockaddr *)&kernel, sizeof kernel) < 0) return -errno;
    _Alignas(struct nlmsghdr) uint8_t answer[4096];
    int result = -EIO; /* nothing was said */
    ssize_t size;
    while ((size = recv(fd, answer, sizeof answer, MSG_DONTWAIT)) > 0) { /* both kinds answer before sendto() is back */
        int left = (int)size;
        for (struct nlmsghdr *h = (struct nlmsghdr *)answer; NLMSG_OK(h, left); h = NLMSG_NEXT(h, left)) {
            if (h->nlmsg_type != NLMSG_ERROR || h->nlmsg_len < NLMSG_LENGTH(sizeof(struct nlmsgerr))) continue;
            int error = ((struct nlmsgerr *)NLMSG_DATA(h))->error;
            if (error) return error;
            result = 0;
        }
    }
    return result;
}

/* One more address of loopback's: C libraries that look whether there is IPv4 at all (AI_ADDRCONFIG) leave 127.0.0.1 out of account. Not one
 * of the outside range: programs that find it here as their own, and connect to it, would reach the edge. */
static void describe_address(struct message *m) {
    const struct ifaddrmsg about = {.ifa_family = AF_INET, .ifa_prefixlen = 32, .ifa_scope = RT_SCOPE_HOST, .ifa_index = LOOPBACK_INDEX};
    const uint32_t address = htonl(INADDR_LOOPBACK + 1);
    begin(m, RTM_NEWADDR, NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE, &about, sizeof about);
    attribute(m, IFA_LOCAL, &address, sizeof address);
    end(m);
}

static void describe_route(struct message *m) {
    const struct rtmsg route = {
        .rtm_family = AF_INET, .rtm_table = RT_TABLE_LOCAL, .rtm_protocol = RTPROT_STATIC, .rtm_scope = RT_SCOPE_HOST, .rtm_type = RTN_LOCAL};
    const uint32_t device = LOOPBACK_INDEX, source = htonl(INADDR_LOOPBACK);
    begin(m, RTM_NEWROUTE, NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE, &route, sizeof route);
    attribute(m, RTA_OIF, &device, sizeof device);
    attribute(m, RTA_PREFSRC, &source, sizeof source);
    end(m);
}

static int add_address_and_route(void) {
    struct message m = {0};
    describe_address(&m);
    describe_route(&m);
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    if (fd < 0) return -errno;
    int error = ask(fd, &m);
    close(fd);
    return error;
}

/* --- expressions of rules ------------------------------------------------------------------------------------------------------------ */

struct expression {
    struct nlattr *element, *data;
};

static struct expression open_expression(struct message *m, const char *name) {
    struct expression e = {.element = open_nest(m, NFTA_LIST_ELEM)};
    text(m, NFTA_EXPR_NAME, name);
    e.data = open_nest(m, NFTA_EXPR_DATA);
    return e;
}
static void close_expression(struct message *m, struct expression e) {
    close_nest(m, e.data);
    close_nest(m, e.element);
}

static void value(struct message *m, unsigned type, const void *data, size_t size) {
    struct nlattr *nest = open_nest(m, type);
    attribute(m, NFTA_DATA_VALUE, data, size);
    close_nest(m, nest);
}

static void compare(struct message *m, unsigned operator, const void *data, size_t size) {
    struct expression e = open_expression(m, "cmp");
    number(m, NFTA_CMP_SREG, NFT_REG_1);
    number(m, NFTA_CMP_OP, operator);
    value(m, NFTA_CMP_DATA, data, size);
    close_expression(m, e);
}

static void load(struct message *m, unsigned base, unsigned offset, unsigned size) {
    struct expression e = open_expression(m, "payload");
    number(m, NFTA_PAYLOAD_DREG, NFT_REG_1);
    number(m, NFTA_PAYLOAD_BASE, base);
    number(m, NFTA_PAYLOAD_OFFSET, offset);
    number(m, NFTA_PAYLOAD_LEN, size);
    close_expression(m, e);
}

static void if_protocol(struct message *m, uint8_t protocol) {
    struct expression e = open_expression(m, "meta");
    number(m, NFTA_META_DREG, NFT_REG_1);
    number(m, NFTA_META_KEY, NFT_META_L4PROTO);
    close_expression(m, e);
    compare(m, NFT_CMP_EQ, &protocol, sizeof protocol);
}

static void if_loopback(struct message *m, bool is) {
    const uint8_t net = LOOPBACK_NET;
    load(m, NFT_PAYLOAD_NETWORK_HEADER, ADDRESS_OFFSET_TO, sizeof net);
    compare(m, is ? NFT_CMP_EQ : NFT_CMP_NEQ, &net, sizeof net);
}

static void if_port(struct message *m, unsigned offset, uint16_t port) {
    port = htons(port);
    load(m, NFT_PAYLOAD_TRANSPORT_HEADER, offset, sizeof port);
    compare(m, NFT_CMP_EQ, &port, sizeof port);
}

static void if_somebody_is_there(struct message *m) {
    struct expression e = open_expression(m, "socket"); /* ends the rule where there is no socket for this packet */
    number(m, NFTA_SOCKET_KEY, NFT_SOCKET_TRANSPARENT);
    number(m, NFTA_SOCKET_DREG, NFT_REG_1);
    close_expression(m, e);
}

static void immediate(struct message *m, unsigned reg, const void *data, size_t size) {
    struct expression e = open_expression(m, "immediate");
    number(m, NFTA_IMMEDIATE_DREG, reg);
    value(m, NFTA_IMMEDIATE_DATA, data, size);
    close_expression(m, e);
}

static void accept_it(struct message *m) {
    struct expression e = open_expression(m, "immediate");
    number(m, NFTA_IMMEDIATE_DREG, NFT_REG_VERDICT);
    struct nlattr *data = open_nest(m, NFTA_IMMEDIATE_DATA), *verdict = open_nest(m, NFTA_DATA_VERDICT);
    number(m, NFTA_VERDICT_CODE, NF_ACCEPT);
    close_nest(m, verdict);
    close_nest(m, data);
    close_expression(m, e);
}

static void hand_over_to(struct message *m, uint16_t port) {
    const uint32_t address = htonl(EDGE_ADDRESS);
    port = htons(port);
    immediate(m, NFT_REG_1, &address, sizeof address);
    immediate(m, NFT_REG_2, &port, sizeof port);
    struct expression e = open_expression(m, "tproxy"); /* ends the rule where there is no such socket */
    number(m, NFTA_TPROXY_FAMILY, NFPROTO_IPV4);
    number(m, NFTA_TPROXY_REG_ADDR, NFT_REG_1);
    number(m, NFTA_TPROXY_REG_PORT, NFT_REG_2);
    close_expression(m, e);
    accept_it(m);
}

static void set_port_from(struct message *m, uint16_t port) {
    port = htons(port);
    immediate(m, NFT_REG_1, &port, sizeof port);
    struct expression e = open_expression(m, "payload");
    number(m, NFTA_PAYLOAD_SREG, NFT_REG_1);
    number(m, NFTA_PAYLOAD_BASE, NFT_PAYLOAD_TRANSPORT_HEADER);
    number(m, NFTA_PAYLOAD_OFFSET, PORT_OFFSET_FROM);
    number(m, NFTA_PAYLOAD_LEN, sizeof port);
    number(m, NFTA_PAYLOAD_CSUM_TYPE, NFT_PAYLOAD_CSUM_INET);
    number(m, NFTA_PAYLOAD_CSUM_OFFSET, 6); /* of UDP */
    close_expression(m, e);
}

/* --- the chain ----------------------------------------------------------------------------------------------------------------------- */

#define TABLE "dsec"
#define CHAIN "out"
#define NFT(message) ((NFNL_SUBSYS_NFTABLES << 8) | (message))

static const struct nfgenmsg IPV4 = {.nfgen_family = NFPROTO_IPV4, .version = NFNETLINK_V0};

static void bracket(struct message *m, unsigned type) {
    const struct nfgenmsg batch = {.nfgen_family = AF_UNSPEC, .version = NFNETLINK_V0, .res_id = htons(NFNL_SUBSYS_NFTABLES)};
    begin(m, type, 0, &batch, sizeof batch);
    end(m);
}

static struct nlattr *open_rule(struct message *m, unsigned flags) {
    begin(m, NFT(NFT_MSG_NEWRULE), NLM_F_CREATE | NLM_F_APPEND | flags, &IPV4, sizeof IPV4);
    text(m, NFTA_RULE_TABLE, TABLE);
    text(m, NFTA_RULE_CHAIN, CHAIN);
    return open_nest(m, NFTA_RULE_EXPRESSIONS);
}
static void close_rule(struct message *m, struct nlattr *expressions) {
    close_nest(m, expressions);
    end(m);
}

static void table(struct message *m, unsigned type, unsigned flags) {
    begin(m, NFT(type), flags, &IPV4, sizeof IPV4);
    text(m, NFTA_TABLE_NAME, TABLE);
    end(m);
}

static void describe(struct message *m, uint16_t tcp_port, uint16_t udp_port, bool replace) {
    bracket(m, NFNL_MSG_BATCH_BEGIN);
    if (replace) table(m, NFT_MSG_DELTABLE, 0);
    table(m, NFT_MSG_NEWTABLE, NLM_F_CREATE | NLM_F_EXCL);
    begin(m, NFT(NFT_MSG_NEWCHAIN), NLM_F_CREATE, &IPV4, sizeof IPV4);
    text(m, NFTA_CHAIN_TABLE, TABLE);
    text(m, NFTA_CHAIN_NAME, CHAIN);
    text(m, NFTA_CHAIN_TYPE, "filter");
    struct nlattr *nest = open_nest(m, NFTA_CHAIN_HOOK);
    number(m, NFTA_HOOK_HOOKNUM, NF_INET_PRE_ROUTING);
    number(m, NFTA_HOOK_PRIORITY, (uint32_t)MANGLE);
    close_nest(m, nest);
    end(m);

    nest = open_rule(m, 0); /* 1 */
    if_protocol(m, IPPROTO_TCP);
    if_loopback(m, false);
    hand_over_to(m, tcp_port);
    close_rule(m, nest);
    nest = open_rule(m, 0); /* 2 */
    if_loopback(m, true);
    if_port(m, PORT_OFFSET_TO, 53);
    if_somebody_is_there(m);
    accept_it(m);
    close_rule(m, nest);
    nest = open_rule(m, 0); /* 3 */
    if_protocol(m, IPPROTO_UDP);
    if_port(m, PORT_OFFSET_TO, 53);
    hand_over_to(m, udp_port);
    close_rule(m, nest);
    nest = open_rule(m, 0); /* 4 */
    if_protocol(m, IPPROTO_TCP);
    if_port(m, PORT_OFFSET_TO, 53);
    hand_over_to(m, tcp_port);
    close_rule(m, nest);
    nest = open_rule(m, NLM_F_ACK); /* 5 */
    if_protocol(m, IPPROTO_UDP);
    if_port(m, PORT_OFFSET_FROM, udp_port);
    set_port_from(m, 53);
    close_rule(m, nest);
    bracket(m, NFNL_MSG_BATCH_END);
}

int firewall_make(uint16_t tcp_port, uint16_t udp_port, int netfilter) {
    if (netfilter < 0) return netfilter;
    int error = add_address_and_route();
    if (!error) {
        struct message m = {0};
        describe(&m, tcp_port, udp_port, false);
        error = ask(netfilter, &m);
    }
    if (error == -EEXIST) { /* of an earlier way out in a machine; a container's namespace has none */
        struct message m = {0};
        describe(&m, tcp_port, udp_port, true);
        error = ask(netfilter, &m);
    }
    close(netfilter);
    return error == -ENOENT ? -EOPNOTSUPP : error; /* an expression that this kernel doesn't have */
}

int firewall_bind(int type, uint16_t *port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(EDGE_ADDRESS)};
    int on = 1, fd = socket(AF_INET, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || setsockopt(fd, IPPROTO_IP, IP_TRANSPARENT, &on, sizeof on) < 0) goto failed;
    for (unsigned number = FIRST_PORT; number > FIRST_PORT - PORTS; number--) {
        *port = (uint16_t)number;
        address.sin_port = htons(*port);
        if (bind(fd, (struct sockaddr *)&address, sizeof address) == 0) return fd;
        if (errno != EADDRINUSE) break;
    }
failed:;
    int error = -errno;
    if (fd >= 0) close(fd);
    return error;
}
