"""File calls over a guest channel: streamed, in bounded memory, as a named user inside.

Each is an un-keyed operation that is released at its end; when the caller goes away in the middle it is ended, and
a half-written file never appears (writes go to a temporary file that is renamed at the end). Errors are mapped from
errno to the tree in `dsec.errors`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing

from dsec.errors import (
    DsecError,
    FileError,
    FileMissing,
    Internal,
    InvalidRequest,
    PermissionDenied,
    QuotaExceeded,
    TooLarge,
)
from dsec.ports import GuestChannel, Operation
from dsec.spec.operations import EndKind, FileFlag, Kind, OpEnd, OpRequest, Stage
from dsec.spec.sandbox import FileInfo
from dsec.wire.entries import EntryDecoder, to_bytes
from dsec.wire.frames import ProtocolError
from dsec.wire.messages import MAX_MESSAGE

LIST_LIMIT = 100_000
"""Entries in one answer."""

Path = str | bytes


def _path(path: Path) -> bytes:
    raw = to_bytes(path) if isinstance(path, str) else path
    if not raw.startswith(b"/") or b"\0" in raw:
        raise InvalidRequest("a path inside a sandbox is absolute and holds no NUL byte")
    return raw


def _user(user: str | None) -> bytes | None:
    return None if user is None else to_bytes(user)


def file_error(end: OpEnd, path: bytes, said: str = "") -> DsecError:
    """What a file call's end means to its caller. `said`: the guest's own words, if any."""
    shown = path.decode("utf-8", "replace")
    if end.kind is not EndKind.START_FAILED:
        return FileError(f"the file call on {shown} was cut: {end.kind.name.lower()} {end.code}", path=shown)
    name, text = errno.errorcode.get(end.code, str(end.code)), os.strerror(end.code)
    text = f"{said}: {text}" if said else text
    if end.stage is Stage.USER:
        return InvalidRequest(f"no such user inside the sandbox: {text}", errno=name)
    if end.stage in (Stage.FORK, Stage.CGROUP):
        return QuotaExceeded(f"the sandbox cannot start another process: {text}", errno=name)
    if end.stage is Stage.REQUEST:
        return QuotaExceeded(end.message) if end.code == errno.EAGAIN else InvalidRequest(end.message, errno=name)
    if end.code == errno.ENOENT:
        return FileMissing(f"{shown} does not exist", path=shown)
    if end.code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionDenied(f"{shown}: {text}", path=shown, errno=name)
    if end.code in (errno.ENOSPC, errno.EDQUOT):
        return FileError(f"{shown}: disk full ({text})", remedy="Raise disk_bytes.", path=shown, errno=name)
    return FileError(f"{shown}: {text}", path=shown, errno=name)


async def _output(operation: Operation, path: bytes) -> AsyncGenerator[bytes, None]:
    """An operation's stdout; raises what its end means unless that was success. Releases it."""
    said = b""
    try:
        async with aclosing(operation.read()) as items:
            async for item in items:
                if isinstance(item, OpEnd):
                    if item.kind is not EndKind.EXITED or item.code != 0:
                        raise file_error(item, path, said.decode("utf-8", "replace").strip())
                elif item.stderr:  # what was the matter, in words
                    said = (said + item.data)[:MAX_MESSAGE]
                else:
                    yield item.data
    finally:
        await operation.release()


async def _run(channel: GuestChannel, request: OpRequest) -> bytes:
    path = request.path or b""
    return b"".join([data async for data in _output(await channel.start(request), path)])


async def read_file(
    channel: GuestChannel, path: Path, *, user: str | None = None, offset: int = 0, length: int | None = None
) -> AsyncGenerator[bytes, None]:
    """A file's bytes from `offset` on, at most `length`. The first step raises `FileMissing`, `PermissionDenied` or
    `FileError`.
    """
    raw = _path(path)
    request = OpRequest(kind=Kind.READ, path=raw, user=_user(user), offset=offset or None, length=length)
    async with aclosing(_output(await channel.start(request), raw)) as output:
        async for data in output:
            yield data


