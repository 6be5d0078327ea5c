"""Unix sockets of machines, below directories whose paths may be longer than a socket's name."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec.errors import Unavailable


@contextmanager
def short(directory: Path) -> Iterator[str]:
    """A short name for it: a unix socket's may have 107 bytes."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


@contextmanager
def listen(directory: Path, name: str) -> Iterator[socket.socket]:
    """A unix socket that listens, for the VMM to be handed; connections wait until it accepts them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as found, short(directory) as place:
        found.bind(f"{place}/{name}")
        found.listen(1)
        yield found


def connect(directory: Path, name: str) -> socket.socket:
    """A connection to a socket of this name there, not blocking. Raises `Unavailable`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with short(directory) as place:
            sock.connect(f"{place}/{name}")
    except OSError as error:
        sock.close()
        raise Unavailable(f"the virtual machine's port can't be reached: {error}") from None
    sock.setblocking(False)
    return sock
