"""The filler: a process of its own that fetches what reads of lazy layers wait for.

It may die at any moment: what it had not answered the holder gives to the next one, and what it had written but not
noted is written again. It finds the layers of its predecessor in the cache directory.

Its control socket speaks JSON, a line a message. Calls `{"id", "call", "layer"?}` are answered, each when it is done,
with `{"id", "ok": {...}}` or `{"id", "error": ErrorBody}`; whoever is connected also hears
`{"failed": layer, "message"}` when reads of a layer fail.

| call | answer |
|---|---|
| `attach` | the layer's metadata is here and its data may be read: `{"metadata_bytes", "data_bytes", "complete"}` |
| `release` | nothing is mounted of it: its directory may be evicted |
| `complete` | returns when all of the layer is here |
| `stop` | it ends (without a holder, whose end is its own) |
| `status` | bytes by layer, and counts of reads |
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dsec.errors import DsecError, Internal, InvalidRequest, NotFound
from dsec.ports import BlobStore, Clock
from dsec.store.format import (
    MANIFEST_BYTES,
    decode_manifest,
    is_layer,
    manifest_key,
    placement_key,
)
from dsec.store.lazy import holder
from dsec.store.lazy.cache import CachedLayer, LazyCache, put_new
from dsec.store.lazy.copier import Copier
from dsec.store.lazy.fetch import Fetcher
from dsec.store.lazy.questions import Questions
from dsec.store.lazy.readahead import Readahead
from dsec.store.lazy.trace import Recorder, load_trace

log = logging.getLogger(__name__)

SYNC_EVERY_S = 20.0
IDLE_S = 60.0
_LARGE_BYTES = 256 << 10
"""A manifest that takes long to read."""
_PREPARE_S = 1.0
_PUNCHES = 64
"""Holes between two turns of the loop."""
_NUMBER = "number"
"""Holds a layer's number at the holder."""


async def _turns() -> None:
    """Let what was just begun get as far as the store."""
    for _ in range(3):
        await asyncio.sleep(0)


