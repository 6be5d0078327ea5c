"""An ext4 file system read from its image, without the kernel: for disks of machines, whose content is hostile.

Only what `mkfs.ext4` makes with the options of `dsec.vmm.disks`, and Linux writes to it: extents, no journal, no inline
data, no encryption. Everything else is `Damaged`. Invariants: whatever the image holds, each call ends with a value or
`Damaged`, in memory bounded by one block and one list of extents; nothing outside the image is read; blocks that are
handed out count against those that the image has, so that an image can't give more than it holds.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from typing import NamedTuple

_SUPERBLOCK = 1024
_MAGIC = 0xEF53
_KNOWN = 0x2 | 0x40 | 0x80 | 0x200 | 0x2000  # file types in names, extents, 64 bits, flexible groups, checksum seed
_64BIT = 0x80
_ROOT = 2
_EXTENTS = 0x80000
_REFUSED = 0x800 | 0x200000 | 0x10000000  # encrypted, an attribute's value, inline data
_EXTENT_MAGIC = 0xF30A
_MOST_DEPTH = 5
_UNWRITTEN = 32768
_XATTR_MAGIC = 0xEA020000
_PREFIXES = {
    1: b"user.",
    2: b"system.posix_acl_access",
    3: b"system.posix_acl_default",
    4: b"trusted.",
    6: b"security.",
}
_EXTENT = struct.Struct("<IHHI")
_HEADER = struct.Struct("<HHH")
_NAME = struct.Struct("<IHBB")
_XATTR = struct.Struct("<BBHIII")


class Damaged(Exception):
    """The image is no such file system, or not a sound one."""


class Extent(NamedTuple):
    """Where a piece of a file lies."""

    offset: int
    """In the file, bytes."""
    size: int
    at: int
    """In the image, bytes."""


class Inode(NamedTuple):
    """A file, directory, or whatever."""

    number: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    links: int
    flags: int
    pointers: bytes
    """Its 60 bytes of extents, of a link's target, or a device's number."""
    own: bytes
    """All of it, as it lies there."""
    xattr_block: int


class Image:
    """One image that doesn't change. Blocking calls."""

    def __init__(self, fd: int) -> None:
        """Reads the superblock. Raises `Damaged`, OSError."""
        self._fd = fd
        self._size = os.fstat(fd).st_size
        head = self._read(_SUPERBLOCK, 1024)
        inodes, low, first, log = (_u32(head, at) for at in (0x0, 0x4, 0x14, 0x18))
        per_group, wanted = _u32(head, 0x28), _u32(head, 0x60)
        inode_size, magic, wide = (struct.unpack_from("<H", head, at)[0] for at in (0x58, 0x38, 0xFE))
        if magic != _MAGIC or wanted & ~_KNOWN or log > 2 or not per_group or _u32(head, 0x4C) != 1:
            raise Damaged("no file system that a machine of ours makes")
        self.block = 1024 << log
        self.blocks = low | (_u32(head, 0x150) << 32 if wanted & _64BIT else 0)
        self._inodes, self._per_group, self._inode_size = inodes, per_group, inode_size
        self._wide = wide if wanted & _64BIT else 32
        self._groups_at = (first + 1) * self.block
        if self.blocks * self.block > self._size or inode_size not in (128, 256, 512) or self._wide not in (32, 64):
            raise Damaged("its superblock contradicts itself")
        self._left = 2 * self.blocks

    def root(self) -> Inode:
        """The directory of all."""
        return self.inode(_ROOT)

    def inode(self, number: int) -> Inode:
        """Raises `Damaged`, OSError."""
        if not 1 <= number <= self._inodes:
            raise Damaged(f"inode {number} is none")
        group, index = divmod(number - 1, self._per_group)
        group_head = self._read(self._groups_at + group * self._wide, self._wide)
        table = _u32(group_head, 0x8) | (_u32(group_head, 0x28) << 32 if self._wide == 64 else 0)
        own = self._read(table * self.block + index * self._inode_size, self._inode_size)
        mode, uid, size, _, _, seconds, _, gid, links, _, flags = struct.unpack_from("<HHIIIIIHHII", own)
        uid |= struct.unpack_from("<H", own, 0x78)[0] << 16
        gid |= struct.unpack_from("<H", own, 0x7A)[0] << 16
        size |= _u32(own, 0x6C) << 32
        xattr_block = _u32(own, 0x68) | struct.unpack_from("<H", own, 0x76)[0] << 32
        if flags & _REFUSED:
            raise Damaged(f"inode {number} is of a kind that no machine of ours makes")
        nanoseconds = 0
        if seconds >= 1 << 31:
            seconds -= 1 << 32
        if self._inode_size > 128 and struct.unpack_from("<H", own, 0x80)[0] >= 12:
            extra = _u32(own, 0x88)
            seconds += (extra & 3) << 32
            nanoseconds = min(extra >> 2, 999_999_999)
        return Inode(
            number, mode, uid, gid, size, seconds * 10**9 + nanoseconds, links, flags, own[0x28:0x64], own, xattr_block
        )

    def extents(self, inode: Inode) -> list[Extent]:
        """What of a file isn't zeros, in any order. Raises `Damaged`, OSError."""
        if not inode.flags & _EXTENTS:
            if inode.size:
                raise Damaged(f"inode {inode.number} has no extents")
            return []
        return list(self._extents(inode.pointers, inode.size, _MOST_DEPTH))

    def _extents(self, node: bytes, size: int, most: int) -> Iterator[Extent]:
        magic, count, room = _HEADER.unpack_from(node)
        depth = struct.unpack_from("<H", node, 6)[0]
        if magic != _EXTENT_MAGIC or depth > most or count > room or 12 + 12 * count > len(node):
            raise Damaged("a file's extents contradict themselves")
        for at in range(12, 12 + 12 * count, 12):
            if depth:
                _, low, high = struct.unpack_from("<IIH", node, at)
                yield from self._extents(self._block(low | high << 32), size, depth - 1)
                continue
            logical, length, high, low = _EXTENT.unpack_from(node, at)
            if length > _UNWRITTEN:
                continue
            start, offset = low | high << 32, logical * self.block
            self._spend(length)
            if start + length > self.blocks:
                raise Damaged("a file lies outside of its file system")
            if offset < size:
                yield Extent(offset, min(length * self.block, size - offset), start * self.block)

    def names(self, directory: Inode) -> Iterator[tuple[bytes, int]]:
        """What is in a directory, without itself and its parent. Raises `Damaged`, OSError."""
        for extent in self.extents(directory):
            for start in range(extent.at, extent.at + extent.size, self.block):
                yield from self._names(self._read(start, self.block))

    def _names(self, block: bytes) -> Iterator[tuple[bytes, int]]:
        at = 0
        while at + _NAME.size <= len(block):
            number, length, size, _ = _NAME.unpack_from(block, at)
            if length < _NAME.size or length % 4 or at + length > len(block) or _NAME.size + size > length:
                raise Damaged("a directory's entries contradict themselves")
            name = block[at + _NAME.size : at + _NAME.size + size]
            if number and name not in (b".", b".."):
                if not name or b"/" in name or b"\0" in name:
                    raise Damaged("a directory has a name that is none")
                yield name, number
            at += length

    def target(self, link: Inode) -> bytes:
        """Of a symbolic link. Raises `Damaged`, OSError."""
        if not 0 < link.size < 4096:
            raise Damaged("a link's target is too long")
        if not link.flags & _EXTENTS:
            found = link.pointers[: link.size]
        else:
            found = b"".join(self._read(extent.at, extent.size) for extent in self.extents(link))
        if len(found) != link.size or b"\0" in found:
            raise Damaged("a link's target is none")
        return found

    def is_whiteout(self, inode: Inode) -> bool:
        """As overlayfs makes them: a character device with the number 0."""
        return stat.S_ISCHR(inode.mode) and not any(inode.pointers[:8])

    def xattrs(self, inode: Inode) -> dict[bytes, bytes]:
        """By full names, those of kinds that Linux has no prefix for left out. Raises `Damaged`, OSError."""
        found: dict[bytes, bytes] = {}
        if self._inode_size > 128:
            begin = 128 + struct.unpack_from("<H", inode.own, 0x80)[0]
            if begin + 4 <= self._inode_size and _u32(inode.own, begin) == _XATTR_MAGIC:
                found |= self._xattrs(inode.own, begin + 4, begin + 4)
        if inode.xattr_block:
            block = self._block(inode.xattr_block)
            if _u32(block, 0) != _XATTR_MAGIC:
                raise Damaged("a block of attributes is none")
            found |= self._xattrs(block, 32, 0)
        return found

    def _xattrs(self, data: bytes, at: int, values: int) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        while at + 4 <= len(data) and _u32(data, at):
            if at + _XATTR.size > len(data):
                raise Damaged("attributes contradict themselves")
            size, prefix, offset, inode, length, _ = _XATTR.unpack_from(data, at)
            start = values + offset
            if inode or at + _XATTR.size + size > len(data) or start + length > len(data):
                raise Damaged("attributes contradict themselves")
            name = data[at + _XATTR.size : at + _XATTR.size + size]
            if prefix in _PREFIXES and b"\0" not in name:
                found[_PREFIXES[prefix] + name] = data[start : start + length]
            at += (_XATTR.size + size + 3) & ~3
        return found

    def _block(self, number: int) -> bytes:
        self._spend(1)
        return self._read(number * self.block, self.block)

    def _spend(self, blocks: int) -> None:
        self._left -= blocks
        if self._left < 0:
            raise Damaged("files share what they can't share")

    def _read(self, at: int, size: int) -> bytes:
        data = os.pread(self._fd, size, at) if at + size <= self._size else b""
        if len(data) != size:
            raise Damaged("it leads outside of its image")
        return data


def _u32(data: bytes, at: int) -> int:
    found: int = struct.unpack_from("<I", data, at)[0]
    return found
