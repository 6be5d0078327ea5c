"""Stores for tests: a directory, and a bucket of a real S3 server's."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dsec.edge.config import SystemClock
from dsec.ports import BlobStore, Clock
from dsec.store.index import ChunkIndex
from dsec.store.layers import LayerStore
from dsec.store.leases import Leases
from dsec.store.shared import SharedLayers
from free_port import free_port


@contextmanager
def s3_server() -> Iterator[str]:
    """A server of the S3 protocol in a process of its own. Yields its URL."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the S3 server did not start"
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait()


def make_bucket(url: str, name: str) -> None:
    """Without credentials: the server takes any."""
    urllib.request.urlopen(urllib.request.Request(f"{url}/{name}", method="PUT"), timeout=60).close()


def node(state: Path, store: BlobStore, clock: Clock | None = None) -> SharedLayers:
    """What one node sees of a store."""
    state.mkdir(exist_ok=True)
    layers = LayerStore(state)
    leases = Leases(store, clock or SystemClock(), state.name)
    return SharedLayers(store, layers, ChunkIndex(state / "chunks.db", "test"), leases)


def project(top: Path, seed: int, files: int = 60) -> Path:
    """A tree of files of many sizes."""
    noise = random.Random(seed)
    for number in range(files):
        path = top / f"d{number % 7}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise.randbytes(noise.choice((10, 3000, 20_000, 150_000))))
    (top / "large").write_bytes(noise.randbytes(2_000_000))
    return top


async def keys(store: BlobStore, prefix: str) -> list[str]:
    return sorted([info.key async for info in store.list(prefix)])


def only(*layers: str) -> Callable[[], Awaitable[Sequence[str]]]:
    """Roots of a garbage collection."""

    async def roots() -> Sequence[str]:
        return layers

    return roots


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait for it to be true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (files are looked at)
            await asyncio.sleep(0.01)