async def _dropped(*tasks: asyncio.Task[Any]) -> None:
    """Nobody wants to know any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Served(msgspec.Struct):
    """A layer that is open here."""

    cached: CachedLayer
    number: int
    readahead: Readahead
    recorder: Recorder | None
    told_complete: bool = False
    users: bool = True
    """Something may be mounted of it."""


class Filler:
    """Answers the kernel's questions from one store."""

    def __init__(
        self,
        cache: LazyCache,
        store: BlobStore,
        questions: Questions,
        clock: Clock,
        *,
        most_bytes: int,
        idle_s: float = IDLE_S,
        keep_every_s: float = SYNC_EVERY_S,
        copier: Copier | None = None,
    ) -> None:
        """`most_bytes`: of data in the cache; beyond it the least recently used goes. `idle_s`: a mounted layer of
        which no read asked for so long may lose its data. `keep_every_s`: between looks at what to sync and evict.
        `copier`: copies chunks in our stead, where it can; its owner's to close."""
        self.cache = cache
        self.fetcher = Fetcher(store, clock, copier)
        self.failures: Counter[str] = Counter()
        self._store = store
        self._clock = clock
        self._questions = questions
        self._most_bytes = most_bytes
        self._idle_s = idle_s
        self._keep_every_s = keep_every_s
        self._numbers: dict[int, str] = {}
        self._served: dict[str, _Served] = {}
        self._attaching: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing: asyncio.Task[None] | None = None
        self._listeners: set[asyncio.StreamWriter] = set()
        self._unheard: deque[dict[str, Any]] = deque(maxlen=1000)
        self.gone = asyncio.Event()
        """No read will ask any more."""

    def open(self) -> None:
        """Tell the holder of every layer that is in the cache, and begin to answer."""
        for layer in self.cache.layers():
            with contextlib.suppress(FileNotFoundError, ValueError):
                number = int((self.cache.path(layer) / _NUMBER).read_text())
                self._numbers[number] = layer
                self._questions.add(number, layer, self.cache.path(layer))
        self.fetcher.open()
        self._questions.start(self.read, self.gone.set)

    async def close(self) -> None:
        self._questions.close()
        await self.fetcher.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for served in self._served.values():
            await self._save_trace(served)
            self._sync(served)
            served.cached.close()

    # --- layers ---

    async def attach(self, layer: str) -> dict[str, Any]:
        """As in the table above. Raises `NotFound`, `LayerCorrupt`, `Unavailable`, `InvalidRequest`."""
        if not is_layer(layer):
            raise InvalidRequest(f"not a layer's digest: {layer[:80]!r}")
        async with self._attaching.setdefault(layer, asyncio.Lock()):
            served = self._served.get(layer)
            if served is None and not self.cache.path(layer).exists():
                served = await self._begin(layer)
            else:
                served = await self._again(layer)
            served.users = True
            if not served.cached.missing:
                self._finish(served)
        cached = served.cached
        return {
            "metadata_bytes": cached.manifest.metadata_bytes,
            "data_bytes": cached.manifest.data_bytes,
            "complete": served.told_complete,
        }

    async def _begin(self, layer: str) -> _Served:
        """A layer that is new here. What other nodes read of it is on its way before its metadata is here."""
        timed = self.fetcher.timed
        manifested = asyncio.create_task(timed(self._store.get(manifest_key(layer), 0, MANIFEST_BYTES)))
        placed = asyncio.create_task(timed(self._store.get(placement_key(layer), 0, MANIFEST_BYTES)))
        traced = asyncio.create_task(timed(load_trace(self._store, layer)))
        try:
            manifest = await manifested
            decoded = decode_manifest(manifest, layer)
            begun = self.cache.make()
        except BaseException:
            await _dropped(manifested, placed, traced)
            raise
        self._prepare_later()
        image = asyncio.create_task(self.fetcher.metadata(layer, decoded, begun / "meta.erofs"))
        number = -1
        try:
            await _turns()
            placement, trace = await placed, await traced
            if len(manifest) > _LARGE_BYTES:
                cached = await asyncio.to_thread(self.cache.begin, begun, layer, decoded, manifest, placement)
            else:  # sooner done than a thread is awake
                cached = self.cache.begin(begun, layer, decoded, manifest, placement)
            try:
                self._follow(cached, trace)
                number = self._number(layer, begun)
                await image
                self.cache.finish(cached)
            except BaseException:
                await self.fetcher.abandon(layer)
                if number in self._numbers:
                    del self._numbers[number]
                    self._questions.remove(number)
                cached.close()
                raise
        except BaseException:
            await _dropped(image, placed, traced)
            self.cache.unmake(begun)
            raise
        return self._serve_as(number, cached, recorder=None if trace else Recorder(self._clock))

    def _prepare_later(self) -> None:
        """Have directories ready again, once the sandbox that waits has begun."""
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.create_task(self._prepare_soon())
            self._tasks.add(self._preparing)
            self._preparing.add_done_callback(self._tasks.discard)

    async def _prepare_soon(self) -> None:
        await self._clock.sleep(_PREPARE_S)
        await self.prepare()

    async def prepare(self) -> None:
        """Make ready what the next layers need."""
        try:
            await asyncio.to_thread(self.cache.prepare)
        except OSError as error:  # a full disk; the next layer tells
            log.warning("directories for lazy layers can't be made: %s", error)

    async def _again(self, layer: str) -> _Served:
        served = self._serve(layer)
        if served.recorder is None and served.cached.missing:
            trace = await load_trace(self._store, layer)
            self._follow(served.cached, trace)
            if not trace:
                served.recorder = Recorder(self._clock)
        return served

    def _follow(self, cached: CachedLayer, trace: Sequence[int]) -> None:
        count = len(cached.chunks)
        self.fetcher.ahead(cached, [index for index in trace if index < count])

    def _serve(self, layer: str) -> _Served:
        """Open it, unless it is."""
        served = self._served.get(layer)
        if served is not None:
            return served
        root = self.cache.path(layer)
        cached = CachedLayer(root, layer)
        return self._serve_as(self._number(layer, root), cached, None)

    def _serve_as(self, number: int, cached: CachedLayer, recorder: Recorder | None) -> _Served:
        served = _Served(cached, number, Readahead(cached.offsets), recorder)
        self._served[cached.layer] = served
        return served

    def _number(self, layer: str, root: Path) -> int:
        """The number of a layer with this directory, or a new one, of which the holder is told."""
        path = root / _NUMBER
        kept = path.read_text() if path.exists() else ""
        number = int(kept) if kept else next((n for n in range(holder.BLOBS) if n not in self._numbers), -1)
        if number < 0:
            raise Internal(f"more than {holder.BLOBS} lazy layers", remedy="Let the cache be smaller.")
        if not kept:
            put_new(path, str(number).encode())
        self._numbers[number] = layer
        self._questions.add(number, layer, root)
        return number

    async def release(self, layer: str) -> None:
        """As in the table above."""
        if self.cache.path(layer).exists():
            served = self._serve(layer)
            served.users = False
            await self._save_trace(served)

    async def complete(self, layer: str) -> None:
        """Fetch what is missing of a layer that was attached. Raises as `Fetcher.ensure`."""
        served = self._served.get(layer)
        if served is None:
            raise NotFound(f"layer {layer} is not attached")
        await self.fetcher.ensure_all(served.cached)
        self._finish(served)

    def status(self) -> dict[str, Any]:
        """As in the table above."""
        counts = self._questions.stats()._asdict()
        layers = {
            layer: {
                "bytes": served.cached.manifest.data_bytes,
                "filled_bytes": served.cached.filled_bytes,
                "fetched_bytes": self.fetcher.fetched_bytes[layer],
                "failures": self.failures[layer],
            }
            for layer, served in self._served.items()
        }
        return {"holder": counts, "layers": layers}

    # --- reads ---

    def read(self, waiting: holder.Waiting) -> None:
        """Answer it, once what it wants is here."""
        try:
            served = self._serve(self._numbers[waiting.blob])
        except (KeyError, OSError, DsecError) as error:
            log.error("a read of blob %d cannot be served: %r", waiting.blob, error)
            self._questions.answer(waiting.token, errno.EIO)
            return
        chunks = served.cached.chunks_of(waiting.offset, waiting.size)
        waits = self.fetcher.begin(served.cached, chunks, waiting.token)
        ahead = [*served.readahead.file(chunks[0]), *served.readahead.read(chunks[0], chunks[-1])] if chunks else []
        if ahead:
            self.fetcher.ahead(served.cached, ahead)
        if served.recorder is not None:  # reads of what was fetched ahead don't come here
            served.recorder.read((*chunks, *ahead))
        if not waits:
            self._questions.answer(waiting.token, 0)
            return
        waits_for: asyncio.Future[Any] = waits[0] if len(waits) == 1 else asyncio.gather(*waits)
        waits_for.add_done_callback(partial(self._arrived, waiting, served))

    def _arrived(self, waiting: holder.Waiting, served: _Served, future: asyncio.Future[Any]) -> None:
        if future.cancelled():  # the next filler is asked
            return
        error = future.exception()
        if error is not None:
            layer = served.cached.layer
            self.failures[layer] += 1
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._questions.answer(waiting.token, errno.ENOSPC if full else errno.EIO)
            self._push({"failed": layer, "message": str(error)[:500]})
            return
        told = future.result()
        if not told or told != waiting.token:
            self._questions.answer(waiting.token, 0)
        if not served.cached.missing:
            self._finish(served)

    def _finish(self, served: _Served) -> None:
        """All of it is here: its reads need not ask any more."""
        if not served.told_complete:
            served.told_complete = True
            self._questions.complete(served.number, served.cached)

    # --- keeping house ---

    async def keep(self) -> None:
        """Sync, save traces, evict, for ever."""
        for layer in list(self.cache.layers()):  # those of a predecessor count too
            with contextlib.suppress(OSError, DsecError):
                self._serve(layer)
            await asyncio.sleep(0)
        while True:
            await self._clock.sleep(self._keep_every_s)
            for served in list(self._served.values()):
                if served.cached.dirty:
                    await asyncio.to_thread(self._sync, served)
                if served.recorder is not None and served.recorder.ripe:
                    await self._save_trace(served)
            await self.evict()

    @staticmethod
    def _sync(served: _Served) -> None:
        """A disk that is full, or fails, promises less after a power loss; reads go on."""
        try:
            served.cached.sync()
        except OSError as error:
            log.warning("layer %s can't be brought to disk: %s", served.cached.layer, error)

    async def evict(self) -> None:
        """Bring the cache under its bound: first layers that nothing mounts, then the data of mounted ones that nobody
        has read for a minute; the longest unread first."""
        sizes = {layer: served.cached.filled_bytes for layer, served in self._served.items()}
        over = sum(sizes.values()) - self._most_bytes
        ages = {layer: self._questions.idle_s(served.number) for layer, served in self._served.items()}
        for layer in sorted(sizes, key=lambda layer: (self._served[layer].users, -ages[layer])):
            served = self._served[layer]
            if over <= 0:
                if not served.cached.missing:
                    self._finish(served)
            elif not served.users:
                if not self.fetcher.busy(layer):
                    self._drop(layer)
                    over -= sizes[layer]
            elif served.told_complete:  # who reads it isn't known: from now on it is, and it goes when nobody did
                served.told_complete = not self._questions.reopen(served.number, served.cached)
            elif ages[layer] >= self._idle_s and await self._empty(served):
                over -= sizes[layer]

    def _drop(self, layer: str) -> None:
        served = self._served.pop(layer)
        self._questions.remove(served.number)
        del self._numbers[served.number]
        served.cached.close()
        self.cache.remove(layer)

    async def _empty(self, served: _Served) -> bool:
        """Give the space of a mounted layer back. A read that was allowed before its chunk was forgotten may be on
        its way still: that is why only a layer at rest is emptied, and only when it stayed so."""
        served.cached.forget()
        before = time.monotonic()
        await asyncio.to_thread(served.cached.forget_synced)
        await self._clock.sleep(1.0)
        if self._questions.idle_s(served.number) < time.monotonic() - before + self._idle_s / 2:
            return False
        count = len(served.cached.chunks)
        for first in range(0, count, _PUNCHES):
            indexes = range(first, min(first + _PUNCHES, count))
            served.cached.punch(i for i in indexes if not self.fetcher.flies(served.cached.layer, i))
            await asyncio.sleep(0)
        return True

    async def _save_trace(self, served: _Served) -> None:
        recorder, served.recorder = served.recorder, None
        if recorder is not None:
            with contextlib.suppress(DsecError):
                await recorder.save(self._store, served.cached)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- control ---

    async def serve_control(self, path: Path) -> asyncio.Server:
        """Listen for the server's calls."""
        await asyncio.to_thread(path.unlink, missing_ok=True)
        old = os.umask(0o077)
        try:
            return await asyncio.start_unix_server(self._control, path, limit=1 << 16)
        finally:
            os.umask(old)

    async def _control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._listeners.add(writer)
        while self._unheard:
            self._push(self._unheard.popleft())
        try:
            while line := await reader.readline():
                self._spawn(self._answer_call(msgspec.json.decode(line, type=dict[str, Any]), writer))
        except (ConnectionError, msgspec.MsgspecError, ValueError) as error:
            log.warning("control connection: %r", error)
        finally:
            self._listeners.discard(writer)
            writer.close()

    async def _answer_call(self, call: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        answer = {"id": call.get("id"), **await self._call(call)}
        writer.write(msgspec.json.encode(answer) + b"\n")

    async def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        layer = call.get("layer", "")
        try:
            match call.get("call"):
                case "attach":
                    return {"ok": await self.attach(layer)}
                case "release":
                    await self.release(layer)
                case "complete":
                    await self.complete(layer)
                case "stop":
                    self.gone.set()
                case "status":
                    return {"ok": self.status()}
                case other:
                    raise InvalidRequest(f"unknown call {other!r}")
        except DsecError as error:
            return {"error": error.body()}
        except OSError as error:
            return {"error": Internal(f"the cache of lazy layers: {error}").body()}
        return {"ok": {}}

    def _push(self, event: dict[str, Any]) -> None:
        if not self._listeners:
            self._unheard.append(event)
        for writer in self._listeners:
            writer.write(msgspec.json.encode(event) + b"\n")
