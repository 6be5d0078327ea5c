"""The filler: a process of its own that fetches what reads of lazy layers wait for.

It may die at any moment: what it had not answered the holder gives to the next one, and what it had written but not
noted is written again. It finds the layers of its predecessor in the cache directory.

A layer is filled either by the filler (`fetch.py`), or, where the store is near, by its copier alone (`plan.py`): then
the filler only hears what came. It takes such a layer back before anything else is done with its data.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dsec.errors import DsecError, Internal, InvalidRequest, NotFound
from dsec.ports import BlobStore, Clock
from dsec.store.format import decode_manifest, is_layer, pack_key
from dsec.store.lazy import holder
from dsec.store.lazy.cache import CachedLayer, LazyCache, put_new
from dsec.store.lazy.control import Control
from dsec.store.lazy.copier import Copier
from dsec.store.lazy.fetch import Fetcher
from dsec.store.lazy.questions import Questions
from dsec.store.lazy.served import Served
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
        self._served: dict[str, Served] = {}
        self._attaching: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing: asyncio.Task[None] | None = None
        self.control = Control(self.call)
        self._copier = copier
        self.gone = asyncio.Event()
        """No read will ask any more."""

    def open(self) -> None:
        """Tell the holder of every layer that is in the cache, and begin to answer."""
        self.cache.alone()
        if self._copier is not None:
            self._copier.keeps = (self.cache.owner,)
            self._copier.on_all = self._all_came
            self._copier.on_gone = self._take_all_back
        for layer in self.cache.layers():
            with contextlib.suppress(FileNotFoundError, ValueError):
                number = int((self.cache.path(layer) / _NUMBER).read_text())
                self._numbers[number] = layer
                self._questions.add(number, layer, self.cache.path(layer))
        self.fetcher.open()
        self._questions.start(self.read, self.gone.set)

    async def close(self) -> None:
        """What the copier serves it goes on to serve until it ends itself."""
        self._questions.close()
        await self.fetcher.close()
        await self.control.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for served in self._served.values():
            served.learn()
            await self._save_trace(served)
            served.sync()
            served.close()
        self._served.clear()

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
                self._learn(served)
            served.users = True
            if not served.cached.missing:
                self._finish(served)
        cached = served.cached
        return {
            "metadata_bytes": cached.manifest.metadata_bytes,
            "data_bytes": cached.manifest.data_bytes,
            "complete": served.told_complete,
        }

    async def _begin(self, layer: str) -> Served:
        """A layer that is new here. What other nodes read of it is on its way before its metadata is here."""
        begun = self.cache.make()
        self._prepare_later()
        guessed = self.fetcher.guess(layer, begun / "meta.erofs")  # first: it takes longest
        manifested, placed, traced = self.fetcher.described(layer)
        try:
            manifest = await manifested
            decoded = decode_manifest(manifest, layer)
        except BaseException:
            await _dropped(manifested, placed, traced, guessed)
            self.cache.unmake(begun)
            raise
        image = asyncio.create_task(self.fetcher.metadata(layer, decoded, begun / "meta.erofs", guessed))
        number = -1
        try:
            await _turns()
            placement, trace = await placed, await traced
            if len(manifest) > _LARGE_BYTES:
                cached = await asyncio.to_thread(self.cache.begin, begun, layer, decoded, manifest, placement)
            else:  # sooner done than a thread is awake
                cached = self.cache.begin(begun, layer, decoded, manifest, placement)
            served = None
            try:
                number = self._number(layer, begun)
                served = Served(cached, number, recorder=None if trace else Recorder(self._clock))
                await self._begin_to_fill(served, trace)
                await image
                self.cache.finish(cached)
            except BaseException:
                if served is not None:
                    await self._take_back(served)
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
        self._served[layer] = served
        return served

    async def _begin_to_fill(self, served: Served, trace: Sequence[int]) -> None:
        """What others read of it is fetched now: by the copier, which serves it from now on, or by us. Raises
        `LayerCorrupt`."""
        cached = served.cached
        wanted = [index for index in trace if index < cached.manifest.chunk_count]
        if not (self._copier is not None and self._questions.to_copier and cached.missing):
            cached.check()
            self.fetcher.ahead(cached, wanted)
            return
        files = [file for pack in cached.placement.packs if (file := self._store.file(pack_key(pack))) is not None]
        streams = self.fetcher.chunk_streams
        if len(files) != len(cached.placement.packs) or not await served.hand_over(
            self._copier, files, wanted, streams
        ):
            cached.check()
            self.fetcher.ahead(cached, wanted)

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

    async def _again(self, layer: str) -> Served:
        served = self._serve(layer)
        if served.plan is None and served.recorder is None and served.cached.missing:
            unused, served.users = not served.users, True
            trace = await load_trace(self._store, layer)
            if unused and not self.fetcher.busy(layer):  # no read is with us
                await self._begin_to_fill(served, trace)
            else:
                count = len(served.cached.chunks)
                self.fetcher.ahead(served.cached, [index for index in trace if index < count])
            if not trace:
                served.recorder = Recorder(self._clock)
        return served

    def _serve(self, layer: str) -> Served:
        """Open it, unless it is."""
        served = self._served.get(layer)
        if served is not None:
            return served
        root = self.cache.path(layer)
        cached = CachedLayer(root, layer)
        served = self._served[layer] = Served(cached, self._number(layer, root), None)
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
            self._learn(served)
            await self._save_trace(served)

    async def complete(self, layer: str) -> None:
        """Fetch what is missing of a layer that was attached. Raises as `Fetcher.ensure`."""
        served = self._served.get(layer)
        if served is None:
            raise NotFound(f"layer {layer} is not attached")
        await self._take_back(served)
        await self.fetcher.ensure_all(served.cached)
        self._finish(served)

    def status(self) -> dict[str, Any]:
        """As in the table above."""
        counts = self._questions.stats()._asdict()
        for served in self._served.values():
            self._learn(served)
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

    # --- what the copier serves ---

    def _learn(self, served: Served) -> None:
        """What the copier brought since we looked; a layer that is complete asks no more."""
        self._learnt(served, served.learn())

    async def _take_back(self, served: Served) -> None:
        """When it returns nobody but us writes the layer."""
        self._learnt(served, await served.take_back())

    def _learnt(self, served: Served, size: int) -> None:
        self.fetcher.fetched_bytes[served.cached.layer] += size
        if size and not served.cached.missing:
            self._finish(served)

    def _all_came(self, number: int) -> None:
        served = self._served.get(self._numbers.get(number, ""))
        if served is not None and served.plan is not None:
            self._learn(served)
            self._spawn(self._take_back(served))

    def _take_all_back(self) -> None:
        """The copier is gone."""
        for served in self._served.values():
            if served.plan is not None:
                self._spawn(self._take_back(served))

    async def _read_back(self, waiting: holder.Waiting, served: Served) -> None:
        try:
            await self._take_back(served)
            self.read(waiting)
        except Exception as error:  # noqa: BLE001 (as in `read`)
            self._fail(waiting, error)

    # --- reads ---

    def read(self, waiting: holder.Waiting) -> None:
        """Answer it, once what it wants is here."""
        try:
            self._read(waiting)
        except Exception as error:  # noqa: BLE001 (a bug too: who reads waits for an answer)
            self._fail(waiting, error)

    def _fail(self, waiting: holder.Waiting, error: BaseException) -> None:
        """What it wants can't be had."""
        layer = self._numbers.get(waiting.blob, "")
        unforeseen = None if isinstance(error, DsecError | OSError) else error
        log.error("a read of blob %d, layer %s, fails: %r", waiting.blob, layer, error, exc_info=unforeseen)
        self.failures[layer] += 1
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        self._questions.answer(waiting.token, errno.ENOSPC if full else errno.EIO)
        self.control.push({"failed": layer, "message": str(error)[:500]})

    def _read(self, waiting: holder.Waiting) -> None:
        served = self._serve(self._numbers[waiting.blob])
        if served.plan is not None:  # the copier could not
            self._spawn(self._read_back(waiting, served))
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

    def _arrived(self, waiting: holder.Waiting, served: Served, future: asyncio.Future[Any]) -> None:
        if future.cancelled():  # the next filler is asked
            return
        error = future.exception()
        if error is not None:
            self._fail(waiting, error)
            return
        told = future.result()
        if not told or told != waiting.token:
            self._questions.answer(waiting.token, 0)
        if not served.cached.missing:
            self._finish(served)

    def _finish(self, served: Served) -> None:
        """All of it is here: its reads need not ask any more."""
        if not served.told_complete:
            served.told_complete = True
            try:
                self._questions.complete(served.number, served.cached)
            except (OSError, DsecError) as error:  # they go on to ask, and are answered
                log.warning("layer %s is complete, its reads ask on: %s", served.cached.layer, error)

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
                self._learn(served)
                if served.cached.dirty:
                    await asyncio.to_thread(served.sync)
                if served.recorder is not None and served.recorder.ripe:
                    await self._save_trace(served)
            await self.evict()

    async def evict(self) -> None:
        """Bring the cache under its bound: first layers that nothing mounts, then the data of mounted ones that nobody
        has read for a minute; the longest unread first."""
        if not self.cache.alone():
            log.warning("nothing is taken out of the cache: the copier of an earlier filler has not ended")
            return
        for served in self._served.values():
            self._learn(served)
        sizes = {layer: served.cached.filled_bytes for layer, served in self._served.items()}
        over = sum(sizes.values()) - self._most_bytes
        ages = {layer: self._questions.idle_s(served.number) for layer, served in self._served.items()}
        for layer in sorted(sizes, key=lambda layer: (self._served[layer].users, -ages[layer])):
            served = self._served[layer]
            if over <= 0:
                if not served.cached.missing:
                    self._finish(served)
            elif not served.users:
                if await self._drop(served):
                    over -= sizes[layer]
            elif served.told_complete:  # who reads it isn't known: from now on it is, and it goes when nobody did
                served.told_complete = not self._questions.reopen(served.number, served.cached)
            elif ages[layer] >= self._idle_s and await self._empty(served):
                over -= sizes[layer]

    async def _drop(self, served: Served) -> bool:
        """Forget a layer that nothing mounts, unless that begins now."""
        layer = served.cached.layer
        async with self._attaching.setdefault(layer, asyncio.Lock()):
            await self._take_back(served)
            if served.users or self.fetcher.busy(layer):
                return False
            del self._served[layer]
            self._questions.remove(served.number)
            del self._numbers[served.number]
            served.cached.close()
            self.cache.remove(layer)
        return True

    async def _empty(self, served: Served) -> bool:
        """Give the space of a mounted layer back. A read that was allowed before its chunk was forgotten may be on
        its way still: that is why only a layer at rest is emptied, and only when it stayed so."""
        await self._take_back(served)
        served.cached.forget()
        before = time.monotonic()
        await asyncio.to_thread(served.cached.forget_synced)
        await self._clock.sleep(1.0)
        if self._questions.idle_s(served.number) < time.monotonic() - before + self._idle_s / 2:
            return False
        count = served.cached.manifest.chunk_count
        for first in range(0, count, _PUNCHES):
            indexes = range(first, min(first + _PUNCHES, count))
            served.cached.punch(i for i in indexes if not self.fetcher.flies(served.cached.layer, i))
            await asyncio.sleep(0)
        if not self.fetcher.busy(served.cached.layer):  # no read is with us
            await self._begin_to_fill(served, ())
        return True

    async def _save_trace(self, served: Served) -> None:
        recorder, served.recorder = served.recorder, None
        if recorder is not None:
            with contextlib.suppress(DsecError):
                await recorder.save(self._store, served.cached)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- control ---

    async def call(self, name: str, layer: str) -> dict[str, Any]:
        """Carry a call of `control.py`'s table out. Raises DsecError, OSError."""
        match name:
            case "attach":
                return await self.attach(layer)
            case "release":
                await self.release(layer)
            case "complete":
                await self.complete(layer)
            case "stop":
                self.gone.set()
            case "status":
                return self.status()
            case other:
                raise InvalidRequest(f"unknown call {other!r}")
        return {}
