"""Tasks with an owner: whoever spawns one closes the set that holds it, and no failure goes unseen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from dsec.errors import DsecError, Internal

T = TypeVar("T")
log = logging.getLogger("dsec.edge")


class Tasks:
    """A set of running tasks."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it; it ends at the latest with `close`. A failure that nobody awaits is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        """Cancel what runs and wait for it. Idempotent."""
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("task failed: %r", error, exc_info=error)


def quiet(future: asyncio.Future[Any]) -> None:
    """A failure of this future may go unawaited (its caller may be gone)."""
    future.add_done_callback(_retrieve)


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def bug(what: str, error: BaseException) -> DsecError:
    """The error for callers where something failed that should not have; the log has all of it."""
    log.error("%s", what, exc_info=error)
    failure = Internal(f"{what}: {type(error).__name__}: {error}", remedy="Report this together with the server's log.")
    failure.__cause__ = error
    return failure
