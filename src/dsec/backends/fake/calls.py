"""What the fake guest's file calls do, watches and connections among them, over its file system in memory."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

from dsec.backends.fake.files import Change, Directory, fail
from dsec.spec.operations import FileFlag, Kind
from dsec.spec.sandbox import FileEvent
from dsec.wire.entries import encode_entry, to_text
from dsec.wire.events import encode_begin, encode_connected, encode_ended, encode_event

if TYPE_CHECKING:
    from dsec.backends.fake.guest import FakeOperation


async def file_call(operation: FakeOperation) -> None:
    """Runs a call of any kind but EXEC and CONNECT. Raises OSError."""
    request, fs, uid, gid = operation.request, operation.fs, operation.uid, operation.gid
    path, flags = request.path or b"/", request.file_flags
    match request.kind:
        case Kind.READ:
            data = fs.open_for_reading(path, uid, gid)[request.offset or 0 :]
            await operation.out(data if request.length is None else data[: request.length])
        case Kind.WRITE:
            parents, exclusive = bool(flags & FileFlag.PARENTS), bool(flags & FileFlag.EXCLUSIVE)
            fs.check_write(path, uid, gid, parents=parents, exclusive=exclusive)
            parts = bytearray()
            while piece := await operation.stdin():
                parts += piece
            operation.guest.check_room(len(parts))
            fs.write(path, bytes(parts), request.mode, uid, gid, append=bool(flags & FileFlag.APPEND))
        case Kind.STAT:
            await operation.out(encode_entry(fs.stat(path, uid, gid, follow=bool(flags & FileFlag.FOLLOW))))
        case Kind.LIST:
            await operation.out(b"".join(map(encode_entry, fs.list(path, request.depth or 1, uid, gid))))
        case Kind.MOVE:
            fs.move(path, request.path2 or b"", uid, gid, exclusive=bool(flags & FileFlag.EXCLUSIVE))
        case Kind.REMOVE:
            fs.remove(path, uid, gid, recursive=bool(flags & FileFlag.RECURSIVE))
        case Kind.MKDIR:
            fs.mkdir(path, request.mode, uid, gid, parents=bool(flags & FileFlag.PARENTS))
        case Kind.WATCH:
            await _watch(operation, path, bool(flags & FileFlag.RECURSIVE))


async def _watch(operation: FakeOperation, path: bytes, recursive: bool) -> None:
    fs = operation.fs
    top = fs.find(path, operation.uid, operation.gid)
    if not isinstance(top, Directory):
        raise fail(errno.ENOTDIR)
    if not top.allows(operation.uid, operation.gid, 4):
        raise fail(errno.EACCES)
    changes: asyncio.Queue[Change] = asyncio.Queue()
    prefix = b"/" + path.strip(b"/")
    fs.listeners.append(changes.put_nowait)
    try:
        await operation.out(encode_begin())
        while True:
            event = _event(await changes.get(), prefix, recursive)
            if event is not None:
                await operation.out(encode_event(event))
                if not event.path:
                    return
    finally:
        fs.listeners.remove(changes.put_nowait)


def _event(change: Change, top: bytes, recursive: bool) -> FileEvent | None:
    """A change as somebody sees it who watches `top`; None: not at all."""

    def below(path: bytes | None) -> str | None:
        if path is None or (path != top and not path.startswith(top.rstrip(b"/") + b"/")):
            return None
        found = path[len(top.rstrip(b"/")) :].lstrip(b"/")
        return None if b"/" in found and not recursive else to_text(found)

    path, before = below(change.path), below(change.before)
    if change.kind != "rename":
        if path is None or (path == "" and change.kind != "remove"):
            return None
        return FileEvent(kind=change.kind, path=path, directory=change.directory)
    if before is not None and path and before:
        return FileEvent(kind="rename", path=path, from_path=before, directory=change.directory)
    if before is not None:
        return FileEvent(kind="remove", path=before, directory=change.directory)
    return FileEvent(kind="create", path=path, directory=change.directory) if path else None


async def connection(operation: FakeOperation) -> None:
    """An echo, where a command listens. Raises OSError where none does."""
    if operation.request.port not in operation.guest.ports:
        raise fail(errno.ECONNREFUSED)
    await operation.err(encode_connected())
    total = 0
    while data := await operation.stdin():
        await operation.out(data)
        total += len(data)
    await operation.err(encode_ended(total))
