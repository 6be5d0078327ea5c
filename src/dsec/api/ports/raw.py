"""A client's connection whose protocol changes: bytes, after the head of an HTTP request that asked for a WebSocket.

The server's protocol feeds it from the moment that such a request has come; the proxy reads and writes once both sides
have agreed. Invariant: what isn't read yet is bounded, because reading from the socket stops.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

RAW = "dsec.raw"
"""In the scope of a request that asks for a WebSocket to a port: its `RawConnection`."""
_HIGH_BYTES = 128 << 10


class Wire(Protocol):
    """What the connection's owner lends."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def send(self, data: bytes) -> Awaitable[None]:
        """Write; waits while the client doesn't read."""
        ...

    def end(self) -> None:
        """Close, after what was written has left."""
        ...


class RawConnection:
    """The client's side."""

    def __init__(self, wire: Wire, taken: Callable[[], None]) -> None:
        """`taken`: called when the connection stops being HTTP."""
        self._wire = wire
        self._taken = taken
        self._data: deque[bytes] = deque()
        self._held = 0
        self._lost = False
        self._event = asyncio.Event()

    # --- the server's side ---

    def feed(self, data: bytes) -> None:
        """The client sent this."""
        self._data.append(data)
        self._held += len(data)
        if self._held > _HIGH_BYTES:
            self._wire.pause()
        self._event.set()

    def lose(self) -> None:
        """The connection is gone."""
        self._lost = True
        self._event.set()

    # --- the proxy's side ---

    def take(self) -> None:
        """From now on it isn't HTTP any more."""
        self._taken()
        self._wire.resume()

    async def read(self) -> bytes:
        """Some bytes; b"" when the client is gone."""
        while not self._data:
            if self._lost:
                return b""
            self._event.clear()
            await self._event.wait()
        data = self._data.popleft()
        self._held -= len(data)
        if not self._data and not self._lost:
            self._wire.resume()
        return data

    async def write(self, data: bytes) -> None:
        """Send; waits while the client doesn't read. Dropped where it is gone."""
        if not self._lost:
            await self._wire.send(data)

    def close(self) -> None:
        """After what was written has left."""
        if not self._lost:
            self._wire.end()
