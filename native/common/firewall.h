#ifndef DSEC_FIREWALL_H
#define DSEC_FIREWALL_H

#include <stdint.h>

/* Of a documentation net: what the edge's sockets are bound to in each namespace. */
#define EDGE_ADDRESS 0xc0000201u

/* A socket bound to EDGE_ADDRESS, by which nothing else is reached, and to a port that nobody has; or -errno. */
int firewall_bind(int type, uint16_t *port);
/* The route and the chain that lead to those two. `netfilter`: a netlink socket, which is closed, or -errno. 0 or -errno; -EOPNOTSUPP: this
 * kernel lacks one of nf_tables, nft_tproxy and nft_socket. */
int firewall_make(uint16_t tcp_port, uint16_t udp_port, int netfilter);

#endif
