"""A store that misbehaves, around a real one: slow, failing, cut off, damaged, gone. For tests and benchmarks."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from dsec.errors import NotFound, Unavailable
from dsec.ports import BlobInfo, BlobStore
from dsec.store.blobs import get_apart


async def sleep_until(when: float) -> None:
    """By the monotonic clock, and never less: a loop's own sleep may be a millisecond short where something else wakes
    it, and what is 2 ms away would seem to be near."""
    while (left := when - time.monotonic()) > 0:  # noqa: ASYNC110 (no event, but time)
        await asyncio.sleep(left)


class FaultyStore:
    """`ports.BlobStore` with faults, each off until it is set."""

    def __init__(self, inner: BlobStore, *, seed: int = 0) -> None:
        self.inner = inner
        self.latency_s = 0.0
        """Added to every call."""
        self.bytes_per_s = 0.0
        """Of one read; 0: as fast as it goes."""
        self.fail_share = 0.0
        """Of all calls, by chance from the seed."""
        self.gone = False
        """Every call fails."""
        self.truncate: set[str] = set()
        """Reads of these keys lose their last byte."""
        self.corrupt: set[str] = set()
        """Reads of these keys have one bit flipped."""
        self.calls = 0
        self.gets = 0
        self.bytes_read = 0
        self._chance = random.Random(seed)

    async def put(self, key: str, data: bytes | Path) -> None:
        await self._enter()
        await self.inner.put(key, data)

    async def put_if_absent(
        self, key: str, data: bytes | Path, told: Callable[[int], None] = lambda done: None
    ) -> bool:
        await self._enter()
        return await self.inner.put_if_absent(key, data, told)

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        self._count()
        began = time.monotonic()
        try:
            data = await self.inner.get(key, offset, size)
        except NotFound:
            await sleep_until(began + self.latency_s)
            raise
        self.gets += 1
        self.bytes_read += len(data)
        seconds = self.latency_s + (len(data) / self.bytes_per_s if self.bytes_per_s else 0.0)
        if seconds:  # all of it at once: each sleep may be a millisecond late
            await sleep_until(began + seconds)
        if key in self.truncate:
            data = data[:-1]
        if key in self.corrupt and data:
            at = self._chance.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data

    async def get_each(self, keys: Sequence[str], most: int) -> list[bytes | None]:
        if any(map(self._faulty, keys)):
            return await get_apart(self, keys, most)
        self._count()
        return await self.inner.get_each(keys, most)

    def file(self, key: str) -> Path | None:
        """Where nothing is set that such a reader would escape."""
        return None if self._faulty(key) else self.inner.file(key)

    def _faulty(self, key: str) -> bool:
        everywhere = self.latency_s or self.bytes_per_s or self.fail_share or self.gone
        return bool(everywhere) or key in self.truncate or key in self.corrupt

    async def size(self, key: str) -> int | None:
        await self._enter()
        return await self.inner.size(key)

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        await self._enter()
        async for info in self.inner.list(prefix):
            yield info

    async def delete(self, key: str) -> None:
        await self._enter()
        await self.inner.delete(key)

    async def close(self) -> None:
        await self.inner.close()

    async def _enter(self) -> None:
        if self.latency_s:
            await sleep_until(time.monotonic() + self.latency_s)
        self._count()

    def _count(self) -> None:
        self.calls += 1
        if self.gone or self._chance.random() < self.fail_share:
            raise Unavailable("the store failed, as the test asked")
