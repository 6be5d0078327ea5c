"""How long a TCP connection of ours may be silent before the kernel takes its peer for gone.

A machine that stops, or whose network is away, says nothing: without this a call waits for as long as it likes. Only
the kernels' own answers count, so that one that is there may take any time to answer, or to read. The options of a
listening socket go over to what it accepts.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

SILENCE_S = 60.0
"""Between a client and a server."""
CLUSTER_SILENCE_S = 20.0
"""Between parts of a cluster: less than a node is silent before it is declared lost."""
UNREAD_S = 300.0
_RTO_MAX_MS = 44
"""`TCP_RTO_MAX_MS`: how far apart the kernel sends again what isn't acknowledged; after 15 times it gives up."""
_TIMES = 15


def keep_alive(sock: socket.socket, silence_s: float = SILENCE_S) -> None:
    """Have the kernel notice a peer that vanished, within about `silence_s` (15 or more), whether something is on its
    way to it or not. Before Linux 6.15 it takes up to `UNREAD_S` while something is, and a peer that is there but reads
    nothing for so long counts as gone too: `TCP_USER_TIMEOUT` doesn't tell them apart."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", silence_s / 2),
        ("TCP_KEEPINTVL", silence_s / 6),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", UNREAD_S * 1000),
    ):
        option = getattr(socket, name, None)  # not on every platform
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, int(value))
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, max(1000, int(silence_s * 1000 / _TIMES)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def watched(address: tuple[Any, ...], silence_s: float = SILENCE_S) -> socket.socket:
    """A socket for an address, as `getaddrinfo` gives it, that is kept alive so."""
    sock = socket.socket(*address[:3])
    keep_alive(sock, silence_s)
    return sock
