"""Streaming answers that are cheap when they are short: what comes within a moment leaves as one write.

Owns the timing of `exec` and batch answers. A short command's start, output and end become one packet instead of three,
which saves a system call and a wake-up of the client each. Nothing is held for longer than HOLD_S, or than the caller
said that it may be. A client that goes away ends the answer, not the work behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from dsec.api.exchange import ClientGone, Exchange

HOLD_S = 0.002
GROUP_HOLD_S = 0.02
"""For answers about many: their items come in swarms."""
FLUSH_BYTES = 64 << 10


class HeldAnswer:
    """Collects parts of an answer and sends them together. Used with `async with`, by one task.

    That task is cancelled when the client goes away, and `async with` then ends quietly with `gone` set.
    """

    __slots__ = (
        "_exchange",
        "_first",
        "_hold_s",
        "_late",
        "_media_type",
        "_parts",
        "_reader",
        "_size",
        "_task",
        "_timer",
        "_watcher",
        "gone",
    )

    def __init__(
        self,
        exchange: Exchange,
        media_type: bytes,
        *,
        first: Callable[[], Awaitable[bytes]] | None = None,
        reader: Callable[[], Awaitable[None]] | None = None,
        hold_s: float = HOLD_S,
    ) -> None:
        """`first`: gives the part that comes before all others, once it is known. `reader`: consumes the rest of the
        request's body; None where it was read whole. `hold_s`: how long a part may be held."""
        self._exchange = exchange
        self._media_type = media_type
        self._first = first
        self._reader = reader
        self._hold_s = hold_s
        self._parts: list[bytes] = []
        self._size = 0
        self._late: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.gone = False

    async def __aenter__(self) -> HeldAnswer:
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._hold_s, self._expired)
        if self._reader is not None:
            self._watcher = loop.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._timer is not None:
            self._timer.cancel()
        if self._late is not None:
            self._late.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        task = self._task
        self._task = self._late = self._watcher = self._timer = None  # all of them refer to this
        if self.gone and kind is asyncio.CancelledError and task is not None:
            task.uncancel()
            return True
        return False

    def push(self, part: bytes) -> None:
        """Add a part; it leaves within `hold_s`."""
        self._parts.append(part)
        self._size += len(part)
        if self._timer is None and self._late is None:
            self._timer = asyncio.get_running_loop().call_later(self._hold_s, self._expired)

    @property
    def full(self) -> bool:
        """There is enough for a write: call `flush`."""
        return self._size >= FLUSH_BYTES

    async def flush(self) -> None:
        """Send what there is; waits while the client doesn't read."""
        if self._late is not None:
            await self._late  # it sends too: one at a time
        await self._send()

    async def finish(self, part: bytes = b"") -> None:
        """Send the last part."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._watcher is not None:  # it would take the end of the answer for the client's going away
            self._watcher.cancel()
        if self._late is not None:
            await self._late
        await self._prepend()
        self._parts.append(part)
        parts, self._parts = self._parts, []
        body = b"".join(parts)
        if not self._exchange.began:  # a whole answer with its length is cheaper for both sides than a chunked one
            length = (b"content-length", b"%d" % len(body))
            await self._exchange.begin(200, self._media_type, length)
        await self._exchange.finish(body)

    async def _prepend(self) -> None:
        if self._first is not None:
            self._parts.insert(0, await self._first())
            self._first = None

    async def _send(self) -> None:
        await self._prepend()
        if not self._exchange.began:
            await self._exchange.begin(200, self._media_type)
        if self._parts:
            parts, self._parts, self._size = self._parts, [], 0
            await self._exchange.more(b"".join(parts))

    def _expired(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        self._late = loop.create_task(self._send_late())
        if self._watcher is None:
            self._watcher = loop.create_task(self._watch())

    async def _send_late(self) -> None:
        try:
            while self._parts or self._first is not None or not self._exchange.began:
                await self._send()
        finally:
            self._late = None

    async def _watch(self) -> None:
        try:
            if self._reader is not None:
                await self._reader()
            # The body was read, so that the next message can only be that the client is gone.
            while (await self._exchange.receive())["type"] != "http.disconnect":
                pass
        except ClientGone:
            pass
        self.gone = True
        if self._task is not None:
            self._task.cancel()
