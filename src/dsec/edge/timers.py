"""Everything that is due at some time, in one heap and one task: idle sandboxes cost no CPU, however many there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dsec.edge.tasks import Tasks
from dsec.plan.expiry import Deadlines
from dsec.ports import Clock

Due = tuple[str, str]
"""What is due (a name known to whoever handles it), and of which sandbox ("" for the node)."""


class Timers:
    """Calls `handle` for what is due; `handle` must not raise."""

    def __init__(self, clock: Clock, tasks: Tasks, handle: Callable[[Due], None]) -> None:
        self._clock = clock
        self._handle = handle
        self._deadlines: Deadlines[Due] = Deadlines()
        self._wake = asyncio.Event()
        self._sleeping_until = float("-inf")
        self._tasks = tasks

    def start(self) -> None:
        self._tasks.spawn(self._run())

    def set(self, key: Due, due: float | None) -> None:
        """`due` on the monotonic clock; None: never."""
        self._deadlines.set(key, due)
        if due is not None and due < self._sleeping_until:
            self._wake.set()

    async def _run(self) -> None:
        while True:
            for key in self._deadlines.pop_due(self._clock.monotonic()):
                self._handle(key)
            self._wake.clear()
            due = self._deadlines.next_due()
            if due is not None and due <= self._clock.monotonic():
                await asyncio.sleep(0)
                continue
            self._sleeping_until = float("inf") if due is None else due
            try:
                await self._sleep(due)
            finally:
                self._sleeping_until = float("-inf")

    async def _sleep(self, due: float | None) -> None:
        """Until `due` or until something earlier is set."""
        if due is None:
            await self._wake.wait()
            return
        waiters = [
            asyncio.ensure_future(self._wake.wait()),
            asyncio.ensure_future(self._clock.sleep(max(0.0, due - self._clock.monotonic()))),
        ]
        try:
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
            # Not one by one with their CancelledError suppressed: one that is meant for this task must get through.
            await asyncio.gather(*waiters, return_exceptions=True)
