"""The filler of a benchmark's node: the product's own, but its store is as far away as a real one.

`python -m dsec.bench.lazy_filler CACHE STORE RUN LATENCY_S BYTES_PER_S [--copier PROGRAM]`
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from dsec.edge.config import SystemClock
from dsec.ports import Clock
from dsec.store.blobs import DirectoryStore
from dsec.store.format import Chunk
from dsec.store.lazy.cache import LazyCache
from dsec.store.lazy.copier import CHECK, COPY, Copier, CopierGone, Done, Outcome
from dsec.store.lazy.filler import Filler
from dsec.store.lazy.questions import Events
from dsec.store.lazy.running import serve_filler
from dsec.testing.blobs import FaultyStore


class FarDirectory(FaultyStore):
    """A directory as a remote store: each call takes so long, each read goes at that rate."""

    def __init__(self, root: Path, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(DirectoryStore(root))
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s

    def file(self, key: str) -> Path | None:
        """`FarCopier` is as late as we are."""
        return self.inner.file(key)


class FarCopier(Copier):
    """The product's, whose reads of a job's source take as long as one of a far store's."""

    def __init__(self, program: Path, holder: Path, clock: Clock, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(program, holder, clock)
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._tickets = itertools.count(-1, -1)
        self._on_way: dict[int, int] = {}
        """Jobs whose bytes have not arrived: at which priority they are copied then."""
        self._arrived: dict[int, int] = {}
        """The copier's numbers of the others."""

    def copy(
        self,
        source: Path,
        offset: int,
        chunks: Sequence[Chunk],
        target: int,
        done: Done,
        *,
        nice: int,
        token: int = 0,
        kind: int = COPY,
    ) -> int:
        seconds = self._latency_s
        if self._bytes_per_s:
            seconds += sum(chunk.size for chunk in chunks) / self._bytes_per_s
        if not seconds or kind == CHECK:  # what is checked is here
            return super().copy(source, offset, chunks, target, done, nice=nice, token=token, kind=kind)
        due, loop = time.monotonic() + seconds, asyncio.get_running_loop()
        ours, ticket = os.dup(target), next(self._tickets)
        self._on_way[ticket] = nice

        def copied(outcome: Outcome) -> None:
            self._arrived.pop(ticket, None)
            done(outcome)

        def arrived() -> None:
            if (left := due - time.monotonic()) > 0:  # a loop's timers are early too, by up to a millisecond
                loop.call_later(left, arrived)
                return
            nice = self._on_way.pop(ticket)
            try:
                self._arrived[ticket] = super(FarCopier, self).copy(
                    source, offset, chunks, ours, copied, nice=nice, token=token, kind=kind
                )
            except CopierGone as error:
                done(Outcome(error))
            finally:
                os.close(ours)

        loop.call_later(seconds, arrived)
        return ticket

    def hasten(self, job: int, nice: int) -> None:
        """Also one that is on its way."""
        if job in self._on_way:
            self._on_way[job] = nice
        else:
            super().hasten(self._arrived.get(job, job), nice)


async def fill(cache: Path, run: Path, store: Path, distance: Sequence[float], program: Path | None) -> None:
    """Serve until the holder ends."""
    clock, socket = SystemClock(), run / "holder.sock"
    copier = FarCopier(program, socket, clock, *distance) if program else None
    far = FarDirectory(store, *distance)
    filler = Filler(LazyCache(cache), far, Events(socket), clock, most_bytes=1 << 40, copier=copier)
    await serve_filler(filler, run / "fill.sock", clock, copier)


if __name__ == "__main__":
    cache, store, run = map(Path, sys.argv[1:4])
    program = Path(sys.argv[7]) if sys.argv[6:7] == ["--copier"] else None
    uvloop.run(fill(cache, run, store, [*map(float, sys.argv[4:6])], program))
