"""A machine's serial console: what it printed last, and a way to type. What comes from it is a claim, and bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket

KEEP_BYTES = 256 << 10
MOST_TYPED = 64 << 10


class Console:
    """One connection to the serial line. What is printed while no server is there is lost."""

    def __init__(self, sock: socket.socket) -> None:
        """The socket is this object's from now on."""
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._kept = bytearray()
        self._begin = 0
        self._more = asyncio.Event()
        self._closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def end(self) -> int:
        """How many bytes were printed so far."""
        return self._begin + len(self._kept)

    def tail(self, size: int = 4000) -> str:
        """The last of it, as text."""
        return bytes(self._kept[-size:]).decode(errors="replace")

    async def read(self, after: int = -1, wait_s: float = 0.0) -> tuple[int, bytes]:
        """What was printed from the offset `after` on (below 0: all that is kept), and the offset at which it begins;
        waits for at least one byte, `wait_s` at most."""
        if 0 <= self.end <= after and wait_s > 0 and not self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._more.wait()
        at = max(after, self._begin)
        return at, bytes(self._kept[at - self._begin :])

    async def write(self, data: bytes) -> None:
        """Type."""
        await self._loop.sock_sendall(self._socket, data[:MOST_TYPED])

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._more.set()

    def _readable(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._socket.recv(65536)
        if not data:
            self.close()
            return
        self._kept += data
        beyond = len(self._kept) - KEEP_BYTES
        if beyond > 0:
            del self._kept[:beyond]
            self._begin += beyond
        self._more.set()
        self._more = asyncio.Event()
