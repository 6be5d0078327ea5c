"""A lazy layer without a server: made by mkfs.erofs with its data apart, served by a holder and a filler of the test's
own. Run as a program, this is the filler: `lazy_kit.py ROOT DELAY_S MOST_BYTES IDLE_S fuse|events COPIER`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import msgspec

from dsec.backends.container.native import build_native
from dsec.edge.config import SystemClock
from dsec.errors import Unavailable
from dsec.kernel import loop, mounts, syscalls
from dsec.kernel.mounts import ErofsMount
from dsec.store.blobs import DirectoryStore
from dsec.store.format import (
    Manifest,
    Place,
    manifest_key,
    metadata_key,
    pack_chunks,
    pack_key,
    pack_places,
    placement_key,
)
from dsec.store.lazy import filler, holder
from dsec.store.lazy.cache import LazyCache
from dsec.store.lazy.copier import Copier
from dsec.store.lazy.fuse import FuseFiles
from dsec.store.lazy.questions import Events
from dsec.store.lazy.running import serve_filler

CHUNK = 65536
BALLAST = "ballast"


class SlowDirectory(DirectoryStore):
    """A store that answers late; gone while a file `gone` is in it, wrong while there is `wrong`. While `held`
    is there, packs that it names answer nothing: all, where it is empty."""

    def __init__(self, root: Path, delay_s: float = 0.0) -> None:
        super().__init__(root)
        self.delay_s = delay_s

    def file(self, key: str) -> Path | None:
        faulty = self.delay_s or any((self.root / name).exists() for name in ("gone", "wrong", "held"))
        return None if faulty else super().file(key)

    async def _enter(self) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if await self.size("gone") is not None:
            raise Unavailable("the store is gone")

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        await self._enter()
        while key.startswith("packs/") and self._holds(key):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        data = await super().get(key, offset, size)
        if key.startswith("packs/") and await self.size("wrong") is not None:
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    def _holds(self, key: str) -> bool:
        try:
            return (self.root / "held").read_text() in key
        except FileNotFoundError:
            return False

    async def get_each(self, keys: Sequence[str], most: int) -> list[bytes | None]:
        await self._enter()
        return await super().get_each(keys, most)


def make_tree(top: Path, seed: int, sizes: list[int]) -> dict[str, str]:
    """Random files; returns the digest of each by name."""
    rng = random.Random(seed)
    top.mkdir()
    digests = {}
    for index, size in enumerate(sizes):
        data = rng.randbytes(size)
        (top / f"f{index}").write_bytes(data)
        digests[f"f{index}"] = hashlib.sha256(data).hexdigest()
    return digests


def publish(tree: Path, scratch: Path, store: Path) -> str:
    """Put a layer of the tree into the store; returns its digest."""
    meta, data = scratch / "meta", scratch / "data"
    subprocess.run(
        ["mkfs.erofs", "--quiet", f"--chunksize={CHUNK}", f"--blobdev={data}", str(meta), str(tree)], check=True
    )
    content = data.read_bytes()
    content += bytes(-len(content) % 4096)
    pieces = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
    pack = hashlib.sha256(content).hexdigest()
    metadata = meta.read_bytes()
    manifest = Manifest(
        kind="directory",
        metadata=hashlib.sha256(metadata).hexdigest(),
        metadata_bytes=len(metadata),
        data_bytes=len(content),
        chunks=pack_chunks((len(piece), hashlib.sha256(piece).digest()) for piece in pieces),
    )
    placement = pack_places(Place(pack, at * CHUNK) for at in range(len(pieces)))
    objects = {
        manifest_key(manifest.digest): manifest.encode(),
        placement_key(manifest.digest): msgspec.json.encode(placement),
        metadata_key(manifest.metadata): metadata,
        pack_key(pack): content,
    }
    for key, value in objects.items():
        path = store / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
    return manifest.digest


@cache
def holder_program() -> Path:
    """The compiled holder, made once for each version of its sources and kept between runs."""
    return build_native(Path(__file__).parents[2] / "build" / "tests") / "holder"


def older_holder(scratch: Path) -> Path:
    """One as it was compiled before its table grew: the same in all else that a successor inherits."""
    sources = scratch / "native"
    shutil.copytree(Path(__file__).parents[2] / "native", sources)
    for name, old, new in (
        ("waits.h", "#define SLOTS 32768", "#define SLOTS 4096"),
        ("main.c", "#define SLOT_BITS 15", "#define SLOT_BITS 12"),
    ):
        path = sources / "holder" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    made = scratch / "older" / "holder"
    subprocess.run(["make", "-s", "-C", str(sources), f"OUT={made.parent}", str(made)], check=True)
    return made


class Node:
    """A cache directory, its marked twin, a holder and a filler."""

    def __init__(
        self,
        root: Path,
        *,
        delay_s: float = 0.0,
        deadline_s: float = 300.0,
        most_bytes: int = 1 << 40,
        idle_s: float = 60.0,
        cache_bytes: int = 0,
        fuse: bool = False,
        program: Path | None = None,
    ) -> None:
        """`cache_bytes`: the disk of the cache is no larger. `program`: the first holder; its successors are ours."""
        self.root = root
        self.fuse = fuse
        self.options = [str(delay_s), str(most_bytes), str(idle_s), "fuse" if fuse else "events", str(deadline_s)]
        self.deadline_s = deadline_s
        self.store = root / "store"
        self.cache = root / "cache"
        self.marked = root / "marked"
        for path in (self.store, self.cache, self.marked):
            path.mkdir(exist_ok=True)
        if cache_bytes:
            self._small_disk(cache_bytes)
        if not fuse:
            syscalls.mount(self.cache, self.marked, None, syscalls.MS_BIND)
        self.holder_path = root / "holder.sock"
        self.control_path = root / "fill.sock"
        self.program = holder_program()
        self.holder: subprocess.Popen[bytes] | None = None
        if not fuse:
            first = program or self.program
            self.holder = holder.start_holder(first, self.holder_path, self.marked, deadline_s=deadline_s)
        self.kept: tuple[int, int] | None = None
        self.filler: subprocess.Popen[bytes] | None = None
        self.mounted: list[Path] = []
        self.start_filler()

    def start_filler(self) -> None:
        self.filler = subprocess.Popen(
            [sys.executable, __file__, str(self.root), *self.options, str(self.program.with_name("copier"))]
        )
        until = time.monotonic() + 120
        while not self._listens():
            assert self.filler.poll() is None, "the filler ended"
            assert time.monotonic() < until
            time.sleep(0.01)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as channel:
            return channel.connect_ex(str(self.control_path)) == 0

    def kill_filler(self) -> None:
        assert self.filler is not None
        self.filler.kill()
        self.filler.wait()
        self.control_path.unlink(missing_ok=True)

    def stop_filler(self) -> None:
        assert self.filler is not None
        self.filler.send_signal(signal.SIGTERM)
        self.filler.wait(120)
        self.control_path.unlink(missing_ok=True)

    def copiers(self) -> list[int]:
        """The filler's children."""
        assert self.filler is not None
        tasks = Path(f"/proc/{self.filler.pid}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]

    def keep(self) -> None:
        """Hold what lets a successor of the holder take over."""
        client = holder.HolderClient(self.holder_path)
        self.kept = client.take()
        client.close()

    def waiting(self) -> int:
        """Reads that wait at the holder."""
        client = holder.HolderClient(self.holder_path)
        try:
            return client.stats().waiting
        finally:
            client.close()

    def kill_holder(self) -> None:
        assert self.holder is not None
        self.holder.kill()
        self.holder.wait()

    def succeed_holder(self) -> None:
        assert self.kept is not None
        self.holder = holder.start_holder(
            self.program, self.holder_path, self.marked, deadline_s=self.deadline_s, inherited=self.kept
        )

    def call(self, name: str, layer: str = "") -> dict[str, object]:
        """A control call; returns the answer's line."""
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(180)
            channel.connect(str(self.control_path))
            channel.sendall(json.dumps({"id": 1, "call": name, "layer": layer}).encode() + b"\n")
            with channel.makefile("rb") as lines:
                for line in lines:
                    answer: dict[str, object] = json.loads(line)
                    if "failed" not in answer:
                        return answer
        raise AssertionError("no answer")

    def mount(self, layer: str, *, marked: bool = True) -> Path:
        assert "ok" in self.call("attach", layer)
        target = self.root / f"mnt{len(self.mounted)}"
        target.mkdir()
        data = (self.marked if marked else self.cache) / layer
        if not self.fuse or not marked:
            data /= "data"
        ErofsMount(self.cache / layer / "meta.erofs", target, data=data, loops=self.fuse).mount()
        self.mounted.append(target)
        return target

    def unmount_last(self) -> None:
        mounts.unmount(self.mounted[-1])

    def _small_disk(self, free_bytes: int) -> None:
        image = self.root / "disk"
        with open(image, "wb") as file:
            file.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", str(image)], check=True)
        with loop.attach(image) as device:
            syscalls.mount(device.path, self.cache, "ext4")
        with open(self.cache / BALLAST, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.cache).free - free_bytes)

    def grow_disk(self) -> None:
        """Only where `cache_bytes` made it small."""
        (self.cache / BALLAST).unlink()

    @staticmethod
    def forget_pages(top: Path, name: str | None = None) -> None:
        """Have the next read of a mounted layer's files ask again."""
        for path in [top / name] if name else top.iterdir():
            if path.is_file():
                with open(path, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for target in self.mounted:
            mounts.unmount(target)
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            if self.filler is not None and self.filler.poll() is None:
                self.stop_filler()
        if self.holder is not None and self.holder.poll() is None:
            self.kill_holder()
        for descriptor in self.kept or ():
            os.close(descriptor)
        mounts.unmount_under(self.marked)
        mounts.unmount_under(self.cache)


@contextmanager
def node(root: Path, **options: float | Path) -> Iterator[Node]:
    made = Node(root, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


async def _main(
    root: Path, delay_s: float, most_bytes: int, idle_s: float, *, fuse: bool, deadline_s: float, copier: Path
) -> None:
    clock = SystemClock()
    helper = Copier(copier, None if fuse else root / "holder.sock", clock)
    made = filler.Filler(
        LazyCache(root / "cache"),
        SlowDirectory(root / "store", delay_s),
        FuseFiles(root / "marked", deadline_s=deadline_s) if fuse else Events(root / "holder.sock"),
        clock,
        most_bytes=most_bytes,
        idle_s=idle_s,
        keep_every_s=min(20.0, idle_s / 2),
        copier=helper,
    )
    await serve_filler(made, root / "fill.sock", clock, helper)


if __name__ == "__main__":
    top, delay, most, idle, way, deadline, program = sys.argv[1:]
    asyncio.run(
        _main(
            Path(top),
            float(delay),
            int(most),
            float(idle),
            fuse=way == "fuse",
            deadline_s=float(deadline),
            copier=Path(program),
        )
    )
