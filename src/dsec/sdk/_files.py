"""Files in a sandbox.

Paths are str, bytes or os.PathLike; Linux names have no encoding, so that a str carries other bytes by surrogate
escapes (`os.fsencode`). Relative paths start at `/`. Every call takes `user`: who does it inside (None: the sandbox's
default user).
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from typing import IO, Any, cast

import msgspec
from msgspec import Struct

from dsec.errors import FileMissing, InvalidRequest, Unavailable
from dsec.sdk._answers import cut_errors
from dsec.sdk._streams import AsyncWatch
from dsec.sdk._transport import Body, Retry, Transport, timed_out
from dsec.spec.sandbox import FileInfo

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Content = str | bytes | bytearray | memoryview | IO[bytes] | AsyncIterable[bytes] | Iterable[bytes]

_OCTETS = {"Content-Type": "application/octet-stream"}
_CHUNK = 256 << 10


class _Written(Struct, frozen=True):
    bytes: int


class _Listing(Struct, frozen=True):
    entries: list[FileInfo]


class AsyncFiles:
    """Reads and writes files of one sandbox; `sandbox.files`.

    All calls raise `FileMissing`, `FileError` (errno and path in `details`), `PermissionDenied`, `SandboxNotFound`,
    `SandboxEnded`, `Unavailable`, and `RequestTimeout` after `request_timeout_s`.
    """

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        """Not for callers."""
        self._transport = transport
        self._path = f"/v1/sandboxes/{sandbox_id}/files"

    async def read(
        self, path: Path, *, encoding: str = "utf-8", user: str | None = None, request_timeout_s: float | None = None
    ) -> str:
        """A file's text; what isn't of this encoding becomes U+FFFD."""
        data = await self.read_bytes(path, user=user, request_timeout_s=request_timeout_s)
        return data.decode(encoding, "replace")

    async def read_bytes(
        self,
        path: Path,
        *,
        offset: int = 0,
        length: int | None = None,
        user: str | None = None,
        request_timeout_s: float | None = None,
    ) -> bytes:
        """A file's bytes, `length` of them (None: to the end) from `offset` on."""
        url = self._transport.url(self._path, path=_bytes(path), offset=offset or None, length=length, user=user)
        if request_timeout_s is None:
            return await self._read_whole(url)
        try:
            async with asyncio.timeout(request_timeout_s):
                return await self._read_whole(url)
        except TimeoutError:
            raise timed_out(request_timeout_s) from None

    async def read_stream(
        self, path: Path, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncIterator[bytes]:
        """A file's bytes in pieces as they come, with bounded memory. Raises `Unavailable` where the connection breaks
        in the middle: go on with `offset`."""
        url = self._transport.url(self._path, path=_bytes(path), offset=offset or None, length=length, user=user)
        response = await self._transport.open("GET", url)
        sent = offset
        try:
            while data := await response.content.readany():
                sent += len(data)
                yield data
        except cut_errors() as error:
            raise Unavailable(
                f"the connection broke at byte {sent}", remedy=f"read on with offset={sent}", offset=sent
            ) from error
        finally:
            response.release()

    async def write(
        self,
        path: Path,
        data: Content,
        *,
        mode: int | None = None,
        parents: bool = False,
        append: bool = False,
        exclusive: bool = False,
        user: str | None = None,
        request_timeout_s: float | None = None,
    ) -> int:
        """Write a file, atomically unless `append`: after any failure it is as it was. Returns the bytes written.

        `data`: str (as UTF-8), bytes, an open binary file (from its position on), or an iterator of bytes,
        asynchronous or not; files and iterators are streamed. `mode`: permission bits of a new file (None: 0644).
        `parents`: make missing directories. `exclusive`: fail where it exists. Raises `OutcomeUnknown` where the
        connection broke and the write may not be repeated (`append`, `exclusive`, an iterator).
        """
        url = self._transport.url(
            self._path,
            path=_bytes(path),
            mode=None if mode is None else f"{mode:o}",
            parents=parents or None,
            append=append or None,
            exclusive=exclusive or None,
            user=user,
        )
        body, again = _content(data)
        written = await self._transport.call(
            "PUT",
            url,
            _Written,
            body=body,
            headers=_OCTETS,
            replay=again and not append and not exclusive,
            request_timeout_s=request_timeout_s,
        )
        return written.bytes

    async def stat(
        self, path: Path, *, follow: bool = False, user: str | None = None, request_timeout_s: float | None = None
    ) -> FileInfo:
        """About a file; `follow`: about what a symbolic link points to."""
        url = self._transport.url(f"{self._path}/stat", path=_bytes(path), follow=follow or None, user=user)
        return _decoded(await self._transport.call("GET", url, FileInfo, request_timeout_s=request_timeout_s))

    async def exists(self, path: Path, *, user: str | None = None, request_timeout_s: float | None = None) -> bool:
        """Whether there is such a file, of whatever type; a dangling symbolic link counts."""
        try:
            await self.stat(path, user=user, request_timeout_s=request_timeout_s)
        except FileMissing:
            return False
        return True

    async def list(
        self, path: Path, *, depth: int = 1, user: str | None = None, request_timeout_s: float | None = None
    ) -> list[FileInfo]:
        """Entries below a directory, `depth` levels of them; names are relative to it."""
        url = self._transport.url(f"{self._path}/list", path=_bytes(path), depth=depth, user=user)
        listing = await self._transport.call("GET", url, _Listing, request_timeout_s=request_timeout_s)
        return [_decoded(entry) for entry in listing.entries]

    async def watch(
        self, path: Path, *, recursive: bool = False, user: str | None = None, request_timeout_s: float | None = None
    ) -> AsyncWatch:
        """Watch a directory, `recursive`: with all below it. Returns when nothing that happens from now on is missed;
        `request_timeout_s` limits that. Raises `QuotaExceeded` where there are more directories than a watch can
        follow."""
        url = self._transport.url(f"{self._path}/watch", path=_bytes(path), recursive=recursive or None, user=user)
        if request_timeout_s is None:
            return AsyncWatch(await self._transport.open("GET", url))
        try:
            async with asyncio.timeout(request_timeout_s):
                return AsyncWatch(await self._transport.open("GET", url))
        except TimeoutError:
            raise timed_out(request_timeout_s) from None

    async def move(
        self,
        path: Path,
        to: Path,
        *,
        exclusive: bool = False,
        user: str | None = None,
        request_timeout_s: float | None = None,
    ) -> None:
        """Rename; replaces `to` unless `exclusive`. Raises `OutcomeUnknown` where the connection broke under it."""
        url = self._transport.url(
            f"{self._path}/move", path=_bytes(path), to=_bytes(to), exclusive=exclusive or None, user=user
        )
        await self._transport.call("POST", url, type(None), replay=False, request_timeout_s=request_timeout_s)

    async def mkdir(
        self,
        path: Path,
        *,
        mode: int | None = None,
        parents: bool = False,
        user: str | None = None,
        request_timeout_s: float | None = None,
    ) -> None:
        """Make a directory. `parents`: missing ones too, and an existing one is no error. Raises `OutcomeUnknown`
        where the connection broke under it and `parents` isn't set."""
        url = self._transport.url(
            f"{self._path}/mkdir",
            path=_bytes(path),
            mode=None if mode is None else f"{mode:o}",
            parents=parents or None,
            user=user,
        )
        await self._transport.call("POST", url, type(None), replay=parents, request_timeout_s=request_timeout_s)

    async def remove(
        self, path: Path, *, recursive: bool = False, user: str | None = None, request_timeout_s: float | None = None
    ) -> None:
        """Remove a file or an empty directory; `recursive`: with all that is in it. Raises `OutcomeUnknown` where the
        connection broke under it."""
        url = self._transport.url(f"{self._path}/remove", path=_bytes(path), recursive=recursive or None, user=user)
        await self._transport.call("POST", url, type(None), replay=False, request_timeout_s=request_timeout_s)

    async def _read_whole(self, url: Any) -> bytes:
        retry = Retry(self._transport)
        while True:
            response = await self._transport.open("GET", url, retry=retry)
            try:
                return await response.read()
            except cut_errors() as error:
                await retry.wait(error)  # from the start again: the file may have changed meanwhile


def _bytes(path: Path) -> bytes:
    raw = os.fsencode(path)
    if not raw or b"\0" in raw:
        raise InvalidRequest(f"{path!r} is not a path")
    return raw


def _decoded(info: FileInfo) -> FileInfo:
    if info.name_b64 is None:
        return info
    return msgspec.structs.replace(info, name=os.fsdecode(base64.b64decode(info.name_b64)))


def _content(data: Content) -> tuple[Body, bool]:
    """A request body and whether it can be sent again."""
    if isinstance(data, str):
        return data.encode(), True
    if isinstance(data, bytes):
        return (data if len(data) <= _CHUNK else lambda: _slices(data)), True
    if isinstance(data, bytearray | memoryview):
        view = memoryview(data).cast("B")
        return lambda: _slices(view), True
    if hasattr(data, "read"):
        file = cast("IO[bytes]", data)
        try:
            start = file.tell()
        except (OSError, AttributeError, ValueError):  # a pipe
            return lambda: _from_file(file, None), False
        return lambda: _from_file(file, start), True
    if isinstance(data, AsyncIterable):
        stream = data
        return lambda: stream, False
    return lambda: _from_iterable(data), False


async def _slices(data: bytes | memoryview) -> AsyncGenerator[bytes]:
    for i in range(0, len(data), _CHUNK):
        yield bytes(data[i : i + _CHUNK])


async def _from_file(file: IO[bytes], start: int | None) -> AsyncGenerator[bytes]:
    if start is not None:
        file.seek(start)
    while chunk := await asyncio.to_thread(file.read, _CHUNK):
        if isinstance(chunk, str):
            raise InvalidRequest("the file is open as text", remedy='open it with mode "rb"')
        yield chunk


async def _from_iterable(data: Iterable[bytes]) -> AsyncGenerator[bytes]:
    for chunk in data:
        yield chunk
