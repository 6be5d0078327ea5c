"""An apiserver's creations from the request to the nodes: fairness, quota and placement put together.

Pure: time is an argument, what is to be sent comes back as values, and whoever does the I/O tells what became of it.
The simulator and the apiserver run this same class. A request for `count` alike is cut into *parts*, each a range of
its indexes on one node; a part is refused by a node (then it goes to another), or taken.

Invariants:

- An index is in one place: waiting here, or in one open part, or taken. It leaves an open part only when the node said
  that it refuses it, or when that incarnation of the node is fenced; never because an answer is missing. (A node that
  refused a part refuses it for as long as a copy of the order could still arrive, so a repeated order can't find room
  where the first found none.)
- Who waits is served by `FairQueue`, one for each kind of node that is asked for, so that what waits for one kind holds
  up nobody of another.
- Nothing is sent beyond what the quota's holder has; it says of which ledgers it needs more (`Need`).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from dsec.errors import AdmissionTimeout, DsecError, QuotaExceeded, Unavailable, Unsupported
from dsec.plan.fairness import FairQueue
from dsec.plan.fencing import Claim, over, serves
from dsec.plan.iam import Iam
from dsec.plan.placeable import Kind
from dsec.plan.placement import Ask, Placer, Share
from dsec.plan.quota import Holder
from dsec.plan.watch import Change, Health, Watch
from dsec.spec.cluster import NodeFacts, NodeReport

QUANTUM = 64
"""Sandboxes of one request that are served at a turn while others wait."""
ALONE = 32768
"""The same while nobody else does."""
MAX_REFUSALS = 12
"""So many nodes may refuse a part before the request is told so."""
MAX_PAUSES = 10
"""A part that is bound to its node asks so often, once a second, for a share that is large enough."""


class Wanted(Struct, frozen=True, kw_only=True):
    """A request."""

    project: str
    account: str = ""
    """To which it is charged; empty: the project."""
    ask: Ask
    count: int
    deadline: float
    """On the scheduler's clock."""


class Part(Struct, frozen=True, array_like=True):
    """A range of a request's indexes on one incarnation of a node."""

    first: int
    count: int
    edge: int
    incarnation: int


class Order(Struct, frozen=True):
    """A part that is to be sent to its node."""

    ticket: int
    part: Part


class Need(Struct, frozen=True):
    """So much more of a quota's ledger is needed."""

    ledger: str
    count: int


class Failure(Struct, frozen=True):
    """Indexes of a request that get no sandbox, and why."""

    ticket: int
    first: int
    count: int
    error: DsecError


class Pumped(Struct, frozen=True):
    """What is to be done now."""

    orders: list[Order]
    needs: list[Need]
    failures: list[Failure]


class _Range(Struct):
    """Indexes that wait."""

    ticket: int
    first: int
    count: int
    exclude: frozenset[int] = frozenset()
    refusals: int = 0
    fixed: Part | None = None
    """It goes nowhere else: an earlier apiserver may have sent it there already."""
    pauses: int = 0


class _Ticket:
    __slots__ = ("account", "open", "ranges", "waiting", "wanted")

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.account = wanted.account or wanted.project
        self.waiting: dict[int, Kind] = {}
        """Numbers in the queue of a kind."""
        self.open: dict[int, tuple[Part, _Range]] = {}
        """By first index."""
        self.ranges = 0


