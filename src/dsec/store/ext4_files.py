"""The upper directory of an overlay, taken out of the ext4 image of a machine's disk into a directory of the host's.

What comes out is as a container's upper directory is: files, directories, links, pipes and sockets, whiteouts, opaque
directories, ids moved up by a base; other device files stay behind, and so do attributes that no layer keeps. Every
step goes from an open directory to a name in it, and follows no link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from dsec.errors import InvalidRequest, TooLarge
from dsec.store.directory import MAX_DEPTH, keep_xattr
from dsec.store.ext4 import Damaged, Image, Inode

MAX_ENTRIES = 2_000_000
MOST_SPARSE = 16
"""Sizes of files together, holes included, as a multiple of the image's."""
MOST_S = 300.0
_ACLS = {b"system.posix_acl_access", b"system.posix_acl_default"}
_NAMED = (2, 8)
"""Entries of an access control list that are of one user, of one group."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HIGHEST = 1 << 31
_NOBODY = 65534
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def take_out(image: Path, path: bytes, into: Path, *, id_base: int) -> None:
    """Fill the empty directory `into` with what is at `path` (one name of the root's) in the image; nothing where there
    is none. `into` gets its owner and mode, too. Blocks: for `MOST_S` at most. Raises `InvalidRequest` for an image
    that isn't sound, `TooLarge`, OSError where there is no room."""
    fd = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _Taker(Image(fd), fd, id_base).take(path, into)
    except (Damaged, OSError) as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise
        raise InvalidRequest(
            f"the machine's disk can't be read: {error}", remedy="What root inside did to it can't be kept."
        ) from error
    finally:
        os.close(fd)


class _Taker:
    def __init__(self, image: Image, fd: int, id_base: int) -> None:
        self._image = image
        self._fd = fd
        self._id_base = id_base
        self._entries = 0
        self._bytes = MOST_SPARSE * os.fstat(fd).st_size
        self._until = time.monotonic() + MOST_S
        self._directories: set[int] = set()
        self._linked: set[int] = set()
        self._links = -1

    def take(self, path: bytes, into: Path) -> None:
        found = dict(self._image.names(self._image.root())).get(path)
        if found is None:
            return
        links = into.with_name(f"{into.name}.links")  # each file with several names is made there first
        links.mkdir(mode=0o700)
        self._links = os.open(links, _DIRECTORY)
        try:
            top = os.open(into, _DIRECTORY)
            try:
                self._fill(top, self._image.inode(found))
            finally:
                os.close(top)
        finally:
            os.close(self._links)
            shutil.rmtree(links, ignore_errors=True)

    def _fill(self, top: int, directory: Inode) -> None:
        levels = [(top, directory, self._names(directory))]
        try:
            while levels:
                fd, inode, names = levels[-1]
                entry = next(names, None)
                if entry is None:
                    levels.pop()
                    self._finish(fd, inode)
                    if fd != top:
                        os.close(fd)
                    continue
                if len(levels) > MAX_DEPTH:
                    raise TooLarge(f"the directories are more than {MAX_DEPTH} levels deep")
                name, number = entry
                child = self._image.inode(number)
                if stat.S_ISDIR(child.mode):
                    os.mkdir(name, 0o700, dir_fd=fd)
                    levels.append((os.open(name, _DIRECTORY, dir_fd=fd), child, self._names(child)))
                else:
                    self._make(fd, name, child)
        finally:
            for fd, _, _ in levels:
                if fd != top:
                    os.close(fd)

    def _names(self, directory: Inode) -> Iterator[tuple[bytes, int]]:
        if not stat.S_ISDIR(directory.mode) or directory.number in self._directories:
            raise Damaged("its directories are no tree")
        self._directories.add(directory.number)
        seen: set[bytes] = set()
        for name, number in self._image.names(directory):
            self._entries += 1
            if self._entries > MAX_ENTRIES or time.monotonic() > self._until:
                raise TooLarge("more files than can be kept", remedy="Delete some inside.")
            if name in seen:
                raise Damaged("a directory has a name twice")
            seen.add(name)
            yield name, number

    def _make(self, parent: int, name: bytes, inode: Inode) -> None:
        kind = stat.S_IFMT(inode.mode)
        if inode.links > 1 and kind == stat.S_IFREG:
            first = b"%d" % inode.number
            if inode.number not in self._linked:
                self._linked.add(inode.number)
                self._file(self._links, first, inode)
            os.link(first, name, src_dir_fd=self._links, dst_dir_fd=parent)
        elif kind == stat.S_IFREG:
            self._file(parent, name, inode)
        elif kind == stat.S_IFLNK:
            os.symlink(self._image.target(inode), name, dir_fd=parent)
            self._own(parent, name, inode)
        elif kind in (stat.S_IFIFO, stat.S_IFSOCK) or self._image.is_whiteout(inode):
            os.mknod(name, kind | 0o600, dir_fd=parent)
            if kind != stat.S_IFCHR:
                self._own(parent, name, inode)
                os.chmod(name, inode.mode & 0o777, dir_fd=parent)
        elif kind not in (stat.S_IFCHR, stat.S_IFBLK):
            raise Damaged(f"inode {inode.number} is of no kind")

    def _own(self, parent: int, name: bytes, inode: Inode) -> None:
        os.chown(name, self._moved(inode.uid), self._moved(inode.gid), dir_fd=parent, follow_symlinks=False)
        with contextlib.suppress(OverflowError):
            os.utime(name, ns=(inode.mtime_ns, inode.mtime_ns), dir_fd=parent, follow_symlinks=False)

    def _file(self, parent: int, name: bytes, inode: Inode) -> None:
        self._bytes -= inode.size
        if self._bytes < 0:
            raise TooLarge("the sizes of files, holes included, are more than can be kept")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=parent)
        try:
            os.ftruncate(fd, inode.size)
            for extent in self._image.extents(inode):
                done = 0
                while done < extent.size:
                    copied = os.copy_file_range(
                        self._fd, fd, extent.size - done, extent.at + done, extent.offset + done
                    )
                    if not copied:
                        raise Damaged("it ends before its files do")
                    done += copied
            self._finish(fd, inode)
        finally:
            os.close(fd)

    def _finish(self, fd: int, inode: Inode) -> None:
        """Owner, attributes, mode and time, in the order in which none undoes another."""
        os.fchown(fd, self._moved(inode.uid), self._moved(inode.gid))
        os.fchmod(fd, inode.mode & 0o7777)
        for key, value in self._image.xattrs(inode).items():
            kept = self._acl(value) if key in _ACLS else value
            if kept is not None and keep_xattr(key, kept):
                with contextlib.suppress(OSError):  # what isn't sound the kernel refuses
                    os.setxattr(fd, key, kept)
        with contextlib.suppress(OverflowError):
            os.utime(fd, ns=(inode.mtime_ns, inode.mtime_ns))

    def _moved(self, number: int) -> int:
        return self._id_base + (number if number < _HIGHEST else _NOBODY)

    def _acl(self, data: bytes) -> bytes | None:
        """An access control list as ext4 keeps it, in the form of system calls."""
        if len(data) < 4 or data[:4] != b"\1\0\0\0":
            return None
        found, at = [struct.pack("<I", 2)], 4
        while at + 4 <= len(data):
            tag, permissions = struct.unpack_from("<HH", data, at)
            at += 4
            number = 0xFFFFFFFF
            if tag in _NAMED:
                if at + 4 > len(data):
                    return None
                number = self._moved(struct.unpack_from("<I", data, at)[0])
                at += 4
            found.append(struct.pack("<HHI", tag, permissions, number))
        return b"".join(found)
