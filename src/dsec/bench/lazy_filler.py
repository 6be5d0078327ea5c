"""The filler of a benchmark's node: the product's own, but its store is as far away as a real one.

`python -m dsec.bench.lazy_filler CACHE STORE RUN LATENCY_S BYTES_PER_S`
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop

from dsec.edge.config import SystemClock
from dsec.store.blobs import DirectoryStore
from dsec.store.lazy.cache import LazyCache
from dsec.store.lazy.filler import Filler, serve_filler
from dsec.store.lazy.questions import Events
from dsec.testing.blobs import FaultyStore


def far_store(root: Path, latency_s: float, bytes_per_s: float) -> FaultyStore:
    """A directory as a remote store: each call takes so long, each read goes at that rate."""
    store = FaultyStore(DirectoryStore(root))
    store.latency_s, store.bytes_per_s = latency_s, bytes_per_s
    return store


async def fill(cache: Path, run: Path, store: FaultyStore) -> None:
    """Serve until the holder ends."""
    filler = Filler(LazyCache(cache), store, Events(run / "holder.sock"), SystemClock(), most_bytes=1 << 40)
    await serve_filler(filler, run / "fill.sock")


if __name__ == "__main__":
    cache, store, run = map(Path, sys.argv[1:4])
    uvloop.run(fill(cache, run, far_store(store, *map(float, sys.argv[4:6]))))
