"""The one task that waits for everything that is due."""

from __future__ import annotations

import asyncio

import pytest

from dsec.edge.config import SystemClock
from dsec.edge.tasks import Tasks
from dsec.edge.timers import Due, Timers


@pytest.mark.parametrize("turns", range(10))
async def test_it_ends_whenever_it_is_told_to(turns: int) -> None:
    """Also in the few turns of the event loop in which it wakes up for something that was set."""
    tasks, clock = Tasks(), SystemClock()
    seen: list[Due] = []
    timers = Timers(clock, tasks, seen.append)
    timers.start()
    timers.set(("late", ""), clock.monotonic() + 3600.0)
    await asyncio.sleep(0.01)
    timers.set(("soon", ""), clock.monotonic() + 1800.0)
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(120):
        await tasks.close()
    assert seen == []
