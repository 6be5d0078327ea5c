"""Users of a sandbox as E2B's client means them: names, homes, and paths that are relative to a home.

Owns a bounded cache of what `/etc/passwd` and `/etc/group` inside said; a name that isn't in it is looked up again.
The client's "user" is the sandbox's default user where no user of that name exists inside.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

from msgspec import Struct

from dsec.edge.client import EdgeClient
from dsec.errors import FileError, FileMissing, InvalidRequest, PermissionDenied

E2B_USER = "user"
_MAX_SANDBOXES = 8192
_MAX_BYTES = 1 << 20
_FRESH_S = 60.0
_AGAIN_S = 1.0


class User(Struct, frozen=True):
    """Who does something inside."""

    name: str
    home: str
    home_exists: bool


class Names:
    """What one sandbox's files said."""

    __slots__ = ("groups", "homes", "read_at", "uids", "users")

    def __init__(self, passwd: str, group: str) -> None:
        self.read_at = time.monotonic()
        self.homes: dict[str, str] = {}
        self.uids: dict[str, str] = {}
        self.groups: dict[str, str] = {}
        self.users: dict[str, User] = {}
        for line in passwd.splitlines():
            fields = line.split(":")
            if len(fields) >= 6 and fields[0] not in self.homes:
                self.homes[fields[0]] = fields[5] if fields[5].startswith("/") else "/"
                self.uids.setdefault(fields[2], fields[0])
        for line in group.splitlines():
            fields = line.split(":")
            if len(fields) >= 3:
                self.groups.setdefault(fields[2], fields[0])


class Users:
    """Looks users up, in any sandbox."""

    def __init__(self, edge: EdgeClient) -> None:
        self._edge = edge
        self._known: OrderedDict[str, Names] = OrderedDict()

    async def find(self, sandbox_id: str, user: str | None) -> User:
        """Who `user` is; None: the sandbox's default user. A name that isn't known inside is passed on as it is: what
        is then tried says so."""
        default = self._edge.get(sandbox_id).spec.user
        name = user or default
        names = await self.names(sandbox_id)
        if name not in names.homes and name not in names.uids:
            names = await self.names(sandbox_id, _AGAIN_S)
        if name == E2B_USER and name not in names.homes:
            name = default
        found = names.users.get(name)
        if found is None:
            home = names.homes.get(names.uids.get(name, name), "/")
            found = User(name, home, await self._is_directory(sandbox_id, home))
            if found.home_exists:
                names.users[name] = found
        return found

    async def names(self, sandbox_id: str, fresh_s: float = _FRESH_S) -> Names:
        """The sandbox's names, as of at most `fresh_s` ago."""
        names = self._known.get(sandbox_id)
        if names is None or time.monotonic() - names.read_at > fresh_s:
            passwd = await self._read(sandbox_id, b"/etc/passwd")
            names = Names(passwd, await self._read(sandbox_id, b"/etc/group"))
            self._known[sandbox_id] = names
            self._known.move_to_end(sandbox_id)
            if len(self._known) > _MAX_SANDBOXES:
                self._known.popitem(last=False)
        return names

    async def path(self, sandbox_id: str, path: str, user: str | None) -> tuple[bytes, str | None]:
        """An absolute path, and the user for the call: `~` and what is relative begin at the user's home. Raises
        `InvalidRequest`."""
        if "\0" in path:
            raise InvalidRequest("the path holds a NUL byte")
        if path.startswith("/") and (user is None or user != E2B_USER):
            return _bytes(path), user
        found = await self.find(sandbox_id, user)
        if not path.startswith("/"):
            if path == "~" or path.startswith("~/"):
                path = path[2:]
            path = f"{found.home.rstrip('/')}/{path}".rstrip("/") or "/"
        return _bytes(path), found.name

    async def _is_directory(self, sandbox_id: str, path: str) -> bool:
        try:
            return (await self._edge.stat_file(sandbox_id, _bytes(path), follow=True)).type == "directory"
        except (FileMissing, FileError, PermissionDenied):
            return False

    async def _read(self, sandbox_id: str, path: bytes) -> str:
        content = cast("AsyncGenerator[bytes]", self._edge.read_file(sandbox_id, path, length=_MAX_BYTES))
        try:
            async with aclosing(content):
                return b"".join([chunk async for chunk in content]).decode("utf-8", "replace")
        except (FileMissing, FileError, PermissionDenied):
            return ""


def _bytes(path: str) -> bytes:
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest("the path holds characters that have no bytes (lone surrogates)") from None
