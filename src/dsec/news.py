"""Waiting for whatever happens next to something, by any number of tasks."""

from __future__ import annotations

import asyncio


class News:
    """Who waits for something to change. For the event loop."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Until `tell` is called. Look again then: others may have been quicker."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def tell(self) -> None:
        """Those who wait now go on."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
