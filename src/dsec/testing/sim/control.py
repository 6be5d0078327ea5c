"""A simulated apiserver: the real `Scheduler` (placement, fairness, watcher, quotas, access), and what does its I/O.

Before any part of a request is sent, the request's record in the store says where; taking a request over from another
apiserver is a compare-and-set on that record, so that only one at a time decides about it. All else is soft: an
apiserver that starts learns the claims from the store and the loads from reports.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from dsec.errors import DsecError, Unavailable
from dsec.plan.fencing import Claim, fence
from dsec.plan.placement import Placer
from dsec.plan.quota import Holder, Ledger, block, give, shrink, take
from dsec.plan.scheduler import Need, Order, Part, Scheduler, Wanted
from dsec.plan.watch import Health, Verdict, Watch
from dsec.spec.cluster import NodeReport
from dsec.testing.sim.chance import RandomPlacer
from dsec.testing.sim.clients import Request, Task
from dsec.testing.sim.node import ORDER_S, SentOrder

if TYPE_CHECKING:
    from dsec.testing.sim.world import World

RESEND_S = 2.0
TICK_S = 1.0
LEASES_S = 5.0
GIVE_S = 10.0


class Intent(Struct, frozen=True):
    """A request's record: who decides about it, and where its parts were sent."""

    owner: str
    parts: tuple[Part, ...] = ()


def overlaid(parts: tuple[Part, ...], new: list[Part]) -> tuple[Part, ...]:
    """Where a request's indexes are, once some have another place: what a node took is the beginning of its part, so an
    old part ends where a new one begins."""
    kept = []
    for part in parts:
        end = part.first + part.count
        begins = [each.first for each in new if each.first < end and part.first < each.first + each.count]
        count = min(begins, default=end) - part.first
        if count > 0:
            kept.append(part if count == part.count else Part(part.first, count, part.edge, part.incarnation))
    return (*kept, *new)


class _Job:
    """A request that this apiserver works on."""

    __slots__ = ("intent", "orders", "request", "revision", "ticket", "writing")

    def __init__(self, request: Request, revision: int, intent: Intent) -> None:
        self.request = request
        self.revision = revision
        self.intent = intent
        self.ticket = 0
        self.orders: list[Order] = []
        """Decided, and not on record yet."""
        self.writing = False


