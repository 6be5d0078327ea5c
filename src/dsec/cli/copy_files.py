"""The ways of `cp` that need no program inside: file by file, over the file calls.

Invariants: a large file that was cut goes on where it stood, as long as its size and time are the same; it appears
under its name only when it is whole.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Iterator
from typing import IO

from dsec import AsyncSandbox, FileInfo
from dsec.cli.progress import Progress
from dsec.cli.tarstream import CHUNK, Entry, header, shown
from dsec.cli.unpack import Unpacker
from dsec.errors import DsecError, FileError, FileMissing, OutcomeUnknown, Unavailable

LARGE_BYTES = 32 << 20
_PIECE = 16 << 20
_WIDTH = 16
_SMALL = 1 << 20
_ATTEMPTS = 5


async def file_in(sandbox: AsyncSandbox, source: bytes, path: bytes, user: str | None, progress: Progress) -> None:
    """One file into a sandbox."""
    with open(source, "rb") as file:
        status = os.fstat(file.fileno())
        mode = stat.S_IMODE(status.st_mode)
        if status.st_size < LARGE_BYTES:
            await sandbox.files.write(path, file, mode=mode, user=user)
            progress.add(status.st_size)
        else:
            await _large_in(sandbox, file, status, path, user, progress)
    progress.file()


async def _large_in(
    sandbox: AsyncSandbox, file: IO[bytes], status: os.stat_result, path: bytes, user: str | None, progress: Progress
) -> None:
    """In pieces that are appended to a file beside it, which is renamed in the end."""
    part = _part(path, status.st_size, status.st_mtime_ns)
    size = await _size(sandbox, part, user)
    if size is None or size > status.st_size:
        await sandbox.files.write(part, b"", mode=stat.S_IMODE(status.st_mode), user=user)
        size = 0
    progress.add(size)
    while size < status.st_size:
        file.seek(size)
        data = await asyncio.to_thread(file.read, _PIECE)
        if not data:
            raise FileError(f"{shown(path)}: it got shorter while it was read")
        try:
            await sandbox.files.write(part, data, append=True, user=user)
            size += len(data)
        except OutcomeUnknown:  # some of it may be there
            size = await _size(sandbox, part, user) or 0
        progress.add(len(data))
    await sandbox.files.move(part, path, user=user)


async def _size(sandbox: AsyncSandbox, path: bytes, user: str | None) -> int | None:
    try:
        return (await sandbox.files.stat(path, user=user)).size
    except FileMissing:
        return None


async def file_out(
    sandbox: AsyncSandbox, source: bytes, info: FileInfo, path: bytes, user: str | None, progress: Progress
) -> None:
    """One file out of a sandbox. What was there of it goes on being used."""
    part = _part(path, info.size, int(info.mtime * 1e9))
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        at = os.fstat(descriptor).st_size
        progress.add(at)
        attempts = 0
        while True:
            try:
                async for chunk in sandbox.files.read_stream(source, offset=at, user=user):
                    await asyncio.to_thread(file.write, chunk)
                    at += len(chunk)
                    progress.add(len(chunk))
                break
            except Unavailable:
                attempts += 1
                if attempts == _ATTEMPTS:
                    raise
        file.flush()
        os.fchmod(descriptor, info.mode & 0o777)
        os.utime(descriptor, (info.mtime, info.mtime))
    os.replace(part, path)
    progress.file()


def _part(path: bytes, size: int, mtime_ns: int) -> bytes:
    """Beside the file, by what it is a part of: a copy of something else doesn't go on with it."""
    directory, name = os.path.split(path)
    return os.path.join(directory, b".%s.%x-%x.dsec-part" % (name[:180], size, mtime_ns))


