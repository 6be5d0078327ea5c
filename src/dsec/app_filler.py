"""The composition of the process that fills lazy layers beside a server: without HTTP, backends and edge, so that it is
there soon after it died, and small.
"""

from __future__ import annotations

from pathlib import Path

import uvloop

from dsec.configuration import read_config
from dsec.edge.config import SystemClock
from dsec.edge.logs import configure
from dsec.store.blobs import open_store
from dsec.store.lazy.cache import LazyCache
from dsec.store.lazy.copier import Copier
from dsec.store.lazy.filler import Filler
from dsec.store.lazy.fuse import FuseFiles
from dsec.store.lazy.questions import Events, Questions
from dsec.store.lazy.running import serve_filler
from dsec.store.lazy.service import DEADLINE_S


def run_filler(state: Path, *, fuse: bool, copier: Path | None) -> int:
    """Fill lazy layers until the holder ends or SIGTERM comes: the process that the server starts beside itself.
    `fuse`: there is no holder, it makes the file system that reads come from. `copier`: the compiled program."""
    configure("human", "info")
    config = read_config(state)

    async def fill() -> None:
        store = open_store(config.store)
        try:
            cache = LazyCache(config.cache)
            clock = SystemClock()
            questions: Questions
            if fuse:
                questions = FuseFiles(config.run / "lazy", deadline_s=DEADLINE_S)
            else:
                questions = Events(config.run / "holder.sock")
            helper = Copier(copier, None if fuse else config.run / "holder.sock", clock) if copier else None
            filler = Filler(cache, store, questions, clock, most_bytes=config.cache_bytes, copier=helper)
            await serve_filler(filler, config.run / "fill.sock", clock, helper)
        finally:
            await store.close()

    uvloop.run(fill())
    return 0
