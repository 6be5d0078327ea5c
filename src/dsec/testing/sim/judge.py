"""What must hold all along, whatever fails; and the figures.

- *twice*: an index of a request is on two nodes at once, none of whose incarnations is fenced.
- *fence*: a node serves sandboxes that were declared lost.
- *quota*: more sandboxes of a project and those below it than its quota, what is queued included.
- *lost*: an index that a client was told is there never came to a node; or one that a client asked for was neither made
  nor refused long after its deadline.
- *lease*: a run lapsed whose client was told that its lease is renewed, on a node and network that were well; or its
  sandboxes run on long after its client died.
- *node*: a node's counts aren't what it has, or it has more than it takes.
- *ledger*: a quota's shares are more than its limit.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from dsec.errors import DsecError
from dsec.plan.quota import Ledger
from dsec.testing.sim.clients import DEADLINE_S, LEASE_S, RENEW_S, Request, Task

if TYPE_CHECKING:
    from dsec.testing.sim.node import Node, Sandbox
    from dsec.testing.sim.world import World

GRACE_S = 60.0


class Locality(Struct):
    """How many sandboxes came to nodes that had held their environment when they were asked for, and how many would
    have, had each come to any node of that moment by chance."""

    made: int = 0
    hits: int = 0
    by_chance: float = 0.0

    def add(self, count: int, hit: bool, share: float) -> None:
        """So many came to one node; `share`: of all nodes, those that held it."""
        self.made += count
        self.hits += count * hit
        self.by_chance += count * share

    @property
    def rate(self) -> float:
        return self.hits / max(1, self.made)

    @property
    def rate_by_chance(self) -> float:
        return self.by_chance / max(1, self.made)

    @property
    def over_chance(self) -> float:
        return self.hits / self.by_chance if self.by_chance else 0.0


class Judge:
    """Sees everything at once, as nobody inside does."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.violations: list[str] = []
        self.live = 0
        self.live_peak = 0
        self.creates: Counter[int] = Counter()
        """By second."""
        self.ends: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.waits: list[float] = []
        self.imbalance: list[float] = []
        self.imbalance_burst = 0.0
        self.locality = Locality()
        """Of all the time."""
        self.locality_steady = Locality()
        """Of what was made at steady state."""
        self._owners: dict[tuple[int, int], Sandbox] = {}
        self._projects: Counter[str] = Counter()
        self._open: dict[int, Request] = {}

    def violated(self, what: str) -> None:
        if len(self.violations) < 1000:
            self.violations.append(f"{self.world.engine.now:.3f} {what}")

    # --- sandboxes --------------------------------------------------------------------------------------------------

    def made(self, node: Node, request: Request, made: list[Sandbox]) -> None:
        """A node has put some of a request on record."""
        world, count = self.world, len(made)
        self.creates[int(world.engine.now)] += count
        world.came[request.number] += count
        held, share = world.had_layers[request.number]
        for locality in (self.locality, self.locality_steady) if world.steady else (self.locality,):
            locality.add(count, node.edge in held, share)
        if world.fenced(node):
            return  # it doesn't know yet; nobody is going to be served there
        for each in made:
            if each.key in self._owners:
                self.violated(f"twice: {each.key} on {node.name}")
                count -= 1
            else:
                each.owned = True
                self._owners[each.key] = each
        self.live += count
        self.live_peak = max(self.live_peak, self.live)
        for ledger in world.ledgers(request.project):
            self._projects[ledger] += count
            if self._projects[ledger] > world.limit(ledger):
                self.violated(f"quota: {ledger} has {self._projects[ledger]} of {world.limit(ledger)}")

    def ended(self, node: Node, each: Sandbox, cause: str) -> None:
        """A node has nothing left of it."""
        self.ends[cause] += 1
        self._disown(each)

    def serves(self, node: Node) -> None:
        """It begins to serve with what it has."""
        ghosts = sum(not each.owned for each in node.sandboxes.values())
        if ghosts:
            self.violated(f"fence: {node.name} serves {ghosts} sandboxes that were declared lost")

    def fenced(self, node: Node) -> None:
        """All that it has is lost from now on."""
        for each in node.sandboxes.values():
            self._disown(each)

    def _disown(self, each: Sandbox) -> None:
        if each.owned:
            each.owned = False
            del self._owners[each.key]
            self.live -= 1
            for ledger in self.world.ledgers(each.request.project):
                self._projects[ledger] -= 1

    # --- clients ----------------------------------------------------------------------------------------------------

    def asked(self, request: Request) -> None:
        self._open[request.number] = request
        placed = self.world.placed
        held = frozenset(node.edge for node in placed if request.environment in node.layers)
        self.world.had_layers[request.number] = held, len(held) / max(1, len(placed))

    def told(self, request: Request, count: int, error: DsecError | None, *, refused: bool) -> None:
        """A client has heard of some of its sandboxes."""
        if error is not None:
            self.failures[error.code] += count
        if request.done and self._open.pop(request.number, None) is not None and not refused:
            self.waits.append(self.world.engine.now - request.started)

    def died(self, task: Task) -> None:
        """Nobody renews its lease any more."""
        for request in task.requests:
            self._open.pop(request.number, None)
        self.world.engine.after(LEASE_S + GRACE_S, self._buried, task)

    def _buried(self, task: Task) -> None:
        now = self.world.engine.now
        for node in self.world.nodes:
            if self.world.well(node, LEASE_S + GRACE_S) and node.runs.get(task.run):
                young = [s for s in node.sandboxes.values() if s.request.run == task.run and not s.running]
                if len(young) < node.runs[task.run]:
                    self.violated(f"lease: {task.run} runs on at {node.name}, its client died at {task.died_at:.1f}")
        self.world.engine.note(now)

    def lapsed(self, node: Node, run: str) -> None:
        """A node ends a run's sandboxes."""
        task = self.world.tasks[run]
        if task.alive and self.world.well(node, LEASE_S) and self.world.bus_well(LEASE_S):
            since = self.world.engine.now - task.renewed_at
            if since < LEASE_S - 2 * RENEW_S:
                self.violated(f"lease: {run} lapsed at {node.name} {since:.1f} s after a renewal")

    def changed(self, key: str, value: Any) -> None:
        """A change in the store, at the moment it is made."""
        top, _, name = key.partition("/")
        if top == "ledger" and isinstance(value, Ledger) and value.held > value.limit:
            self.violated(f"ledger: {name} has shares of {value.held}, the limit is {value.limit}")
        elif top == "claim" and value.lost:
            self.fenced(self.world.node(int(name)))

    # --- now and then -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Figures and counts at this moment."""
        world, now = self.world, self.world.engine.now
        loads = [node.live / node.facts.max_live for node in world.placed if world.well(node, 1800.0)]
        mean = sum(loads) / len(loads) if loads else 0.0
        if mean > 0.05 and len(loads) > 1:
            imbalance = max(loads) / mean - 1
            self.imbalance_burst = max(self.imbalance_burst, imbalance)
            if world.steady:
                self.imbalance.append(imbalance)
        for node in world.nodes:
            if not node.up or node.claim is None:
                continue
            if node.live + len(node.queue) != len(node.sandboxes):
                self.violated(f"node: {node.name} counts {node.live} and {len(node.queue)}, has {len(node.sandboxes)}")
            if node.live > node.facts.max_live or node.memory > node.facts.memory_capacity_bytes:
                self.violated(f"node: {node.name} has more than it takes")
        for number, request in list(self._open.items()):
            if now > request.deadline + 2 * DEADLINE_S + GRACE_S:
                del self._open[number]
                self.violated(f"lost: request {number} has {request.answered} answers of {request.count}")

    def end(self) -> None:
        """At the very end: what clients were told is there has been on a node."""
        for request in self.world.told_of():
            taken = sum(mark == 1 for mark in request.taken)
            if taken > self.world.came[request.number]:
                self.violated(
                    f"lost: request {request.number} was told of {taken}, {self.world.came[request.number]} came"
                )