async def tree_in_by_file(
    sandbox: AsyncSandbox, entries: Iterator[Entry], path: bytes, user: str | None, progress: Progress
) -> None:
    """A tree into a sandbox that has no `tar`."""
    room = asyncio.Semaphore(_WIDTH)

    async def one(entry: Entry, target: bytes) -> None:
        try:
            if stat.S_ISLNK(entry.status.st_mode):
                link = os.readlink(os.fsdecode(entry.path))
                made = await sandbox.commands.run(["ln", "-sfn", "--", link, os.fsdecode(target)], user=user)
                if made.exit_code:
                    progress.note(f"{shown(entry.path)}: the sandbox has no `ln` to make the link with")
            else:
                await file_in(sandbox, entry.path, target, user, progress)
        except (DsecError, OSError) as error:
            if isinstance(error, DsecError) and error.infra:
                raise
            progress.note(f"{shown(entry.path)}: {error}")
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        for entry in entries:
            target = path if entry.name == b"." else path + b"/" + entry.name.removeprefix(b"./")
            if stat.S_ISDIR(entry.status.st_mode):
                mode = stat.S_IMODE(entry.status.st_mode) | 0o700  # files are still to go into it
                await sandbox.files.mkdir(target, mode=mode, parents=True, user=user)
            else:
                await room.acquire()
                group.create_task(one(entry, target))


async def tree_out_by_file(
    sandbox: AsyncSandbox, source: bytes, path: bytes, unpacker: Unpacker, user: str | None, progress: Progress
) -> None:
    """A tree out of a sandbox, without what is here already with the same size and time; through the unpacker, as
    names and links are the sandbox's."""
    listed = await sandbox.files.list(source, depth=1000, user=user)
    wanted = [each for each in listed if not _is_here(path, each)]
    progress.total_bytes = (progress.total_bytes or 0) + sum(each.size for each in wanted if each.type == "file")
    window: list[tuple[FileInfo, asyncio.Task[bytes] | None]] = []

    async def feed(info: FileInfo, reading: asyncio.Task[bytes] | None) -> None:
        async for piece in _member(sandbox, source, info, reading, user, progress):
            await asyncio.to_thread(unpacker.feed, piece)
            progress.add(len(piece))

    try:
        for info in wanted:
            small = info.type == "file" and info.size <= _SMALL
            name = source + b"/" + os.fsencode(info.name)
            reading = sandbox.files.read_bytes(name, user=user) if small else None
            window.append((info, asyncio.create_task(reading) if reading is not None else None))
            if len(window) >= _WIDTH:
                await feed(*window.pop(0))
        while window:
            await feed(*window.pop(0))
    finally:
        for _, left in window:
            if left is not None:
                left.cancel()
    unpacker.feed(bytes(1024))
    await asyncio.to_thread(unpacker.finish)


async def _member(
    sandbox: AsyncSandbox,
    source: bytes,
    info: FileInfo,
    reading: asyncio.Task[bytes] | None,
    user: str | None,
    progress: Progress,
) -> AsyncIterator[bytes]:
    """What a tar archive would hold of a file."""
    name, mtime = os.fsencode(info.name), max(0, int(info.mtime))
    if info.type == "directory":
        yield header(name + b"/", info.mode & 0o777, 0, mtime, b"5")
    elif info.type == "symlink":
        yield header(name, 0o777, 0, mtime, b"2", os.fsencode(info.target or ""))
    elif info.type != "file":
        progress.note(f"{shown(name)}: a device, pipe or socket is left out")
    elif reading is not None:
        try:
            data = await reading
        except DsecError as error:
            if error.infra:
                raise
            progress.note(f"{shown(name)}: {error.message}")
            return
        yield header(name, info.mode & 0o777, len(data), mtime, b"0") + data + bytes(-len(data) % 512)
    else:
        yield header(name, info.mode & 0o777, info.size, mtime, b"0")
        left = info.size
        async for chunk in sandbox.files.read_stream(source + b"/" + name, length=left, user=user):
            left -= len(chunk)
            yield chunk
        while left:
            zeros = bytes(min(left, CHUNK))
            left -= len(zeros)
            yield zeros
        yield bytes(-info.size % 512)


def _is_here(path: bytes, info: FileInfo) -> bool:
    """It was copied before. A name that leads out is the unpacker's to refuse."""
    name = os.fsencode(info.name)
    if info.type != "file" or b".." in name.split(b"/") or name.startswith(b"/"):
        return False
    try:
        status = os.lstat(path + b"/" + name)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and info.size == status.st_size and int(info.mtime) == int(status.st_mtime)
