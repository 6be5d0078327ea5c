"""Quotas in a running cluster, as those see them who make something: creations wait for shares in the scheduler,
whatever else runs for a project (`spending.py`, `moves.py`) asks here.

Put together of which limits there are (`bounds.py`), this apiserver's shares of them (`ledgers.py`), who of the
apiservers is there (`presence.py`) and the pace of creations (`pace.py`). Invariant: what runs on a share that no node
reports (`held`) is let go well before that share can be another's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from dsec.cluster.bounds import Bounds
from dsec.cluster.bus import Bucket, Bus
from dsec.cluster.iam import Authority
from dsec.cluster.ledgers import PATIENCE_S, Ledgers
from dsec.cluster.pace import Pace
from dsec.cluster.presence import Presence
from dsec.errors import QuotaExceeded
from dsec.plan.quota import Holder, Ledger
from dsec.plan.scheduler import Need, Scheduler, exceeded

AGAIN_S = 0.5


class Share:
    """Room for one sandbox of an account's: kept here until it is sent to a node."""

    def __init__(self, holder: Holder, account: str) -> None:
        self._holder = holder
        self._account = account
        self._kept = True
        holder.hold(account, 1)

    def sent(self, edge: int) -> None:
        """A node is about to be asked, and will report it."""
        self._holder.spend(self._account, edge, 1, time.monotonic())
        self.end()

    def refused(self, edge: int) -> None:
        """That node hasn't made it."""
        self._holder.refused(self._account, edge, 1)
        self._holder.hold(self._account, 1)
        self._kept = True

    def end(self) -> None:
        """It is kept here no longer. Idempotent."""
        if self._kept:
            self._kept = False
            self._holder.hold(self._account, -1)


class Quotas:
    """For the event loop."""

    def __init__(
        self, bus: Bus, ledgers: Bucket[Ledger], authority: Authority, scheduler: Scheduler, bounds: Bounds
    ) -> None:
        self._holder = scheduler.holder
        self._bounds = bounds
        self._presence = Presence(bus, self._holder.name, self._freeze)
        self._ledgers = Ledgers(bus, ledgers, scheduler, bounds, self._presence)
        self._pace = Pace(authority.iam, self._presence)
        self._released = asyncio.Event()
        authority.changed = self._changed

    def call(self, pump: Callable[[], None]) -> None:
        """`pump` is called when something more may pass."""
        self._ledgers.pump = pump

    async def start(self) -> None:
        await self._presence.start()
        await self._ledgers.start()

    async def close(self) -> None:
        """Gives back what isn't used. Idempotent."""
        await self._presence.close()
        await self._ledgers.close()

    def _freeze(self, frozen: bool) -> None:
        self._holder.frozen = frozen

    def _changed(self) -> None:
        self._bounds.changed()
        self._holder.recount()
        self._ledgers.changed()
        self._ledgers.pump()

    # --- what creations need ----------------------------------------------------------------------------------------

    async def pace(self, project: str, count: int, deadline: float) -> None:
        """As `Pace.wait`."""
        await self._pace.wait(project, count, deadline)

    def need(self, need: Need) -> None:
        """Take more of a ledger; the scheduler is told what came of it."""
        self._ledgers.need(need)

    # --- what no creation is ----------------------------------------------------------------------------------------

    def bound(self, project: str) -> bool:
        """Whether any quota bounds a project."""
        return self._bounds.bound(project)

    async def room(self, account: str, count: int, deadline: float) -> int:
        """How many of `count` may be spent, at least one: before anything else is awaited. Raises `QuotaExceeded`,
        `AdmissionTimeout` after the deadline (`time.monotonic`), `Unavailable`."""
        while True:
            free = self._holder.free(account)
            if free is None or free >= count:
                return count
            ledger, missing = next(iter(self._holder.short(account, count)), ("", 0))
            if await self._ledgers.more(ledger, missing, deadline):
                continue
            free = self._holder.free(account)
            if free is None or free > 0:
                return count if free is None else min(free, count)
            raise self.exceeded(account, ledger)

    def exceeded(self, account: str, ledger: str = "") -> QuotaExceeded:
        """Of which limit an account has nothing left."""
        name = next((name for name, _ in self._holder.short(account, 1)), ledger)
        return exceeded(name or account.partition("\0")[0])

    async def room_soon(self, account: str, count: int, deadline: float) -> int:
        """The same for what is over in moments: while the quota is used up, wait for what is let go of here."""
        while True:
            try:
                return await self.room(account, count, time.monotonic() + PATIENCE_S)
            except QuotaExceeded:
                if time.monotonic() >= deadline or not self._bounds.fits(account):
                    raise
            self._released.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._released.wait(), AGAIN_S)

    def spend(self, account: str, edge: int, count: int) -> None:
        """`count` are sent to a node, which will report them."""
        self._holder.spend(account, edge, count, time.monotonic())

    def unspent(self, account: str, edge: int, count: int) -> None:
        """The node took none of these."""
        self._holder.refused(account, edge, count)
        self._ledgers.pump()

    @asynccontextmanager
    async def share(self, project: str, account: str, deadline: float) -> AsyncIterator[Share]:
        """Room for one that no creation makes. Raises as `pace` and `room`."""
        await self.pace(project, 1, deadline)
        await self.room(account, 1, deadline)
        share = Share(self._holder, account)
        try:
            yield share
        finally:
            share.end()
            self._ledgers.pump()

    @asynccontextmanager
    async def held(self, account: str, count: int) -> AsyncIterator[None]:
        """Count these for as long as the block runs. Raises as `Presence.while_heard` within it."""
        self._holder.hold(account, count)
        try:
            async with self._presence.while_heard():
                yield
        finally:
            self._holder.hold(account, -count)
            self._released.set()
            self._ledgers.pump()
