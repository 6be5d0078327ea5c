"""From an edge's own trajectories to the cluster's streams (`logs.py`).

Owns `shipped.json`: how far each log has been published, and which generation it is. Invariants: a log's lines are
published after they are in the edge's own log, in messages of consecutive lines, after the bodies that they name are
in the shared store; what has no acknowledgement is published again, so that a reader may find it twice and never a gap
that stays; memory is bounded, because what waits is on disk. While the servers can't be reached, or a stream is full,
sandboxes go on: only those with `sync="always"` wait for the streams, and are refused after `ASK_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.cluster.bus import ASK_S, Bus
from dsec.cluster.logs import (
    KEEP_S,
    MESSAGE_BYTES,
    Shipment,
    body_key,
    digests_in,
    encrypt,
    key_of,
    pack,
    subject_of,
)
from dsec.edge.trajectory import Trajectories
from dsec.errors import DsecError, Unavailable
from dsec.ports import BlobStore
from dsec.spec.trajectory import EntryType, parse
from dsec.tasks import ended

LINGER_S = 0.03
"""What is written meanwhile goes into the same message."""
WIDTH = 64
"""Logs that are published at the same time."""
SAVE_S = 1.0
RETRY_S = 1.0
MOST_RETRY_S = 15.0
TIDY_S = 6 * 3600.0
FILE = "shipped.json"
log = logging.getLogger("dsec.cluster")


class Place(Struct, array_like=True):
    """How far a log is published."""

    generation: int = 0
    offset: int = 0


_places = msgspec.json.Decoder(dict[str, Place])
_encode = msgspec.json.Encoder().encode


class Shipper:
    """For the event loop: `start` once the node has joined, `close` in the end."""

    def __init__(
        self, bus: Bus, trajectories: Trajectories, *, store: BlobStore | None, edge: int, key: bytes, state: Path
    ) -> None:
        """`store`: where bodies go; None: they stay here, and are lost with the node. `key`: the node's."""
        self._bus = bus
        self._trajectories = trajectories
        self._store = store
        self._edge = edge
        self._key = key
        self._path = state / FILE
        self._shards = 0
        self._incarnation = 0
        self._places = self._read()
        self._waiting: dict[str, None] = {}
        """Logs with lines that aren't published, in the order in which they got them."""
        self._busy: set[str] = set()
        self._watched: dict[str, list[tuple[int, asyncio.Future[None]]]] = {}
        self._put: dict[str, set[str]] = {}
        """Bodies that are in the store, by sandbox."""
        self._wake = asyncio.Event()
        self._changed = False
        self._failing = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def waiting(self) -> int:
        """Logs that aren't published to their end."""
        return len(self._waiting) + len(self._busy)

    def start(self, shards: int, incarnation: int, live: Iterable[str]) -> None:
        """The node has joined a cluster with so many streams (0: it keeps none); again after each join. `live`: its
        sandboxes."""
        self._shards, self._incarnation = shards, incarnation
        if not shards or self._tasks:
            return
        for sandbox_id in {*live, *self._places, *self._trajectories.store.recent(self._read_at - SAVE_S - 5)}:
            self._waiting[sandbox_id] = None
        self._trajectories.ship = self
        self._wake.set()
        self._tasks = [
            asyncio.create_task(self._run(), name="shipping"),
            asyncio.create_task(self._save_often(), name="shipping: places"),
            asyncio.create_task(self._tidy(), name="shipping: old bodies"),
        ]

    def note(self, sandbox_id: str) -> None:
        """Its log has another line. On the path of every command."""
        if sandbox_id not in self._waiting:
            self._waiting[sandbox_id] = None
            self._wake.set()

    def begin(self, sandbox_id: str, generation: int) -> None:
        """A sandbox is about to be made anew here."""
        self._places[sandbox_id] = Place(generation)
        self._save()

    def shipped(self, sandbox_id: str) -> asyncio.Future[None]:
        """Resolves when all that its log has now is acknowledged; fails with `Unavailable` after a while."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        chain = self._trajectories.store.chain(sandbox_id)
        if chain is None or self._offset(sandbox_id) >= chain.size:
            future.set_result(None)
            return future
        self._watched.setdefault(sandbox_id, []).append((chain.size, future))
        self.note(sandbox_id)
        timer = asyncio.get_running_loop().call_later(2 * ASK_S, _refuse, future)
        future.add_done_callback(lambda _: timer.cancel())
        return future

    async def close(self) -> None:
        """Publish what can be at once. Idempotent."""
        self._trajectories.ship = None
        if self._tasks:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    while self.waiting and self._bus.connected and not self._failing:  # noqa: ASYNC110
                        await asyncio.sleep(LINGER_S)
        await ended(self._tasks)
        if self._tasks:
            self._save()
        self._tasks = []

    # --- publishing -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        retry_s = RETRY_S
        async with asyncio.TaskGroup() as group:
            room = asyncio.Semaphore(WIDTH)
            while True:
                await self._wake.wait()
                await asyncio.sleep(LINGER_S)
                self._wake.clear()
                for sandbox_id in list(self._waiting):
                    if sandbox_id in self._busy:
                        continue
                    await room.acquire()
                    if self._failing:
                        room.release()
                        break
                    self._waiting.pop(sandbox_id, None)
                    self._busy.add(sandbox_id)
                    task = group.create_task(self._ship(sandbox_id))
                    task.add_done_callback(lambda _: room.release())
                if self._failing:
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, MOST_RETRY_S)
                    self._failing = False
                    self._wake.set()
                elif not self._waiting:
                    retry_s = RETRY_S

    async def _ship(self, sandbox_id: str) -> None:
        try:
            while await self._one_message(sandbox_id):
                pass
        except DsecError as error:
            if not self._failing:
                log.warning("the log of sandbox %s isn't in the cluster yet: %s", sandbox_id, error)
            self._failing = True
            self._waiting[sandbox_id] = None
        finally:
            self._busy.discard(sandbox_id)
            if sandbox_id in self._waiting:
                self._wake.set()

    async def _one_message(self, sandbox_id: str) -> bool:
        """Publish what comes next; False where that is nothing. Raises `Unavailable`."""
        place = self._places.setdefault(sandbox_id, Place())
        lines: list[bytes] = []
        size, end, last = 0, place.offset, ""
        for offset, line in self._trajectories.store.lines(sandbox_id, place.offset):
            lines.append(line)
            end, size = offset, size + len(line)
            if size >= MESSAGE_BYTES:
                break
        if not lines:
            self._forget_ended(sandbox_id)
            return False
        for line in lines:
            entry = parse(line)
            last = entry.type
            await self._bodies(sandbox_id, place.generation, entry.time, digests_in(entry.data))
        key = key_of(self._key, sandbox_id).hex() if self._store is not None else ""
        message = pack(Shipment(incarnation=self._incarnation, key=key), lines)
        await self._bus.append(subject_of(sandbox_id, self._edge, place.generation, self._shards), message)
        place.offset = end
        self._changed = True
        watched = self._watched.pop(sandbox_id, [])
        left = [each for each in watched if each[0] > end]
        if left:
            self._watched[sandbox_id] = left
        for wanted, future in watched:
            if wanted <= end and not future.done():
                future.set_result(None)
        if last == EntryType.END:
            self._forget_ended(sandbox_id)
            return False
        return True

    async def _bodies(self, sandbox_id: str, generation: int, at: float, digests: set[str]) -> None:
        if not digests or self._store is None:
            return
        there = self._put.setdefault(sandbox_id, set())
        for digest in digests - there:
            data = self._trajectories.store.blob(sandbox_id, digest)
            if data is not None:
                key = key_of(self._key, sandbox_id)
                sealed = await asyncio.to_thread(encrypt, data, key, digest)
                await self._store.put(body_key(at, sandbox_id, digest, key if generation else b""), sealed)
            there.add(digest)

    def _forget_ended(self, sandbox_id: str) -> None:
        """Its log has been published to its end."""
        chain = self._trajectories.store.chain(sandbox_id)
        if chain is None or chain.last == EntryType.END:
            self._places.pop(sandbox_id, None)
            self._put.pop(sandbox_id, None)
            self._changed = True

    # --- what is on disk --------------------------------------------------------------------------------------------

    def _offset(self, sandbox_id: str) -> int:
        place = self._places.get(sandbox_id)
        return place.offset if place is not None else 0

    def _read(self) -> dict[str, Place]:
        self._read_at = 0.0
        try:
            self._read_at = self._path.stat().st_mtime
            return _places.decode(self._path.read_bytes())
        except FileNotFoundError:
            self._read_at = time.time()
            return {}
        except msgspec.MsgspecError as error:
            log.warning("%s can't be read, all logs are published again: %s", FILE, error)
            return {}

    def _save(self) -> None:
        new = self._path.with_suffix(".new")
        try:
            new.write_bytes(_encode(self._places))
            os.replace(new, self._path)  # noqa: PTH105
        except OSError as error:
            log.warning("%s can't be written: %s", FILE, error)
        self._changed = False

    async def _save_often(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            if self._changed:
                self._save()

    async def _tidy(self) -> None:
        """Delete bodies of days that nobody can ask for any more: any node does, whoever wrote them."""
        while self._store is not None:
            await asyncio.sleep(TIDY_S)
            last = int((time.time() - KEEP_S) // 86400) - 1
            try:
                for day in range(last - 7, last):
                    async for info in self._store.list(f"trajectories/{day}/"):
                        await self._store.delete(info.key)
            except DsecError as error:
                log.warning("old bodies of trajectories can't be deleted: %s", error)


def _refuse(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(
            Unavailable(
                "the cluster's streams haven't acknowledged the log of this sandbox",
                remedy="It is on the node's disk, and will be published; try again.",
            )
        )
