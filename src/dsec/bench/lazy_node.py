"""A node for the benchmarks of layers: it has nothing, and its store is far away.

The store is on a tmpfs of its own: it is another machine's, so that `drop_caches` on this one does not concern it. A
sandbox is what a node mounts for one (an overlay over the layers, EROFS with the product's own options) and a command
in it by chroot: what surrounds it otherwise is the same however the layers come.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from msgspec import Struct

from dsec.bench.lazy_filler import FarDirectory
from dsec.edge.config import SystemClock
from dsec.errors import DsecError
from dsec.kernel import mounts, syscalls
from dsec.store.format import decode_manifest, trace_key
from dsec.store.index import ChunkIndex
from dsec.store.layers import LayerFiles, LayerStore, mount_layer
from dsec.store.lazy.large import FOLLOW, Follower
from dsec.store.lazy.service import LazyLayers
from dsec.store.leases import Leases
from dsec.store.shared import SharedLayers

STREAMS = 4
"""Of fetching a layer whole."""
ATTACH_S = 60.0
"""A layer that isn't attached by then never will be: reads fail by themselves, this would be waited for."""
_CHROOT = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin") or "chroot"


class Distance(Struct, frozen=True):
    """How far the store is."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0


class Place:
    """Where a benchmark keeps its nodes and their store. A context manager; removes all of it."""

    def __init__(self, root: Path, program: Path) -> None:
        """`program`: the compiled holder."""
        self.root = root
        self.program = program
        self.store = root / "store"
        self._numbers = 0

    def __enter__(self) -> Place:
        self.store.mkdir()
        syscalls.mount("none", self.store, "tmpfs", 0, "size=8g,mode=700")
        return self

    def __exit__(self, *_: object) -> None:
        mounts.unmount_under(self.root)

    def fresh(self, name: str) -> Path:
        """A directory that nothing used before."""
        self._numbers += 1
        path = self.root / f"{self._numbers}-{name}"
        path.mkdir()
        return path

    async def publish(self, layers: LayerStore, digests: Iterable[str]) -> None:
        """Put layers of this machine into the store."""
        shared = self.shared(layers, Distance())
        for digest in digests:
            await shared.push(digest)
        await shared.store.close()

    def shared(self, layers: LayerStore, distance: Distance) -> SharedLayers:
        """The store as a node sees it that is so far away. Close its `store`."""
        store = FarDirectory(self.store, distance.latency_s, distance.bytes_per_s)
        index = ChunkIndex(self.fresh("index") / "chunks.db", str(self.store))
        return SharedLayers(store, layers, index, Leases(store, SystemClock(), "bench"))

    @asynccontextmanager
    async def lazy(self, distance: Distance) -> AsyncIterator[LazyNode]:
        """A node that fills on demand."""
        root = self.fresh("lazy")
        run = root / "run"
        run.mkdir()
        words = [sys.executable, "-m", "dsec.bench.lazy_filler", root / "cache", self.store, run]
        numbers = [str(distance.latency_s), str(distance.bytes_per_s)]
        lazy = LazyLayers(cache=root / "cache", run=run, filler=[*map(str, words), *numbers])
        await lazy.open(self.program)
        node = LazyNode(root, lazy, self.program.with_name(FOLLOW))
        try:
            yield node
        finally:
            await node.settle()
            await lazy.close(keep=False)
            shutil.rmtree(root)

    @asynccontextmanager
    async def whole(self, distance: Distance) -> AsyncIterator[WholeNode]:
        """A node that fetches layers before it uses them."""
        root = self.fresh("whole")
        layers = LayerStore(root)
        shared = self.shared(layers, distance)
        try:
            yield WholeNode(root, layers, shared)
        finally:
            await shared.store.close()
            shutil.rmtree(root)

    def set_trace(self, layer: str, data: bytes | None) -> None:
        """What other nodes recorded; None: nothing."""
        path = self.store / trace_key(layer)
        path.unlink(missing_ok=True)
        if data is not None:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)

    def trace(self, layer: str) -> bytes | None:
        """What a node recorded; None: nothing was read."""
        path = self.store / trace_key(layer)
        return path.read_bytes() if path.exists() else None


class LazyNode:
    """Layers come as they are read."""

    def __init__(self, root: Path, lazy: LazyLayers, follow: Path) -> None:
        self.root = root
        self.lazy = lazy
        self._follow_library = follow
        self._followers: list[Follower] = []
        self._threads: list[threading.Thread] = []

    async def mount(self, layer: str, target: Path) -> None:
        """Raises TimeoutError where the filler gives no answer."""
        try:
            async with asyncio.timeout(ATTACH_S):
                files = await self.lazy.attach(layer)
        except TimeoutError:
            raise TimeoutError(f"the filler has not attached layer {layer} within {ATTACH_S:.0f} s") from None
        _mount(LayerFiles(files.image, files.data), target, lazy=not files.complete)
        if not files.complete:
            follower = Follower(self._follow_library)
            self._followers.append(follower)
            self._threads.append(threading.Thread(target=self._follow, args=(follower, layer, files.image, target)))
            self._threads[-1].start()

    def _follow(self, follower: Follower, layer: str, image: Path, target: Path) -> None:
        """As `LayerMounts` does."""
        hot = decode_manifest(image.with_name("manifest.json").read_bytes(), layer).hot
        follower.read(image, target, hot)

    async def settle(self) -> None:
        """Nothing is mounted any more."""
        for follower in self._followers:
            follower.stop()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    async def fetched(self, layers: Iterable[str]) -> int:
        """Bytes of data that came from the store."""
        counts = (await self.lazy.status())["layers"]
        return sum(counts[layer]["fetched_bytes"] for layer in layers)


class WholeNode:
    """Layers are fetched before they are mounted, each over `STREAMS` streams."""

    def __init__(self, root: Path, layers: LayerStore, shared: SharedLayers) -> None:
        self.root = root
        self._layers = layers
        self._shared = shared

    async def mount(self, layer: str, target: Path) -> None:
        await self._shared.pull(layer, streams=STREAMS)
        _mount(self._layers.files(layer), target, lazy=False)


class LocalNode:
    """Layers are here."""

    def __init__(self, layers: LayerStore) -> None:
        self._layers = layers

    def data_bytes(self, layer: str) -> int:
        """Size of a layer's data."""
        return self._layers.manifest(layer).data_bytes

    async def mount(self, layer: str, target: Path) -> None:
        _mount(self._layers.files(layer), target, lazy=False)


