"""Places for what runs, handed out fairly by `plan.turns`. Cancelling a wait gives the place to the next.

The judge and function calls of a node share one `Slots`: what bounds them is the node's CPUs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from dsec.plan.turns import Path, Turns


def places_here() -> int:
    """How many run at once on this machine: two for each CPU, so that one is prepared while another runs."""
    return 2 * (os.cpu_count() or 1)


class _Ticket(NamedTuple):
    caller: Path
    ready: asyncio.Future[None]


class Slots:
    """A fair semaphore."""

    def __init__(self, places: int | None = None, weights: Mapping[str, float] | None = None) -> None:
        """`places`: how many run at once; None: `places_here`. `weights` of projects; others have 1."""
        known: Mapping[Any, float] = weights or {}
        self._turns: Turns[_Ticket] = Turns(places or places_here(), lambda name: known.get(name, 1.0))
        self._numbers = itertools.count()

    def caller(self, project: str) -> Path:
        """A new batch, or submission, of a project's."""
        return (project, next(self._numbers))

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
