"""The Filesystem service of E2B's data plane, but for watching (`watchers`)."""

from __future__ import annotations

import os
import posixpath
import stat as modes
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Never

from msgspec import Meta, Struct

from dsec.api.e2b import rpc
from dsec.api.e2b.call import Call
from dsec.api.e2b.errors import RpcError
from dsec.api.e2b.users import Names, Users
from dsec.edge.client import EdgeClient
from dsec.errors import FileError, FileMissing, InvalidRequest
from dsec.spec.sandbox import FileInfo
from dsec.wire.connect import Code

MAX_DEPTH = 1000
_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}


class PathRequest(Struct):
    """Stat, MakeDir, Remove."""

    path: str = ""


class ListRequest(Struct):
    path: str = ""
    depth: Annotated[int, Meta(ge=0)] = 0


class MoveRequest(Struct):
    source: str = ""
    destination: str = ""


class Entry(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What the client calls EntryInfo."""

    name: str
    type: str
    path: str
    size: str
    """64 bits are text in this JSON."""
    mode: int
    permissions: str
    owner: str
    group: str
    modified_time: str
    symlink_target: str | None = None
    is_symlink: bool = False


class Found(Struct, frozen=True):
    """Answer to a call about one file."""

    entry: Entry


class Entries(Struct, frozen=True):
    """Answer to ListDir."""

    entries: list[Entry]


class FilesystemService:
    """Handlers by the RPC's name; each returns its answer."""

    def __init__(self, edge: EdgeClient, users: Users) -> None:
        self._edge = edge
        self._users = users
        self.unary = {
            "Stat": self.stat,
            "ListDir": self.list_dir,
            "MakeDir": self.make_dir,
            "Move": self.move,
            "Remove": self.remove,
        }

    async def stat(self, sandbox_id: str, call: Call) -> Found:
        """An entry; a symlink is itself."""
        path, user = await self._path(sandbox_id, call, (await rpc.unary(call.x, PathRequest)).path)
        return Found(await self.entry(sandbox_id, path, user))

    async def list_dir(self, sandbox_id: str, call: Call) -> Entries:
        """The entries below a directory, in the order of their paths; `depth` 0 and 1: its own."""
        request = await rpc.unary(call.x, ListRequest)
        path, user = await self._path(sandbox_id, call, request.path)
        depth = min(request.depth or 1, MAX_DEPTH)
        found = await self._edge.list_files(sandbox_id, path, user=user, depth=depth)
        names = await self._users.names(sandbox_id)
        base = text_of(path)
        entries = [entry_of(info, posixpath.join(base, info.name), names) for info in found]
        return Entries(sorted(entries, key=_by_path))

    async def make_dir(self, sandbox_id: str, call: Call) -> Found:
        """A directory and those above it."""
        path, user = await self._path(sandbox_id, call, (await rpc.unary(call.x, PathRequest)).path)
        try:
            await self._edge.make_directory(sandbox_id, path, user=user)
        except FileMissing:
            await self._edge.make_directory(sandbox_id, path, user=user, parents=True)
        except FileError as error:
            if error.details.get("errno") != "EEXIST":
                raise
            info = await self._edge.stat_file(sandbox_id, path, user=user, follow=True)
            if info.type == "directory":
                raise RpcError(Code.ALREADY_EXISTS, f"directory already exists: {text_of(path)}") from None
            raise InvalidRequest(f"the path exists and is no directory: {text_of(path)}") from None
        return Found(await self.entry(sandbox_id, path, user))

    async def move(self, sandbox_id: str, call: Call) -> Found:
        """Rename; directories above the target are made."""
        request = await rpc.unary(call.x, MoveRequest)
        path, user = await self._path(sandbox_id, call, request.source)
        to, _ = await self._path(sandbox_id, call, request.destination)
        try:
            await self._edge.move_file(sandbox_id, path, to, user=user)
        except FileMissing:
            await self._edge.stat_file(sandbox_id, path, user=user)
            await self._edge.make_directory(sandbox_id, posixpath.dirname(to), user=user, parents=True)
            await self._edge.move_file(sandbox_id, path, to, user=user)
        return Found(await self.entry(sandbox_id, to, user))

    async def remove(self, sandbox_id: str, call: Call) -> dict[str, Never]:
        """Remove a file or a tree; one that isn't there is no error."""
        path, user = await self._path(sandbox_id, call, (await rpc.unary(call.x, PathRequest)).path)
        with suppress(FileMissing):
            await self._edge.remove_file(sandbox_id, path, user=user, recursive=True)
        return {}

    async def entry(self, sandbox_id: str, path: bytes, user: str | None) -> Entry:
        """An entry. Raises what a stat raises."""
        info = await self._edge.stat_file(sandbox_id, path, user=user)
        return entry_of(info, text_of(path), await self._users.names(sandbox_id))

    async def _path(self, sandbox_id: str, call: Call, path: str) -> tuple[bytes, str | None]:
        return await self._users.path(sandbox_id, path, call.user())


def entry_of(info: FileInfo, path: str, names: Names) -> Entry:
    """A `FileInfo` as EntryInfo. A name that isn't UTF-8 is shown with replacement characters."""
    shown = text_of(os.fsencode(path))
    return Entry(
        name=posixpath.basename(shown),
        type=_TYPES.get(info.type, "FILE_TYPE_UNSPECIFIED"),
        path=shown,
        size=str(info.size),
        mode=modes.S_IMODE(info.mode),
        permissions=_permissions(info),
        owner=names.uids.get(str(info.uid), str(info.uid)),
        group=names.groups.get(str(info.gid), str(info.gid)),
        modified_time=datetime.fromtimestamp(info.mtime, UTC).isoformat().replace("+00:00", "Z"),
        symlink_target=None if info.target is None else text_of(os.fsencode(info.target)),
        is_symlink=info.target is not None,
    )


_KINDS = {
    "directory": modes.S_IFDIR,
    "symlink": modes.S_IFLNK,
    "fifo": modes.S_IFIFO,
    "socket": modes.S_IFSOCK,
    "char": modes.S_IFCHR,
    "block": modes.S_IFBLK,
}


def _permissions(info: FileInfo) -> str:
    """As `ls -l` shows it."""
    return modes.filemode(_KINDS.get(info.type, modes.S_IFREG) | modes.S_IMODE(info.mode))


def _by_path(entry: Entry) -> str:
    return entry.path


def text_of(path: bytes) -> str:
    """A path as JSON can hold it: what isn't UTF-8 is replaced."""
    return path.decode("utf-8", "replace")
