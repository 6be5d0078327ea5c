"""Quotas in a running cluster: this apiserver's shares of the ledgers (`plan/quota.py`), and the pace of creations.
Creations wait for shares in the scheduler; whatever else runs for a project (`spending.py`) asks here.

Owns the bucket `dsec_ledgers` (a record for each limit of each project with a quota) and who of the apiservers is
there: each says so every two seconds. Invariants: a share is spent only while this apiserver hears itself on the bus,
so that it stops well before the others take it for dead; a dead one's share shrinks to what nodes say is charged to it,
and only once nothing that it sent can arrive any more; nobody is refused while somebody else may hold idle shares that
haven't been asked for; what runs on a share that no node reports (`held`) is let go well before that share can be
another's.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress

import msgspec
from nats.aio.msg import Msg

from dsec.cluster.bus import Bucket, Bus
from dsec.cluster.iam import Authority
from dsec.cluster.wire import ORDER_S
from dsec.errors import AdmissionTimeout, DsecError, QuotaExceeded, Unavailable
from dsec.plan.iam import Iam, lineage
from dsec.plan.quota import UNITS, Holder, Ledger, block, costs_of, give, shrink, take, with_limit
from dsec.plan.scheduler import Need, Scheduler, exceeded
from dsec.plan.watch import Health

HERE_S = 2.0
FROZEN_S = 10.0
"""An apiserver that hasn't heard itself for so long spends nothing."""
DEAD_S = 2 * ORDER_S
LET_GO_S = 40.0
"""What it holds for calls ends then: the others take its share after `DEAD_S`."""
GIVE_S = 5.0
AGAIN_S = 0.5
ASK_S = 0.25
"""The others get so long to give back what they don't use."""
PATIENCE_S = 75.0
"""What waits for a dead apiserver's share, or for the store, is refused then."""
MAX_ACCOUNTS = 10_000
_UNKNOWN = 1 << 60
log = logging.getLogger("dsec.cluster")


