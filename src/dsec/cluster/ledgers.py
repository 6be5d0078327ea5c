"""This apiserver's shares of the ledgers (`plan/quota.py`), in the bucket `dsec_ledgers`: a record for each limit of
each project with a quota.

Invariants: what is charged to an apiserver is never more than its share on record, whatever the limit: also what was
made before there was the limit, or a lower one. While more is on record than the limit allows, nobody gets any, and
idle shares go back. A dead apiserver's share shrinks to what nodes say is charged to it, and only once nothing that it
sent can arrive any more; it grows by what they say only while a ledger is new. Nobody is refused while somebody else
may hold idle shares that haven't been asked for.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress

import msgspec
from nats.aio.msg import Msg

from dsec.cluster.bounds import Bounds
from dsec.cluster.bus import Bucket, Bus
from dsec.cluster.presence import Presence
from dsec.errors import AdmissionTimeout, DsecError, Unavailable
from dsec.plan.quota import Ledger, block, counted_in, give, raised, shrink, take, with_limit
from dsec.plan.scheduler import Need, Scheduler
from dsec.plan.watch import Health
from dsec.tasks import ended

GIVE_S = 5.0
ASK_S = 0.25
"""The others get so long to give back what they don't use."""
PATIENCE_S = 75.0
"""What waits for a dead apiserver's share, or for the store, is refused then."""
_UNKNOWN = 1 << 60
log = logging.getLogger("dsec.cluster")


