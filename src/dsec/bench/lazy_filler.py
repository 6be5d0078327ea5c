"""The filler of a benchmark's node: the product's own, but its store is as far away as a real one.

`python -m dsec.bench.lazy_filler CACHE STORE RUN LATENCY_S BYTES_PER_S [--copier PROGRAM]`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from dsec.edge.config import SystemClock
from dsec.store.blobs import DirectoryStore
from dsec.store.lazy.cache import LazyCache
from dsec.store.lazy.copier import Copier
from dsec.store.lazy.filler import Filler
from dsec.store.lazy.questions import Events
from dsec.store.lazy.running import serve_filler
from dsec.testing.blobs import FaultyStore

FAR = "far.so"
"""Beside the copier."""


class FarDirectory(FaultyStore):
    """A directory as a remote store: each call takes so long, each read goes at that rate."""

    def __init__(self, root: Path, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(DirectoryStore(root))
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s

    def file(self, key: str) -> Path | None:
        """The copier is as late as we are (`native/far`)."""
        return self.inner.file(key)


def far_words(program: Path, store: Path, latency_s: float, bytes_per_s: float) -> dict[str, str]:
    """The environment in which a copier is as late."""
    library = program.with_name(FAR).resolve(strict=True)
    return {"LD_PRELOAD": str(library), "DSEC_FAR": f"{latency_s * 1e9:.0f} {bytes_per_s:.0f} {store}"}


async def fill(cache: Path, run: Path, store: Path, distance: Sequence[float], program: Path | None) -> None:
    """Serve until the holder ends."""
    clock, socket = SystemClock(), run / "holder.sock"
    if program and any(distance):
        os.environ |= far_words(program, store, *distance)
    copier = Copier(program, socket, clock) if program else None
    far = FarDirectory(store, *distance)
    filler = Filler(LazyCache(cache), far, Events(socket), clock, most_bytes=1 << 40, copier=copier)
    await serve_filler(filler, run / "fill.sock", clock, copier)


if __name__ == "__main__":
    cache, store, run = map(Path, sys.argv[1:4])
    program = Path(sys.argv[7]) if sys.argv[6:7] == ["--copier"] else None
    uvloop.run(fill(cache, run, store, [*map(float, sys.argv[4:6])], program))
