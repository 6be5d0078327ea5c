"""Whoever waits for the filler hears of it, whatever goes wrong; and a benchmark's store is as far as it says."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import lazy_kit
import native_guest
import pytest
import uvloop

from dsec.bench import lazy_node
from dsec.bench.lazy_filler import FAR, FarDirectory, far_words
from dsec.configuration import read_config
from dsec.edge.config import SystemClock
from dsec.errors import Unavailable
from dsec.store.blobs import DirectoryStore
from dsec.store.format import Chunk
from dsec.store.lazy import holder
from dsec.store.lazy.cache import LazyCache
from dsec.store.lazy.control import Control
from dsec.store.lazy.copier import Copier, Outcome
from dsec.store.lazy.filler import Filler
from dsec.store.lazy.holder import Waiting
from dsec.store.lazy.rehearsal import Nobody
from dsec.store.lazy.service import LazyLayers, Way

LATENCY_S = 0.002
BYTES_PER_S = 50e6


class Broken(DirectoryStore):
    """Has a bug."""

    broken = True

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        if self.broken and key.startswith("packs/"):
            raise KeyError(key)
        return await super().get(key, offset, size)


@asynccontextmanager
async def layers(root: Path, way: Way = "") -> AsyncIterator[LazyLayers]:
    """Of a server whose store is `root/store`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSEC_RUN", str(root / "run"))
        patch.setenv("DSEC_STORE", str(root / "store"))
        config = read_config(root / "state")
        for path in (config.run, config.cache, root / "store"):
            path.mkdir(parents=True)
        words = [sys.executable, "-m", "dsec.cli.main", "filler", "--state", config.state]
        made = LazyLayers(cache=config.cache, run=config.run, filler=words, way=way)
        await made.open(lazy_kit.holder_program())
        try:
            yield made
        finally:
            await made.close(keep=False)


async def test_a_call_that_fails_as_nobody_foresaw_is_answered(tmp_path: Path) -> None:
    async def call(name: str, layer: str) -> dict[str, Any]:
        if name == "attach":
            raise KeyError(layer)
        return {}

    control = Control(call)
    server = await control.serve(tmp_path / "fill.sock")
    reader, writer = await asyncio.open_unix_connection(tmp_path / "fill.sock")
    for number, name in enumerate(("attach", "status")):
        writer.write(json.dumps({"id": number, "call": name, "layer": "ab"}).encode() + b"\n")
    async with asyncio.timeout(native_guest.PATIENCE_S):
        answers = {answer["id"]: answer for answer in [json.loads(await reader.readline()) for _ in range(2)]}
    assert answers[0]["error"]["code"] == "internal"
    assert "KeyError: 'ab'" in answers[0]["error"]["message"]
    assert answers[1]["ok"] == {}
    writer.close()
    server.close()
    await control.close()


async def test_a_read_that_fails_as_nobody_foresaw_is_answered_and_the_next_one_tries_anew(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    lazy_kit.make_tree(tmp_path / "tree", 1, [200_000])
    layer = lazy_kit.publish(tmp_path / "tree", tmp_path, tmp_path / "store")
    store, nobody, cache = Broken(tmp_path / "store"), Nobody(), LazyCache(tmp_path / "cache")
    filler = Filler(cache, store, nobody, SystemClock(), most_bytes=1 << 30)
    try:
        await filler.attach(layer)
        for store.broken, blob, error in ((True, 0, errno.EIO), (True, 5, errno.EIO), (False, 0, 0)):
            filler.read(Waiting(1, blob, 0, 4096))
            async with asyncio.timeout(native_guest.PATIENCE_S):
                assert await nobody.answers.get() == error
        store.broken = True
        assert filler._serve(layer).cached.missing
        with pytest.raises(KeyError):
            await filler.complete(layer)
    finally:
        await filler.close()
        cache.close()
        await store.close()


@pytest.mark.root
async def test_an_answer_is_not_lost_with_whoever_else_was_cancelled(tmp_path: Path) -> None:
    async with layers(tmp_path) as made:
        for turns in range(600):
            call = asyncio.create_task(made.status())
            for _ in range(turns % 20):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
        async with asyncio.timeout(native_guest.PATIENCE_S):
            assert (await made.status())["layers"] == {}


@pytest.mark.root
async def test_calls_that_begin_while_a_filler_ends_go_to_the_next_one(tmp_path: Path) -> None:
    async with layers(tmp_path) as made:
        calls = []
        made._processes[-1].kill()
        while made.hears:
            calls.append(asyncio.create_task(made.status()))
            await asyncio.sleep(0)
        async with asyncio.timeout(native_guest.PATIENCE_S):
            assert all(answer["layers"] == {} for answer in await asyncio.gather(*calls))


@pytest.mark.root
@pytest.mark.parametrize("error", [KeyError, OSError])
async def test_a_filler_is_kept_running_whatever_fails_for_those_who_are_told(
    tmp_path: Path, error: type[Exception]
) -> None:
    def told(layer: str) -> None:
        raise error(layer)

    lazy_kit.make_tree(tmp_path / "tree", 1, [200_000])
    async with layers(tmp_path, "fuse") as made:
        made.on_lost = told
        layer = lazy_kit.publish(tmp_path / "tree", tmp_path, tmp_path / "store")
        await made.attach(layer)
        for count in (1, 2):
            made._processes[-1].kill()
            while made.lost[layer] < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            async with asyncio.timeout(native_guest.PATIENCE_S):
                assert layer in (await made.status())["layers"]
        assert made.attached() == {layer}


@pytest.mark.root
async def test_an_answer_of_the_holder_that_comes_late_is_not_the_next_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "_TIMEOUT_S", 0.2)
    with lazy_kit.node(tmp_path) as made:
        client = holder.HolderClient(made.holder_path)
        assert made.holder is not None
        native_guest.stop(made.holder.pid)
        try:
            with pytest.raises(Unavailable):
                client.stats()
        finally:
            made.holder.send_signal(signal.SIGCONT)
        monkeypatch.undo()
        with pytest.raises(OSError, match="Invalid argument"):
            client.complete(holder.BLOBS, 0)
        client.close()


