"""Who uses a store: leases of uploads and of nodes, and the lock of the one who collects garbage.

    leases/upload-<id>   somebody adds objects; nothing is deleted meanwhile
    leases/use-<node>    the layers that a node has names for or uses; nobody deletes them
    locks/gc             somebody deletes, or waits for the uploads to end in order to; no new upload begins

Each side writes its own mark first and then looks for the other's, so that at least one of the two sees both: an upload
then takes its mark back and waits, so the collector never starves. A mark that isn't renewed expires, and its holder
stops by itself before that: the times hold while clocks differ by less than SKEW_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from hashlib import sha256

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dsec.errors import NotFound, Unavailable
from dsec.ports import BlobStore, Clock

TTL_S = 600.0
RENEW_S = 60.0
USE_TTL_S = 7 * 86400.0
"""A node that is down for longer than this no longer keeps layers in the store."""
SKEW_S = 120.0
GC_LOCK = "locks/gc"
_LOOK_AGAIN_S = 0.2


class Lease(Struct, frozen=True, kw_only=True):
    """A mark in the store."""

    holder: str
    """For people: who it is."""
    expires_at: float
    layers: list[str] = []
    sum: str = ""
    """Of all of it, so that damage is noticed; empty: of an earlier version."""

    def summed(self) -> str:
        """What `sum` has to be."""
        return sha256(msgspec.json.encode([self.holder, self.expires_at, self.layers])).hexdigest()


class Leases:
    """The leases of one store."""

    def __init__(self, store: BlobStore, clock: Clock, holder: str) -> None:
        """`holder`: names this process in messages."""
        self._store = store
        self._clock = clock
        self._holder = holder

    @asynccontextmanager
    async def upload(self, *, wait_s: float = 600.0) -> AsyncIterator[None]:
        """While this is open nothing is deleted from the store. Waits while somebody deletes.

        Raises `Unavailable` where that takes longer than `wait_s`. The work inside is cancelled, and `Unavailable`
        raised, where the lease can't be renewed in time.
        """
        key = f"leases/upload-{os.urandom(12).hex()}"
        until = self._clock.monotonic() + wait_s
        while True:
            await self._write(key)
            if await self._live(GC_LOCK) is None:
                break
            await self._store.delete(key)
            if self._clock.monotonic() > until:
                raise Unavailable("the store is being cleaned up", remedy="Try again later.")
            await self._clock.sleep(_LOOK_AGAIN_S)
        async with self._renewed(key):
            yield

    @asynccontextmanager
    async def collection(self, *, wait_s: float = 3600.0) -> AsyncIterator[None]:
        """While this is open no upload runs. Waits for those that do.

        Raises `Unavailable` where another collection runs, or uploads go on for longer than `wait_s`.
        """
        lock = await self._live(GC_LOCK)
        if lock is not None:
            raise Unavailable(f"the store is being cleaned up by {lock.holder}", remedy="Try again later.")
        await self._store.delete(GC_LOCK)  # an expired one
        if not await self._store.put_if_absent(GC_LOCK, self._encoded([], TTL_S)):
            raise Unavailable("the store is being cleaned up", remedy="Try again later.")
        async with self._renewed(GC_LOCK):
            until = self._clock.monotonic() + wait_s
            while holders := [lease.holder async for lease in self._all("leases/upload-")]:
                if self._clock.monotonic() > until:
                    raise Unavailable(f"uploads go on: {', '.join(sorted(set(holders)))[:300]}", remedy="Try later.")
                await self._clock.sleep(_LOOK_AGAIN_S)
            yield

    async def use(self, node: str, layers: Iterable[str]) -> None:
        """Say which layers a node has names for or uses, for the next USE_TTL_S. Layers that are pushed are young
        enough to stay for longer than the next time that a node says it (RENEW_S)."""
        await self._store.put(f"leases/use-{node}", self._encoded(sorted(layers), USE_TTL_S))

    async def used(self) -> set[str]:
        """The layers that any node uses."""
        return {layer async for lease in self._all("leases/use-") for layer in lease.layers}

    @asynccontextmanager
    async def _renewed(self, key: str) -> AsyncIterator[None]:
        """Renew it until the end, then delete it. The work is cancelled where that fails for too long."""
        work = asyncio.current_task()
        lost = False

        async def renew() -> None:
            nonlocal lost
            good_until = self._clock.now() + TTL_S - SKEW_S
            while True:
                await self._clock.sleep(RENEW_S)
                try:
                    await self._write(key)
                    good_until = self._clock.now() + TTL_S - SKEW_S
                except Unavailable:
                    if self._clock.now() + RENEW_S > good_until:
                        lost = True
                        if work is not None:
                            work.cancel()
                        return

        renewing = asyncio.create_task(renew(), name=f"renew {key}")
        try:
            yield
        except asyncio.CancelledError:
            if lost:
                raise Unavailable("the store could not be reached for too long", remedy="Try again.") from None
            raise
        finally:
            renewing.cancel()
            with contextlib.suppress(Unavailable):
                await asyncio.shield(self._store.delete(key))

    async def _write(self, key: str) -> None:
        await self._store.put(key, self._encoded([], TTL_S))

    def _encoded(self, layers: list[str], ttl_s: float) -> bytes:
        lease = Lease(holder=self._holder, expires_at=self._clock.now() + ttl_s, layers=layers)
        return msgspec.json.encode(replace(lease, sum=lease.summed()))

    async def _live(self, key: str) -> Lease | None:
        """Raises `Unavailable` for one that can't be read: it isn't known that nobody relies on it."""
        try:
            lease = msgspec.json.decode(await self._store.get(key), type=Lease)
            if lease.sum not in ("", lease.summed()):
                raise ValueError("it is damaged")
        except NotFound:
            return None
        except ValueError as error:
            message = f"{key} in the store can't be read: {error}"
            raise Unavailable(message, remedy="If it stays so, delete it.") from None
        return lease if lease.expires_at + SKEW_S > self._clock.now() else None

    async def _all(self, prefix: str) -> AsyncIterator[Lease]:
        """Those that live; dead ones are removed. Raises `Unavailable`."""
        folder, _, begin = prefix.rpartition("/")
        async for info in self._store.list(f"{folder}/"):
            if info.key.rpartition("/")[2].startswith(begin):
                lease = await self._live(info.key)
                if lease is not None:
                    yield lease
                elif info.modified_at + TTL_S + SKEW_S < self._clock.now():
                    await self._store.delete(info.key)
