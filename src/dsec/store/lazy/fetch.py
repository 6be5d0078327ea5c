"""Chunks from the store into the cache: each is fetched once however many readers want it, verified before it is
written, and noted when it is written.

Invariant: a chunk that `CachedLayer.have` says is there is the chunk that the manifest names. A chunk that can't be
had fails all who wait for it, and is tried anew by the next who asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

from dsec.errors import DsecError, LayerCorrupt
from dsec.ports import BlobStore, Clock
from dsec.store.format import Chunk, Place, check_chunk, iter_runs, pack_key
from dsec.store.lazy.cache import CachedLayer
from dsec.store.threads import started_pool

log = logging.getLogger(__name__)

T = TypeVar("T")

RUN_BYTES = 1 << 20
"""One request to the store asks for no more."""
STREAMS = 8
"""Requests ahead of readers at the same time."""
NEAR_STREAMS = 2
"""The same where the store answers at once: then they cost computing only, and a reader's own would wait for it."""
NEAR_RUN_BYTES = 512 << 10
NEAR_S = 0.0015
_THREADS = 4
"""That verify and write."""
_ATTEMPTS = 4
_FIRST_DELAY_S = 0.05


class _Run:
    """Chunks that one request to the store brings."""

    __slots__ = ("chunks", "done", "indexes", "layer", "place")

    def __init__(self, layer: CachedLayer, place: Place, chunks: list[Chunk], indexes: Sequence[int]) -> None:
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
        self._queued: dict[tuple[str, int], CachedLayer] = {}
        """To be fetched ahead, not begun yet, in order."""
        self._background = 0
        self._waited = 0
        """Requests that readers wait for."""
        self._took_s: deque[float] = deque(maxlen=16)
        """How long the last requests took."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = started_pool(_THREADS, "dsec-verify")
        self.fetched_bytes: Counter[str] = Counter()
        """From the store, by layer."""

    async def ensure(self, layer: CachedLayer, indexes: Iterable[int]) -> None:
        """Return when these chunks are in the cache. Raises `Unavailable` or `NotFound` where the store fails,
        `LayerCorrupt` where it hands out something else, OSError where the disk is full."""
        for future in self.begin(layer, indexes):
            await asyncio.shield(future)  # others may wait for it too

    async def ensure_all(self, layer: CachedLayer) -> None:
        """Return when the whole layer is in the cache, fetched over a bounded number of streams. Raises as `ensure`."""
        runs = iter_runs(layer.places, layer.chunks, RUN_BYTES)
        position = 0

        async def stream() -> None:
            nonlocal position
            for _, run in runs:
                first, position = position, position + len(run)
                await self.ensure(layer, range(first, position))

        for failed in await asyncio.gather(*(stream() for _ in range(STREAMS)), return_exceptions=True):
            if failed is not None:
                raise failed

    def begin(self, layer: CachedLayer, indexes: Iterable[int]) -> list[asyncio.Future[None]]:
        """Fetch what isn't there, at once. Returns what to wait for."""
        waits: dict[asyncio.Future[None], None] = {}
        wanted = []
        for index in indexes:
            if layer.have[index]:
                continue
            key = (layer.layer, index)
            run = self._flying.get(key)
            if run is not None:
                waits[run.done] = None
            else:
                self._queued.pop(key, None)
                wanted.append(index)
        if wanted:
            places, chunks = [layer.places[i] for i in wanted], [layer.chunks[i] for i in wanted]
            position = 0
            for place, part in iter_runs(places, chunks, RUN_BYTES):
                run = _Run(layer, place, part, wanted[position : position + len(part)])
                position += len(part)
                waits[run.done] = None
                self._waited += 1
                self._start(run).add_done_callback(self._waited_done)
        return list(waits)

    def ahead(self, layer: CachedLayer, indexes: Iterable[int]) -> None:
        """Fetch what isn't there when its turn comes; nobody waits. What lies together in the store comes together."""
        for index in indexes:
            key = (layer.layer, index)
            if not layer.have[index] and key not in self._flying:
                self._queued.setdefault(key, layer)
        self._start_queued()

    async def timed(self, request: Awaitable[T]) -> T:
        """A request to the store, from which is learnt how far that is."""
        began = self._clock.monotonic()
        found = await request
        self._took_s.append(self._clock.monotonic() - began)
        return found

    def busy(self, layer: str) -> bool:
        """Whether anything of a layer is on its way, or will be."""
        return any(name == layer for name, _ in (*self._flying, *self._queued))

    async def abandon(self, layer: str) -> None:
        """Don't begin what isn't begun of a layer; return when nothing of it is on its way."""
        for key in [key for key in self._queued if key[0] == layer]:
            del self._queued[key]
        while runs := {run.done for (name, _), run in self._flying.items() if name == layer}:
            await asyncio.wait(runs)

    def flies(self, layer: str, index: int) -> bool:
        """Whether a chunk is on its way, perhaps written by a thread at this moment."""
        return (layer, index) in self._flying

    async def close(self) -> None:
        """Stop; who waits is cancelled. No thread writes any more when it returns."""
        self._queued.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)

    @property
    def _near(self) -> bool:
        return min(self._took_s, default=1.0) < NEAR_S

    def _start_queued(self) -> None:
        streams = NEAR_STREAMS if self._near else STREAMS
        while self._queued and self._background < streams:
            self._background += 1
            self._start(self._next()).add_done_callback(self._background_done)

    def _next(self) -> _Run:
        """The first that is queued, with those queued that follow it in the layer and in the store."""
        (name, first), layer = next(iter(self._queued.items()))
        del self._queued[name, first]
        last, size = first, layer.chunks[first].size
        place, most = layer.places[first], NEAR_RUN_BYTES if self._near else RUN_BYTES
        while (name, last + 1) in self._queued and size + layer.chunks[last + 1].size <= most:
            if layer.places[last + 1] != Place(place.pack, place.offset + size):
                break
            last += 1
            size += layer.chunks[last].size
            del self._queued[name, last]
        return _Run(layer, place, layer.chunks[first : last + 1], range(first, last + 1))

    def _waited_done(self, _: asyncio.Task[None]) -> None:
        self._waited -= 1

    def _background_done(self, _: asyncio.Task[None]) -> None:
        self._background -= 1
        self._start_queued()

    def _start(self, run: _Run) -> asyncio.Task[None]:
        self._flying.update(((run.layer.layer, index), run) for index in run.indexes)
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

    async def _fetch(self, layer: CachedLayer, place: Place, run: list[Chunk], indexes: Sequence[int]) -> None:
        size = sum(chunk.size for chunk in run)
        delay_s = _FIRST_DELAY_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                data = memoryview(await self.timed(self._store.get(pack_key(place.pack), place.offset, size)))
                self.fetched_bytes[layer.layer] += len(data)
                if len(run) == 1 and self._waited <= 2:  # few wait for this loop: less than for a thread's turn
                    self._put(layer, run, data)
                else:
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._threads, self._put, layer, run, data)
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
