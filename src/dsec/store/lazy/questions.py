"""How reads of lazy layers reach the filler: the kernel's questions, by one of two ways.

`Events` are those of a holder: fanotify pre-content events. `fuse.FuseFiles` are files of a file system of the
filler's own, for kernels without such events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dsec.store.lazy import holder
from dsec.store.lazy.cache import CachedLayer
from dsec.store.lazy.holder import HolderStats, Waiting


class Questions(Protocol):
    """Reads that wait for a filler. A layer has a number, below `holder.BLOBS`."""

    def start(self, on_read: Callable[[Waiting], None], on_gone: Callable[[], None]) -> None:
        """Begin to hand reads over, each to be answered once; `on_gone`: none will come any more. On the loop."""
        ...

    def add(self, number: int, layer: str, root: Path) -> None:
        """Tell of a layer in the cache, whose directory is `root`. Replaces the number's earlier one. Raises OSError,
        `Unavailable`."""
        ...

    def remove(self, number: int) -> None:
        """Nothing is mounted of it any more. Idempotent."""
        ...

    def answer(self, token: int, error: int) -> None:
        """What it asked for is there (0), or can't be had (an errno)."""
        ...

    def complete(self, number: int, cached: CachedLayer) -> None:
        """All of it is there."""
        ...

    def reopen(self, number: int, cached: CachedLayer) -> bool:
        """Some of what is there will be taken away: its reads ask again. False where that can't be."""
        ...

    def idle_s(self, number: int) -> float:
        """How long ago a read of it asked."""
        ...

    @property
    def to_copier(self) -> bool:
        """Whether reads can go to the copier without us."""
        ...

    def stats(self) -> HolderStats: ...

    def close(self) -> None: ...


class Events:
    """Of a holder."""

    def __init__(self, path: Path) -> None:
        """`path`: its socket. Raises `Unavailable`."""
        self._client = holder.HolderClient(path)
        self._channel = holder.connect(path)
        self._to_copier = self._client.knows_copiers()

    def start(self, on_read: Callable[[Waiting], None], on_gone: Callable[[], None]) -> None:
        self._channel.send(holder.MESSAGE.pack(holder.FILL, 0, 0, 0, 0, 0, 0, 0, 0, 0))
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel, self._readable, on_read, on_gone)

    def add(self, number: int, layer: str, root: Path) -> None:
        with open(root / "filled", "rb") as bitmap:
            self._client.add(number, (root / "data").stat(), bitmap.fileno(), 4096)

    def remove(self, number: int) -> None:
        self._client.remove(number)

    def answer(self, token: int, error: int) -> None:
        message = holder.MESSAGE.pack(holder.DONE, 0, token, 0, 0, 0, 0, 0, 0, error)
        with contextlib.suppress(OSError):  # a holder that is gone: its successor asks again
            try:
                self._channel.send(message)
            except BlockingIOError:  # it reads soon: it never waits for us
                self._channel.setblocking(True)
                self._channel.send(message)
                self._channel.setblocking(False)

    def complete(self, number: int, cached: CachedLayer) -> None:
        self._client.complete(number, cached.data)

    def reopen(self, number: int, cached: CachedLayer) -> bool:
        return cached.asks and self._client.reopen(number, cached.data)

    def idle_s(self, number: int) -> float:
        return self._client.idle_s(number)

    @property
    def to_copier(self) -> bool:
        return self._to_copier

    def stats(self) -> HolderStats:
        return self._client.stats()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        self._client.close()

    def _readable(self, on_read: Callable[[Waiting], None], on_gone: Callable[[], None]) -> None:
        for _ in range(64):
            try:
                message = self._channel.recv(holder.MESSAGE.size)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if len(message) != holder.MESSAGE.size:
                asyncio.get_running_loop().remove_reader(self._channel)
                on_gone()
                return
            fields = holder.MESSAGE.unpack(message)
            if fields[0] == holder.REQUEST:
                on_read(Waiting(fields[2], fields[1], fields[5], fields[6]))
