"""A tree read from a directory, or from the upper directory of an overlay.

The directory may change meanwhile, by a hostile hand: every step goes from an open directory to a name in it and
follows no link, so nothing outside is ever read.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import struct
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from dsec.errors import InvalidRequest
from dsec.store.data import LayerData
from dsec.store.tree import OPAQUE, Node

MAX_DEPTH = 500
_AHEAD = 32
"""Files that are on their way from the disk before it is their turn."""
_CAPABILITY = b"security.capability"
_ACLS = (b"system.posix_acl_access", b"system.posix_acl_default")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def keep_xattr(name: bytes, value: bytes) -> bool:
    """Whether a layer keeps this attribute: the user's own, capabilities, ACLs, and overlayfs's mark of an opaque
    directory. Its other marks would lead elsewhere, and labels of the host's security modules mean nothing here."""
    if name == OPAQUE:
        return value == b"y"
    return (name.startswith(b"user.") and not name.startswith(b"user.overlay.")) or name in (_CAPABILITY, *_ACLS)


def _names(fd: int) -> Iterator[str]:
    """What is in a directory, in order: files first, then directories, so that the files of one lie together."""
    with os.scandir(fd) as entries:
        found = sorted((each.is_dir(follow_symlinks=False), os.fsencode(each.name), each) for each in entries)
    files = [each.name for is_dir, _, each in found if not is_dir and each.is_file(follow_symlinks=False)]
    ahead = iter(files)
    for number, (_, _, each) in enumerate(found):
        for name in itertools.islice(ahead, _AHEAD if number == 0 else 1):
            _advise(fd, name)
        yield each.name


def _advise(parent: int, name: str) -> None:
    """Have the kernel begin to read a file. What can't be opened is met again in its turn."""
    with contextlib.suppress(OSError):
        fd = os.open(name, _FILE, dir_fd=parent)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


class DirectoryReader:
    """Reads one directory into a tree and its files into `data`."""

    def __init__(
        self,
        data: LayerData,
        *,
        owner: tuple[int, int] | None = None,
        xattrs: bool = True,
        id_base: int = 0,
    ) -> None:
        """`owner`: whose everything becomes. `id_base`: subtracted from every user and group id (an upper directory
        holds those of the host)."""
        self._data = data
        self._owner = owner
        self._xattrs = xattrs
        self._id_base = id_base
        self._links: dict[tuple[int, int], Node] = {}

    def read(self, top: Path, *, without: Collection[bytes] = ()) -> Node:
        """`without`: paths that stay out, with all that is below them. Raises `InvalidRequest`, `TooLarge`, OSError."""
        return self._read(os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), without)

    def read_below(self, top: Path, path: bytes) -> Node | None:
        """The directory at a path below `top`; None where there is none, or a link on the way. Raises as `read`."""
        if b".." in path.split(b"/"):
            return None
        fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in path.split(b"/"):
            try:
                below = os.open(part, _DIRECTORY, dir_fd=fd)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                if error.errno == errno.ELOOP:
                    return None
                raise
            finally:
                os.close(fd)
            fd = below
        return self._read(fd, ())

    def _read(self, fd: int, without: Collection[bytes]) -> Node:
        open_fds = [fd]
        try:
            root = self._node(os.fstat(fd), f"/proc/self/fd/{fd}/.")
            levels = [(root, _names(fd), b"")]
            while levels:
                parent, names, prefix = levels[-1]
                name = next(names, None)
                if name is None:
                    levels.pop()
                    os.close(open_fds.pop())
                    continue
                path = prefix + os.fsencode(name)
                if path in without:
                    continue
                node, child = self._entry(open_fds[-1], name)
                parent.children[os.fsencode(name)] = node
                if child >= 0:
                    open_fds.append(child)
                    if len(open_fds) > MAX_DEPTH:
                        raise InvalidRequest(f"the directory is more than {MAX_DEPTH} levels deep")
                    levels.append((node, _names(child), path + b"/"))
            return root
        finally:
            for each in open_fds:
                os.close(each)

    def _entry(self, parent: int, name: str) -> tuple[Node, int]:
        """The entry, and its descriptor where it is a directory."""
        self._data.budget.take(entries=1, metadata=len(os.fsencode(name)))
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        path = f"/proc/self/fd/{parent}/{name}"
        if stat.S_ISDIR(found.st_mode):
            fd = os.open(name, _DIRECTORY, dir_fd=parent)
            try:
                return self._node(os.fstat(fd), path), fd
            except BaseException:
                os.close(fd)
                raise
        linked = (found.st_dev, found.st_ino) if found.st_nlink > 1 else None
        if linked is not None and linked in self._links:
            return self._links[linked], -1
        node = self._node(found, path)
        if node.is_link:
            node.target = os.fsencode(os.readlink(name, dir_fd=parent))
            self._data.budget.take(metadata=len(node.target))
        elif node.is_file:
            file = os.open(name, _FILE, dir_fd=parent)
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode):
                    raise InvalidRequest(f"{name!r} was replaced while it was read")
                node.content = self._data.add(partial(os.read, file), found.st_size)
            finally:
                os.close(file)
        if linked is not None:
            self._links[linked] = node
        return node, -1

    def _node(self, found: os.stat_result, path: str) -> Node:
        uid, gid = self._owner or (self._shift(found.st_uid), self._shift(found.st_gid))
        rdev = (os.major(found.st_rdev), os.minor(found.st_rdev))
        node = Node(found.st_mode, uid, gid, found.st_mtime_ns, rdev=rdev)
        if self._xattrs and not node.is_whiteout:
            node.xattrs = self._read_xattrs(path)
        return node

    def _read_xattrs(self, path: str) -> dict[bytes, bytes]:
        try:
            names = os.listxattr(path, follow_symlinks=False)
        except OSError:
            return {}  # a file system without them
        found = {}
        for name in names:
            value = os.getxattr(path, name, follow_symlinks=False)
            encoded = os.fsencode(name)
            self._data.budget.take_xattrs({encoded: value})
            if keep_xattr(encoded, value):
                found[encoded] = self._shifted(encoded, value) if self._id_base else value
        return found

    def _shift(self, number: int) -> int:
        return max(0, number - self._id_base)

    def _shifted(self, name: bytes, value: bytes) -> bytes:
        """Ids inside attributes: ACLs hold them, and a capability says whose root it is for."""
        if name == _CAPABILITY and len(value) == 24:
            (magic,) = struct.unpack_from("<I", value)
            return struct.pack("<I", 0x02000000 | (magic & 1)) + value[4:20]
        if name in _ACLS:
            entries = (struct.unpack_from("<HHI", value, at) for at in range(4, len(value), 8))
            return value[:4] + b"".join(
                struct.pack("<HHI", tag, bits, self._shift(number) if tag in (2, 8) else number)
                for tag, bits, number in entries
            )
        return value
