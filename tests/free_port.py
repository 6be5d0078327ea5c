"""Ports for servers that a test starts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_000


def free_port() -> int:
    """One at which nobody listens, below those that the kernel gives to outgoing connections: of these, another's may
    take it while a server of ours is down between its kill and its next start."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = random.randrange(_LOWEST, ephemeral)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port in {_LOWEST} ... {ephemeral}")
