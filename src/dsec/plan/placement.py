"""Where sandboxes go.

Pure: no clock, no I/O, randomness is injected. A `Placer` is one apiserver's view: the watcher's last report of each
node with the placer's own later placements laid over it. The rules, in order:

1. Filter: placeable (the watcher says), not cordoned, has the backend, features and labels, has room. Those that come
   and go (*unsteady*) count only where no steady one has what is asked for, full or not: a creation that names what
   one such node alone has goes there.
2. Nodes that held the environment's layers before the request come first, the least full of a few at random, until
   they are fuller than the mean by `locality_slack` of it and `locality_share` times their share of the request, or by
   `locality_most` of it; have `start_turns` times as much to start as they start at once, or `start_share` times their
   share; or `spread` times their share of the run.
3. For the rest of a request for many, as few others as balance allows: the least full of `k` at random gets what it
   lacks until it is as full as all will be at the mean afterwards (`locality_more` at most), within the same bounds. So
   few nodes fetch the layers and hold them from then on, each for many.
4. What is left, and one alone, by power of k choices: of `k` nodes at random the one with the least load. What was sent
   to it since its last report counts twice, up to `unseen`: other apiservers, which aren't seen before the next one,
   fill the same gaps. A node that has much more than its share of a run counts as fuller.

Many alike are planned at once, a chunk with each choice. What was placed counts as load at once, and until a
report says that the node took it (`NodeReport.taken`, a counter, so that no clock is compared); what is known never to
have arrived is taken back by `failed`. Nodes labelled `burst=true` get what the others have no room for, from
`burst_above` on and only where the caller allows it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from random import Random

from msgspec import Struct

from dsec.plan.placeable import Kind, Node, steady
from dsec.spec.cluster import NodeFacts, NodeReport


class Policy(Struct, frozen=True, kw_only=True):
    """How to choose; the numbers are measured by `dsec sim`."""

    k: int = 6
    holders: int = 8
    """Nodes with the environment's layers that are looked at."""
    locality_slack: float = 0.03
    """How much fuller than the mean a node with the layers may become, of the mean."""
    locality_share: float = 4.0
    """How much more, in its shares of the request; the fuller all are, the less: while a cluster fills, a request is
    large against what there is, and what it makes uneven is soon little."""
    locality_most: float = 0.11
    """How much in all, of the mean: in bursts 15 % are allowed, and apiservers see each other's only in reports."""
    locality_more: float = 0.05
    """How much, of the mean, a node without the layers may get at once: other apiservers may just have given it what it
    seems to lack."""
    start_turns: float = 3.0
    """So many times what it starts at once a node may have to start for the layers' sake: fetching takes longer."""
    start_share: float = 2.0
    """Or so many times its share of a request, where that is more."""
    chunk: int = 4
    """Most sandboxes of a batch that one choice places."""
    start_window: float = 8.0
    """A node gets no more while this many times its `max_starting` are on their way to it: what waits there would be
    out of the reach of fairness."""
    spread: float = 10.0
    """A node with so many times its share of a run gets no more of it for the layers' sake, and counts as fuller."""
    spread_from: int = 48
    spread_cost: float = 0.05
    unseen: float = 0.01
    """So much of what was sent to a node since its last report counts twice."""
    busy_from: float = 0.8
    burst_above: float = 0.8


class Ask(Struct, frozen=True, kw_only=True):
    """What a sandbox needs of a node."""

    memory_bytes: int
    backend: str = "container"
    environment: str = ""
    run: str = ""
    features: frozenset[str] = frozenset()
    labels: frozenset[tuple[str, str]] = frozenset()
    burst: bool = False
    """May go to a node for overflow."""

    @property
    def kind(self) -> Kind:
        return (self.backend, self.features, self.labels)


class Share(Struct, frozen=True):
    """A part of a plan: `count` sandboxes for one node."""

    edge: int
    count: int


class _Bounds(Struct, frozen=True):
    """How far a request may make nodes uneven for the layers' sake."""

    level: float
    """How full all will be at the mean once it is placed."""
    full: float
    """How full nodes may become that have the layers."""
    more: float
    """How much fuller one that hasn't them may become."""
    starts: float
    """What a node may have to start, where that is more than `start_turns` say."""
    run: float
    """So many of the run a node may have."""