@pytest.mark.root
async def test_a_benchmark_says_what_it_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_node, "ATTACH_S", 0.2)
    with lazy_node.Place(tmp_path, lazy_kit.holder_program()) as place:
        async with place.lazy(lazy_node.Distance()) as made:
            filler = made.lazy._processes[-1]
            native_guest.stop(filler.pid)
            try:
                with pytest.raises(TimeoutError, match="ab" * 32):
                    await made.mount("ab" * 32, tmp_path / "top")
            finally:
                filler.send_signal(signal.SIGCONT)


async def test_a_far_copier_is_as_late_as_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(3).randbytes(1_000_000)
    (tmp_path / "from").write_bytes(data)
    chunks = [
        Chunk(at, 100_000, hashlib.sha256(data[at : at + 100_000]).digest()) for at in range(0, 1_000_000, 100_000)
    ]
    program = native_guest.built("static", "copier")
    native_guest.built("static", FAR)
    for name, value in far_words(program, tmp_path, LATENCY_S, BYTES_PER_S).items():
        monkeypatch.setenv(name, value)
    copier = Copier(program, None, SystemClock())
    target = os.open(tmp_path / "to", os.O_RDWR | os.O_CREAT)

    async def copied(some: list[Chunk]) -> None:
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        copier.copy(tmp_path / "from", some[0].offset, some, target, done.set_result, nice=0)
        assert (await done).error is None

    try:
        for streams in (2, 4):
            began = time.monotonic()
            told = await copier.copy_telling(tmp_path / "from", target, 1 << 20, streams=streams, nice=0)
            assert time.monotonic() - began >= LATENCY_S + len(data) / BYTES_PER_S / streams
            assert told == hashlib.sha256(data).digest()
        began = time.monotonic()
        await copied(chunks)  # one request
        assert time.monotonic() - began >= LATENCY_S + len(data) / BYTES_PER_S
        began = time.monotonic()
        for chunk in chunks:  # each of them is one
            await copied([chunk])
        assert time.monotonic() - began >= len(chunks) * LATENCY_S + len(data) / BYTES_PER_S
    finally:
        os.close(target)
        await copier.close()
    assert (tmp_path / "to").read_bytes() == data


def test_a_far_directory_is_never_nearer_than_it_says(tmp_path: Path) -> None:
    """Else a filler would take it for a near one now and then."""
    (tmp_path / "object").write_bytes(b"x")
    store = FarDirectory(tmp_path, LATENCY_S, 0.0)

    async def quickest(dice: random.Random) -> float:
        took = []
        for _ in range(100):
            began = time.monotonic()
            await (store.get("object") if dice.random() < 0.5 else store.size("object"))
            took.append(time.monotonic() - began)
            await asyncio.sleep(dice.random() * LATENCY_S)  # the loop wakes for others too
        return min(took)

    async def all_of_them() -> list[float]:
        try:
            return await asyncio.gather(*(quickest(random.Random(seed)) for seed in range(5)))
        finally:
            await store.close()

    assert min(uvloop.run(all_of_them())) >= LATENCY_S
