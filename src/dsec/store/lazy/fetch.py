"""Chunks from the store into the cache: each is fetched once however many readers want it, verified before it is
written, and noted when it is written.

Invariant: a chunk that `CachedLayer.have` says is there is the chunk that the manifest names. A chunk that can't be
had fails all who wait for it, and is tried anew by the next who asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable

from dsec.errors import DsecError, LayerCorrupt
from dsec.ports import BlobStore, Clock
from dsec.store.format import Chunk, Place, check_chunk, iter_runs, pack_key
from dsec.store.lazy.cache import CachedLayer

log = logging.getLogger(__name__)

RUN_BYTES = 1 << 20
"""One request to the store asks for no more."""
STREAMS = 8
"""Requests of a prefetch at the same time; reads that wait are not counted."""
_ATTEMPTS = 4
_FIRST_DELAY_S = 0.05


class _Run:
    """Chunks that one request to the store brings."""

    __slots__ = ("chunks", "done", "indexes", "layer", "place")

    def __init__(self, layer: CachedLayer, place: Place, chunks: list[Chunk], indexes: list[int]) -> None:
        self.layer = layer
        self.place = place
        self.chunks = chunks
        self.indexes = indexes
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Fetcher:
    """Fetches for all layers of a cache."""

    def __init__(self, store: BlobStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._flying: dict[tuple[str, int], _Run] = {}
        self._queued: dict[_Run, None] = {}
        """In the background, not begun yet, in order."""
        self._background = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.fetched_bytes: Counter[str] = Counter()
        """From the store, by layer."""

    async def ensure(self, layer: CachedLayer, indexes: Iterable[int]) -> None:
        """Return when these chunks are in the cache. Raises `Unavailable` or `NotFound` where the store fails,
        `LayerCorrupt` where it hands out something else, OSError where the disk is full."""
        for future in self.begin(layer, indexes):
            await asyncio.shield(future)  # others may wait for it too

    def begin(
        self, layer: CachedLayer, indexes: Iterable[int], *, background: bool = False
    ) -> list[asyncio.Future[None]]:
        """Start to fetch what isn't there; `background`: when its turn comes. Returns what to wait for."""
        waits: dict[asyncio.Future[None], None] = {}
        wanted = []
        for index in indexes:
            if layer.have[index]:
                continue
            run = self._flying.get((layer.layer, index))
            if run is None:
                wanted.append(index)
                continue
            waits[run.done] = None
            if not background and run in self._queued:  # a reader waits for it now
                del self._queued[run]
                self._start(run)
        position = 0
        places, chunks = [layer.places[i] for i in wanted], [layer.chunks[i] for i in wanted]
        for place, part in iter_runs(places, chunks, RUN_BYTES):
            run = _Run(layer, place, part, wanted[position : position + len(part)])
            position += len(part)
            self._flying.update(((layer.layer, index), run) for index in run.indexes)
            waits[run.done] = None
            if not background:
                self._start(run)
            else:
                self._queued[run] = None
        self._start_queued()
        return list(waits)

    def busy(self, layer: str) -> bool:
        """Whether anything of a layer is on its way."""
        return any(flying == layer for flying, _ in self._flying)

    async def close(self) -> None:
        """Stop; who waits is cancelled."""
        self._queued.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_queued(self) -> None:
        while self._queued and self._background < STREAMS:
            run = next(iter(self._queued))
            del self._queued[run]
            self._background += 1
            self._start(run).add_done_callback(self._background_done)

    def _background_done(self, _: asyncio.Task[None]) -> None:
        self._background -= 1
        self._start_queued()

    def _start(self, run: _Run) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, run: _Run) -> None:
        try:
            await self._fetch(run.layer, run.place, run.chunks, run.indexes)
        except (DsecError, OSError) as error:
            log.warning("layer %s: %s", run.layer.layer, error)
            run.done.set_exception(error)
            run.done.exception()  # nobody may be waiting
        except asyncio.CancelledError:
            run.done.cancel()
            raise
        else:
            run.done.set_result(None)
        finally:
            for index in run.indexes:
                self._flying.pop((run.layer.layer, index), None)

    async def _fetch(self, layer: CachedLayer, place: Place, run: list[Chunk], indexes: list[int]) -> None:
        size = sum(chunk.size for chunk in run)
        delay_s = _FIRST_DELAY_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                data = memoryview(await self._store.get(pack_key(place.pack), place.offset, size))
                self.fetched_bytes[layer.layer] += len(data)
                self._put(layer, run, data)
                layer.note(indexes)
                return
            except LayerCorrupt:
                # Half a body looks the same as a damaged object: another try tells.
                if attempt == _ATTEMPTS:
                    raise
                await self._clock.sleep(delay_s)
                delay_s *= 2

    @staticmethod
    def _put(layer: CachedLayer, run: list[Chunk], data: memoryview) -> None:
        """Verify all, then write; chunks that follow each other in the layer too are one write."""
        at, begin, first = 0, 0, run[0]
        for chunk in run:
            check_chunk(data[at : at + chunk.size], chunk)
            at += chunk.size
        at = 0
        for chunk in run:
            if chunk.offset != first.offset + (at - begin):
                layer.write(first, data[begin:at])
                first, begin = chunk, at
            at += chunk.size
        layer.write(first, data[begin:at])
