"""Layers that are on this node, taken apart again: several merged into one, and one written out as an archive."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import BinaryIO

from dsec.errors import InvalidRequest
from dsec.store.environments import merged_config
from dsec.store.format import BLOCK, Kind
from dsec.store.layers import LayerMeta, LayerStore
from dsec.store.tree import EMPTY, HOLE, OPAQUE, Content, Node, directory, overlay, walk

_STEP = 1 << 20
_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}


def merge_layers(store: LayerStore, layers: Sequence[str], kind: Kind, description: str = "") -> LayerMeta:
    """One layer that shows what these (digests, top first) show together; whiteouts are kept, since what they hide may
    lie below. Blocks.

    Raises `NotFound`, `InvalidRequest` for fewer than two, `LayerCorrupt`, `TooLarge`.
    """
    if len(layers) < 2:
        raise InvalidRequest("merging takes two layers or more", field="layers")
    return laid_together(store, layers, kind, description, source={"merged": " ".join(layers)})


def laid_together(
    store: LayerStore,
    layers: Sequence[str],
    kind: Kind,
    description: str = "",
    *,
    source: dict[str, str],
    settle: Callable[[Node], None] = lambda top: None,
) -> LayerMeta:
    """The same of one layer or more. `settle` may change the tree. Raises `NotFound`, `LayerCorrupt`, `TooLarge`."""
    config = merged_config([store.manifest(layer).config for layer in layers])
    with ExitStack() as files, store.making() as maker:
        top = directory()
        owners: dict[int, BinaryIO | None] = {}
        trees = []
        for layer in reversed(layers):
            tree, data = store.tree(layer), store.files(layer).data
            file = files.enter_context(open(data, "rb", buffering=0)) if data is not None else None
            owners |= {id(node): file for _, node in walk(tree) if node.is_file}
            trees.append(tree)
        top = trees[0]
        for tree in trees[1:]:
            top = overlay(top, tree)
        settle(top)
        done: set[int] = set()
        for _, node in walk(top):
            maker.data.budget.take(entries=1)
            if node.is_file and node.content.size and id(node) not in done:
                done.add(id(node))
                node.content = maker.data.add(reader(node.content, owners[id(node)]), node.content.size)
        return maker.finish(top, kind, description, config=config, source=source)


def reader(content: Content, data: BinaryIO | None) -> Callable[[int], bytes]:
    """`read(n)` over a file's content, from its start to its end. `data`: the layer's."""
    if not content.blocks:
        return io.BytesIO(content.inline).read
    assert data is not None
    at = 0

    def read(size: int) -> bytes:
        nonlocal at
        piece, inside = at >> content.piece_bits, at & ((1 << content.piece_bits) - 1)
        size = min(size, content.size - at, (1 << content.piece_bits) - inside)
        if size <= 0:
            return b""
        block = content.blocks[piece]
        found = bytes(size) if block == HOLE else os.pread(data.fileno(), size, block * BLOCK + inside)
        at += len(found)
        return found

    return read


def export_layer(store: LayerStore, layer: str) -> Iterator[bytes]:
    """The layer as an archive of the kind that OCI images hold, piece by piece: whiteouts are `.wh.` files. The same
    layer gives the same archive. Raises `NotFound`, `LayerCorrupt`."""
    tree, data = store.tree(layer), store.files(layer).data
    with ExitStack() as files:
        file = files.enter_context(open(data, "rb", buffering=0)) if data is not None else None
        first: dict[int, str] = {}
        for path, node in walk(tree):
            for info, content in _entries(os.fsdecode(path), node, first):
                yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
                read = reader(content, file)
                left = content.size
                while left:
                    piece = read(min(left, _STEP))
                    left -= len(piece)
                    yield piece
                yield bytes(-content.size % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)


def _entries(name: str, node: Node, first: dict[int, str]) -> Iterator[tuple[tarfile.TarInfo, Content]]:
    parent, _, last = name.rpartition("/")
    inside = f"{parent}/" if parent else ""
    if node.is_whiteout:
        yield _plain(f"{inside}.wh.{last}"), EMPTY
        return
    if stat.S_ISSOCK(node.mode):
        return  # archives have none
    info = _plain(name or ".")
    info.type = _TYPES[stat.S_IFMT(node.mode)]
    info.mode, info.uid, info.gid = stat.S_IMODE(node.mode), node.uid, node.gid
    info.mtime = node.mtime_ns // 10**9
    more: dict[str, str] = {}
    seconds, nanoseconds = divmod(node.mtime_ns, 10**9)
    if nanoseconds and seconds >= 0:
        more["mtime"] = f"{seconds}.{nanoseconds:09}"
    info.linkname = os.fsdecode(node.target)
    info.devmajor, info.devminor = node.rdev
    for key, value in node.xattrs.items():
        if key != OPAQUE:
            more[f"SCHILY.xattr.{os.fsdecode(key)}"] = value.decode("utf-8", "surrogateescape")
    info.pax_headers = more
    known = first.setdefault(id(node), name)
    if known != name and not node.is_dir:
        info.type, info.linkname = tarfile.LNKTYPE, known
        yield info, EMPTY
        return
    info.size = node.content.size if node.is_file else 0
    yield info, node.content if node.is_file else EMPTY
    if node.is_opaque:
        yield _plain(f"{name}/.wh..wh..opq" if name else ".wh..wh..opq"), EMPTY


def _plain(name: str) -> tarfile.TarInfo:
    return tarfile.TarInfo(name)
