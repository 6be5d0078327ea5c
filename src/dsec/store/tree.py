"""A file tree in memory: what layers are made of, whatever it came from, and what an image is read back into.

A hard link is one `Node` under two names. Names are bytes, without `/`. Content lies elsewhere: `Content` says where in
a layer's data, or holds it where it is tiny. Nothing here touches a file system, so no name can lead anywhere.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import NamedTuple

HOLE = -1
OPAQUE = b"trusted.overlay.opaque"


class Content(NamedTuple):
    """A regular file's bytes: `inline`, or pieces of `1 << piece_bits` bytes each (the last may be shorter)."""

    size: int = 0
    inline: bytes = b""
    piece_bits: int = 0
    blocks: tuple[int, ...] = ()
    """Of each piece: number of its first 4 KiB block in the data, or HOLE."""


EMPTY = Content()


class Node:
    """A file of any type."""

    __slots__ = ("children", "content", "gid", "mode", "mtime_ns", "rdev", "target", "uid", "xattrs")

    def __init__(
        self,
        mode: int,
        uid: int = 0,
        gid: int = 0,
        mtime_ns: int = 0,
        *,
        rdev: tuple[int, int] = (0, 0),
        target: bytes = b"",
        xattrs: dict[bytes, bytes] | None = None,
        content: Content = EMPTY,
    ) -> None:
        """`mode`: with the type's bits. `rdev`: major and minor. `target`: of a symbolic link."""
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.mtime_ns = mtime_ns
        self.rdev = rdev
        self.target = target
        self.xattrs = xattrs or {}
        self.content = content
        self.children: dict[bytes, Node] = {}

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def is_device(self) -> bool:
        return stat.S_ISCHR(self.mode) or stat.S_ISBLK(self.mode)

    @property
    def is_whiteout(self) -> bool:
        """Overlayfs's mark for "not here any more"."""
        return stat.S_ISCHR(self.mode) and self.rdev == (0, 0)

    @property
    def is_opaque(self) -> bool:
        """Overlayfs's mark for a directory that hides those below."""
        return self.xattrs.get(OPAQUE) == b"y"


def directory(mode: int = 0o755, mtime_ns: int = 0) -> Node:
    return Node(stat.S_IFDIR | mode, mtime_ns=mtime_ns)


def whiteout() -> Node:
    return Node(stat.S_IFCHR)


def walk(top: Node) -> Iterator[tuple[bytes, Node]]:
    """Every entry with its path (`b""`: the top), parents first, names in order. A hard link comes once for each
    name. The tree may be as deep as it likes."""
    stack: list[tuple[bytes, Node]] = [(b"", top)]
    while stack:
        path, node = stack.pop()
        yield path, node
        prefix = path + b"/" if path else b""
        stack += [(prefix + name, node.children[name]) for name in sorted(node.children, reverse=True)]


def find(top: Node, path: bytes) -> Node | None:
    """The entry at a path, no links followed."""
    node: Node | None = top
    for part in path.split(b"/"):
        if part and node is not None:
            node = node.children.get(part)
    return node


def overlay(lower: Node, upper: Node) -> Node:
    """The two as overlayfs would show them, as one layer for above others: whiteouts and opaque marks stay, since what
    they hide may lie further below. `lower` is used up. Entries above hide those below; directories merge."""
    stack = [(lower, upper)]
    while stack:
        below, above = stack.pop()
        for field in ("mode", "uid", "gid", "mtime_ns"):
            setattr(below, field, getattr(above, field))
        opaque = above.is_opaque or below.is_opaque
        below.xattrs = dict(above.xattrs)
        if opaque:
            below.xattrs[OPAQUE] = b"y"
        for name, node in above.children.items():
            old = below.children.get(name)
            if node.is_dir and old is not None and old.is_dir and not node.is_opaque:
                stack.append((old, node))
                continue
            if node.is_dir and old is not None and not node.is_opaque:  # it hid what lies further below
                node.xattrs[OPAQUE] = b"y"
            below.children[name] = node
    return lower
