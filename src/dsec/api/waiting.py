"""Work that nobody needs once its client has gone away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from dsec.api.exchange import ClientGone, Exchange
from dsec.errors import DsecError

T = TypeVar("T")


async def while_awaited(x: Exchange, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; the request's body was read. Raises `ClientGone`, once the work has ended, where the client
    closed the connection first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(x.next_message())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, DsecError, OSError):
                await task
    return task.result()
