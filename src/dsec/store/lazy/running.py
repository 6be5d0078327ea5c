"""The filler's process: its priority, its threads, its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsec.ports import Clock
from dsec.store.lazy.copier import Copier
from dsec.store.lazy.fetch import NICE
from dsec.store.lazy.filler import Filler
from dsec.store.lazy.rehearsal import rehearse
from dsec.store.threads import started_pool

_THREADS = 4
_SWITCH_S = 0.0005
"""A thread that has something to say waits for the interpreter no longer."""
_COLLECT = (50_000, 20, 50)
"""What is made by the thousand here is a layer's chunks, which stay: looking through them again frees nothing."""


async def serve_filler(filler: Filler, control: Path, clock: Clock, copier: Copier | None) -> None:
    """Run until SIGTERM, or until the holder is gone. `copier`: the filler's own; it ends too."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    _be_prompt()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each layer in the cache has two descriptors
    loop.set_default_executor(started_pool(_THREADS, "dsec-filler"))
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    sys.setswitchinterval(_SWITCH_S)
    filler.open()
    await rehearse(filler.cache.scratch, clock, copier)
    await filler.fetcher.measure()
    await filler.prepare()
    gc.freeze()
    gc.set_threshold(*_COLLECT)
    server = await filler.control.serve(control)
    waits: Iterable[asyncio.Task[Any]] = [
        asyncio.create_task(stop.wait()),
        asyncio.create_task(filler.gone.wait()),
        asyncio.create_task(filler.keep()),
    ]
    _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    server.close()
    await filler.close()
    if copier is not None:
        await copier.close()


def _be_prompt() -> None:
    """Before any thread is made: they inherit it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        Path("/proc/self/autogroup").write_text(str(NICE))  # where sessions are groups, nice counts only inside one
