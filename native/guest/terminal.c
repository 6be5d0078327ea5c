/* A command's terminal: a pseudo terminal of the sandbox's own devpts. */
#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/vfs.h>
#include <termios.h>
#include <unistd.h>

#include "guest.h"

#define DEVPTS_MAGIC 0x1cd1
#define DEFAULT_SIZE (80u << 16 | 24u)
#ifndef TIOCGPTPEER
#define TIOCGPTPEER 0x5441
#endif

uint32_t terminal_size(uint32_t before, uint64_t cols, uint64_t rows) {
    if (cols == 0) cols = before >> 16;
    if (rows == 0) rows = before & 0xffff;
    return (uint32_t)(MIN(cols, DSEC_MAX_TERMINAL) << 16 | MIN(rows, DSEC_MAX_TERMINAL));
}

int terminal_resize(const struct op *op) {
    struct winsize size = {.ws_col = (unsigned short)(op->pty_size >> 16), .ws_row = (unsigned short)(op->pty_size & 0xffff)};
    if (op->out.fd < 0) return -EIO;
    return ioctl(op->out.fd, TIOCSWINSZ, &size) ? -errno : 0;
}

int terminal_make(struct op *op, uint64_t size, int *slave) {
    struct statfs file_system;
    struct termios modes;
    int locked = 0;
    op->out.fd = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    if (op->out.fd < 0) return -errno;
    if (fstatfs(op->out.fd, &file_system) || file_system.f_type != DEVPTS_MAGIC) return -ENODEV;
    if (ioctl(op->out.fd, TIOCSPTLCK, &locked)) return -errno;
    *slave = ioctl(op->out.fd, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC); /* not by its path */
    if (*slave < 0) return -errno;
    op->input = fcntl(op->out.fd, F_DUPFD_CLOEXEC, 0);
    if (op->input < 0) return -errno;
    op->pty_size = terminal_size(DEFAULT_SIZE, size >> 16, size & 0xffff);
    if (tcgetattr(*slave, &modes) == 0) {
        modes.c_iflag |= IUTF8; /* erasing takes a character, not a byte */
        tcsetattr(*slave, TCSANOW, &modes);
    }
    return terminal_resize(op);
}

/* In the middle of a line the first such character only hands over what was typed. */
bool terminal_type_end(struct op *op) {
    struct termios modes;
    uint8_t typed[2];
    if (tcgetattr(op->input, &modes)) return true;
    typed[0] = typed[1] = modes.c_cc[VEOF];
    size_t count = modes.c_lflag & ICANON && op->input_in_line ? 2 : 1;
    return write(op->input, typed, count) > 0 || errno != EAGAIN;
}

int terminal_take(uid_t owner) {
    if (ioctl(STDIN_FILENO, TIOCSCTTY, 0)) return -errno;
    if (owner && fchown(STDIN_FILENO, owner, (gid_t)-1)) return -errno; /* so that it can be opened by its name */
    return 0;
}
