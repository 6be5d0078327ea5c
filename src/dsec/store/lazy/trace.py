"""Which chunks the first sandboxes of a layer read, in their order, so that another node can fetch them before they are
asked for.

In the store, at `traces/<layer>`: u32 little-endian indexes of chunks. It is advice: whatever is wrong with it costs
time only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from dsec.errors import NotFound
from dsec.ports import BlobStore, Clock
from dsec.store.format import trace_key
from dsec.store.lazy.cache import CachedLayer

RIPE_S = 60.0
"""So long after the first read a trace is saved."""
MOST = 1 << 14
"""Chunks in a trace: 4 GiB at most."""


class Recorder:
    """Records one layer's first reads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: float | None = None
        self._order: dict[int, None] = {}

    def read(self, chunks: Iterable[int]) -> None:
        """A read of these came."""
        if self._began is None:
            self._began = self._clock.monotonic()
        if len(self._order) < MOST:
            self._order.update(dict.fromkeys(chunks))

    @property
    def ripe(self) -> bool:
        return self._began is not None and self._clock.monotonic() - self._began >= RIPE_S

    async def save(self, store: BlobStore, cached: CachedLayer) -> None:
        """Keep it in the store, unless another node's is there or there were no reads. Raises `Unavailable`."""
        if self._order:
            await store.put_if_absent(trace_key(cached.layer), struct.pack(f"<{len(self._order)}I", *self._order))


async def load_trace(store: BlobStore, layer: str) -> list[int]:
    """The chunks to fetch first; empty where nobody recorded any. They may be none of the layer's. Raises
    `Unavailable`."""
    try:
        return decode_trace(await store.get(trace_key(layer), 0, 4 * MOST))
    except NotFound:
        return []


def decode_trace(data: bytes) -> list[int]:
    """Of an object of the store, at most `MOST`."""
    data = data[: 4 * MOST]
    return list(struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4]))