class Api:
    """One apiserver."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"a{number}"
        self.up = False
        self.instance = ""
        self._starts = 0

    def start(self) -> None:
        """The process begins, knowing nothing."""
        self._starts += 1
        self.up = True
        self.instance = f"{self.name}.{self._starts}"
        world = self.world
        holder = Holder(self.instance, world.charges, expiry_s=ORDER_S + 5)
        kind = RandomPlacer if world.config.random else Placer
        placer = kind(self.instance, world.engine.stream(self.instance))
        self.scheduler = Scheduler(placer=placer, watch=Watch(), holder=holder, iam=world.iam)
        self._jobs: dict[int, _Job] = {}
        self._tickets: dict[int, _Job] = {}
        self._wanting: dict[str, int] = {}
        self._ledger_revision: dict[str, int] = {}
        self._renewed: dict[str, float] = {}
        self._seen = 0
        self._heard_store = -1e9
        self._ready = False
        self._last_beat: dict[str, float] = {}
        self._tick(self.instance)
        self._leases(self.instance)
        self._give(self.instance)

    def kill(self) -> None:
        self.up = False

    def works_on(self, request: Request) -> bool:
        return request.number in self._jobs

    # --- watching ---------------------------------------------------------------------------------------------------

    def _tick(self, instance: str) -> None:
        if not self.up or instance != self.instance:
            return
        world, now = self.world, self.world.engine.now
        world.store.since(self.name, "claim", self._seen, lambda rev, items: self._claims(instance, rev, items))
        self.scheduler.watch.connected(now, now - self._heard_store < 2.5 * TICK_S)
        for change in self.scheduler.tick(now):
            if change.verdict is Verdict.FENCE:
                world.store.get(self.name, f"claim/{change.edge}", partial(self._fence, change.incarnation))
        self._pump()
        world.engine.after(TICK_S, self._tick, instance)

    def _fence(self, incarnation: int, revision: int, record: Claim | None) -> None:
        if record is not None:
            lost = fence(record, incarnation or record.incarnation, self.world.engine.now)
            if lost is not None:
                self.world.store.put_if(self.name, f"claim/{record.edge}", revision, lost, lambda *_: None)

    def _claims(self, instance: str, revision: int, items: list[tuple[str, Claim]]) -> None:
        if not self.up or instance != self.instance:
            return
        self._heard_store = self.world.engine.now
        self._seen = max(self._seen, revision)
        self._ready = True
        for _, record in items:
            known = self.scheduler.claim(record.edge)
            if known is not None and (known.incarnation, known.lost) >= (record.incarnation, record.lost):
                continue
            if known is None or known.incarnation < record.incarnation:
                self.scheduler.join(self.world.facts[record.edge], replace(record, lost=False), self.world.engine.now)
            if record.lost:
                self.scheduler.lost(record.edge)
        self._pump()

    def hear(self, report: NodeReport) -> None:
        if self.up:
            self.scheduler.hear(report, self.world.engine.now)
            if self.scheduler.waiting():
                self._pump()

    # --- creations --------------------------------------------------------------------------------------------------

    def create(self, request: Request) -> None:
        """A client's request, perhaps one that another apiserver had before."""
        if not self.up or not self._ready or request.number in self._jobs:
            return
        owned = partial(self._owned, self.instance, request)
        self.world.store.put_if(self.name, f"req/{request.number}", 0, Intent(self.instance), owned)

    def _owned(self, instance: str, request: Request, done: bool, revision: int, there: Intent) -> None:
        if not self.up or instance != self.instance or request.number in self._jobs:
            return
        if not done:  # take it over
            mine = Intent(self.instance, there.parts)
            self.world.store.put_if(
                self.name,
                f"req/{request.number}",
                revision,
                mine,
                lambda ok, rev, value: self._owned(instance, request, True, rev, value) if ok else None,
            )
            return
        job = _Job(request, revision, there)
        wanted = Wanted(project=request.project, ask=request.ask(), count=request.count, deadline=request.deadline)
        try:
            job.ticket = self.scheduler.submit(wanted, list(there.parts))
        except Unavailable:
            return  # the client asks again
        except DsecError as error:
            self._tell(job, 0, request.count, error)
            return
        self._jobs[request.number] = self._tickets[job.ticket] = job
        self._pump()

    def _pump(self) -> None:
        if not self.up:
            return
        out = self.scheduler.pump(self.world.engine.now)
        told = [(self._tickets.get(failure.ticket), failure) for failure in out.failures]
        for job, failure in told:  # found first: the first that is told may be the end of its job
            if job is not None:
                self._tell(job, failure.first, failure.count, failure.error)
        for order in out.orders:
            job = self._tickets[order.ticket]
            job.orders.append(order)
        for job in {id(self._tickets[order.ticket]): self._tickets[order.ticket] for order in out.orders}.values():
            self._record(job)
        for need in out.needs:
            self._need(need)

    def _record(self, job: _Job) -> None:
        """Where its parts go is on record before they go."""
        if job.writing or not job.orders:
            return
        job.writing = True
        orders, job.orders = job.orders, []
        intent = Intent(self.instance, overlaid(job.intent.parts, [order.part for order in orders]))

        def put(done: bool, revision: int, _: Any, instance: str = self.instance) -> None:
            if not self.up or instance != self.instance:
                return
            job.writing = False
            if not done:  # another apiserver has it
                self._drop(job)
                return
            job.revision, job.intent = revision, intent
            for order in orders:
                self._send(instance, job, order, 0)
            self._record(job)

        key = f"req/{job.request.number}"
        self.world.store.put_if(self.name, key, job.revision, intent, put)
        self.world.engine.after(3.0, self._stuck, self.instance, job)

    def _stuck(self, instance: str, job: _Job) -> None:
        """The store didn't answer: whether the record was written isn't known, so it is nobody's until it is asked
        for again."""
        if self.up and instance == self.instance and job.writing:
            self._drop(job)

    def _drop(self, job: _Job) -> None:
        self._jobs.pop(job.request.number, None)
        self._tickets.pop(job.ticket, None)
        self.scheduler.withdraw(job.ticket)

    def _send(self, instance: str, job: _Job, order: Order, tries: int) -> None:
        """To its node, again and again until it answers, or its claim is over."""
        if not self.up or instance != self.instance:
            return
        if job.ticket not in self._tickets or not self.scheduler.is_open(order):
            return
        node = self.world.node(order.part.edge)
        sent = SentOrder(self.name, self.instance, job.request, order.part, self.world.engine.now)

        def answer(taken: int) -> None:
            if self.up and instance == self.instance:
                self._answered(job, order, taken)

        self.world.network.send(self.name, node.name, node.order, sent, answer)
        self.world.engine.after(RESEND_S * (tries + 1), self._send, instance, job, order, tries + 1)

    def _answered(self, job: _Job, order: Order, taken: int) -> None:
        if job.ticket not in self._tickets or not self.scheduler.is_open(order):
            return
        self.scheduler.answered(order.ticket, order.part, taken)
        if taken:
            self._tell(job, order.part.first, taken, None)
        if taken < order.part.count:
            self._pump()

    def _tell(self, job: _Job, first: int, count: int, error: DsecError | None) -> None:
        request: Request = job.request
        self.world.network.send(self.name, "client", request.task.told, request, first, count, error)
        if request.number in self._jobs and not self.scheduler.knows(job.ticket):
            self._drop(job)

    # --- quotas -----------------------------------------------------------------------------------------------------

    def _need(self, need: Need) -> None:
        """Take more of a ledger; one turn at a time for each."""
        known = self._wanting.get(need.ledger)
        self._wanting[need.ledger] = max(need.count, known or 0)
        if known is None:
            self._turn(self.instance, need.ledger)

    def _turn(self, instance: str, ledger: str) -> None:
        def found(revision: int, record: Ledger | None) -> None:
            if not self.up or instance != self.instance or ledger not in self._wanting:
                return
            holder = self.scheduler.holder
            record = record or Ledger(limit=self.world.limit(ledger))
            size = block(record.limit, len(self.world.apis))
            new, got = take(record, self.instance, self._wanting[ledger], size)
            if not got:
                del self._wanting[ledger]
                self.scheduler.granted(ledger, holder.shares.get(ledger, 0), more=False)
                self._pump()
                return

            def put(done: bool, *_: Any) -> None:
                if not self.up or instance != self.instance or ledger not in self._wanting:
                    return
                if done:
                    del self._wanting[ledger]
                    self.scheduler.granted(ledger, new.shares[self.instance], more=True)
                    self._pump()
                else:
                    self._turn(instance, ledger)

            self.world.store.put_if(self.name, f"ledger/{ledger}", revision, new, put)

        self.world.store.get(self.name, f"ledger/{ledger}", found)
        self.world.engine.after(3.0, self._retry, instance, ledger)

    def _retry(self, instance: str, ledger: str) -> None:
        if self.up and instance == self.instance and ledger in self._wanting:
            self._turn(instance, ledger)

    def _give(self, instance: str) -> None:
        """Give back what lies idle; and of holders that are dead, what they have no use for."""
        if not self.up or instance != self.instance:
            return
        self.world.engine.after(GIVE_S, self._give, instance)
        for ledger in self.world.quota_projects:
            if ledger not in self._wanting:
                self.world.store.get(self.name, f"ledger/{ledger}", partial(self._give_back, instance, ledger))

    def _give_back(self, instance: str, ledger: str, revision: int, record: Ledger | None) -> None:
        if not self.up or instance != self.instance or record is None or ledger in self._wanting:
            return
        holder, mine = self.scheduler.holder, record.shares.get(self.instance, 0)
        share = holder.shares.get(ledger, 0)
        spare = share - holder.used(ledger) - block(record.limit, len(self.world.apis))
        if spare > 0:
            share -= spare
            holder.shares[ledger] = share  # first, and for good: what is given back is never used meanwhile
        new = give(record, self.instance, mine - share) if mine > share else record
        for name in record.shares:
            if name != self.instance and self.world.dead_for(name) > 2 * ORDER_S:
                new = shrink(new, name, self._charged(name, ledger))
        if new != record:
            self.world.store.put_if(self.name, f"ledger/{ledger}", revision, new, lambda *_: None)

    def _charged(self, holder: str, ledger: str) -> int:
        """What nodes say is charged to another holder; more than any share while not all have been heard, so that
        nothing is taken away."""
        watch = self.scheduler.watch
        if not self._ready:
            return 1 << 40  # it doesn't even know which nodes there are
        total = 0
        for edge in watch.edges():
            report = watch.report(edge)
            if report is None or watch.health(edge) is Health.SILENT:
                return 1 << 40
            for project, charged in report.charged.get(holder, {}).items():
                if ledger in self.world.ledgers(project):
                    total += charged.live
        return total

    # --- leases -----------------------------------------------------------------------------------------------------

    def renew(self, task: Task) -> None:
        """A client's renewal; the nodes hear of it with the next batch."""
        if self.up:
            self._renewed[task.run] = 60.0
            self.world.network.send(self.name, "client", task.acknowledged)

    def _leases(self, instance: str) -> None:
        if not self.up or instance != self.instance:
            return
        self.world.engine.after(LEASES_S, self._leases, instance)
        renewed, self._renewed = self._renewed, {}
        if renewed:
            for node in self.world.nodes:
                self.world.network.send(self.name, node.name, node.renewed, renewed, bus=True)
