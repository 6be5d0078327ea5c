"""A file system in memory for the fake guest: nodes, paths, permissions, errno.

Only what file calls and the scripted commands need. Errors are `OSError` with the errno that Linux gives.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from dsec.spec.sandbox import FileInfo
from dsec.wire.entries import to_text

_MAX_LINKS = 40


def fail(code: int) -> OSError:
    """An OSError as the kernel would give it."""
    return OSError(code, os.strerror(code))


class Node:
    """A file, directory or symlink."""

    def __init__(self, mode: int, uid: int, gid: int) -> None:
        self.mode = mode & 0o7777
        self.uid = uid
        self.gid = gid
        self.mtime = time.time()

    def allows(self, uid: int, gid: int, bit: int) -> bool:
        """`bit`: 4 read, 2 write, 1 execute or search."""
        if uid == 0:
            return bit != 1 or isinstance(self, Directory) or bool(self.mode & 0o111)
        shift = 6 if uid == self.uid else 3 if gid == self.gid else 0
        return bool(self.mode >> shift & bit)


class File(Node):
    """Bytes. `refused`: stands for a file of procfs, which file calls refuse."""

    def __init__(self, mode: int = 0o644, uid: int = 0, gid: int = 0, data: bytes = b"", refused: bool = False) -> None:
        super().__init__(mode, uid, gid)
        self.data = bytearray(data)
        self.refused = refused


class Directory(Node):
    def __init__(self, mode: int = 0o755, uid: int = 0, gid: int = 0) -> None:
        super().__init__(mode, uid, gid)
        self.entries: dict[bytes, Node] = {}


class Symlink(Node):
    def __init__(self, target: bytes, uid: int = 0, gid: int = 0) -> None:
        super().__init__(0o777, uid, gid)
        self.target = target


class Change(Struct, frozen=True):
    """What happened to an entry."""

    kind: Literal["create", "write", "remove", "rename"]
    path: bytes
    directory: bool = False
    before: bytes | None = None


class FileSystem:
    """A tree. Each call names the user that makes it."""

    def __init__(self) -> None:
        self.root = Directory()
        self.listeners: list[Callable[[Change], None]] = []

    def _changed(
        self,
        kind: Literal["create", "write", "remove", "rename"],
        path: bytes,
        node: Node | None,
        before: bytes | None = None,
    ) -> None:
        change = Change(kind, b"/" + path.strip(b"/"), isinstance(node, Directory), before)
        for listener in list(self.listeners):
            listener(change)

    # --- paths -------------------------------------------------------------------------------------------------------

    def _walk(
        self, path: bytes, uid: int, gid: int, *, follow: bool, links: int = 0
    ) -> tuple[Directory, bytes, Node | None]:
        """The directory, the last name in it and what is there, if anything."""
        if len(path) >= 4096:
            raise fail(errno.ENAMETOOLONG)
        stack: list[Directory] = [self.root]
        parts = [part for part in path.split(b"/") if part and part != b"."]
        for index, part in enumerate(parts):
            if len(part) > 255:
                raise fail(errno.ENAMETOOLONG)
            here = stack[-1]
            if not here.allows(uid, gid, 1):
                raise fail(errno.EACCES)
            if part == b"..":
                stack = stack[:-1] or [self.root]
                continue
            node = here.entries.get(part)
            last = index == len(parts) - 1
            if isinstance(node, Symlink) and (follow or not last):
                if links >= _MAX_LINKS:
                    raise fail(errno.ELOOP)
                rest = b"/".join(parts[index + 1 :])
                base = b"" if node.target.startswith(b"/") else self._path_of(stack)
                target = base + b"/" + node.target + (b"/" + rest if rest else b"")
                return self._walk(target, uid, gid, follow=follow, links=links + 1)
            if last:
                return here, part, node
            if node is None:
                raise fail(errno.ENOENT)
            if not isinstance(node, Directory):
                raise fail(errno.ENOTDIR)
            stack.append(node)
        return stack[-1], b".", stack[-1]

    def _path_of(self, stack: list[Directory]) -> bytes:
        names = []
        for parent, child in itertools.pairwise(stack):
            names += [name for name, node in parent.entries.items() if node is child]
        return b"".join(b"/" + name for name in names)

    def find(self, path: bytes, uid: int = 0, gid: int = 0, *, follow: bool = True) -> Node:
        """The node at a path."""
        node = self._walk(path, uid, gid, follow=follow)[2]
        if node is None:
            raise fail(errno.ENOENT)
        return node

    # --- calls -------------------------------------------------------------------------------------------------------

    def open_for_reading(self, path: bytes, uid: int = 0, gid: int = 0) -> bytes:
        """A file's bytes."""
        node = self.find(path, uid, gid)
        if isinstance(node, Directory):
            raise fail(errno.EISDIR)
        if not isinstance(node, File) or node.refused or not node.allows(uid, gid, 4):
            raise fail(errno.EACCES)
        return bytes(node.data)

    def check_write(self, path: bytes, uid: int, gid: int, *, parents: bool, exclusive: bool) -> None:
        """What can be known before the bytes come; makes the missing directories."""
        if parents:
            self.mkdir(path.rpartition(b"/")[0] or b"/", None, uid, gid, parents=True)
        parent, _, node = self._walk(path, uid, gid, follow=True)
        if isinstance(node, Directory):
            raise fail(errno.EISDIR)
        if isinstance(node, File) and node.refused:
            raise fail(errno.EACCES)
        if node is not None and exclusive:
            raise fail(errno.EEXIST)
        if not parent.allows(uid, gid, 2):
            raise fail(errno.EACCES)

    def write(self, path: bytes, data: bytes, mode: int | None, uid: int, gid: int, *, append: bool = False) -> None:
        """Put a whole file in place, or append to it."""
        parent, name, node = self._walk(path, uid, gid, follow=True)
        if append and isinstance(node, File):
            node.data += data
            node.mtime = time.time()
            self._changed("write", path, node)
            return
        kept = node.mode if isinstance(node, File) else 0o644
        parent.entries[name] = File(kept if mode is None else mode, uid, gid, data)
        if node is None:
            self._changed("create", path, None)
        self._changed("write", path, None)

    def mkdir(self, path: bytes, mode: int | None, uid: int, gid: int, *, parents: bool = False) -> None:
        if parents:
            at = b""
            for part in [part for part in path.split(b"/") if part]:
                at += b"/" + part
                parent, name, node = self._walk(at, uid, gid, follow=True)
                if node is None:
                    self._add(parent, name, Directory(0o755 if mode is None else mode, uid, gid), uid, gid)
                    self._changed("create", at, parent.entries[name])
                elif not isinstance(node, Directory):
                    raise fail(errno.ENOTDIR)
            return
        parent, name, node = self._walk(path, uid, gid, follow=False)
        if node is not None:
            raise fail(errno.EEXIST)
        self._add(parent, name, Directory(0o755 if mode is None else mode, uid, gid), uid, gid)
        self._changed("create", path, parent.entries[name])

    def symlink(self, target: bytes, path: bytes, uid: int = 0, gid: int = 0) -> None:
        parent, name, node = self._walk(path, uid, gid, follow=False)
        if node is not None:
            raise fail(errno.EEXIST)
        self._add(parent, name, Symlink(target, uid, gid), uid, gid)
        self._changed("create", path, None)

    def _add(self, parent: Directory, name: bytes, node: Node, uid: int, gid: int) -> None:
        if not parent.allows(uid, gid, 2):
            raise fail(errno.EACCES)
        parent.entries[name] = node

    def remove(self, path: bytes, uid: int, gid: int, *, recursive: bool = False) -> None:
        parent, name, node = self._walk(path, uid, gid, follow=False)
        if node is None:
            raise fail(errno.ENOENT)
        if not parent.allows(uid, gid, 2):
            raise fail(errno.EACCES)
        if isinstance(node, Directory) and node.entries and not recursive:
            raise fail(errno.ENOTEMPTY)
        if name == b".":
            raise fail(errno.EBUSY)
        del parent.entries[name]
        self._changed("remove", path, node)

    def move(self, path: bytes, to: bytes, uid: int, gid: int, *, exclusive: bool = False) -> None:
        parent, name, node = self._walk(path, uid, gid, follow=False)
        if node is None:
            raise fail(errno.ENOENT)
        target, target_name, there = self._walk(to, uid, gid, follow=False)
        if there is not None and exclusive:
            raise fail(errno.EEXIST)
        if isinstance(there, Directory):
            if not isinstance(node, Directory):
                raise fail(errno.EISDIR)
            if there.entries:
                raise fail(errno.ENOTEMPTY)
        elif there is not None and isinstance(node, Directory):
            raise fail(errno.ENOTDIR)
        if not parent.allows(uid, gid, 2) or not target.allows(uid, gid, 2):
            raise fail(errno.EACCES)
        del parent.entries[name]
        target.entries[target_name] = node
        self._changed("rename", to, node, b"/" + path.strip(b"/"))

    # --- entries -----------------------------------------------------------------------------------------------------

    def entry(self, node: Node, name: bytes) -> FileInfo:
        """A node as STAT and LIST show it."""
        kind = "directory" if isinstance(node, Directory) else "symlink" if isinstance(node, Symlink) else "file"
        target = node.target if isinstance(node, Symlink) else None
        size = len(node.data) if isinstance(node, File) else len(target or b"")
        return FileInfo(
            name=to_text(name),
            type=kind,  # type: ignore[arg-type]  # mypy widens the conditional to str
            size=size,
            mode=node.mode,
            uid=node.uid,
            gid=node.gid,
            nlink=1,
            mtime=node.mtime,
            target=None if target is None else to_text(target),
        )

    def stat(self, path: bytes, uid: int, gid: int, *, follow: bool) -> FileInfo:
        return self.entry(self.find(path, uid, gid, follow=follow), path.rstrip(b"/").rpartition(b"/")[2] or b"/")

    def list(self, path: bytes, depth: int, uid: int, gid: int) -> list[FileInfo]:
        """Entries below a directory, names relative to it; `depth` 1 is its own."""
        node = self.find(path, uid, gid)
        if not isinstance(node, Directory):
            raise fail(errno.ENOTDIR)
        if not node.allows(uid, gid, 4):
            raise fail(errno.EACCES)
        found: list[FileInfo] = []
        pending: list[tuple[bytes, Directory, int]] = [(b"", node, depth)]
        while pending:
            prefix, directory, left = pending.pop()
            for name, child in sorted(directory.entries.items()):
                found.append(self.entry(child, prefix + name))
                if isinstance(child, Directory) and left > 1:
                    pending.append((prefix + name + b"/", child, left - 1))
        return found

    def used(self) -> int:
        """Bytes in all files."""
        total, pending = 0, [self.root]
        while pending:
            for child in pending.pop().entries.values():
                if isinstance(child, Directory):
                    pending.append(child)
                elif isinstance(child, File):
                    total += len(child.data)
        return total
