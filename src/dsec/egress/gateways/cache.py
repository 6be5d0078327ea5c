"""What gateways fetched, on disk: content that never changes, by the key that its gateway made for it (URL, digest and
whose credentials it took), and pages that are asked for again after a while.

On disk: `DIR/<sha256 of the key>`, a file each: the body, the `_Footer` as JSON, its length (u32), a magic.
A file is written under a name of its own and renamed when it is whole, so that a crash leaves no half of one; its
modification time is when it was last known to be current, its access time when it was last used. The footer holds the
body's SHA-256: a file that doesn't match it is removed, not served (checked at its first use in a server's life).

One object is fetched once, however many ask for it at the same time: the fetch is a task of the cache's, the askers
read the growing file. Invariant: the last chunk becomes readable only when digest and length were right.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from dsec.egress.gateways.answers import UpstreamError

MAGIC = b"dsc1"
CHUNK = 256 << 10

_TAIL = struct.Struct("<I4s")


class _Footer(Struct, frozen=True):
    key: str
    sha256: str
    size: int
    headers: dict[str, str]


class Body(Struct, frozen=True):
    """What a fetch found: the answer's headers that are worth keeping, and its bytes."""

    headers: Mapping[str, str]
    data: AsyncGenerator[bytes, None]
    """Closed by who was handed it."""


Fetch = Callable[[], Awaitable[Body]]
"""Asks the upstream. Raises whatever the askers shall see."""


