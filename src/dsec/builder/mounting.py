"""What a command of a build sees through `RUN --mount`: no mounts, but one more layer on top of its sandbox.

Each target is an opaque directory there (or a file), filled with what is bound or cached. What the command changes
below a target stays out of the step's layer; of a cache it becomes the cache's next layer. A cache is a project's own,
by its id, and lasts as long as its layer, like a remembered step.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dsec.builder.copying import Copy, Entries, Owner, Source
from dsec.builder.files import Files, Layers
from dsec.errors import InvalidRequest
from dsec.store.archive import place_entries
from dsec.store.data import Budget
from dsec.store.directory import DirectoryReader
from dsec.store.layers import LayerMaker, LayerStore
from dsec.store.tree import OPAQUE, Node, directory, find

CACHE = b"cache"
"""Where the content lies in a cache's layer."""


class Mounted(NamedTuple):
    """One mount, its words understood."""

    target: bytes
    """From the root, as it was written."""
    files: Files | None = None
    """Where `source` is from; None: an empty directory."""
    source: Node | None = None
    owner: Owner | None = None
    """Of a directory that is made; None: as the source is."""
    mode: int = 0o755
    cache: str = ""
    """Names the cache that it is; empty: none."""
    cached: str = ""
    """The layer of the cache's content, where there is one."""


class Mounts:
    """Those of one command. Blocks."""

    def __init__(self, store: LayerStore, image: Files, mounts: Sequence[Mounted]) -> None:
        """`image`: what the layers below show. Raises `InvalidRequest`."""
        self._store = store
        self._image = image
        self._mounts = [each._replace(target=self._real(each.target)) for each in mounts]
        targets = [each.target for each in self._mounts]
        for target in targets:
            if sum(other == target or target.startswith(other + b"/") for other in targets) > 1:
                raise InvalidRequest(f"mounts lie one in another: {target.decode(errors='replace')[:200]!r}")

    def _real(self, target: bytes) -> bytes:
        try:
            found = self._image.real(target)
        except ValueError as error:
            raise InvalidRequest(f"{target.decode(errors='replace')[:200]!r}: {error}") from None
        if not found:
            raise InvalidRequest("nothing can be mounted over the root")
        return found

    @property
    def targets(self) -> frozenset[bytes]:
        """Where they lie, links followed."""
        return frozenset(each.target for each in self._mounts)

    def layer(self) -> str:
        """Make the layer that lies on top."""
        with self._store.making(Budget()) as maker:
            return maker.finish(self._place(maker), "workspace", "mounts of a build's command").digest

    def _place(self, maker: LayerMaker) -> Node:
        copies = []
        for each in self._mounts:
            if each.files is not None and each.source is not None:
                source = Source(each.target.rpartition(b"/")[2], each.source)
                owner = None if each.cache else each.owner
                copies.append(Copy(each.files, [source], b"/" + each.target, into=each.source.is_dir, owner=owner))
        top = place_entries(Entries(copies, self._image), maker.data, self._image.top)
        for each in self._mounts:
            if each.source is None or each.source.is_dir:
                node = self._directory(top, each)
                node.xattrs = {**node.xattrs, OPAQUE: b"y"}
        return top

    def _directory(self, top: Node, mounted: Mounted) -> Node:
        """The target, with those above it as they are below."""
        node, path = top, b""
        for part in mounted.target.split(b"/"):
            path = path + b"/" + part if path else part
            if part not in node.children:
                below = find(self._image.top, path)
                made = directory()
                if below is not None and below.is_dir:
                    made = Node(below.mode, below.uid, below.gid, below.mtime_ns)
                    made.xattrs = {name: value for name, value in below.xattrs.items() if name != OPAQUE}
                elif path == mounted.target and mounted.owner is not None:
                    made = Node(stat.S_IFDIR | mounted.mode, *mounted.owner)
                node.children[part] = made
            node = node.children[part]
        return node

    def keep(self, upper: Path, id_base: int) -> list[tuple[str, str]]:
        """The caches that a command changed: name and layer. `upper`: what its sandbox wrote, in which nothing runs."""
        kept = []
        for each in self._mounts:
            if each.cache:
                with self._store.making(Budget()) as maker:
                    changed = DirectoryReader(maker.data, id_base=id_base).read_below(upper, each.target)
                    if changed is None:
                        continue
                    top = directory()
                    top.children[CACHE] = changed
                    part = maker.finish(top, "workspace", "change of a build's cache").digest
                kept.append((each.cache, self._joined(each, part)))
        return kept

    def _joined(self, mounted: Mounted, part: str) -> str:
        """The cache with a change, as one layer that hides nothing."""
        view = Layers(self._store)
        try:
            if mounted.cached:
                view.push(mounted.cached)
            view.push(part)
            node = view.files.find(CACHE)
            assert node is not None
            copy = Copy(view.files, [Source(b"", node)], b"/" + CACHE, into=True)
            empty = Files(directory(), lambda _: None)
            with self._store.making(Budget()) as maker:
                return maker.finish(
                    place_entries(Entries([copy], empty), maker.data, empty.top), "workspace", "a build's cache"
                ).digest
        finally:
            view.close()