class _Suiting(Struct):
    """The nodes that a kind of sandbox can be on."""

    plain: list[Node]
    burst: list[Node]
    """For overflow."""
    mean: float = 0.0
    """Load of the plain ones."""
    due: int = 0
    """When it is reckoned again."""
    room: int = 1
    capacity: int = 1
    """Of the plain ones together."""


class Placer:
    """One instance's placements. Not thread-safe; every call is synchronous."""

    def __init__(self, name: str, rng: Random, policy: Policy | None = None) -> None:
        """`name`: of this instance, under which nodes count what they took from it."""
        self.name = name
        self._random = rng.random
        self._policy = policy or Policy()
        self._nodes: dict[int, Node] = {}
        self._kinds: dict[Kind, _Suiting] = {}
        self._changes = 0
        """Of any node's load."""
        self._holders: dict[str, list[Node]] = {}
        self._runs: dict[str, int] = {}

    # --- what is known ----------------------------------------------------------------------------------------------

    def join(self, facts: NodeFacts) -> None:
        """A node is there, or is there again: whatever was placed on it before is over. Not placeable before its first
        report."""
        self.leave(facts.edge)
        self._nodes[facts.edge] = Node(facts)
        self._kinds.clear()

    def leave(self, edge: int) -> None:
        """A node is lost, or gone. Idempotent."""
        node = self._nodes.pop(edge, None)
        if node is not None:
            self._hold(node, ())
            self._count_runs(node, {})
            self._kinds.clear()

    def observe(self, report: NodeReport, *, placeable: bool = True, unsteady: bool = False) -> None:
        """A report of a node that has joined; `placeable`, `unsteady`: what the watcher makes of it."""
        node = self._nodes.get(report.edge)
        if node is None:
            return
        if (node.placeable, node.unsteady) != (placeable, unsteady):
            node.placeable, node.unsteady = placeable, unsteady
            self._kinds.clear()
        taken = report.taken.get(self.name, 0)
        before = node.report.taken.get(self.name, 0) if node.report is not None else 0
        arrived = max(0, min(taken - before, node.sent))
        if arrived:
            node.sent_bytes -= node.sent_bytes * arrived // node.sent
            node.sent -= arrived
        same = node.report is not None and node.report.layers == report.layers
        node.report = report
        if not same:
            self._hold(node, report.layers)
        self._count_runs(node, report.runs)
        node.overlaid = False
        self._weigh(node)

    def settled(self, edge: int) -> bool:
        """Whether a report that says what the last one said would change nothing."""
        node = self._nodes.get(edge)
        return node is not None and not node.overlaid

    def doubt(self, edge: int) -> None:
        """Nothing goes there until the next report that says otherwise."""
        node = self._nodes.get(edge)
        if node is not None and node.placeable:
            node.placeable = False
            self._kinds.clear()

    def cordon(self, edge: int, cordoned: bool = True) -> None:
        """An operator's word: nothing new goes there."""
        node = self._nodes.get(edge)
        if node is not None and node.cordoned != cordoned:
            node.cordoned = cordoned
            self._kinds.clear()

    def failed(self, edge: int, ask: Ask, count: int = 1) -> None:
        """Some of what was placed there is known not to have arrived: refused before the node counted it, or never
        sent."""
        node = self._nodes.get(edge)
        if node is not None:
            count = min(count, node.sent)
            node.sent -= count
            node.sent_bytes = max(0, node.sent_bytes - count * ask.memory_bytes) if node.sent else 0
            self._weigh(node)

    def loads(self) -> dict[int, float]:
        """How full each node is that gets something, 0..1, as this placer reckons."""
        return {node.edge: node.load for node in steady([n for n in self._nodes.values() if n.placeable])}

    def holders(self, environment: str) -> int:
        """How many nodes hold an environment's layers."""
        return len(self._holders.get(environment, ()))

    def possible(self, ask: Ask) -> bool:
        """Whether any known node, placeable or not, could ever take it: else waiting is in vain."""
        return any(
            node.suits(ask.kind) and node.capacity >= ask.memory_bytes and (ask.burst or not node.burst)
            for node in self._nodes.values()
        )

    # --- choosing ---------------------------------------------------------------------------------------------------

    def place(self, ask: Ask, exclude: Collection[int] = ()) -> int | None:
        """The node for one; None: none has room now. `exclude`: those that have refused it."""
        shares = self.place_many(ask, 1, exclude)
        return shares[0].edge if shares else None

    def place_many(self, ask: Ask, count: int, exclude: Collection[int] = ()) -> list[Share]:
        """A plan for `count` alike, at most one share a node; what it doesn't cover has no room now."""
        policy, suiting = self._policy, self._nodes_for(ask.kind)
        chunk = max(1, min(policy.chunk, count // 8))
        holding = list(self._holders.get(ask.environment, ()))
        bounds = self._bounds(suiting, ask, count)
        overflows = ask.burst and bool(suiting.burst) and bounds.level > policy.burst_above
        few = count > 1 and not overflows
        plan: dict[int, int] = {}
        left = count
        while left > 0:
            size = min(chunk, left)
            node = self._nearest(holding, suiting, ask, size, bounds, exclude) if holding else None
            if node is None and few:
                node = self._emptier(suiting, ask, size, bounds, exclude)
                if node is not None:
                    size = min(left, max(size, self._lacks(node, ask, bounds)))
                few = node is not None
            if node is None:
                node = self._choose(suiting, ask, size, bounds.run, exclude)
            if node is None:
                if chunk == 1:
                    break
                chunk = 1  # no node has room for a whole one
                continue
            self._put(node, ask, size)
            plan[node.edge] = plan.get(node.edge, 0) + size
            left -= size
        return [Share(edge, n) for edge, n in plan.items()]

    def _bounds(self, suiting: _Suiting, ask: Ask, count: int) -> _Bounds:
        policy = self._policy
        share = count * max(1 / suiting.room, ask.memory_bytes / suiting.capacity)
        mean = self._mean(suiting)
        level = mean + share
        slack = policy.locality_slack * level + policy.locality_share * (1 - min(1.0, level)) * share
        return _Bounds(
            level=level,
            full=max(level, mean + min(slack, policy.locality_most * level)),
            more=policy.locality_more * level,
            starts=policy.start_share * count / max(1, len(suiting.plain)),
            run=self._most(ask, count),
        )

    def _nearest(  # noqa: PLR0917
        self,
        holding: list[Node],
        suiting: _Suiting,
        ask: Ask,
        count: int,
        bounds: _Bounds,
        exclude: Collection[int],
    ) -> Node | None:
        """The least full of some that hold the environment's layers and are within the bounds. Those that can't take it
        are removed, and not asked about the rest."""
        policy, mean = self._policy, self._mean(suiting)
        near, seen = None, 0
        while holding and seen < policy.holders:
            at = int(self._random() * len(holding))
            node = holding[at]
            more = count / node.max_live
            if (
                node.load + more > max(bounds.full, mean + more)
                or node.starts + count > max(policy.start_turns * node.facts.max_starting, bounds.starts)
                or node.in_runs.get(ask.run, 0) + count > bounds.run
                or not node.fits(ask.memory_bytes, count)
                or not node.ok
                or node.burst
                or node.edge in exclude
                or not node.suits(ask.kind)
            ):
                holding[at] = holding[-1]
                holding.pop()
                continue
            seen += 1
            if near is None or node.load < near.load:
                near = node
        return near

    def _emptier(
        self, suiting: _Suiting, ask: Ask, count: int, bounds: _Bounds, exclude: Collection[int]
    ) -> Node | None:
        """The least full of some at random that lack so many or more, else of all; None: there is none."""
        nodes = suiting.plain

        def lacking(some: Iterable[Node]) -> Node | None:
            fitting = (n for n in some if self._lacks(n, ask, bounds) >= count and n.edge not in exclude)
            return min(fitting, key=lambda node: node.load, default=None)

        if len(nodes) > self._policy.k:
            found = lacking([nodes[int(self._random() * len(nodes))] for _ in range(self._policy.k)])
            if found is not None:
                return found
        return lacking(nodes)

    def _lacks(self, node: Node, ask: Ask, bounds: _Bounds) -> int:
        """How many it may get until it is as full as all are at the mean, within the other bounds."""
        memory = max(1, ask.memory_bytes)
        holds = min(node.max_live, node.capacity / memory)
        starts = max(self._policy.start_turns * node.facts.max_starting, bounds.starts)
        return math.floor(
            min(
                min(bounds.level - node.load, bounds.more) * holds,
                min(starts, node.window) - node.starts,
                bounds.run - node.in_runs.get(ask.run, 0),
                node.max_live - node.live,
                (node.capacity - node.memory) / memory,
            )
        )

    def _choose(self, suiting: _Suiting, ask: Ask, count: int, most: float, exclude: Collection[int]) -> Node | None:
        best = self._best_of(suiting.plain, ask, count, most, exclude)
        if ask.burst and suiting.burst and (best is None or best.load > self._policy.burst_above):
            other = self._best_of(suiting.burst, ask, count, most, exclude)
            if other is not None and (best is None or other.load < best.load):
                best = other
        return best

    def _best_of(self, nodes: list[Node], ask: Ask, count: int, most: float, exclude: Collection[int]) -> Node | None:
        size = len(nodes)
        best, least = None, 0.0
        for _ in range(min(self._policy.k, size)):
            node = nodes[int(self._random() * size)]
            if node.fits(ask.memory_bytes, count) and node.edge not in exclude:
                cost = self._cost(node, ask, most)
                if best is None or cost < least:
                    best, least = node, cost
        if best is None:  # the lucky ones were full: look at all
            fitting = (node for node in nodes if node.fits(ask.memory_bytes, count) and node.edge not in exclude)
            best = min(fitting, key=lambda node: (self._cost(node, ask, most), node.edge), default=None)
        return best

    def _most(self, ask: Ask, count: int) -> float:
        """So many of its run a node may have before it counts as fuller."""
        policy = self._policy
        if not ask.run:
            return math.inf
        return max(policy.spread_from, policy.spread * (self._runs.get(ask.run, 0) + count) / max(1, len(self._nodes)))

    def _cost(self, node: Node, ask: Ask, most: float) -> float:
        policy = self._policy
        load = node.load + min(node.sent / node.max_live, policy.unseen)
        return load + policy.spread_cost * (node.in_runs.get(ask.run, 0) >= most)

    def _mean(self, suiting: _Suiting) -> float:
        """How full nodes are, some changes ago at most."""
        if self._changes >= suiting.due:
            nodes = suiting.plain
            suiting.mean = sum([node.load for node in nodes]) / max(1, len(nodes))
            suiting.due = self._changes + max(8, len(nodes) // 8)
        return suiting.mean

    def _nodes_for(self, kind: Kind) -> _Suiting:
        found = self._kinds.get(kind)
        if found is None:
            suit = [n for n in self._nodes.values() if n.placeable and not n.cordoned and n.suits(kind)]
            for node in self._nodes.values():
                node.ok = node.placeable and not node.cordoned and not node.unsteady
            found = _Suiting(steady([n for n in suit if not n.burst]), steady([n for n in suit if n.burst]))
            found.room = sum(node.max_live for node in found.plain) or 1
            found.capacity = sum(node.capacity for node in found.plain) or 1
            if len(self._kinds) > 1000:  # callers choose labels: what they can fill is bounded
                self._kinds.clear()
            self._kinds[kind] = found
        return found

    # --- keeping count ----------------------------------------------------------------------------------------------

    def _put(self, node: Node, ask: Ask, count: int) -> None:
        if not node.overlaid:
            node.overlaid = True
            node.in_runs = dict(node.in_runs)
        node.sent += count
        node.sent_bytes += count * ask.memory_bytes
        if ask.environment and ask.environment not in node.layers:
            node.layers.add(ask.environment)
            self._holders.setdefault(ask.environment, []).append(node)
        if ask.run:
            node.in_runs[ask.run] = node.in_runs.get(ask.run, 0) + count
            self._runs[ask.run] = self._runs.get(ask.run, 0) + count
        self._weigh(node)

    def _weigh(self, node: Node) -> None:
        node.weigh(start_window=self._policy.start_window, busy_from=self._policy.busy_from)
        self._changes += 1

    def _hold(self, node: Node, layers: Iterable[str]) -> None:
        new = set(layers)
        for environment in node.layers - new:
            holding = self._holders[environment]
            holding.remove(node)
            if not holding:
                del self._holders[environment]
        for environment in sorted(new - node.layers):  # sorted: sets have no order that a seed could replay
            self._holders.setdefault(environment, []).append(node)
        node.layers = new

    def _count_runs(self, node: Node, runs: dict[str, int]) -> None:
        """Keeps the totals; what didn't change costs next to nothing."""
        before = node.in_runs
        if before == runs:
            return
        changed = [(run, count - before.get(run, 0)) for run, count in runs.items() if before.get(run) != count]
        if len(runs) - sum(run not in before for run, _ in changed) < len(before):
            changed += [(run, -count) for run, count in before.items() if run not in runs]
        for run, more in changed:
            total = self._runs.get(run, 0) + more
            if total > 0:
                self._runs[run] = total
            else:
                del self._runs[run]
        node.in_runs = runs
