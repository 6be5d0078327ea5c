"""Sockets for tests of a guest channel: pairs, and one that stands for an edge which is killed at a frame boundary."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12


def seqpacket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that keep packets apart, as a container's channel does."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


STREAM_READ = 32 << 10
"""Bytes at most that a read of a stream takes: however much waits, there are boundaries to be cut at."""


class CuttingSocket(socket.socket):
    """Takes over a socket and, after so many frames in one direction, does what the socket of a killed edge does:
    nothing more comes out of it, and what is sent is lost. `cut` is set then.

    `sends`, `receives`: frames until the cut, each way; None: no limit.
    """

    def __init__(self, sock: socket.socket, *, sends: int | None = None, receives: int | None = None) -> None:
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self._left = {"send": sends, "receive": receives}
        self.cut = asyncio.Event()

    def _spend(self, way: str) -> bool:
        left = self._left[way]
        if left == 0:
            self.cut.set()
        elif left is not None:
            self._left[way] = left - 1
        return self.cut.is_set()

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        if self.cut.is_set():
            raise BlockingIOError
        if self._left["receive"] == 0 and super().recv_into(bytearray(1), 1, socket.MSG_PEEK):
            self.cut.set()
            raise BlockingIOError
        if self.type == socket.SOCK_STREAM:
            nbytes = min(nbytes or memoryview(buffer).nbytes, STREAM_READ)
        count = super().recv_into(buffer, nbytes, flags)
        self._spend("receive")
        return count

    def send(self, data: Buffer, flags: int = 0) -> int:
        if self._spend("send"):
            return len(memoryview(data))
        return super().send(data, flags)