async def write_file(
    channel: GuestChannel,
    path: Path,
    chunks: AsyncIterable[bytes],
    *,
    user: str | None = None,
    mode: int | None = None,
    parents: bool = False,
    append: bool = False,
    exclusive: bool = False,
) -> int:
    """Write a file whole or not at all (`append`: what came before an error stays); returns the bytes written. An
    exception of `chunks`
    goes through and leaves the file as it was. Raises as `read_file` does."""
    raw = _path(path)
    flags = FileFlag(0)
    for wanted, flag in ((parents, FileFlag.PARENTS), (append, FileFlag.APPEND), (exclusive, FileFlag.EXCLUSIVE)):
        flags |= flag if wanted else FileFlag(0)
    operation = await channel.start(OpRequest(kind=Kind.WRITE, path=raw, user=_user(user), mode=mode, file_flags=flags))
    count = 0
    try:
        async for data in chunks:
            await operation.write(data)
            count += len(data)
            if operation.end is not None:
                break  # it failed; the end says why
        await operation.close_stdin()
        async for _ in _output(operation, raw):
            raise Internal("a write answered with data")
    finally:
        await operation.release()
    return count


async def stat(channel: GuestChannel, path: Path, *, user: str | None = None, follow: bool = True) -> FileInfo:
    """The entry of a path. Raises as `read_file` does."""
    flags = FileFlag.FOLLOW if follow else FileFlag(0)
    request = OpRequest(kind=Kind.STAT, path=_path(path), user=_user(user), file_flags=flags)
    decoder = EntryDecoder()
    try:
        entries = decoder.feed(await _run(channel, request))
        decoder.end()
    except ProtocolError as error:
        raise Internal(f"the guest answered with {error}") from error
    if len(entries) != 1:
        raise Internal(f"the guest answered with {len(entries)} entries")
    return entries[0]


async def list_dir(
    channel: GuestChannel, path: Path, *, user: str | None = None, depth: int = 1, limit: int = LIST_LIMIT
) -> list[FileInfo]:
    """The entries below a directory, names relative to it; `depth` 1: its own. Raises `TooLarge` above `limit`
    entries, else as
    `read_file` does."""
    raw = _path(path)
    request = OpRequest(kind=Kind.LIST, path=raw, user=_user(user), depth=depth)
    decoder = EntryDecoder()
    entries: list[FileInfo] = []
    try:
        async with aclosing(_output(await channel.start(request), raw)) as output:
            async for data in output:
                entries += decoder.feed(data)
                if len(entries) > limit:
                    raise TooLarge(f"more than {limit} entries", remedy="List subdirectories one by one.")
        decoder.end()
    except ProtocolError as error:
        raise Internal(f"the guest answered with {error}") from error
    return entries


async def move(
    channel: GuestChannel, path: Path, to: Path, *, user: str | None = None, exclusive: bool = False
) -> None:
    """Rename. `exclusive`: fail where the target exists. Raises as `read_file` does."""
    flags = FileFlag.EXCLUSIVE if exclusive else FileFlag(0)
    await _run(
        channel, OpRequest(kind=Kind.MOVE, path=_path(path), path2=_path(to), user=_user(user), file_flags=flags)
    )


async def remove(channel: GuestChannel, path: Path, *, user: str | None = None, recursive: bool = False) -> None:
    """Remove a file or directory; one that isn't empty only if `recursive`. Raises as `read_file` does."""
    flags = FileFlag.RECURSIVE if recursive else FileFlag(0)
    await _run(channel, OpRequest(kind=Kind.REMOVE, path=_path(path), user=_user(user), file_flags=flags))


async def mkdir(
    channel: GuestChannel, path: Path, *, user: str | None = None, mode: int | None = None, parents: bool = False
) -> None:
    """Make a directory. `parents`: missing ones above it too, and an existing one is no error. Raises as
    `read_file` does.
    """
    flags = FileFlag.PARENTS if parents else FileFlag(0)
    request = OpRequest(kind=Kind.MKDIR, path=_path(path), user=_user(user), mode=mode, file_flags=flags)
    await _run(channel, request)
