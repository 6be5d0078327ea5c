/* The edge's connection: who it is, and what waits to be sent to it. Its tag in the epoll set is &edge. */
#ifndef DSEC_EDGE_H
#define DSEC_EDGE_H

#include "fields.h"
#include "frame.h"
#include "zygote.h"

struct outgoing;

struct edge {
    int fd;
    uint64_t number; /* of connections so far: answers go only to the one that asked */
    bool greeted, writing;
    struct outgoing *first, **last;
    unsigned queued;
    struct dsec_request request; /* one that came in part */
};
extern struct edge edge;

int watch(int fd, void *tag);
void close_fds(int *fds, int count);
/* One packet with descriptors; as sendmsg(2). */
ssize_t send_packet(int to, const void *data, size_t size, const int *fds, int fd_count);
void drop_edge(void);
void flush_edge(void);
/* Queue or send a frame; takes the descriptors over. */
void answer(uint8_t type, uint64_t op, const void *payload, size_t size, int *fds, int fd_count);
void failed(uint64_t op, int error, const char *text);

/* The socket on which edges knock. 0 or -errno. */
int edge_listen(const char *path);
extern const char *edge_path;
extern char listener_tag, candidate_tag; /* of their events */
int watch_door(void);
void accept_candidate(void);
#define CANDIDATE_PACKET (DSEC_HEADER_SIZE + 9)
/* The first frame of a candidate. HELLO makes it the edge: then true. */
bool read_candidate(struct dsec_header *header, uint8_t packet[CANDIDATE_PACKET]);

#endif
