"""The layers of a node: complete ones on its disk, and their mounts.

On disk, for each layer, `store/layers/<digest>/` as docs/LAYERS.md says, with `meta.json` (`LayerMeta`) beside. A layer
appears by the rename of a finished directory, so that what is there is whole. Whole images of the first version
(`layer.erofs`) are still mounted.

A layer is mounted once a node at `<run>/layers/<digest>/0`, and once for each id range as an id-mapped clone at
`<run>/layers/<digest>/<base>`. All sandboxes of a range share the clone. A restarted server finds them in mountinfo.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from dsec.errors import NotFound
from dsec.kernel import idmap, mounts
from dsec.kernel.mounts import ErofsMount
from dsec.kernel.syscalls import KernelError
from dsec.store.data import Budget, LayerData
from dsec.store.directory import DirectoryReader
from dsec.store.erofs import read_image, write_image
from dsec.store.format import DIGEST, ImageConfig, Kind, Manifest, decode_manifest
from dsec.store.holds import Holds
from dsec.store.lazy.large import PIECE_BYTES, Follower, read_through
from dsec.store.scratch import Scratch, ScratchRoot
from dsec.store.tree import Node, directory, walk

ID_COUNT = 65_536
READAHEAD_KIB = 1024
"""Of complete layers: measured, docs/SPECIFICATION.md."""
ALL_HOT_BYTES = 48 << 20
"""A layer up to this size is read whole when it is mounted."""
_JOIN_S = 2.0
"""A thread that reads from a store that doesn't answer keeps a detached mount for longer."""


class LayerMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known about a layer that is on this node."""

    digest: str
    kind: str
    description: str = ""
    size_bytes: int = 0
    """On this node's disk."""
    created_at: float = 0.0
    hot: list[str] = []
    """Files that most sandboxes read, worth having in the page cache; `/`: all. See `LayerMounts.warm`."""


class Entry(Struct, frozen=True):
    """A file of a generated layer: bytes with a mode, a directory (`data` is None), or a symbolic link (`target`)."""

    data: bytes | None = None
    mode: int = 0o644
    target: str = ""
    uid: int = 0
    gid: int = 0


Tree = Mapping[str, Entry]


class LayerFiles(NamedTuple):
    """What the kernel mounts."""

    image: Path
    data: Path | None
    """None: the image has no extra device."""


class LayerMaker:
    """A layer on its way: contents go into `data`, in the order in which they are to lie; then `finish`."""

    def __init__(self, store: LayerStore, directory: Path, data: LayerData) -> None:
        self.data = data
        self._store = store
        self._directory = directory

    def finish(
        self,
        top: Node,
        kind: Kind,
        description: str = "",
        *,
        config: ImageConfig | None = None,
        source: dict[str, str] | None = None,
        hot: list[str] | None = None,
    ) -> LayerMeta:
        """Write the tree and put the layer into the store; an equal one may be there. Blocks.

        Raises `InvalidRequest` for what a layer can't hold, OSError where the disk is full.
        """
        data_bytes, chunks = self.data.finish()
        image = write_image(top, data_bytes)
        _write_file(self._directory / "meta.erofs", image)
        if not data_bytes:
            (self._directory / "data").unlink()
        size = len(image) + data_bytes
        manifest = Manifest(
            kind=kind,
            metadata=sha256(image).hexdigest(),
            metadata_bytes=len(image),
            data_bytes=data_bytes,
            chunks=chunks,
            files=sum(1 for _ in walk(top)),
            file_bytes=self.data.file_bytes,
            config=config or ImageConfig(),
            source=source or {},
            hot=hot or (["/"] if size <= ALL_HOT_BYTES else []),
        )
        return self._store.place(self._directory, manifest, description)


