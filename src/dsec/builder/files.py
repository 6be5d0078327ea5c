"""Trees of files with their contents: the context of a build, and what the layers of a stage show together.

A context is never unpacked: it is a tree in memory and one file of data, so that no name and no link in it can lead
anywhere but into itself.
"""

from __future__ import annotations

import hashlib
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from dsec.errors import TooLarge
from dsec.recipe.ignore import Ignored
from dsec.store.archive import read_tree
from dsec.store.data import GIB, Budget, LayerData
from dsec.store.layers import LayerStore
from dsec.store.merge import reader
from dsec.store.packed import Unpacked
from dsec.store.tree import Node, directory, overlay, walk

HOPS = 40
_STEP = 1 << 20
_LOOK_BYTES = 64 << 20
_LEAST_FREE = 1 << 30


class Files:
    """A tree, and what its files hold."""

    def __init__(self, top: Node, data: Callable[[Node], BinaryIO | None]) -> None:
        """`data`: the file in which a node's content lies."""
        self.top = top
        self._data = data
        self._digests: dict[int, str] = {}

    def reader(self, node: Node) -> Callable[[int], bytes]:
        """`read(n)` over a file."""
        return reader(node.content, self._data(node))

    def content(self, node: Node, most: int) -> bytes:
        """A small file's bytes. Raises `TooLarge`."""
        if node.content.size > most:
            raise TooLarge(f"a file of {node.content.size} bytes where {most} are enough")
        read = self.reader(node)
        return b"".join(iter(lambda: read(_STEP), b""))

    def digest(self, node: Node) -> str:
        """Of a tree: names, types, modes, owners, links and contents; no times."""
        known = self._digests.get(id(node))
        if known is not None:
            return known
        found = hashlib.sha256()
        for path, each in walk(node):
            found.update(b"%d:%s %o %d %d " % (len(path), path, each.mode, each.uid, each.gid))
            if each.is_link:
                found.update(b"%d:%s" % (len(each.target), each.target))
            elif each.is_file:
                content, read = hashlib.sha256(), self.reader(each)
                while data := read(_STEP):
                    content.update(data)
                found.update(content.digest())
            elif each.is_device:
                found.update(b"%d %d" % each.rdev)
        self._digests[id(node)] = found.hexdigest()
        return self._digests[id(node)]

    def find(self, path: bytes, *, follow: bool = True) -> Node | None:
        """The entry at a path from the top, links followed inside the tree (the last one where `follow`). Raises
        ValueError where a link leads out of it, or in a circle."""
        todo = [part for part in reversed(path.split(b"/")) if part not in (b"", b".")]
        trail, hops = [self.top], 0
        while todo:
            part = todo.pop()
            if part == b"..":
                if len(trail) == 1:
                    raise ValueError("it leads out")
                trail.pop()
                continue
            node = trail[-1].children.get(part) if trail[-1].is_dir else None
            if node is None or node.is_whiteout:
                return None
            if node.is_link and (todo or follow):
                hops += 1
                if hops > HOPS:
                    raise ValueError("its links go in a circle")
                if node.target.startswith(b"/"):
                    trail = [self.top]
                todo += [each for each in reversed(node.target.split(b"/")) if each not in (b"", b".")]
                continue
            trail.append(node)
        return trail[-1]

    def real(self, path: bytes) -> bytes:
        """Where a path leads: links of what is there followed, the rest as it is; no `/` at the ends. Raises as
        `find`."""
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        names: list[bytes] = []
        hops = 0
        while parts:
            part = parts.pop(0)
            if part == b"..":
                if not names:
                    raise ValueError("it leads out")
                names.pop()
                continue
            node = self.find(b"/".join((*names, part)), follow=False)
            if node is not None and node.is_link:
                hops += 1
                if hops > HOPS:
                    raise ValueError("its links go in a circle")
                if node.target.startswith(b"/"):
                    names = []
                parts = [each for each in node.target.split(b"/") if each not in (b"", b".")] + parts
                continue
            names.append(part)
        return b"/".join(names)


def load_archive(path: Path, data: BinaryIO) -> Files:
    """The files of a tar archive, which may be compressed; contents go to `data`. Blocks. Raises `InvalidRequest`,
    `Unsupported`, `TooLarge`."""
    budget = Budget(data_bytes=32 * GIB, file_bytes=64 * GIB, entries=500_000)
    with open(path, "rb") as file:
        archive = Unpacked(file.read, "the context")
        top = read_tree(_watched(archive.read, path.parent), LayerData(data, budget))
        archive.finish()
    data.flush()
    return Files(top, lambda _: data)


def _watched(read: Callable[[int], bytes], where: Path) -> Callable[[int], bytes]:
    """The same, but for a disk that gets full meanwhile."""
    since = 0

    def watched(size: int) -> bytes:
        nonlocal since
        piece = read(size)
        since += len(piece)
        if since > _LOOK_BYTES:
            since = 0
            if shutil.disk_usage(where).free < _LEAST_FREE:
                raise TooLarge("the server's disk has no room for this context", remedy="See .dockerignore.")
        return piece

    return watched


def leave_out(files: Files, ignored: Ignored) -> None:
    """Take what is ignored out of the tree."""
    stack: list[tuple[bytes, Node]] = [(b"", files.top)]
    emptied: list[tuple[Node, bytes]] = []
    while stack:
        prefix, node = stack.pop()
        for name, child in list(node.children.items()):
            path = prefix + name
            if ignored(path.decode(errors="surrogateescape")):
                if child.is_dir and ignored.has_exceptions:
                    emptied.append((node, name))
                else:
                    del node.children[name]
                    continue
            if child.is_dir:
                stack.append((path + b"/", child))
    for parent, name in reversed(emptied):  # a directory that is ignored stays for what is in it
        if not parent.children[name].children:
            del parent.children[name]


class Layers:
    """What a stack of layers shows; grows by one layer after another."""

    def __init__(self, store: LayerStore) -> None:
        self._store = store
        self._open = ExitStack()
        self._owners: dict[int, BinaryIO | None] = {}
        self.files = Files(directory(), lambda node: self._owners[id(node)])

    def push(self, layer: str) -> None:
        """Lay one on top. Blocks. Raises `NotFound`."""
        tree, data = self._store.tree(layer), self._store.files(layer).data
        file = None
        if data is not None:
            file = self._open.enter_context(data.open("rb", buffering=0))
        self._owners |= {id(node): file for _, node in walk(tree) if node.is_file}
        self.files.top = overlay(self.files.top, tree)

    def close(self) -> None:
        """Let go of the data."""
        self._open.close()


def visible(node: Node) -> Iterator[tuple[bytes, Node]]:
    """As `walk`, without what overlayfs hides and what no layer can hold."""
    for path, each in walk(node):
        if not each.is_whiteout and not stat.S_ISSOCK(each.mode):
            yield path, each