Node = LazyNode | WholeNode | LocalNode


def _mount(files: LayerFiles, target: Path, *, lazy: bool) -> None:
    target.mkdir()
    mount_layer(files, target, lazy=lazy, loops=not lazy)


@contextmanager
def unmounted_after(root: Path) -> Iterator[None]:
    """Whatever is mounted below `root` in here goes when it ends."""
    try:
        yield
    finally:
        mounts.unmount_under(root)


def overlay(lowers: Sequence[Path], root: Path) -> Path:
    """A sandbox's root over these mounted layers, top first."""
    for name in ("upper", "work", "top"):
        (root / name).mkdir(parents=True)
    joined = ":".join(map(str, lowers))
    options = f"lowerdir={joined},upperdir={root / 'upper'},workdir={root / 'work'},volatile"
    syscalls.mount("none", root / "top", "overlay", 0, options)
    return root / "top"


async def command(top: Path, words: Sequence[str]) -> None:
    """Run it in a sandbox's root. Raises `DsecError` with what it said where it fails."""
    process = await asyncio.create_subprocess_exec(
        *(_CHROOT, str(top), *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": "/work/src"},
    )
    _, said = await process.communicate()
    if process.returncode:
        raise DsecError(f"{' '.join(words)} failed: {said.decode(errors='replace')[-400:]}")


async def start(node: Node, place: Path, layers: Sequence[str], words: Sequence[str]) -> float:
    """Seconds until a sandbox of these layers, which nothing on the node has used, has carried out a command. Raises
    as `command`."""
    await asyncio.to_thread(drop_caches)
    with ExitStack() as undo:
        syscalls.mount("none", place, "tmpfs", 0, "size=1g")
        undo.enter_context(unmounted_after(place))
        await command(Path("/"), ["true"])  # so that the programs of this machine are back in memory
        began = time.perf_counter()
        lowers = [place / f"layer{number}" for number in range(len(layers))]
        await asyncio.gather(*(node.mount(layer, at) for layer, at in zip(layers, lowers, strict=True)))
        await command(overlay(lowers, place / "sandbox"), words)
        return time.perf_counter() - began


def drop_caches() -> None:
    """Forget the pages of all files that are on a disk. Blocks."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def disk_bytes(root: Path) -> int:
    """What the files below `root` take."""
    return sum((Path(top) / name).lstat().st_blocks * 512 for top, _, names in os.walk(root) for name in names)