class Scheduler:
    """One apiserver's. Not thread-safe; every call is synchronous."""

    def __init__(self, *, placer: Placer, watch: Watch, holder: Holder, iam: Iam) -> None:
        self.placer = placer
        self.watch = watch
        self.holder = holder
        self._iam = iam
        self._queues: dict[Kind, FairQueue[_Range]] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._parked: dict[str, list[_Range]] = {}
        """Ledger -> what waits for more of it."""
        self._paused: list[_Range] = []
        """What asks for more of its ledger at the next tick."""
        self._claims: dict[int, Claim] = {}
        self._numbers = 0
        self._failures: list[Failure] = []
        self.eligible = 0
        """Requests so far that may be on nodes for overflow."""

    # --- nodes ------------------------------------------------------------------------------------------------------

    def join(self, facts: NodeFacts, claim: Claim, now: float) -> None:
        """A node has made a new claim. What was open on one before is sent to it again, if its sandboxes went on, and
        else placed again."""
        if not claim.lost:
            self._claims[facts.edge] = claim
            self.holder.joined(facts.edge)
            self._reopen(facts.edge)
            self.watch.join(facts, now)
            self.placer.join(facts)

    def hear(self, report: NodeReport, now: float) -> None:
        """A report has come."""
        if not serves(self._claims.get(report.edge), report.incarnation):
            return
        heard = self.watch.hear(report, now)
        if heard is not None:
            flaps = self.watch.health(report.edge) is Health.FLAPPING
            self.placer.observe(heard[0], placeable=heard[1], unsteady=flaps)
            self.holder.report(report.edge, report.instance, report.charged.get(self.holder.name, {}), now)

    def again(self, edge: int, now: float) -> bool:
        """A report has come that says what the last one said; False: it has to be heard (`hear`)."""
        return self.placer.settled(edge) and self.holder.settled(edge) and self.watch.again(edge, now)

    def lost(self, edge: int) -> None:
        """The node's incarnation is fenced."""
        self.watch.lost(edge)
        self.placer.leave(edge)
        self.holder.gone(edge)
        claim = self._claims.get(edge)
        if claim is not None:
            self._claims[edge] = replace(claim, lost=True)
            self._reopen(edge)

    def tick(self, now: float) -> list[Change]:
        """Once a second: what the watcher asks for. A node that fell silent gets nothing new."""
        paused, self._paused = self._paused, []
        for each in paused:
            if (found := self._tickets.get(each.ticket)) is not None:
                found.ranges -= 1
                self._wait(each)
        changes = self.watch.tick(now)
        for change in changes:
            self.placer.doubt(change.edge)
        return changes

    def behaved(self, edge: int, well: bool, now: float) -> None:
        """A node answered an order, or said what none says."""
        if self.watch.behaved(edge, well, now):
            self.placer.doubt(edge)

    def claim(self, edge: int) -> Claim | None:
        """The last one of a node that is known here."""
        return self._claims.get(edge)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, wanted: Wanted, parts: list[Part] | None = None) -> int:
        """A request; returns its ticket. `parts`: what an earlier apiserver had placed of it already: they are sent
        again to the same nodes, where those are still the same.

        Raises `Unsupported` where no node could ever take it, `Unavailable` where no node is known, or not yet what
        became of a node that has parts."""
        for part in parts or ():
            claim = self._claims.get(part.edge)
            if claim is None or claim.incarnation < part.incarnation:
                raise Unavailable("this server has just begun to learn about the cluster", remedy="Try again.")
        if not parts and not self.placer.possible(wanted.ask):
            if all(claim.lost for claim in self._claims.values()):
                raise Unavailable("no node has joined, or none is known yet", remedy="Try again in a moment.")
            raise Unsupported(
                "no node of the cluster has what this sandbox asks for",
                remedy="Ask for another backend, for less, or add such a node.",
            )
        self._numbers += 1
        self.eligible += wanted.ask.burst
        self._tickets[self._numbers] = _Ticket(wanted)
        at = 0
        for part in sorted(parts or [], key=lambda part: part.first):
            if over(self._claims[part.edge], part.incarnation):
                continue
            if part.first > at:
                self._wait(_Range(self._numbers, at, part.first - at))
            self._wait(_Range(self._numbers, part.first, part.count, fixed=part))
            at = part.first + part.count
        if at < wanted.count:
            self._wait(_Range(self._numbers, at, wanted.count - at))
        return self._numbers

    def knows(self, ticket: int) -> bool:
        """Whether anything of a request is still waiting or on its way."""
        return ticket in self._tickets

    def is_open(self, order: Order) -> bool:
        """Whether an order is still on its way: sent, and not answered."""
        found = self._tickets.get(order.ticket)
        return found is not None and found.open.get(order.part.first, (None,))[0] == order.part

    def unsent(self, order: Order) -> None:
        """An order will never be sent from here, nor placed again: another apiserver decides about it."""
        found = self._tickets.get(order.ticket)
        if found is not None and self.is_open(order):
            del found.open[order.part.first]
            self.placer.failed(order.part.edge, found.wanted.ask, order.part.count)
            self.holder.refused(found.account, order.part.edge, order.part.count)
            self._close(order.ticket)

    def pump(self, now: float) -> Pumped:
        """Place what can be placed now."""
        out = Pumped([], [], self._failures)
        self._failures = []
        for kind, queue in list(self._queues.items()):
            for each in queue.expired(now):
                out.failures.append(self._late(each))
            while self._serve(queue, now, out):
                pass
            if not len(queue):
                del self._queues[kind]
        return out

    def answered(self, ticket: int, part: Part, taken: int) -> None:
        """The node took the first `taken` of a part for certain, and refused the others for good."""
        found = self._tickets.get(ticket)
        if found is None or found.open.get(part.first, (None,))[0] != part:
            return
        _, each = found.open.pop(part.first)
        left = part.count - taken
        if left:
            self.placer.failed(part.edge, found.wanted.ask, left)
            self.holder.refused(found.account, part.edge, left)
            again = _Range(ticket, part.first + taken, left, each.exclude | {part.edge}, each.refusals + 1)
            if again.refusals >= MAX_REFUSALS:
                error = Unavailable(f"{again.refusals} nodes refused it, one after the other")
                self._failures.append(Failure(ticket, again.first, again.count, error))
            else:
                self._wait(again)
        self._close(ticket)

    def granted(self, ledger: str, share: int, *, more: bool, error: DsecError | None = None) -> None:
        """The holder's share of a ledger is `share` now; `more`: it got something. Where it didn't, what waits for it
        is refused (with `error`, where it isn't the quota's fault)."""
        self.holder.shares[ledger] = share
        for each in self._parked.pop(ledger, []):
            found = self._tickets.get(each.ticket)
            if found is None:
                continue
            free = self.holder.free(found.account) or 0
            found.ranges -= 1
            if more or free >= (each.count if each.fixed is not None else 1):
                self._wait(each)
            elif free and each.pauses < MAX_PAUSES:  # it can't be split: asking at once again would go on for ever
                found.ranges += 1
                each.pauses += 1
                self._paused.append(each)
            else:
                refused = error or exceeded(ledger)
                self._failures.append(Failure(each.ticket, each.first, each.count, refused))
                self._close(each.ticket)

    def withdraw(self, ticket: int) -> None:
        """Nobody waits for the rest; open parts go on."""
        found = self._tickets.pop(ticket, None)
        if found is not None:
            for number, kind in found.waiting.items():
                queue = self._queues.get(kind)
                if queue is not None:
                    queue.withdraw(number)

    def waiting(self) -> int:
        """Ranges that wait for room."""
        return sum(len(queue) for queue in self._queues.values())

    def waiting_bytes(self) -> int:
        """Memory of what waits for room and may be on nodes for overflow."""
        total = 0
        for queue in self._queues.values():
            for each in queue.items():
                ask = self._tickets[each.ticket].wanted.ask
                total += each.count * ask.memory_bytes * ask.burst
        return total

    # --- inside -----------------------------------------------------------------------------------------------------

    def _wait(self, each: _Range) -> None:
        found = self._tickets[each.ticket]
        wanted = found.wanted
        kind = wanted.ask.kind
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = FairQueue(self._iam.weight)
        number = queue.push(wanted.project, each, deadline=wanted.deadline)
        found.waiting[number] = kind
        found.ranges += 1

    def _serve(self, queue: FairQueue[_Range], now: float, out: Pumped) -> bool:
        """A turn of the one whose turn it is; False: there is no room for it, nor for those behind it."""
        head = queue.peek()
        if head is None:
            return False
        number, each = head
        found = self._tickets[each.ticket]
        wanted = found.wanted
        size = min(each.count, QUANTUM if len(queue) > 1 else ALONE)
        if each.fixed is not None:
            if over(self._claims[each.fixed.edge], each.fixed.incarnation):
                each.fixed = None
            else:
                size = each.count
        free = self.holder.free(found.account)
        if free is not None and free < size:
            if free == 0 or each.fixed is not None:
                least = size if each.fixed is not None else 1
                ledger = next((name for name, _ in self.holder.short(found.account, least)), "")
                need = dict(self.holder.short(found.account, each.count)).get(ledger, 0)
                queue.withdraw(number)
                del found.waiting[number]
                self._parked.setdefault(ledger, []).append(each)
                out.needs.append(Need(ledger, need))
                return True
            size = free
        if each.fixed is not None:
            shares = [Share(each.fixed.edge, size)]
        else:
            shares = self.placer.place_many(wanted.ask, size, each.exclude)
        placed = 0
        for share in shares:
            part = Part(each.first, share.count, share.edge, self._claims[share.edge].incarnation)
            self.holder.spend(found.account, share.edge, share.count, now)
            found.open[part.first] = (part, _Range(each.ticket, 0, 0, each.exclude, each.refusals))
            out.orders.append(Order(each.ticket, part))
            each.first += share.count
            each.count -= share.count
            placed += share.count
        if placed == 0 and each.exclude:  # all that have room have refused it: they may have some again
            queue.withdraw(number)
            del found.waiting[number]
            found.ranges -= 1
            each.exclude = frozenset()
            self._wait(each)
            return False
        queue.served(number, placed, done=each.count == 0)
        if each.count == 0:
            del found.waiting[number]
            found.ranges -= 1
        return placed == size

    def _late(self, each: _Range) -> Failure:
        found = self._tickets[each.ticket]
        found.waiting = {n: kind for n, kind in found.waiting.items() if self._has(n, kind)}
        found.ranges -= 1
        error = AdmissionTimeout(
            "no node had room for it before its deadline", remedy="Wait longer, ask for less, or add nodes."
        )
        failure = Failure(each.ticket, each.first, each.count, error)
        self._close(each.ticket)
        return failure

    def _has(self, number: int, kind: Kind) -> bool:
        queue = self._queues.get(kind)
        return queue is not None and number in queue

    def _reopen(self, edge: int) -> None:
        """Its claim is another one, or gone: so are its open parts."""
        claim = self._claims[edge]
        for ticket, found in list(self._tickets.items()):
            for part, each in list(found.open.values()):
                if part.edge == edge:
                    del found.open[part.first]
                    fixed = None if over(claim, part.incarnation) else part
                    self._wait(_Range(ticket, part.first, part.count, each.exclude, each.refusals, fixed))

    def _close(self, ticket: int) -> None:
        found = self._tickets.get(ticket)
        if found is not None and not found.open and not found.ranges:
            del self._tickets[ticket]


def exceeded(ledger: str) -> QuotaExceeded:
    """A ledger is a project, or a project NUL the name of a limit."""
    project, _, field = ledger.partition("\0")
    return QuotaExceeded(
        f"the project {project!r} has as much as its quota allows ({field or 'sandboxes'})",
        remedy="End some, or ask for a larger quota.",
        project=project,
        limit=field or "sandboxes",
    )
