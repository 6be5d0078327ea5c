"""How an edge leaves: what is queued is refused, what is being made or taken down gets its time."""

from __future__ import annotations

import asyncio

from dsec.edge.lives import Lives, wait_for
from dsec.errors import Unavailable
from dsec.spec.causes import Cause


async def settle(lives: Lives, timeout_s: float) -> None:
    """Refuse what is queued, then wait for what is being made or taken down."""
    for sandbox in list(lives.sandboxes.values()):
        if lives.gate.leave_queue(sandbox):
            lives.refuse(sandbox, Unavailable("the server is stopping", remedy="Try again when it is back."))
    deadline = asyncio.get_running_loop().time() + timeout_s
    if lives.gate.starting:
        lives.none_starts.clear()
        await wait_for(lives.none_starts, max(0.0, deadline - asyncio.get_running_loop().time()))
    if lives.removals.active:
        lives.removals.idle.clear()
        await wait_for(lives.removals.idle, max(0.0, deadline - asyncio.get_running_loop().time()))


async def end_all(lives: Lives, cause: Cause, timeout_s: float) -> bool:
    """End every sandbox, paced; False where some were still there after `timeout_s`."""
    for sandbox in list(lives.sandboxes.values()):
        lives.end(sandbox, cause)
    return not lives.sandboxes or await wait_for(lives.empty, timeout_s)
