"""The file calls of an edge, a part of `dsec.edge.node.Edge`: each is an operation of the guest's, and what it changed
is in the sandbox's trajectory before the caller is told.

Owns nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from dsec.channel import files
from dsec.edge.notes import Notes
from dsec.edge.recorder import Stream
from dsec.edge.trajectory import Trajectories
from dsec.ports import GuestChannel
from dsec.spec.sandbox import FileInfo
from dsec.spec.trajectory import EntryType


class FileCalls:
    """Every method is described in `dsec.edge.client.EdgeClient`."""

    _notes: Notes
    _trajectories: Trajectories

    @abstractmethod
    def _channel(self, sandbox_id: str, *paths: bytes) -> AbstractAsyncContextManager[tuple[GuestChannel, str]]:
        """A sandbox's channel for one file call, and its default user."""

    @abstractmethod
    def _syncs(self, sandbox_id: str) -> bool:
        """Whether a sandbox's entries are to be on disk before the answer."""

    async def read_file(
        self, sandbox_id: str, path: bytes, *, user: str | None = None, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        async with (
            self._channel(sandbox_id, path) as (channel, default),
            aclosing(files.read_file(channel, path, user=user or default, offset=offset, length=length)) as chunks,
        ):
            async for chunk in chunks:
                self._notes.tally.read_bytes += len(chunk)
                yield chunk

    async def write_file(
        self,
        sandbox_id: str,
        path: bytes,
        data: AsyncIterable[bytes],
        *,
        user: str | None = None,
        mode: int | None = None,
        parents: bool = False,
        append: bool = False,
        exclusive: bool = False,
    ) -> int:
        async with self._channel(sandbox_id, path) as (channel, default):
            content = self._trajectories.passing()
            written = await files.write_file(
                channel,
                path,
                _seen(data, content),
                user=user or default,
                mode=mode,
                parents=parents,
                append=append,
                exclusive=exclusive,
            )
            entry = {"user": user or default, "mode": mode, "parents": parents, "append": append}
            await self._logged(sandbox_id, EntryType.WRITE, path, {**entry, "exclusive": exclusive}, content)
        self._notes.file_written(sandbox_id, path, written)
        return written

    async def stat_file(
        self, sandbox_id: str, path: bytes, *, user: str | None = None, follow: bool = False
    ) -> FileInfo:
        async with self._channel(sandbox_id, path) as (channel, default):
            return await files.stat(channel, path, user=user or default, follow=follow)

    async def list_files(
        self, sandbox_id: str, path: bytes, *, user: str | None = None, depth: int = 1
    ) -> list[FileInfo]:
        async with self._channel(sandbox_id, path) as (channel, default):
            return await files.list_dir(channel, path, user=user or default, depth=depth)

    async def move_file(
        self, sandbox_id: str, path: bytes, to: bytes, *, user: str | None = None, exclusive: bool = False
    ) -> None:
        async with self._channel(sandbox_id, path, to) as (channel, default):
            self._trajectories.store.check_room()
            await files.move(channel, path, to, user=user or default, exclusive=exclusive)
            entry = {"user": user or default, "to": _name(to), "exclusive": exclusive}
            await self._logged(sandbox_id, EntryType.MOVE, path, entry)
        self._notes.file_moved(sandbox_id, path, to)

    async def make_directory(
        self, sandbox_id: str, path: bytes, *, user: str | None = None, mode: int | None = None, parents: bool = False
    ) -> None:
        async with self._channel(sandbox_id, path) as (channel, default):
            self._trajectories.store.check_room()
            await files.mkdir(channel, path, user=user or default, mode=mode, parents=parents)
            entry = {"user": user or default, "mode": mode, "parents": parents}
            await self._logged(sandbox_id, EntryType.MKDIR, path, entry)

    async def remove_file(
        self, sandbox_id: str, path: bytes, *, user: str | None = None, recursive: bool = False
    ) -> None:
        async with self._channel(sandbox_id, path) as (channel, default):
            self._trajectories.store.check_room()
            await files.remove(channel, path, user=user or default, recursive=recursive)
            await self._logged(sandbox_id, EntryType.REMOVE, path, {"user": user or default, "recursive": recursive})
        self._notes.file_removed(sandbox_id, path, recursive)

    async def _logged(
        self, sandbox_id: str, kind: EntryType, path: bytes, data: dict[str, Any], content: Stream | None = None
    ) -> None:
        self._trajectories.file(sandbox_id, kind, {"path": _name(path), **data}, content)
        if self._syncs(sandbox_id):
            await self._trajectories.settled(sandbox_id)


def _name(path: bytes) -> str:
    """A path in an entry; bytes that aren't text as Python's file names have them, escaped where it is written down."""
    return path.decode("utf-8", "surrogateescape")


async def _seen(data: AsyncIterable[bytes], content: Stream) -> AsyncGenerator[bytes, None]:
    async for chunk in data:
        content.feed(chunk)
        yield chunk
