"""A benchmark's whole run, which leaves nothing behind also where it is ended."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_bench(work: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """As `asyncio.run`, which a second Ctrl-C leaves where it is, machines, mounts and all; here it changes nothing."""

    async def cancellable() -> T:
        task, came = asyncio.current_task(), asyncio.Event()
        assert task is not None

        def end() -> None:
            if not came.is_set():
                task.cancel()
            came.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, end)
        return await work

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return runner.run(cancellable())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