class LayerStore:
    """The layers below a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.root = state_dir / "store" / "layers"
        self._scratch = ScratchRoot(state_dir)
        self._lazy: dict[str, LayerFiles] = {}
        self._looped: set[str] = set()
        self._filling: set[str] = set()
        self.holds = Holds()
        self.root.mkdir(parents=True, exist_ok=True)
        self._scratch.path.mkdir(exist_ok=True)

    def attach(self, digest: str, files: LayerFiles, *, loops: bool, complete: bool = False) -> None:
        """From now on a layer that isn't here whole is where its data comes when it is read (`store.lazy`). `loops`:
        loop devices may stand in for its files. `complete`: all of it is there by now."""
        self._lazy[digest] = files
        (self._looped.add if loops else self._looped.discard)(digest)
        (self._filling.discard if complete else self._filling.add)(digest)

    def detach(self, digest: str) -> None:
        """The opposite of `attach`: such a layer is unknown again. Idempotent."""
        self._lazy.pop(digest, None)

    def may_loop(self, digest: str) -> bool:
        """Whether a layer may be mounted by loop devices."""
        return digest in self._looped or not self.is_lazy(digest)

    def is_lazy(self, digest: str) -> bool:
        """Whether its data comes when it is read."""
        return digest in self._lazy and not self.has(digest)

    def is_filling(self, digest: str) -> bool:
        """Whether it is lazy and was not complete when it was attached."""
        return self.is_lazy(digest) and digest in self._filling

    def has(self, digest: str) -> bool:
        self.holds.add(digest)
        return DIGEST.fullmatch(digest) is not None and (self.root / digest).exists()

    def files(self, digest: str) -> LayerFiles:
        """A layer's image and data, with its manifest beside the image. Raises `NotFound`."""
        path = self.root / digest
        if self.has(digest):
            for image in (path / "meta.erofs", path / "layer.erofs"):
                if image.exists():
                    data = path / "data"
                    return LayerFiles(image, data if data.exists() else None)
        if digest in self._lazy:
            return self._lazy[digest]
        raise NotFound(f"there is no layer {digest[:80]!r}", remedy="Build it again; its files are gone.")

    def meta(self, digest: str) -> LayerMeta:
        """Raises `NotFound`."""
        try:
            return msgspec.json.decode((self.files(digest).image.parent / "meta.json").read_bytes(), type=LayerMeta)
        except FileNotFoundError:  # it is lazy
            manifest = self.manifest(digest)
            size = manifest.metadata_bytes + manifest.data_bytes
            return LayerMeta(digest=digest, kind=manifest.kind, size_bytes=size, hot=manifest.hot)

    def manifest(self, digest: str) -> Manifest:
        """Raises `NotFound`, also for a whole image of the first version; `LayerCorrupt`."""
        try:
            return decode_manifest((self.files(digest).image.parent / "manifest.json").read_bytes(), digest)
        except FileNotFoundError:
            raise NotFound(
                f"layer {digest} is of an older form, which has no manifest", remedy="Build it again."
            ) from None

    def tree(self, digest: str) -> Node:
        """The layer's files. Raises `NotFound`, `LayerCorrupt`."""
        self.manifest(digest)
        return read_image(self.files(digest).image.read_bytes())

    def all(self) -> list[LayerMeta]:
        return [self.meta(name) for name in sorted(os.listdir(self.root)) if DIGEST.fullmatch(name)]

    def remove(self, digest: str, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """Delete a layer that no environment uses; idempotent. False: it stays, because work in progress holds it, or
        `unless` says so."""
        if not DIGEST.fullmatch(digest):
            raise ValueError(digest)
        with self.scratch() as scratch:  # it goes at once, then its files

            def remove() -> None:
                with contextlib.suppress(FileNotFoundError):
                    (self.root / digest).rename(Path(scratch) / "gone")

            return self.holds.remove(digest, remove, unless=unless)

    def scratch(self) -> Scratch:
        """A directory on the store's file system, for building."""
        return self._scratch.make()

    def clear_scratch(self) -> None:
        """Remove what builds that were killed left."""
        self._scratch.clear()

    @contextmanager
    def making(self, budget: Budget | None = None) -> Iterator[LayerMaker]:
        """Begin a layer; whatever isn't finished is gone when the context ends."""
        with self.scratch() as scratch:
            made = Path(scratch) / "layer"
            made.mkdir(mode=0o755)
            with open(made / "data", "x+b") as file:
                yield LayerMaker(self, made, LayerData(file, budget))

    def place(self, made: Path, manifest: Manifest, description: str = "") -> LayerMeta:
        """Take a directory with a layer's verified `meta.erofs` and `data` into the store. Returns the layer, new or
        not."""
        encoded = manifest.encode()
        digest = sha256(encoded).hexdigest()
        meta = LayerMeta(
            digest=digest,
            kind=manifest.kind,
            description=description,
            size_bytes=manifest.metadata_bytes + manifest.data_bytes,
            created_at=time.time(),
            hot=manifest.hot,
        )
        self.holds.add(digest)
        _write_file(made / "manifest.json", encoded)
        _write_file(made / "meta.json", msgspec.json.encode(meta))
        try:
            made.rename(self.root / digest)
        except OSError:
            if not (self.root / digest / "meta.json").exists():
                raise
            return self.meta(digest)  # the same layer was there
        return meta

    def add(
        self,
        tree: Path,
        kind: Kind,
        description: str = "",
        *,
        at: str = "/",
        owner: tuple[int, int] | None = None,
        xattrs: bool = True,
        id_base: int = 0,
        config: ImageConfig | None = None,
        hot: list[str] | None = None,
        source: dict[str, str] | None = None,
    ) -> LayerMeta:
        """Make a layer of a directory, placed at the path `at`, or of an overlay's upper directory, whose whiteouts and
        opaque marks are kept and whose ids are `id_base` too high. `owner`: make everything that user's and group's.
        Blocks while it packs.

        Raises ValueError for a bad `at`, `InvalidRequest` for what a layer can't hold, OSError where the disk is full.
        """
        parts = _parts(at) if at.strip("/") else []
        with self.making() as maker:
            node = DirectoryReader(maker.data, owner=owner, xattrs=xattrs, id_base=id_base).read(tree)
            for part in reversed(parts):
                top = directory()
                top.children[part] = node
                node = top
            return maker.finish(node, kind, description, config=config, hot=hot, source=source)

    def add_tree(self, tree: Tree, kind: Kind, description: str = "") -> LayerMeta:
        """Make a layer of generated files. Missing parents are made (0755). Raises ValueError for a bad name."""
        top = directory()
        with self.making() as maker:
            for name in sorted(tree):
                _place(top, name, tree[name], maker.data)
            return maker.finish(top, kind, description)


def _parts(name: str) -> list[bytes]:
    parts = [part for part in os.fsencode(name).split(b"/") if part]
    if not parts or any(part in (b".", b"..") for part in parts):
        raise ValueError(f"not a path in a layer: {name!r}")
    return parts


def _place(top: Node, name: str, entry: Entry, data: LayerData) -> None:
    *parents, last = _parts(name)
    for part in parents:
        top = top.children.setdefault(part, directory())
    if entry.target:
        node = Node(stat.S_IFLNK | 0o777, target=os.fsencode(entry.target))
    elif entry.data is None:
        node = top.children.get(last) or directory()
        node.mode = stat.S_IFDIR | entry.mode
    else:
        content = data.add(io.BytesIO(entry.data).read, len(entry.data))
        node = Node(stat.S_IFREG | entry.mode, content=content)
    node.uid, node.gid = entry.uid, entry.gid
    top.children[last] = node


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fdatasync(file.fileno())


def _regular_files(top: Path) -> Iterator[Path]:
    for found, _, names in os.walk(top):
        for name in names:
            path = Path(found, name)
            if path.is_file() and not path.is_symlink():
                yield path


def mount_layer(files: LayerFiles, target: Path, *, lazy: bool, loops: bool) -> None:
    """Mount a layer as it is. `lazy`: its data comes as it is read. Raises KernelError."""
    # Of a lazy one, what was just filled is in the page cache: reading around that would wait for the disk; and what is
    # read ahead would be fetched before the reader goes on.
    readahead_kib = 0 if lazy else READAHEAD_KIB
    ErofsMount(files.image, target, not lazy, files.data, loops, readahead_kib).mount()


class LayerMounts:
    """The mounted layers of this node."""

    def __init__(self, run_dir: Path, store: LayerStore) -> None:
        self.root = run_dir / "layers"
        self._store = store
        self._lock = threading.Lock()
        self._mounted: set[Path] = set()
        self._paths: dict[tuple[str, int], Path] = {}
        """Of mounted layers that were asked for."""
        self._warming: dict[str, threading.Thread] = {}
        self._followers: dict[str, Follower] = {}
        self._stopping = False
        self.follow: Path | None = None
        """The compiled `native/follow`, to be set before there are layers that are being filled."""
        self.on_unmount: Callable[[str], object] = lambda digest: None
        """Told of a layer that nobody new may have open; called by any thread."""

    def open(self) -> None:
        """Find what an earlier server mounted."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._mounted = {entry.target for entry in mounts.mounted(self.root)}

    def path(self, digest: str, uid_base: int = 0) -> Path:
        """Where a layer is mounted for an id range (0: as it is); mounted on first use, in well under a millisecond.

        Its hot files are then read by a thread. Raises `NotFound` for an unknown layer, KernelError where it can't be
        mounted.
        """
        known = self._paths.get((digest, uid_base))
        if known is not None:
            return known
        target = self.root / digest / str(uid_base)
        with self._lock:
            plain = self.root / digest / "0"
            if plain not in self._mounted:
                image, data = self._store.files(digest)
                lazy = self._store.is_filling(digest)
                plain.mkdir(parents=True, exist_ok=True)
                mount_layer(LayerFiles(image, data), plain, lazy=lazy, loops=self._store.may_loop(digest))
                self._mounted.add(plain)
                if lazy and self.follow is not None:
                    self._followers[digest] = Follower(self.follow)
                warm = self._follow if lazy else self.warm
                thread = threading.Thread(target=warm, args=[digest], name="dsec-warm", daemon=True)
                self._warming[digest] = thread
                thread.start()
            if target not in self._mounted:
                target.mkdir(exist_ok=True)
                idmap.place_clone(plain, target, uid_base, ID_COUNT)
                self._mounted.add(target)
            self._paths[digest, uid_base] = target
        return target

    def warm(self, digest: str) -> int:
        """Read a layer's hot files, so that their pages are charged to the server and not to whichever sandbox comes
        first (and don't leave with it). Blocks; returns the bytes read. A layer that went before its thread's turn has
        none."""
        top, total = self.root / digest / "0", 0
        try:
            hot = self._store.meta(digest).hot
        except NotFound:
            return 0
        with contextlib.suppress(OSError):
            root, buffer = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), bytearray(PIECE_BYTES)
            try:
                for name in hot:
                    files = (str(each.relative_to(top)) for each in _regular_files(top)) if name == "/" else [name]
                    for each in files:
                        if self._stopping:
                            return total
                        total += read_through(root, each, buffer, lambda: self._stopping)
            finally:
                os.close(root)
        return total

    def _follow(self, digest: str) -> None:
        """`warm` for a layer that is being filled: only what somebody begins to read."""
        follower = self._followers.get(digest)
        if follower is not None:
            with contextlib.suppress(NotFound):
                image, hot = self._store.files(digest).image, self._store.meta(digest).hot
                follower.read(image, self.root / digest / "0", hot)

    def settle(self) -> None:
        """Wait until the hot files of all layers that were mounted have been read. Blocks."""
        for thread in list(self._warming.values()):
            thread.join()

    def unmount(self, digest: str) -> None:
        """Unmount a layer and its clones; running sandboxes keep theirs."""
        self.on_unmount(digest)
        thread = self._warming.pop(digest, None)
        self._stop_following(digest)
        if thread is not None:
            thread.join(_JOIN_S)
        with self._lock:
            self._paths.clear()
            for path in sorted((p for p in self._mounted if p.parent.name == digest), reverse=True):
                mounts.unmount(path)
                self._mounted.discard(path)
                with contextlib.suppress(OSError):
                    path.rmdir()
            with contextlib.suppress(OSError):
                (self.root / digest).rmdir()

    def _stop_following(self, digest: str) -> None:
        follower = self._followers.pop(digest, None)
        if follower is not None:
            follower.stop()

    def unmount_all(self) -> None:
        """Unmount every layer."""
        self._stopping = True
        for digest in list(self._followers):
            self._stop_following(digest)
        self.settle()
        self._warming.clear()
        self._stopping = False
        with contextlib.suppress(FileNotFoundError):
            for digest in os.listdir(self.root):
                self.unmount(digest)
            with contextlib.suppress(KernelError):
                mounts.unmount_under(self.root)
            self._mounted.clear()
