"""Chunks from the store into the cache: each is fetched once however many readers want it, verified before it is
written, and noted when it is written.

Invariant: a chunk that `CachedLayer.have` says is there is the chunk that the manifest names. A chunk that can't be
had fails all who wait for it, and is tried anew by the next who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from asyncio import create_task
from collections import Counter, deque
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from dsec.errors import DsecError, LayerCorrupt, NotFound
from dsec.ports import BlobStore, Clock
from dsec.store.format import (
    MANIFEST_BYTES,
    Chunk,
    Manifest,
    Place,
    check_chunk,
    image_key,
    iter_runs,
    manifest_key,
    metadata_key,
    pack_key,
    placement_key,
    trace_key,
)
from dsec.store.lazy.cache import CachedLayer, open_new, put_new
from dsec.store.lazy.copier import Copier, CopierGone, Outcome
from dsec.store.lazy.trace import decode_trace, load_trace
from dsec.store.threads import started_pool

log = logging.getLogger(__name__)

T = TypeVar("T")

RUN_BYTES = 1 << 20
"""One request to the store asks for no more."""
STREAMS = 8
"""Requests ahead of readers at the same time."""
CHUNK_STREAMS = 16
"""The same of the copier, whose requests are for a chunk each, or a part of a metadata image."""
NEAR_STREAMS = min(4, max(2, (os.cpu_count() or 1) // 2))
"""The same where the store answers at once: then they cost computing only, and a reader's own would wait for it."""
NICE = -10
"""Sandboxes wait for the filler and for what it does for readers: they must not wait for those that compute."""
AHEAD_NICE = 0
NEAR_RUN_BYTES = 256 << 10
NEAR_S = 0.0015
_PARTS = 8
"""A layer's metadata comes in so many requests at the same time,"""
_PART_BYTES = 256 << 10
"""none of them for less."""
_GUESS_BYTES = _PARTS * _PART_BYTES
"""Of a far image are asked for before it is known how large it is."""
_GUESSED = range(0, _GUESS_BYTES, _PART_BYTES)
_MOST_GUESSED = 64 << 20
"""By the copier."""
_THREADS = 4
"""That verify and write."""
_ATTEMPTS = 4
_FIRST_DELAY_S = 0.05
_NO_LAYER = "0" * 64


class _Guess(NamedTuple):
    """What came of a metadata image whose digest wasn't known yet."""

    parts: Sequence[bytes] = ()
    """From its begin on; none: it is in the file."""
    digest: bytes = b""
    """Of what is in the file; empty: nothing that is worth anything."""


