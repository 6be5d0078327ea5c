"""A clock that tests own. (The machine's is `dsec.edge.config.SystemClock`.)"""

from __future__ import annotations

import asyncio
import heapq
import itertools


class FakeClock:
    """`ports.Clock` that stands still until `advance`. Both its times move together, but for a `jump`."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._offset = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now + self._offset

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        waiter = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + max(0.0, seconds), next(self._order), waiter))
        await waiter

    async def advance(self, seconds: float) -> None:
        """Let time pass: sleepers wake in the order of their times, each before time goes on; first whoever is about to
        sleep does."""
        await self.settle()
        target = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= target:
            at, _, waiter = heapq.heappop(self._sleepers)
            self._now = max(self._now, at)
            if not waiter.done():
                waiter.set_result(None)
            await self.settle()
        self._now = target
        await self.settle()

    async def stall(self, seconds: float) -> None:
        """The machine stands still: time passes, and whoever was due meanwhile wakes when it is over."""
        self._now += seconds
        await self.advance(0.0)

    def jump(self, seconds: float) -> None:
        """Somebody sets the wall clock."""
        self._offset += seconds

    @property
    def sleepers(self) -> int:
        """How many wait now."""
        return sum(1 for _, _, waiter in self._sleepers if not waiter.done())

    @staticmethod
    async def settle(rounds: int = 10) -> None:
        """Let everything that is ready to run do so."""
        for _ in range(rounds):
            await asyncio.sleep(0)