class Bounds:
    """Which ledgers bound whom, by the projects on record."""

    def __init__(self, iam: Iam) -> None:
        self._iam = iam
        self._costs: dict[str, list[tuple[str, int]]] = {}

    def charges(self, account: str) -> list[tuple[str, int]]:
        """The ledgers that bound an account, and what one of its sandboxes costs each."""
        found = self._costs.get(account)
        if found is None:
            if len(self._costs) > MAX_ACCOUNTS:
                self._costs.clear()
            project, costs = costs_of(account)
            found = self._costs[account] = [
                (f"{path}\0{field}", costs[field])
                for path in lineage(project)
                for field in self.limits(path)
                if field in costs
            ]
        return found

    def fits(self, account: str) -> bool:
        """Whether one would be within all limits if nothing else were there."""
        ledgers = ((*each.partition("\x00"), cost) for each, cost in self.charges(account))
        return all(self.limits(path).get(field, cost) >= cost for path, _, field, cost in ledgers)

    def limits(self, path: str) -> dict[str, int]:
        """A project's own, in ledgers' units."""
        project = self._iam.known(path)
        if project is None:
            return {}
        return {field: int(limit * UNITS.get(field, 1)) for field, limit in project.quota.limits().items()}

    def bound(self, project: str) -> bool:
        """Whether any quota bounds a project, by its pace or otherwise."""
        quotas = (known.quota for path in lineage(project) if (known := self._iam.known(path)) is not None)
        return any(quota.creates_per_s is not None or quota.limits() for quota in quotas)

    def ledgers(self) -> list[str]:
        """All of projects on record."""
        return [f"{each.path}\0{field}" for each in self._iam.projects("") for field in self.limits(each.path)]

    def changed(self) -> None:
        """The records are others now."""
        self._costs.clear()


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
        self.pump: Callable[[], None] = lambda: None
        """Called when something more may pass."""
        self._bus = bus
        self._ledgers = ledgers
        self._authority = authority
        self._scheduler = scheduler
        self._holder = scheduler.holder
        self._bounds = bounds
        self._heard: dict[str, float] = {}
        self._since = time.monotonic()
        self._wanting: dict[str, int] = {}
        """How much of a ledger is to be free here."""
        self._waiting: dict[str, list[asyncio.Future[bool]]] = {}
        """Who waits for a turn of a ledger to end."""
        self._held: set[asyncio.Timeout] = set()
        self._released = asyncio.Event()
        self._paced: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        authority.changed = self._changed

    async def start(self) -> None:
        await self._bus.listen("dsec.holder.*", self._hear)
        await self._bus.listen("dsec.spare", self._hear_wanted)
        self._holder.frozen = True
        self._spawn(self._stay())
        self._spawn(self._tidy())

    async def close(self) -> None:
        """Gives back what isn't used. Idempotent."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._holder.shares and self._bus.connected:
            for ledger in list(self._holder.shares):
                try:
                    await self._give_back(ledger, keep=0)
                except Unavailable as error:
                    log.warning("giving back quotas: %s", error)

    def _changed(self) -> None:
        self._bounds.changed()
        self._holder.recount()
        self.pump()

    # --- the pace ---------------------------------------------------------------------------------------------------

    async def pace(self, project: str, count: int, deadline: float) -> None:
        """Wait until so many more may be made by the limits of creations a second, of which each apiserver has an even
        part. Raises `QuotaExceeded` where that is after the deadline (`time.monotonic`)."""
        now, begin = time.monotonic(), 0.0
        rates = []
        for path in lineage(project):
            known = self._authority.iam.known(path)
            if known is not None and known.quota.creates_per_s is not None:
                rates.append((path, known.quota.creates_per_s / self._others(now)))
                begin = max(begin, self._paced.get(path, 0.0))
        if not rates:
            return
        if begin > deadline:
            raise QuotaExceeded(
                f"the project {rates[0][0]!r} makes as many sandboxes a second as its quota allows",
                remedy="Ask again later, or for a larger quota.",
                project=rates[0][0],
                limit="creates_per_s",
            )
        for path, rate in rates:
            self._paced[path] = max(begin, now - 1.0) + count / rate  # a second's worth is saved up
        if begin > now:
            await asyncio.sleep(begin - now)

    def _others(self, now: float) -> int:
        """Apiservers that are there, this one included."""
        return max(1, sum(now - at < FROZEN_S for at in self._heard.values()))

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
            if await self._more(ledger, missing, deadline):
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
        self.pump()

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
            self.pump()

    @asynccontextmanager
    async def held(self, account: str, count: int) -> AsyncIterator[None]:
        """Count these for as long as the block runs. Raises `Unavailable` within it when this apiserver was cut off for
        so long that its shares may become another's."""
        self._holder.hold(account, count)
        try:
            async with asyncio.timeout(None) as limit:
                self._held.add(limit)
                try:
                    yield
                finally:
                    self._held.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Unavailable(
                "this server is cut off from the cluster, and can't count what runs any more", remedy="Ask another."
            ) from None
        finally:
            self._holder.hold(account, -count)
            self._released.set()
            self.pump()

    # --- more of a ledger -------------------------------------------------------------------------------------------

    async def _more(self, ledger: str, missing: int, deadline: float) -> bool:
        """Whether a turn of the ledger got something. Raises `AdmissionTimeout`, `Unavailable`."""
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

    def _tell(self, ledger: str, got: bool | DsecError) -> None:
        """The turn of a ledger is over."""
        for told in self._waiting.pop(ledger, ()):
            if told.done():
                continue
            if isinstance(got, bool):
                told.set_result(got)
            else:
                told.set_exception(got)

    def need(self, need: Need) -> None:
        """Take more of a ledger; one turn at a time for each."""
        known = self._wanting.get(need.ledger)
        free = self._holder.shares.get(need.ledger, 0) - self._holder.used(need.ledger)
        self._wanting[need.ledger] = max(free + need.count, known or 0)
        if known is None:
            self._spawn(self._turn(need.ledger))

    async def _turn(self, ledger: str) -> None:
        began = time.monotonic()
        asked = False
        while True:
            try:
                got, mine, waiting = await self._take(ledger)
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
                self._scheduler.granted(ledger, mine, more=got)
                self._tell(ledger, got)
                break
        self.pump()

    async def _take(self, ledger: str) -> tuple[bool, int, bool]:
        """Whether it got something, its share now, and whether a share of one that may be dead is to be waited for.
        Raises `Unavailable`."""
        if not ledger:  # nothing is short but the word that this apiserver is heard
            return not self._holder.frozen, 0, True
        path, _, field = ledger.partition("\0")
        limit = self._bounds.limits(path).get(field)
        name = self._holder.name
        while True:
            mine = self._holder.shares.get(ledger, 0)
            if limit is None:  # the quota is gone
                return True, mine, False
            if self._holder.frozen:
                raise Unavailable("this server is cut off from the cluster", remedy="Try again in a moment.")
            missing = self._wanting[ledger] - (mine - self._holder.used(ledger))
            if missing <= 0:
                return True, mine, False
            revision, record = await self._ledgers.get(_key(ledger))
            if record is None:
                record = Ledger(limit=limit, shares=self._charged_now(ledger))
            elif record.limit != limit:
                record = with_limit(record, limit)
            size = block(limit, self._others(time.monotonic()))
            new, got = take(record, name, missing, size)
            if not got:
                now = time.monotonic()
                absent = [each for each in record.shares if each != name and self._absent(each, now) > HERE_S * 2]
                return False, mine, any(record.shares[each] > self._charged(each, ledger) for each in absent)
            if await self._ledgers.put_if(_key(ledger), revision, new) is not None:
                return True, new.shares[name], False

    def _charged_now(self, ledger: str) -> dict[str, int]:
        """Shares of a ledger that begins: what each apiserver has live already."""
        holders = {self._holder.name: self._holder.used(ledger)}
        for edge in self._scheduler.watch.edges():
            report = self._scheduler.watch.report(edge)
            for holder in report.charged if report is not None else ():
                if holder not in holders:
                    holders[holder] = self._charged(holder, ledger)
        return {holder: count for holder, count in holders.items() if 0 < count < _UNKNOWN}

    # --- giving back ------------------------------------------------------------------------------------------------

    async def _tidy(self) -> None:
        """Give back what lies idle; and of apiservers that are dead, what they have no use for."""
        while True:
            await asyncio.sleep(GIVE_S)
            if self._holder.frozen:
                continue
            for ledger in {*self._holder.shares, *self._bounds.ledgers()}:
                try:
                    await self._give_back(ledger, keep=None)
                except Unavailable as error:
                    log.warning("tidying quotas: %s", error)

    async def _give_back(self, ledger: str, keep: int | None) -> None:
        """`keep`: how much of the idle share stays here; None: a block."""
        revision, record = await self._ledgers.get(_key(ledger))
        if record is None or ledger in self._wanting:
            return
        name, holder = self._holder.name, self._holder
        share = holder.shares.setdefault(ledger, record.shares.get(name, 0))  # as who began the ledger reckoned
        spare = share - holder.used(ledger)
        spare -= block(record.limit, self._others(time.monotonic())) if keep is None else keep
        if spare > 0:
            share -= spare
            holder.shares[ledger] = share  # first, and for good: what is given back is never used meanwhile
        mine = record.shares.get(name, 0)
        new = give(record, name, mine - share) if mine > share else record
        now = time.monotonic()
        for each in record.shares:
            if each != name and self._absent(each, now) > DEAD_S:
                new = shrink(new, each, self._charged(each, ledger))
        if new != record:
            await self._ledgers.put_if(_key(ledger), revision, new)

    def _charged(self, holder: str, ledger: str) -> int:
        """What nodes say is charged to another holder; more than any share while not all have been heard, so that
        nothing is taken away."""
        watch = self._scheduler.watch
        total = 0
        for edge in watch.edges():
            report = watch.report(edge)
            if report is None or watch.health(edge) is Health.SILENT:
                return _UNKNOWN
            for account, charged in report.charged.get(holder, {}).items():
                total += sum(cost * charged.live for each, cost in self._bounds.charges(account) if each == ledger)
        return total

    # --- who is there -----------------------------------------------------------------------------------------------

    async def _stay(self) -> None:
        while True:
            await self._bus.publish(f"dsec.holder.{self._holder.name}", None)
            await asyncio.sleep(HERE_S)
            heard = self._heard.get(self._holder.name)
            now = time.monotonic()
            self._holder.frozen = heard is None or now - heard > FROZEN_S
            if heard is not None and now - heard > LET_GO_S:
                for limit in self._held:
                    if limit.when() is None:
                        limit.reschedule(asyncio.get_running_loop().time())
            self._heard = {name: at for name, at in self._heard.items() if now - at < 10 * DEAD_S}

    def _absent(self, name: str, now: float) -> float:
        """For how long an apiserver hasn't been heard, as far as this one can know."""
        return now - max(self._heard.get(name, 0.0), self._since)

    async def _hear(self, message: Msg) -> None:
        name = message.subject.rpartition(".")[2]
        self._heard[name] = time.monotonic()
        if name == self._holder.name:
            self._holder.frozen = False

    async def _hear_wanted(self, message: Msg) -> None:
        """Somebody needs what isn't used."""
        try:
            ledger = msgspec.json.decode(message.data, type=str)
        except msgspec.MsgspecError:
            return
        if ledger in self._holder.shares and ledger not in self._wanting:
            try:
                await self._give_back(ledger, keep=0)
            except Unavailable as error:
                log.warning("giving back quotas: %s", error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _key(ledger: str) -> str:
    """Names of projects may hold what keys of a bucket may not."""
    return hashlib.sha256(ledger.encode()).hexdigest()[:40]