class Item:
    """An object, perhaps still arriving. Closed by whoever got it."""

    def __init__(self, file: BinaryIO, headers: Mapping[str, str], sha256: str = "", size: int = 0) -> None:
        self.headers = headers
        self._file = file
        self._sha256 = sha256
        self._readable = size
        self._ended = bool(sha256)
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self.users = 1

    @property
    def sha256(self) -> str:
        """Of the body; empty while it arrives."""
        return self._sha256

    @property
    def size(self) -> int | None:
        """Bytes of the body; None while it arrives."""
        return self._readable if self._ended else None

    @property
    def age_s(self) -> float:
        """How long ago it was known to be current."""
        return time.time() - os.fstat(self._file.fileno()).st_mtime

    def renew(self) -> None:
        """It is current now."""
        os.utime(self._file.fileno())

    async def read(self, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """The bytes from `start` to `end` as they arrive. Raises what the fetch raised."""
        position = start
        while end is None or position < end:
            if position < self._readable:
                stop = min(self._readable, end if end is not None else self._readable, position + CHUNK)
                data = os.pread(self._file.fileno(), stop - position, position)
                if not data:
                    raise UpstreamError("the cache on disk was cut")
                position += len(data)
                yield data
            elif self._error is not None:
                raise self._error
            elif self._ended:
                return
            else:
                await self._news.wait()

    async def whole(self) -> bytes:
        """All of it."""
        return b"".join([data async for data in self.read()])

    async def arrived(self) -> None:
        """Until it is complete. Raises what the fetch raised."""
        while not self._ended:
            if self._error is not None:
                raise self._error
            await self._news.wait()

    def close(self) -> None:
        """No longer needed by one who got it."""
        self.users -= 1
        if self.users == 0:
            self._file.close()

    # --- the fetch's side ---

    def grew(self, readable: int) -> None:
        self._readable = readable
        self._tell()

    def finished(self, size: int, sha256: str) -> None:
        self._readable, self._sha256, self._ended = size, sha256, True
        self._tell()

    def failed(self, error: BaseException) -> None:
        self._error = error
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class _Want(Struct, frozen=True):
    """What a fetch is for."""

    name: str
    key: str
    fetch: Fetch
    limit: int
    sha256: str | None = None


class _Flight:
    """A fetch that several may wait for."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.item: Item | None = None
        self.waiting = 0

    def left(self) -> None:
        """One who waited for the item gives up."""
        if self.item is None:
            self.waiting -= 1
        else:
            self.item.close()


class Cache:
    """Bounded by bytes; the least recently used goes first. One process owns the directory."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit = limit_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._total = 0
        self._sound: set[str] = set()
        self._flights: dict[str, _Flight] = {}
        self._writers: set[asyncio.Task[None]] = set()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for path in directory.iterdir():
            if path.name.startswith("."):
                path.unlink()  # a fetch that a crash ended
            else:
                status = path.stat()
                found.append((status.st_atime_ns, path.name, status.st_size))
        for _, name, size in sorted(found):
            self._account(name, size)
        self._evict()

    async def get(self, key: str, fetch: Fetch, *, limit: int, sha256: str | None = None) -> Item:
        """The object of a key that stands for one content for ever. `limit`: bytes that are taken at most. `sha256`:
        what the body must have, where that is known."""
        name = _name(key)
        item = await self._stored(name, key)
        if item is not None:
            if sha256 is None or item.sha256 == sha256:
                return item
            item.close()
            self._drop(name)
        return await self._fetched(_Want(name, key, fetch, limit, sha256))

    async def page(self, key: str, fetch: Callable[[Mapping[str, str]], Awaitable[Body | None]], *, limit: int,
                   ttl_s: float) -> Item:  # fmt: skip
        """A page that may change: served as it is for `ttl_s`, then asked for again with the headers of the stored one;
        `fetch` returns None where that is still current."""
        name = _name(key)
        item = await self._stored(name, key)
        if item is not None and item.age_s < ttl_s:
            return item
        old = item.headers if item is not None else {}

        async def changed() -> Body:
            body = await fetch(old)
            if body is None:
                raise _StillCurrentError
            return body

        try:
            return await self._fetched(_Want(name, key, changed, limit))
        except _StillCurrentError:
            stored = await self._stored(name, key)
            if stored is None:  # evicted meanwhile
                return await self._fetched(_Want(name, key, lambda: _must(fetch({})), limit))
            stored.renew()
            return stored
        finally:
            if item is not None:
                item.close()

    async def close(self) -> None:
        """End the fetches that go on."""
        tasks: list[asyncio.Task[Any]] = [*(each.task for each in self._flights.values()), *self._writers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- stored objects ---

    def _path(self, name: str) -> Path:
        return self._directory / name

    async def _stored(self, name: str, key: str) -> Item | None:
        if name not in self._sizes:
            return None
        try:
            file = self._path(name).open("rb")
        except OSError:
            self._drop(name)
            return None
        footer = await asyncio.to_thread(_checked, file, key, name in self._sound)
        if footer is None:
            file.close()
            self._drop(name)
            return None
        if name in self._sizes:  # it may have been evicted meanwhile
            self._sound.add(name)
            self._sizes.move_to_end(name)
        os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))
        return Item(file, footer.headers, footer.sha256, footer.size)

    def _account(self, name: str, size: int) -> None:
        self._total += size - self._sizes.pop(name, 0)
        self._sizes[name] = size

    def _drop(self, name: str) -> None:
        self._total -= self._sizes.pop(name, 0)
        self._sound.discard(name)
        self._path(name).unlink(missing_ok=True)

    def _evict(self) -> None:
        while self._total > self._limit and self._sizes:
            self._drop(next(iter(self._sizes)))

    # --- fetches ---

    async def _fetched(self, want: _Want) -> Item:
        name = want.name
        flight = self._flights.get(name)
        if flight is None:
            flight = self._flights[name] = _Flight()
            flight.task = asyncio.create_task(self._begin(flight, want))
            flight.task.add_done_callback(lambda task: self._begun(name, task))
        if flight.item is None:
            flight.waiting += 1
            try:
                await asyncio.shield(flight.task)
            except BaseException:
                flight.left()
                raise
        else:
            flight.item.users += 1
        assert flight.item is not None
        return flight.item

    def _begun(self, name: str, task: asyncio.Task[None]) -> None:
        """A fetch that failed before its first byte is forgotten; one that goes on is forgotten when it ends."""
        if task.cancelled() or task.exception() is not None:
            self._flights.pop(name, None)

    async def _begin(self, flight: _Flight, want: _Want) -> None:
        body = await want.fetch()
        try:
            handle, temporary = tempfile.mkstemp(prefix=".", dir=self._directory)
        except OSError as error:
            await anext(body.data, None)  # one that never began holds on to its connection
            await body.data.aclose()
            raise UpstreamError(f"the cache: {error.strerror}") from error
        flight.item = item = Item(os.fdopen(handle, "w+b", buffering=0), dict(body.headers))
        item.users += flight.waiting
        writer = asyncio.create_task(self._write(want, body, item, Path(temporary)))
        self._writers.add(writer)
        writer.add_done_callback(self._writers.discard)

    async def _write(self, want: _Want, body: Body, item: Item, temporary: Path) -> None:
        digest, size = hashlib.sha256(), 0
        try:
            async for data in body.data:
                item.grew(size)  # all but the chunk that may be the last
                size += len(data)
                if size > want.limit:
                    raise UpstreamError(f"the server outside sent more than {want.limit} bytes")
                digest.update(data)
                _write_all(item, data)
            if want.sha256 not in {None, digest.hexdigest()}:
                raise UpstreamError("what the server outside sent doesn't have the digest that its index says")
            footer = msgspec.json.encode(_Footer(want.key, digest.hexdigest(), size, dict(item.headers)))
            _write_all(item, footer + _TAIL.pack(len(footer), MAGIC))
            temporary.rename(self._path(want.name))  # noqa: ASYNC240 (one call, on the cache's own disk)
            self._account(want.name, size + len(footer) + _TAIL.size)
            self._sound.add(want.name)
            self._evict()
            item.finished(size, digest.hexdigest())
        except (UpstreamError, OSError) as error:
            _remove(temporary)
            item.failed(error if isinstance(error, UpstreamError) else UpstreamError(f"the cache: {error.strerror}"))
        except BaseException:
            _remove(temporary)
            item.failed(UpstreamError("the gateway ends"))
            raise
        finally:
            self._flights.pop(want.name, None)
            item.close()
            await body.data.aclose()


class _StillCurrentError(Exception):
    """The stored page may be served on."""


async def _must(fetch: Awaitable[Body | None]) -> Body:
    body = await fetch
    if body is None:
        raise UpstreamError("the server outside says that nothing changed where nothing was known")
    return body


def _write_all(item: Item, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[item._file.write(view) :]


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _checked(file: BinaryIO, key: str, sound: bool) -> _Footer | None:
    """The footer, if the file is whole and, unless that is known, its body has the digest."""
    try:
        end = file.seek(0, os.SEEK_END) - _TAIL.size
        length, magic = _TAIL.unpack(os.pread(file.fileno(), _TAIL.size, max(end, 0)))
        if magic != MAGIC or length > end:
            return None
        footer = msgspec.json.decode(os.pread(file.fileno(), length, end - length), type=_Footer)
        if footer.key != key or footer.size != end - length:
            return None
        if not sound:
            digest, position = hashlib.sha256(), 0
            while position < footer.size:
                data = os.pread(file.fileno(), min(CHUNK, footer.size - position), position)
                digest.update(data)
                position += len(data) or footer.size
            if digest.hexdigest() != footer.sha256:
                return None
    except (struct.error, msgspec.MsgspecError, OSError):
        return None
    return footer
