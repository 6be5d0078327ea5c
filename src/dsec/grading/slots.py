"""Places for what runs, handed out fairly by `plan.turns`. Cancelling a wait gives the place to the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from dsec.plan.turns import Path, Turns


class _Ticket(NamedTuple):
    caller: Path
    ready: asyncio.Future[None]


class Slots:
    """A fair semaphore."""

    def __init__(self, places: int) -> None:
        self._turns: Turns[_Ticket] = Turns(places)

    @property
    def places(self) -> int:
        """How many there are."""
        return self._turns.places

    @asynccontextmanager
    async def turn(self, caller: Path, deadline_s: float | None = None) -> AsyncIterator[None]:
        """Hold a place, once there is one for this caller. Raises TimeoutError after `deadline_s` without one."""
        ticket = _Ticket(caller, asyncio.get_running_loop().create_future())
        self._turns.wait(caller, ticket)
        self._call()
        try:
            async with asyncio.timeout(deadline_s):
                await ticket.ready
        except (asyncio.CancelledError, TimeoutError):
            if not self._turns.forget(caller, ticket) and not ticket.ready.cancelled():
                self.free(caller)  # it was given in the same moment
            raise
        try:
            yield
        finally:
            self.free(caller)

    def take_free(self, caller: Path) -> bool:
        """Hold a place where one is free, to be given back by `free`; False: none is."""
        return self._turns.take(caller)

    def free(self, caller: Path) -> None:
        """Give a place back."""
        self._turns.free(caller)
        self._call()

    def _call(self) -> None:
        while (ticket := self._turns.give()) is not None:
            if ticket.ready.done():  # cancelled, and its waiter hasn't run since
                self._turns.free(ticket.caller)
            else:
                ticket.ready.set_result(None)
