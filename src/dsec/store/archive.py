"""An OCI layer's archive, turned into a tree: whiteouts into overlayfs's own, everything else as it would have been
unpacked, without unpacking.

Names never reach a file system, so none can lead out: absolute names and links begin at the layer's root, symbolic
links on the way to an entry are followed inside the tree (one of a lower layer too, as by a runtime that unpacks over
the lower layers), and names with `..` are refused. A directory that an archive implies but doesn't list has the owner
and mode of the one below.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from typing import Protocol

from dsec.errors import InvalidRequest
from dsec.store.data import LayerData
from dsec.store.directory import MAX_DEPTH, keep_xattr
from dsec.store.erofs import MAX_XATTR_BYTES
from dsec.store.tar import Header, TarReader
from dsec.store.tree import OPAQUE, Node, directory, whiteout

MAX_ID = (1 << 32) - 2
_HOPS = 40
_NAME_MAX, _PATH_MAX = 255, 4096
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_KINDS = {
    b"0": stat.S_IFREG,
    b"2": stat.S_IFLNK,
    b"3": stat.S_IFCHR,
    b"4": stat.S_IFBLK,
    b"5": stat.S_IFDIR,
    b"6": stat.S_IFIFO,
}


class Entries(Protocol):
    """Entries of an archive, or like those of one: `read` gives the content of the one that came last."""

    def __iter__(self) -> Iterator[Header]: ...
    def read(self, size: int) -> bytes: ...


def read_layer(read: Callable[[int], bytes], data: LayerData, below: Node | None = None) -> Node:
    """The tree of one layer's uncompressed archive; `below`: what the lower layers show together.

    Raises `InvalidRequest` for a broken or malicious archive, `Unsupported`, `TooLarge`.
    """
    return _Archive(data, below or directory()).read(TarReader(read))


def read_tree(read: Callable[[int], bytes], data: LayerData) -> Node:
    """The tree of a plain archive, in which no name has a special meaning. Raises as `read_layer`."""
    return _Archive(data, directory(), whiteouts=False).read(TarReader(read))


def place_entries(entries: Entries, data: LayerData, below: Node) -> Node:
    """A layer over `below` of entries that are worked out one by one; no name has a special meaning. Raises as
    `read_layer`."""
    return _Archive(data, below, whiteouts=False).read(entries)


class _Archive:
    def __init__(self, data: LayerData, below: Node, *, whiteouts: bool = True) -> None:
        self._data = data
        self._whiteouts = whiteouts
        self._below = below
        self._top = _like(below)
        self._pairs: dict[int, Node | None] = {id(self._top): below}
        """For each directory of the layer: the directory below it."""
        self._hidden: dict[tuple[int, bytes], Node] = {}
        """Whiteouts, by directory and name."""
        self._kept: list[Node] = []
        """Directories, also those that were replaced: no other may take their number in `_pairs`."""

    def read(self, reader: Entries) -> Node:
        for header in reader:
            self._data.budget.take(entries=1, metadata=len(header.name) + len(header.target))
            self._data.budget.take_xattrs(header.xattrs)
            parts = _parts(header.name)
            if not parts:
                if header.kind == b"5":
                    self._set(self._top, header)
                continue
            parent = self._parent(parts, header.name)
            name = parts[-1]
            if self._whiteouts and name == _OPAQUE:
                parent.xattrs[OPAQUE] = b"y"
            elif self._whiteouts and name.startswith(_WHITEOUT):
                self._hide(parent, name[len(_WHITEOUT) :])
            else:
                self._place(parent, name, header, reader)
        for (_, name), parent in self._hidden.items():
            node = parent.children.setdefault(name, whiteout())
            if node.is_dir:
                node.xattrs[OPAQUE] = b"y"
        return self._top

    def _hide(self, parent: Node, name: bytes) -> None:
        if name.startswith(_WHITEOUT):
            return  # another of aufs's own marks
        if name in (b"", b".", b".."):
            raise InvalidRequest(f"the archive has a whiteout that names nothing: {_WHITEOUT + name!r}")
        self._hidden[id(parent), name] = parent

    def _place(self, parent: Node, name: bytes, header: Header, reader: Entries) -> None:
        old = parent.children.get(name)
        if header.kind == b"1":
            parent.children[name] = self._linked(header)
            return
        if header.kind == b"5" and old is not None and old.is_dir:
            self._set(old, header)
            return
        node = Node(_KINDS[header.kind])
        self._set(node, header)
        if header.kind == b"0":
            node.content = self._data.add(reader.read, header.size)
        elif header.kind == b"2":
            if not 0 < len(header.target) < _PATH_MAX or b"\0" in header.target:
                raise InvalidRequest(f"the archive has a symbolic link that can't be: {header.name[:200]!r}")
            node.target = header.target
        elif header.kind in b"34":
            node.rdev = header.rdev
            if not (0 <= header.rdev[0] < 1 << 12 and 0 <= header.rdev[1] < 1 << 20):
                raise InvalidRequest(f"the archive has a device whose number is out of range: {header.name[:200]!r}")
        elif header.kind == b"5":
            self._pair(node, parent, name)
        parent.children[name] = node

    def _set(self, node: Node, header: Header) -> None:
        if not (0 <= header.uid <= MAX_ID and 0 <= header.gid <= MAX_ID):
            raise InvalidRequest(f"the archive has an owner that is out of range: {header.name[:200]!r}")
        opaque = {OPAQUE: b"y"} if node.is_opaque else {}
        node.mode = stat.S_IFMT(node.mode) | (0o777 if node.is_link else header.mode)
        node.uid, node.gid, node.mtime_ns = header.uid, header.gid, header.mtime_ns
        if sum(len(name) + len(value) for name, value in header.xattrs.items()) > MAX_XATTR_BYTES:
            raise InvalidRequest(f"the archive has more attributes than a file can have: {header.name[:200]!r}")
        node.xattrs = {name: value for name, value in header.xattrs.items() if keep_xattr(name, value)} | opaque

    def _linked(self, header: Header) -> Node:
        parts = _parts(header.target)
        found = None
        if parts:
            found = self._parent(parts, header.target).children.get(parts[-1])
        if found is None or found.is_dir:
            raise InvalidRequest(
                f"the archive has a hard link to what isn't a file before it in the archive: {header.name[:200]!r} to "
                f"{header.target[:200]!r}"
            )
        return found

    def _parent(self, parts: list[bytes], name: bytes) -> Node:
        """The directory of an entry, made where it is missing, links followed inside the tree."""
        todo = list(reversed(parts[:-1]))
        trail = [self._top]
        hops = 0
        while todo:
            part = todo.pop()
            if part == b"..":  # of a link's target; at the root it stays there
                trail = trail[:-1] or trail
                continue
            here = trail[-1]
            child = here.children.get(part)
            if child is None:
                child = self._implied(here, part)
            if child.is_link:
                hops += 1
                if hops > _HOPS:
                    raise InvalidRequest(f"the archive has links in a circle at {name[:200]!r}")
                if child.target.startswith(b"/"):
                    trail = [self._top]
                todo += [each for each in reversed(child.target.split(b"/")) if each not in (b"", b".")]
                continue
            if not child.is_dir:  # replaced, as a directory that comes later would
                child = here.children[part] = directory()
                self._pair(child, here, part)
            trail.append(child)
            if len(trail) > MAX_DEPTH:
                raise InvalidRequest(f"the archive is more than {MAX_DEPTH} levels deep at {name[:200]!r}")
        return trail[-1]

    def _implied(self, here: Node, part: bytes) -> Node:
        """What isn't in this layer: a link of a lower one, which is followed, or a directory, made as the one below."""
        below = None
        paired = self._pairs.get(id(here))
        if paired is not None and not here.is_opaque and (id(here), part) not in self._hidden:
            below = paired.children.get(part)
        if below is not None and below.is_link:
            return below
        child = _like(below) if below is not None and below.is_dir else directory()
        self._data.budget.take(entries=1, metadata=len(part))
        here.children[part] = child
        self._pair(child, here, part)
        return child

    def _pair(self, child: Node, parent: Node, name: bytes) -> None:
        paired = self._pairs.get(id(parent))
        below = paired.children.get(name) if paired is not None and not parent.is_opaque else None
        self._pairs[id(child)] = below if below is not None and below.is_dir else None
        self._kept.append(child)


def _like(node: Node) -> Node:
    made = Node(node.mode, node.uid, node.gid, node.mtime_ns)
    made.xattrs = {name: value for name, value in node.xattrs.items() if name != OPAQUE}
    return made


def _parts(name: bytes) -> list[bytes]:
    if len(name) > _PATH_MAX or b"\0" in name:
        raise InvalidRequest(f"the archive has a name that can't be: {len(name)} bytes, {name[:100]!r}")
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise InvalidRequest(f"the archive has a name that leads out: {name[:200]!r}")
    if any(len(part) > _NAME_MAX for part in parts):
        raise InvalidRequest(f"the archive has a name that is too long: {name[:100]!r}")
    return parts
