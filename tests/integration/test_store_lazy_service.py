"""Layers filled on demand as a node's server sees them: what is held in the store and the cache, and for how long."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import lazy_kit
import pytest
import store_kit
from test_store_lazy import digest, published

from dsec.bench.lazy import cached_bytes
from dsec.errors import Unavailable
from dsec.kernel import loop, mounts
from dsec.kernel.mounts import ErofsMount
from dsec.spec.sandbox import SandboxSpec
from dsec.store.blobs import DirectoryStore
from dsec.store.environments import Environment, EnvironmentStore
from dsec.store.layers import LayerMounts
from dsec.store.lazy import service
from dsec.store.lazy.large import FOLLOW
from dsec.store.lazy.service import LazyLayers
from dsec.store.remote import UNUSED_S, RemoteCatalog
from dsec.testing.clock import FakeClock

pytestmark = pytest.mark.root


class Server:
    """The part of a server that serves layers from a store which other nodes fill."""

    def __init__(self, root: Path, store: DirectoryStore) -> None:
        self.root = root
        for name in ("state", "run"):
            (root / name).mkdir(parents=True)
        self.clock = FakeClock()
        self.environments = EnvironmentStore(root / "state")
        self.mounts = LayerMounts(root / "run", self.environments.layers)
        self.mounts.follow = lazy_kit.holder_program().with_name(FOLLOW)
        self.mounts.open()
        self.shared = store_kit.node(root / "state", store)
        words = [sys.executable, "-m", "dsec.bench.lazy_filler", root / "cache", store.root, root / "run", "0", "0"]
        self.lazy = LazyLayers(cache=root / "cache", run=root / "run", filler=list(map(str, words)))
        self.remote = RemoteCatalog(self.shared, self.environments, self.lazy, self.clock, "node")

    async def start(self, name: str, layer: str) -> Path:
        """What a sandbox of an environment of this one layer stands on."""
        self.environments.learn(Environment(name=name, layers=[layer], project="p"))
        spec = SandboxSpec(environment=name)
        if not self.remote.knows(spec, "p"):
            await self.remote.learn(spec, "p")
        assert self.remote.knows(spec, "p")
        return self.mounts.path(layer)


@asynccontextmanager
async def server(root: Path, store: DirectoryStore) -> AsyncIterator[Server]:
    made = Server(root, store)
    await made.lazy.open(lazy_kit.holder_program())
    await made.remote.open()
    try:
        yield made
    finally:
        await made.remote.close()
        await asyncio.to_thread(made.mounts.unmount_all)
        await made.lazy.close(keep=False)


def touch(path: Path, *offsets: int) -> None:
    with open(path, "rb", buffering=0) as file:
        for offset in offsets:
            assert os.pread(file.fileno(), 1, offset)


def forget(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def digests(tree: Path) -> dict[str, str]:
    return {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tree.rglob("*")
        if path.is_file()
    }


async def test_garbage_collection_keeps_what_a_node_reads_on_demand(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    maker = store_kit.node(tmp_path / "maker", store)
    source = store_kit.project(tmp_path / "source", 1)
    layers = []
    for number in range(3):  # each new one needs the packs of those before it
        (source / f"own{number}").write_bytes(bytes([number]) * 300_000)
        layers.append(maker._layers.add(source, "workspace").digest)
        await maker.push(layers[-1])
    used, truth, later = layers[2], digests(source), time.time() + 7200
    async with server(tmp_path / "node", store) as node:
        top = await node.start("app", used)
        assert digest(top / "large") == truth["large"]
        fetched = (await node.lazy.status())["layers"][used]["fetched_bytes"]
        collecting = maker.collect(store_kit.only(), least_age_s=3600, now=later)
        reading = asyncio.to_thread(lambda: {name: digest(top / name) for name in truth})  # while it collects
        freed, found = await asyncio.gather(collecting, reading)
        assert freed > 0
        assert found == truth
        assert (await node.lazy.status())["layers"][used]["fetched_bytes"] > fetched
        assert [layer async for layer in maker.all()] == [used]
        await maker.verify(used)
        # A sandbox stands on it, then none does, for a while.
        await node.clock.advance(UNUSED_S + 1)
        await node.remote.let_go({used}, node.mounts.unmount)
        assert digest(top / "own0") == truth["own0"]
        await node.remote.let_go(set(), node.mounts.unmount)  # from now on it is known that nothing does
        await node.start("app", used)  # somebody asked
        await node.clock.advance(UNUSED_S - 1)
        await node.remote.let_go(set(), node.mounts.unmount)
        assert top.exists()
        await node.clock.advance(2)
        await node.remote.let_go(set(), node.mounts.unmount)
        assert mounts.find_mount(top) is None
        assert await maker.leases.used() == set()
        # It comes back when it is wanted, also while it is being let go.
        again, _ = await asyncio.gather(node.start("app", used), node.remote.let_go(set(), node.mounts.unmount))
        assert {name: digest(again / name) for name in truth} == truth
        assert await maker.leases.used() == {used}


async def test_a_large_hot_file_is_read_whole_once_it_was_begun(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    maker = store_kit.node(tmp_path / "maker", store)
    source = tmp_path / "source"
    source.mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(random.Random(9).randbytes(1 << 20))
    forget(outside)
    (source / "link").symlink_to(outside)
    os.mkfifo(source / "fifo")
    for name, size in {"begun": 1_500_000, "another": 1_500_000, "not hot": 1_500_000, "twice": 3_000_000}.items():
        (source / name).write_bytes(random.Random(name).randbytes(size))
    hot = ["/", "gone", "fifo", "link", "../outside", str(outside), "/begun", "another", "twice", "nul\0"]
    layer = maker._layers.add(source, "workspace", hot=hot).digest
    await maker.push(layer)
    (source / "link").unlink()
    truth = digests(source)

    async with server(tmp_path / "node", store) as node:
        top = await node.start("app", layer)

        async def fetched() -> int:
            return int((await node.lazy.status())["layers"][layer]["fetched_bytes"])

        touch(top / "begun", 0)
        whole = -(-1_500_000 // 4096) * 4096
        await store_kit.until(lambda: cached_bytes(top / "begun") == whole)
        assert await fetched() == whole
        assert cached_bytes(top / "another") == cached_bytes(top / "twice") == 0
        asked = (await node.lazy.status())["holder"]
        assert digest(top / "begun") == truth["begun"]
        assert (await node.lazy.status())["holder"] == asked  # nobody had to be asked
        touch(top / "twice", 0, 2_000_000)
        await store_kit.until(lambda: cached_bytes(top / "twice") == -(-3_000_000 // 4096) * 4096)
        assert {name: digest(top / name) for name in truth} == truth
        assert cached_bytes(outside) == 0
        await asyncio.to_thread(node.mounts.unmount, layer)  # it goes with its mount
        assert mounts.find_mount(top) is None
        assert not [thread for thread in threading.enumerate() if thread.name == "dsec-warm"]


async def test_large_programs_are_read_whole_where_no_file_is_called_hot(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    maker = store_kit.node(tmp_path / "maker", store)
    source = tmp_path / "source"
    (source / "usr/lib").mkdir(parents=True)
    (source / "lib").symlink_to("usr/lib")
    (source / "opt").symlink_to("/")
    for name in ("etc", "usr/lib/x86_64-linux-gnu"):
        (source / name).mkdir()
    (source / "etc/ld.so.cache").write_bytes(b"list" * 3000)
    begins = ("usr/lib/x86_64-linux-gnu/libc.so.6", "etc/ld.so.cache")
    for name in (begins[0], "usr/lib/libbegun.so", "usr/lib/libother.so", "elsewhere"):
        (source / name).write_bytes(random.Random(name).randbytes(1_000_000))
    layer = maker._layers.add(source, "workspace").digest
    await maker.push(layer)
    truth, whole = digests(source), -(-1_000_000 // 4096) * 4096
    async with server(tmp_path / "node", store) as node:
        top = await node.start("app", layer)
        await store_kit.until(lambda: all(cached_bytes(top / name) for name in begins))
        await store_kit.until(lambda: cached_bytes(top / begins[0]) == whole)
        touch(top / "elsewhere", 0)
        touch(top / "usr/lib/libbegun.so", 500_000)
        await store_kit.until(lambda: cached_bytes(top / "usr/lib/libbegun.so") == whole)
        assert cached_bytes(top / "usr/lib/libother.so") == 0
        assert {name: digest(top / name) for name in truth} == truth


async def test_what_nothing_mounts_is_released_when_the_server_starts_again(tmp_path: Path) -> None:
    with lazy_kit.node(tmp_path, fuse=True, most_bytes=1 << 20, idle_s=0.4) as made:
        looped, truth = published(made, 1)
        other, _ = published(made, 2)
        for layer in (looped, other):
            assert "ok" in made.call("attach", layer)
        target = tmp_path / "looped"
        target.mkdir()
        image = made.cache / looped / "meta.erofs"  # as on Linux before 6.12
        with loop.attach(image, readonly=True) as meta, loop.attach(made.marked / looped, readonly=True) as data:
            ErofsMount(meta.path, target, data=data.path).mount()
        made.mounted.append(target)
        assert {name: digest(target / name) for name in truth} == truth
        assert "ok" in made.call("complete", other)
        lazy = LazyLayers(cache=made.cache, run=made.root, filler=[], way="fuse")
        assert await lazy.open(made.program)  # the filler lives: what is mounted can be trusted
        try:
            assert lazy.mounted() == lazy.attached() == {looped}
            lazy.adopted()
            await store_kit.until(lambda: not (made.cache / other).exists())
            made.forget_pages(target)
            assert {name: digest(target / name) for name in truth} == truth
        finally:
            await lazy.close(keep=True)


async def test_a_filler_that_is_late_leaves_no_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host; the server goes on without lazy layers."""
    monkeypatch.setattr(service, "_START_S", 0.5)
    (tmp_path / "run").mkdir()
    lazy = LazyLayers(cache=tmp_path / "cache", run=tmp_path / "run", filler=["sh", "-c", "sleep 2", "filler"])
    try:
        with pytest.raises((TimeoutError, Unavailable)):
            await lazy.open(lazy_kit.holder_program())
        assert not lazy._holder_lives()
    finally:
        await lazy.close(keep=False)