class Ledgers:
    """For the event loop."""

    def __init__(
        self, bus: Bus, ledgers: Bucket[Ledger], scheduler: Scheduler, bounds: Bounds, presence: Presence
    ) -> None:
        self.pump: Callable[[], None] = lambda: None
        """Called when something more may pass."""
        self._bus = bus
        self._ledgers = ledgers
        self._scheduler = scheduler
        self._holder = scheduler.holder
        self._bounds = bounds
        self._presence = presence
        self._wanting: dict[str, int] = {}
        """How much of a ledger is to be free here."""
        self._waiting: dict[str, list[asyncio.Future[bool]]] = {}
        """Who waits for a turn of a ledger to end."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._bus.listen("dsec.spare", self._hear_wanted)
        self._spawn(self._tidy())

    async def close(self) -> None:
        """Gives back what isn't used. Idempotent."""
        await ended(self._tasks)
        if self._holder.shares and self._bus.connected:
            for ledger in list(self._holder.shares):
                await self._settle(ledger, keep=0)

    def changed(self) -> None:
        """Limits are others now."""
        self._changed.set()

    # --- more of a ledger -------------------------------------------------------------------------------------------

    async def more(self, ledger: str, missing: int, deadline: float) -> bool:
        """Whether a turn of the ledger got something. Raises `AdmissionTimeout` after the deadline (`time.monotonic`),
        `Unavailable`."""
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(ledger, []).append(told)
        self.need(Need(ledger, missing))
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await told
        except TimeoutError:
            raise AdmissionTimeout(
                "another server's share of the quota may be free, and can't be had yet", remedy="Try again in a moment."
            ) from None

    def need(self, need: Need) -> None:
        """Take more of a ledger; one turn at a time for each."""
        known = self._wanting.get(need.ledger)
        free = self._holder.shares.get(need.ledger, 0) - self._holder.used(need.ledger)
        self._wanting[need.ledger] = max(free + need.count, known or 0)
        if known is None:
            self._spawn(self._turn(need.ledger))

    def _tell(self, ledger: str, got: bool | DsecError) -> None:
        """The turn of a ledger is over."""
        for told in self._waiting.pop(ledger, ()):
            if told.done():
                continue
            if isinstance(got, bool):
                told.set_result(got)
            else:
                told.set_exception(got)

    async def _turn(self, ledger: str) -> None:
        began = time.monotonic()
        asked = False
        while True:
            try:
                got, waiting = await self._take(ledger)
            except Unavailable as error:
                if time.monotonic() - began < PATIENCE_S:
                    await asyncio.sleep(1.0)
                    continue
                del self._wanting[ledger]
                self._scheduler.granted(ledger, self._holder.shares.get(ledger, 0), more=False, error=error)
                self._tell(ledger, error)
                break
            if not got and not asked:
                asked = True
                await self._bus.publish("dsec.spare", ledger)
                await asyncio.sleep(ASK_S)
            elif not got and waiting and time.monotonic() - began < PATIENCE_S:
                await asyncio.sleep(1.0)
            else:
                del self._wanting[ledger]
                self._scheduler.granted(ledger, self._holder.shares.get(ledger, 0), more=got)
                self._tell(ledger, got)
                break
        self.pump()

    async def _take(self, ledger: str) -> tuple[bool, bool]:
        """Whether it got something, and whether a share of one that may be dead is to be waited for. Raises
        `Unavailable`."""
        holder, presence = self._holder, self._presence
        if not ledger:  # nothing is short but the word that this apiserver is heard
            return not holder.frozen, True
        while True:
            limit = self._limit(ledger)
            if limit is None:  # the quota is gone
                return True, False
            if holder.frozen:
                raise Unavailable("this server is cut off from the cluster", remedy="Try again in a moment.")
            used = holder.used(ledger)
            missing = self._wanting[ledger] - (holder.shares.get(ledger, 0) - used)
            if missing <= 0:
                return True, False
            revision, found = await self._ledgers.get(_key(ledger))
            record = self._reckoned(ledger, found, limit)
            new, got = take(record, holder.name, missing, block(limit, presence.count()))
            if new != found and await self._ledgers.put_if(_key(ledger), revision, new) is None:
                continue
            if got:
                holder.shares[ledger] = new.shares[holder.name]
                holder.over.discard(ledger)
                return True, False
            absent = [each for each in record.shares if presence.may_be_dead(each)]
            return False, any(record.shares[each] > self._charged(each, ledger) for each in absent)

    # --- what is on record ------------------------------------------------------------------------------------------

    def _limit(self, ledger: str) -> int | None:
        path, _, field = ledger.partition("\0")
        return self._bounds.limits(path).get(field)

    def _reckoned(self, ledger: str, record: Ledger | None, limit: int) -> Ledger:
        """The record with this limit, with at least what is charged to this holder, and, while it is new, to all
        others: nodes that can't be heard now are counted when they can be, or are lost."""
        record = Ledger(limit=limit, new=True) if record is None else with_limit(record, limit)
        record = raised(record, self._holder.name, self._holder.used(ledger))
        if record.new:
            record = counted_in(record, self._charged_to_others(ledger), done=self._all_heard())
        return record

    def _charged_to_others(self, ledger: str) -> dict[str, int]:
        """By holder, as far as nodes can be heard. None of them says more than it has in all."""
        watch = self._scheduler.watch
        found: dict[str, int] = {}
        for edge in watch.edges():
            report = watch.report(edge)
            if report is None:
                continue
            left = report.live
            for holder, accounts in sorted(report.charged.items()):
                for account, charged in sorted(accounts.items()):
                    live = min(charged.live, left)
                    left -= live
                    cost = self._cost(account, ledger)
                    if holder != self._holder.name and live * cost:
                        found[holder] = found.get(holder, 0) + live * cost
        return found

    def _charged(self, holder: str, ledger: str) -> int:
        """What nodes say is charged to another holder; more than any share while not all can be heard, so that nothing
        is taken away."""
        watch = self._scheduler.watch
        if not self._all_heard():
            return _UNKNOWN
        reports = (watch.report(edge) for edge in watch.edges())
        return sum(
            self._cost(account, ledger) * charged.live
            for report in reports
            if report is not None
            for account, charged in report.charged.get(holder, {}).items()
        )

    def _cost(self, account: str, ledger: str) -> int:
        return sum(cost for each, cost in self._bounds.charges(account) if each == ledger)

    def _all_heard(self) -> bool:
        watch = self._scheduler.watch
        return all(watch.report(edge) is not None and watch.health(edge) is not Health.SILENT for edge in watch.edges())

    # --- giving back ------------------------------------------------------------------------------------------------

    async def _tidy(self) -> None:
        """Put what is charged here on record, give back what lies idle; and of apiservers that are dead, what they have
        no use for."""
        all_at = time.monotonic()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.0, all_at + GIVE_S - time.monotonic()))
            mine = {*self._holder.shares, *self._holder.ledgers()}
            if time.monotonic() >= all_at + GIVE_S:
                mine |= {*self._bounds.ledgers()}
                all_at = time.monotonic()
            else:
                await asyncio.sleep(ASK_S)  # more may change
            self._changed.clear()
            if not self._holder.frozen:
                for ledger in mine:
                    await self._settle(ledger, keep=None)

    async def _settle(self, ledger: str, keep: int | None) -> None:
        """`keep`: how much of the idle share stays here; None: a block."""
        try:
            if self._limit(ledger) is None:
                await self._forget(ledger)
            else:
                await self._give_back(ledger, keep)
        except Unavailable as error:
            log.warning("settling a quota: %s", error)

    async def _give_back(self, ledger: str, keep: int | None) -> None:
        """Raises `Unavailable`."""
        revision, found = await self._ledgers.get(_key(ledger))
        limit = self._limit(ledger)
        if ledger in self._wanting or limit is None:
            return
        name, holder = self._holder.name, self._holder
        used = holder.used(ledger)
        if found is None and not used:
            return
        record = self._reckoned(ledger, found, limit)
        mine = record.shares.get(name, 0)  # as who began the ledger reckoned, where this one hasn't taken any
        share = max(used, min(holder.shares.get(ledger, mine), mine))
        if record.held > limit:
            holder.over.add(ledger)
            keep = 0
        else:
            holder.over.discard(ledger)
        share -= max(0, share - used - (block(limit, self._presence.count()) if keep is None else keep))
        holder.shares[ledger] = share  # first, and for good: what is given back is never used meanwhile
        new = give(record, name, mine - share)
        for each in record.shares:
            if self._presence.is_dead(each):
                new = shrink(new, each, self._charged(each, ledger))
        if new != found:
            await self._ledgers.put_if(_key(ledger), revision, new)

    async def _forget(self, ledger: str) -> None:
        """There is no such quota any more: the next one begins its ledger anew. Raises `Unavailable`."""
        self._holder.over.discard(ledger)
        if self._holder.shares.pop(ledger, None) is None:
            return
        revision, record = await self._ledgers.get(_key(ledger))
        if record is not None and not record.new and self._limit(ledger) is None:
            await self._ledgers.put_if(_key(ledger), revision, Ledger(limit=record.limit, new=True))

    async def _hear_wanted(self, message: Msg) -> None:
        """Somebody needs what isn't used."""
        try:
            ledger = msgspec.json.decode(message.data, type=str)
        except msgspec.MsgspecError:
            return
        if ledger in self._holder.shares and ledger not in self._wanting:
            await self._settle(ledger, keep=0)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _key(ledger: str) -> str:
    """Names of projects may hold what keys of a bucket may not."""
    return hashlib.sha256(ledger.encode()).hexdigest()[:40]