class _Run:
    """Chunks that one request to the store brings."""

    __slots__ = ("ahead", "began", "chunks", "done", "indexes", "job", "layer", "place", "token")

    def __init__(
        self,
        layer: CachedLayer,
        place: Place,
        chunks: list[Chunk],
        indexes: Sequence[int],
        *,
        ahead: bool = False,
        token: int = 0,
    ) -> None:
        self.layer = layer
        self.place = place
        self.chunks = chunks
        self.indexes = indexes
        self.ahead = ahead
        """Nobody waits for it."""
        self.token = token
        """Of a read that waits for this alone."""
        self.began = 0.0
        self.job = 0
        """Of the copier; 0: it has none, or is in a hurry already."""
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its result: the token that the holder was told of, or 0."""


def _write_whole(path: Path, parts: Sequence[bytes], digest: str) -> None:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    if found.hexdigest() != digest:
        raise LayerCorrupt(f"the metadata image {digest} is not what its digest says")
    image = b"".join(parts)
    put_new(path, image, len(image))


class Fetcher:
    """Fetches for all layers of a cache."""

    def __init__(self, store: BlobStore, clock: Clock, copier: Copier | None = None) -> None:
        """`copier`: does the work where the store's objects are files."""
        self._store = store
        self._copier = copier
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

    def open(self) -> None:
        """Have ready what takes a while to start."""
        if self._copier is not None:
            with contextlib.suppress(CopierGone):
                self._copier.start()

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

    def begin(self, layer: CachedLayer, indexes: Iterable[int], token: int = 0) -> list[asyncio.Future[int]]:
        """Fetch what isn't there, at once. Returns what to wait for. `token`: of the read that waits, of which the
        holder may be told before that: a future whose result is the token says that it was."""
        waits: dict[asyncio.Future[int], None] = {}
        wanted = []
        for index in indexes:
            if layer.have[index]:
                continue
            key = (layer.layer, index)
            run = self._flying.get(key)
            if run is not None:
                waits[run.done] = None
                if run.ahead and run.job and self._copier is not None:
                    self._copier.hasten(run.job, NICE)
                    run.job = 0
            else:
                self._queued.pop(key, None)
                wanted.append(index)
        if wanted:
            places, chunks = [layer.places[i] for i in wanted], [layer.chunks[i] for i in wanted]
            position = 0
            for place, part in iter_runs(places, chunks, RUN_BYTES):
                alone = not waits and len(part) == len(wanted)
                indexed = wanted[position : position + len(part)]
                run = _Run(layer, place, part, indexed, token=token if alone else 0)
                position += len(part)
                waits[run.done] = None
                self._waited += 1
                self._start(run)
        return list(waits)

    def ahead(self, layer: CachedLayer, indexes: Iterable[int]) -> None:
        """Fetch what isn't there when its turn comes; nobody waits. What lies together in the store comes together."""
        for index in indexes:
            key = (layer.layer, index)
            if not layer.have[index] and key not in self._flying:
                self._queued.setdefault(key, layer)
        self._start_queued()

    def guess(self, layer: str, path: Path) -> asyncio.Task[_Guess]:
        """Ask for a layer's metadata image before its digest and size are known, at the same time as for the manifest:
        by the copier for `_MOST_GUESSED`, else, of a far store, for the first `_GUESS_BYTES`."""
        return create_task(self._guess(image_key(layer), path))

    async def _guess(self, key: str, path: Path) -> _Guess:
        source = self._store.file(key)
        if self._copier is not None and source is not None:
            target = open_new(path)
            try:
                with contextlib.suppress(CopierGone, DsecError, OSError):
                    streams = self._image_streams
                    told = self._copier.copy_telling(source, target, _MOST_GUESSED, streams=streams, nice=NICE)
                    return _Guess(digest=await told)
            finally:
                os.close(target)
        elif not self.near:
            gets = (self._store.get(key, at, _PART_BYTES) for at in _GUESSED)
            got = await asyncio.gather(*gets, return_exceptions=True)
            return _Guess([part for part in got if isinstance(part, bytes)])
        return _Guess()

    async def metadata(self, layer: str, manifest: Manifest, path: Path, guessed: asyncio.Task[_Guess]) -> None:
        """The metadata image into a file, which is good only where this returns. Raises `NotFound`, `Unavailable`,
        `LayerCorrupt`, OSError."""
        try:
            # Until it has ended it writes; what it wrote may be anything.
            if not await self._guessed(manifest, path, await guessed):
                await self._metadata(manifest, path)
        except LayerCorrupt as error:
            raise LayerCorrupt(f"the metadata of layer {layer}: {error.message}", layer=layer) from error

    async def _guessed(self, manifest: Manifest, path: Path, guess: _Guess) -> bool:
        """Whether that was it, and with the rest of it is now in the file. Raises as `_metadata`."""
        key, size = metadata_key(manifest.metadata), manifest.metadata_bytes
        if guess.digest.hex() == manifest.metadata:
            return True
        had = min(size, _GUESS_BYTES)
        if sum(map(len, guess.parts)) < had:
            return False
        rest = range(had, size, max(_PART_BYTES, -(-(size - had) // _PARTS)))
        more = await asyncio.gather(*(self._store.get(key, at, min(rest.step, size - at)) for at in rest))
        with contextlib.suppress(LayerCorrupt):
            await asyncio.to_thread(_write_whole, path, [b"".join(guess.parts)[:had], *more], manifest.metadata)
            return True
        return False

    async def _metadata(self, manifest: Manifest, path: Path) -> None:
        key, size = metadata_key(manifest.metadata), manifest.metadata_bytes
        source = self._store.file(key) if size < 1 << 32 else None
        if self._copier is not None and source is not None:
            with contextlib.suppress(CopierGone):
                return await self._copy_whole(self._copier, source, path, manifest)
        step = max(_PART_BYTES, -(-size // _PARTS))
        parts = (self._store.get(key, at, min(step, size - at)) for at in range(0, size, step))
        image = await asyncio.gather(*parts)
        await asyncio.to_thread(_write_whole, path, image, manifest.metadata)

    async def _copy_whole(self, copier: Copier, source: Path, path: Path, manifest: Manifest) -> None:
        whole, target = Chunk(0, manifest.metadata_bytes, bytes.fromhex(manifest.metadata)), open_new(path)
        try:
            os.truncate(target, whole.size)  # a wrong guess may have been longer
            await copier.copy_whole(source, target, whole, streams=self._image_streams, nice=NICE)
        finally:
            os.close(target)

    def described(self, layer: str) -> tuple[asyncio.Task[bytes], asyncio.Task[bytes], asyncio.Task[list[int]]]:
        """The manifest and the placement (not verified), and the trace, empty where there is none: all asked for now.
        They raise `NotFound`, `Unavailable`."""
        keys = manifest_key(layer), placement_key(layer), trace_key(layer)
        if not self.near:
            manifest, placement = (self.timed(self._store.get(key, 0, MANIFEST_BYTES)) for key in keys[:2])
            return create_task(manifest), create_task(placement), create_task(load_trace(self._store, layer))
        # A thread's turn for each, and their turns at the interpreter, would take several times as long as the reading.
        found = create_task(self.timed(self._store.get_each(keys, MANIFEST_BYTES)))

        async def one(number: int) -> bytes:
            data = (await asyncio.shield(found))[number]
            if data is None:
                raise NotFound("the store has no such object")
            return data

        async def trace() -> list[int]:
            return decode_trace((await asyncio.shield(found))[2] or b"")

        return create_task(one(0)), create_task(one(1)), create_task(trace())

    async def measure(self) -> None:
        """Learn how far the store is. It may be gone at the moment."""
        for _ in range(2):
            with contextlib.suppress(DsecError):
                await self.timed(self._store.size(manifest_key(_NO_LAYER)))

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
        """Stop; who waits is cancelled. No thread of ours writes any more when it returns; the copier may."""
        self._queued.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for run in self._flying.values():
            run.done.cancel()
        self._flying.clear()
        await asyncio.to_thread(self._threads.shutdown)

    @property
    def near(self) -> bool:
        """Whether the store answers at once."""
        return min(self._took_s, default=1.0) < NEAR_S

    @property
    def chunk_streams(self) -> int:
        """So many single chunks are fetched ahead at the same time."""
        return NEAR_STREAMS if self.near else CHUNK_STREAMS

    @property
    def _image_streams(self) -> int:
        return 2 if self.near else CHUNK_STREAMS

    def _start_queued(self) -> None:
        streams = NEAR_STREAMS if self.near else STREAMS
        while self._queued and self._background < streams:
            self._background += 1
            self._start(self._next())

    def _next(self) -> _Run:
        """The first that is queued, with those queued that follow it in the layer and in the store."""
        (name, first), layer = next(iter(self._queued.items()))
        del self._queued[name, first]
        last, size = first, layer.chunks[first].size
        place, most = layer.places[first], NEAR_RUN_BYTES if self.near else RUN_BYTES
        while (name, last + 1) in self._queued and size + layer.chunks[last + 1].size <= most:
            if layer.places[last + 1] != Place(place.pack, place.offset + size):
                break
            last += 1
            size += layer.chunks[last].size
            del self._queued[name, last]
        return _Run(layer, place, layer.chunks[first : last + 1], range(first, last + 1), ahead=True)

    def _start(self, run: _Run) -> None:
        self._flying.update(((run.layer.layer, index), run) for index in run.indexes)
        run.began = self._clock.monotonic()
        path = self._store.file(pack_key(run.place.pack)) if self._copier is not None else None
        if self._copier is not None and path is not None:
            done, nice = partial(self._copied, run), AHEAD_NICE if run.ahead else NICE
            with contextlib.suppress(CopierGone, OSError):
                target = run.layer.data
                run.job = self._copier.copy(
                    path, run.place.offset, run.chunks, target, done, nice=nice, token=run.token
                )
                return
        self._spawn(run)

    def _copied(self, run: _Run, outcome: Outcome) -> None:
        """The copier has done it, or could not."""
        error = outcome.error
        if run.done.done():  # we are closed
            return
        if isinstance(error, CopierGone | LayerCorrupt):  # the latter: another try tells
            self._spawn(run)
            return
        if error is None:
            self._took_s.append(self._clock.monotonic() - run.began)
            self.fetched_bytes[run.layer.layer] += sum(chunk.size for chunk in run.chunks)
            run.layer.note(run.indexes)
        self._end(run, run.token if outcome.told else 0, error)

    def _end(self, run: _Run, told: int, error: Exception | None) -> None:
        for index in run.indexes:
            self._flying.pop((run.layer.layer, index), None)
        if error is None:
            run.done.set_result(told)
        else:
            log.warning("layer %s: %s", run.layer.layer, error)
            run.done.set_exception(error)
            run.done.exception()  # nobody may be waiting
        if run.ahead:
            self._background -= 1
            self._start_queued()
        else:
            self._waited -= 1

    def _spawn(self, run: _Run) -> None:
        task = asyncio.create_task(self._run(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, run: _Run) -> None:
        try:
            await self._fetch(run.layer, run.place, run.chunks)
            run.layer.note(run.indexes)
        except Exception as error:  # a bug too: who waits hears of it, and the next one tries anew
            if not isinstance(error, DsecError | OSError):
                log.exception("chunks of layer %s can't be fetched", run.layer.layer)
            self._end(run, 0, error)
        else:
            self._end(run, 0, None)

    async def _fetch(self, layer: CachedLayer, place: Place, run: list[Chunk]) -> None:
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
