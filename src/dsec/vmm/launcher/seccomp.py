"""The filter of system calls that launcher and VMMs run behind.

It is loaded once, and inherited: never a BPF program for each VMM (the kernel frees them through one work queue, and
has wedged over thousands at once). What it leaves that only root may do, set-up needs; a VMM lacks the capabilities.
"""

from __future__ import annotations

import ctypes
import struct

from dsec.vmm.launcher.calls import NEWUSER, PR_SET_SECCOMP, check, libc

ALLOWED = (
    # files and memory
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 17, 18,
    19, 20, 21, 25, 26, 27, 28, 32, 33, 72, 73, 74, 75, 77, 78, 79,
    80, 89, 137, 138, 217, 221, 257, 262, 267, 269, 277,
    285, 292, 293, 295, 296, 319, 326, 327, 328, 332, 436, 439,
    # signals, time, waiting
    13, 14, 15, 22, 23, 24, 34, 35, 36, 37, 38, 62, 96,
    127, 128, 130, 131, 200, 202, 222, 223, 224, 225, 226, 228, 229,
    230, 232, 233, 234, 240, 270, 271, 281, 282, 283, 284, 286, 287, 289, 290, 291, 324, 449,
    # sockets that are there
    43, 44, 45, 46, 47, 48, 50, 51, 52, 53, 54, 55, 288, 299, 307,
    # processes and threads
    39, 56, 57, 58, 59, 60, 61, 63, 95, 97, 98, 99, 100,
    102, 104, 107, 108, 110, 111, 112, 115, 118, 120, 121, 124, 143,
    144, 145, 146, 147, 157, 158, 160, 186, 203, 204, 218, 219, 231, 247, 273, 274, 302, 309, 318, 334,
    # of set-up alone: without capabilities they do nothing
    116, 117, 119, 161, 165, 166, 272, 308,
)  # fmt: skip
"""Numbers of x86-64's system calls."""
ALLOWED_SOCKETS = (42, 49, 87, 323)
"""connect, bind, unlink, userfaultfd: with `--sockets`."""

_ARCH = 0xC000003E
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_SOCKET, _CLONE, _UNSHARE, _PRCTL, _SETSOCKOPT, _CLONE3 = 41, 56, 272, 157, 54, 435
_AF_UNIX = 1
_EPERM, _ENOSYS = 1, 38


def filter_program(*, sockets: bool = False) -> list[tuple[int, int, int, int]]:
    """The filter: (code, jump if true, jump if false, operand) each. `sockets`: as `--sockets`."""
    load, equal, is_set, answer = 0x20, 0x15, 0x45, 0x06

    def argument(number: int) -> tuple[int, int, int, int]:
        return (load, 0, 0, 16 + 8 * number)

    program = [(load, 0, 0, 4), (equal, 1, 0, _ARCH), (answer, 0, 0, _KILL), (load, 0, 0, 0)]
    for number in (_CLONE, _UNSHARE):  # no user namespace, which would give capabilities
        program += [(equal, 0, 4, number), argument(0), (is_set, 0, 1, NEWUSER), (answer, 0, 0, _ERRNO | _EPERM)]
        program += [(answer, 0, 0, _ALLOW)]
    program += [(equal, 0, 4, _PRCTL), argument(0), (equal, 0, 1, PR_SET_SECCOMP), (answer, 0, 0, _ERRNO | _EPERM)]
    program += [(answer, 0, 0, _ALLOW)]
    options = (26, 50, 51, 52)  # SO_ATTACH_FILTER, _BPF, _REUSEPORT_CBPF, _REUSEPORT_EBPF
    program += [(equal, 0, 2 + len(options) * 2, _SETSOCKOPT), argument(2)]
    for option in options:
        program += [(equal, 0, 1, option), (answer, 0, 0, _ERRNO | _EPERM)]
    program += [(answer, 0, 0, _ALLOW)]
    program += [(equal, 0, 1, _CLONE3), (answer, 0, 0, _ERRNO | _ENOSYS)]  # its flags can't be seen: use clone
    if sockets:
        program += [(equal, 0, 4, _SOCKET), argument(0), (equal, 1, 0, _AF_UNIX), (answer, 0, 0, _ERRNO | _EPERM)]
        program += [(answer, 0, 0, _ALLOW)]
    for number in sorted(set(ALLOWED + (ALLOWED_SOCKETS if sockets else ())) - {_CLONE, _UNSHARE, _PRCTL, _SETSOCKOPT}):
        program += [(equal, 0, 1, number), (answer, 0, 0, _ALLOW)]
    return [*program, (answer, 0, 0, _ERRNO | _EPERM)]


def load_filter(*, sockets: bool = False) -> None:
    program = filter_program(sockets=sockets)
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in program))
    header = struct.pack("<H6xQ", len(program), ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(header), 0, 0), "load the seccomp filter")
