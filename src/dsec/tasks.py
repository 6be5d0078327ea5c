"""Ending tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 5.0
"""For a task that tidies up: another cancellation would break that off."""


async def ended(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel these and return when they have ended, however. A cancellation may be lost: Python 3.11's `wait_for`
    returns a result that comes in the same moment as if nobody had cancelled it. So who doesn't end is cancelled again.
    """
    left = {task for task in tasks if task is not None}
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # seen
