"""A simulated edge: admission, deadlines, leases and claims by the real code; making and ending take virtual time.

What survives what: the process may be killed (its queue and what was being made are gone, running sandboxes go on, as
the zygote's do), the machine may reboot (all are gone, its disk knows the last incarnation), the network may be cut.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import Struct

from dsec.plan.admission import Limits, Load, never_fits, plan
from dsec.plan.expiry import Deadlines
from dsec.plan.fencing import Claim, Return, claim, serves
from dsec.plan.scheduler import Part
from dsec.spec.cluster import Charged, NodeFacts, NodeReport

if TYPE_CHECKING:
    from dsec.testing.sim.clients import Request
    from dsec.testing.sim.world import World

ORDER_S = 20.0
"""An order that is older than this is refused."""
LAYERS = 192
"""Environments whose layers a node keeps."""
CREATE_S = 0.12
PULL_S = 1.5
NEWS_S = 0.2
"""What a node took is reported after so long at most."""
RETRY_S = 1.0
_NONE = Charged(0, 0)


class Sandbox:
    """One on a node."""

    __slots__ = ("holder", "key", "memory", "owned", "request", "running")

    def __init__(self, request: Request, index: int, holder: str) -> None:
        self.request = request
        self.key = (request.number, index)
        self.holder = holder
        self.memory: int = request.memory_bytes
        self.running = False
        self.owned = False
        """Counted by the judge."""


class SentOrder(Struct, frozen=True):
    """An order on the wire."""

    api: str
    holder: str
    """The process that sends it, to whom what is taken is charged."""
    request: Request
    part: Part
    sent_at: float


class Node:
    """One machine and its edge."""

    def __init__(self, world: World, facts: NodeFacts) -> None:
        self.world = world
        self.facts = facts
        self.edge = facts.edge
        self.name = f"n{facts.edge}"
        self.limits = Limits(
            max_starting=facts.max_starting,
            max_live=facts.max_live,
            max_queued=8 * facts.max_starting,
            memory_capacity_bytes=facts.memory_capacity_bytes,
        )
        rng = world.engine.stream(self.name)
        self._gauss, self._uniform = rng.gauss, rng.random
        self.slow = 1.0
        self.cordoned = False
        # the disk
        self.had: int | None = None
        self.boot = 0
        self.sandboxes: dict[tuple[int, int], Sandbox] = {}
        """Running and being made, by request and index."""
        self.answers: dict[tuple[int, int], int] = {}
        """(request, first index) of each order -> how many it took: the same order gets the same answer."""
        self.layers: OrderedDict[str, None] = OrderedDict()
        self.fetches = 0
        """Of an environment's layers, so far."""
        # the process
        self.up = False
        self.claim: Claim | None = None
        self.instance = ""
        self.upset_at = -math.inf
        """When something last happened to it, or to its network."""
        self._starts = 0
        self._clear()

    def _clear(self) -> None:
        """A new process."""
        self.queue: deque[Sandbox] = deque()
        self.starting = 0
        self.memory = 0
        self.live = 0
        self.projects: dict[str, int] = {}
        self.runs: dict[str, int] = {}
        self.charged: dict[str, dict[str, Charged]] = {}
        self._charged_said: dict[str, dict[str, Charged]] = {}
        """What the last report said of those holders of which nothing has changed since."""
        self.taken: dict[str, int] = {}
        self.leases: Deadlines[str] = Deadlines()
        self._create_ms = 0.0
        self._news = False
        """It took something that no report has said yet."""
        self._layers: tuple[str, ...] | None = tuple(self.layers)
        """As a report says them; None: they are others since the last one."""
        self._generation = self.boot * 1000 + self._starts

    # --- its life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The process begins: it claims its number before it serves."""
        self._starts += 1
        self.up = True
        self.claim = None
        self.instance = f"{self.name}.{self._starts}"
        self._clear()
        self._join(self._starts)

    def kill(self) -> None:
        """SIGKILL of the process."""
        self.up = False
        self.claim = None
        for key, each in list(self.sandboxes.items()):
            if not each.running:
                del self.sandboxes[key]
                self.world.judge.ended(self, each, "create_failed")
        self.upset_at = self.world.engine.now

    def reboot(self) -> None:
        """The machine dies: nothing runs any more."""
        self.kill()
        self.boot += 1
        for each in self.sandboxes.values():
            self.world.judge.ended(self, each, "node_lost")
        self.sandboxes.clear()

    def _join(self, start: int) -> None:
        if self.up and self._starts == start and self.claim is None:
            self.world.store.get(self.name, f"claim/{self.edge}", lambda rev, value: self._found(start, rev, value))
            self.world.engine.after(RETRY_S, self._join, start)

    def _found(self, start: int, revision: int, record: Claim | None) -> None:
        if not self.up or self._starts != start or self.claim is not None:
            return
        new, how = claim(record, edge=self.edge, instance=self.instance, host=self.name, had=self.had, alive=False)

        def put(done: bool, _: int, value: Claim) -> None:
            if not self.up or self._starts != start or self.claim is not None:
                return
            if not done and value.instance != self.instance:
                return  # somebody was quicker: look again
            self.claim = new
            self.had = new.incarnation
            if how is Return.END_ALL:
                self._end_all()
            self._serve()

        self.world.store.put_if(self.name, f"claim/{self.edge}", revision, new, put)

    def _end_all(self) -> None:
        for each in self.sandboxes.values():
            self.world.judge.ended(self, each, "node_lost")
        self.sandboxes.clear()
        self.answers.clear()

    def _serve(self) -> None:
        now = self.world.engine.now
        self.world.judge.serves(self)
        for each in self.sandboxes.values():
            self._count(each.request, each.holder, 1)
            self.live += 1
            self.memory += each.memory
            self.leases.set(each.request.run, now + each.request.lease_s)  # while it was away nobody could renew
        self.beat(self._generation)
        self._expire(self._generation)

    # --- heartbeats -------------------------------------------------------------------------------------------------

    def beat(self, generation: int) -> None:
        """Say how it is, and look whether it still speaks for its number."""
        if not self.up or generation != self._generation or self.claim is None:
            return
        world = self.world
        self._say()
        world.store.get(self.name, f"claim/{self.edge}", self._check)
        world.engine.after(world.config.report_s * (0.95 + 0.1 * self._uniform()), self.beat, generation)

    def _say(self) -> None:
        report = self.report()
        self._news = False
        for api in self.world.apis:
            self.world.network.send(self.name, api.name, api.hear, report, bus=True)

    def _say_news(self, generation: int) -> None:
        """It has taken something, as real edges say soon, unless a beat has said it."""
        if self._news and self.up and generation == self._generation and self.claim is not None:
            self._say()

    def _check(self, _: int, record: Claim | None) -> None:
        if self.up and self.claim is not None and not serves(record, self.claim.incarnation):
            if record is not None and record.incarnation < self.claim.incarnation:
                return  # an old answer
            self.start()  # it was fenced: all over again

    def report(self) -> NodeReport:
        assert self.claim is not None
        if self._layers is None:
            self._layers = tuple(sorted(self.layers))
        said = self._charged_said
        for holder, by in self.charged.items():
            if holder not in said:
                said[holder] = dict(by)
        return NodeReport(
            edge=self.edge,
            instance=self.instance,
            incarnation=self.claim.incarnation,
            live=self.live,
            starting=self.starting,
            queued=len(self.queue),
            memory_committed_bytes=self.memory,
            create_ms=self._create_ms,
            draining=self.cordoned,
            projects=dict(self.projects),
            runs=dict(self.runs),
            layers=self._layers,
            taken=dict(self.taken),
            charged=dict(said),
        )

    # --- sandboxes --------------------------------------------------------------------------------------------------

    def order(self, order: SentOrder, reply: Callable[[int], None]) -> None:
        """An order arrives; the reply is how many of its first were taken, the others being refused for good."""
        world, part, request = self.world, order.part, order.request
        if not self.up or self.claim is None or part.incarnation != self.claim.incarnation:
            return
        if world.engine.now - order.sent_at > ORDER_S:
            return
        key = (request.number, part.first)
        taken = self.answers.get(key)
        if taken is None:
            taken = self.answers[key] = self._take(order)
        world.network.send(self.name, order.api, reply, min(taken, part.count))

    def _take(self, order: SentOrder) -> int:
        part, request = order.part, order.request
        if never_fits(request.memory_bytes, self.limits) is not None or self.cordoned:
            return 0
        room = min(self.limits.max_queued - len(self.queue), self.limits.max_live - self.live - len(self.queue))
        taken = max(0, min(part.count, room))
        if taken:
            made = [Sandbox(request, index, order.holder) for index in range(part.first, part.first + taken)]
            for each in made:
                self.sandboxes[each.key] = each
            self.queue += made
            self.world.judge.made(self, request, made)
            self._count(request, order.holder, taken, taken)
            self.taken[order.holder] = self.taken.get(order.holder, 0) + taken
            self.leases.set(request.run, self.world.engine.now + request.lease_s)
            if not self._news:
                self._news = True
                self.world.engine.after(NEWS_S, self._say_news, self._generation)
            self.pump()
        return taken

    def pump(self) -> None:
        """Start what may start: as the edge's gate does, by the same rules."""
        if not self.queue:
            return
        room = max(0, self.limits.max_starting - self.starting)
        head = [each.memory for each in islice(self.queue, room + 1)]
        load = Load(
            starting=self.starting,
            live=self.live,
            memory_committed_bytes=self.memory,
            memory_free_bytes=1 << 40,
            disk_free_bytes=1 << 40,
        )
        for _ in range(plan(head, load, self.limits).start):
            each = self.queue.popleft()
            self.starting += 1
            self.live += 1
            self.memory += each.memory
            seconds = CREATE_S * self.slow * math.exp(self._gauss(0.0, 0.4))
            seconds += self._layer(each.request.environment)
            self.world.engine.after(seconds, self._made, each, self._generation, seconds)

    def _layer(self, environment: str) -> float:
        """How long its layers take to come."""
        layers = self.layers
        if environment in layers:
            layers.move_to_end(environment)
            return 0.0
        layers[environment] = None
        self.fetches += 1
        if len(layers) > LAYERS:
            layers.popitem(last=False)
        self._layers = None
        return PULL_S

    def _made(self, each: Sandbox, generation: int, seconds: float) -> None:
        if generation != self._generation or not self.up:
            return
        self.starting -= 1
        self._create_ms = seconds * 1000 if not self._create_ms else 0.9 * self._create_ms + 0.1 * seconds * 1000
        each.running = True
        request = each.request
        self.world.engine.after(request.lifetime(self._gauss), self._over, each, self.boot)
        self.pump()

    def _over(self, each: Sandbox, boot: int) -> None:
        """It has lived its time."""
        if boot != self.boot or self.sandboxes.get(each.key) is not each:
            return
        if not self.up or self.claim is None:
            self.world.engine.after(RETRY_S, self._over, each, boot)  # the next process sees that it is due
            return
        self._end(each, "ended")
        self.pump()

    def _end(self, each: Sandbox, cause: str) -> None:
        del self.sandboxes[each.key]
        self._count(each.request, each.holder, -1)
        self.live -= 1
        self.memory -= each.memory
        self.world.judge.ended(self, each, cause)

    def _count(self, request: Request, holder: str, change: int, taken: int = 0) -> None:
        """So many more are here, of which some were just taken."""
        by = self.charged.get(holder)
        if by is None:
            by = self.charged[holder] = {}
        self._charged_said.pop(holder, None)
        known = by.get(request.project, _NONE)
        by[request.project] = Charged(known.taken + taken, known.live + change)
        for counts, name in ((self.projects, request.project), (self.runs, request.run)):
            left = counts.get(name, 0) + change
            if left:
                counts[name] = left
            else:
                del counts[name]

    # --- leases -----------------------------------------------------------------------------------------------------

    def renewed(self, runs: dict[str, float]) -> None:
        """Runs whose clients are there, and their leases."""
        if self.up and self.claim is not None:
            now = self.world.engine.now
            for run, lease_s in runs.items():
                if run in self.runs:
                    self.leases.set(run, now + lease_s)

    def _expire(self, generation: int) -> None:
        if not self.up or generation != self._generation:
            return
        for run in self.leases.pop_due(self.world.engine.now):
            doomed = [each for each in self.sandboxes.values() if each.request.run == run]
            if doomed:
                self.world.judge.lapsed(self, run)
            for each in doomed:
                if each.running:
                    self._end(each, "lease_lapsed")
            if any(not each.running for each in doomed):
                self.leases.set(run, self.world.engine.now + RETRY_S)  # what is being made meets it when it runs
        self.world.engine.after(RETRY_S, self._expire, generation)
