"""Puts the simulated cluster together, lets things go wrong in it, and says what came of it."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import Struct

from dsec.plan.fencing import Claim
from dsec.plan.iam import Iam, lineage
from dsec.spec.cluster import NodeFacts
from dsec.spec.iam import Project, Quota
from dsec.testing.sim.clients import PRODUCTION_NODES, TASK_MAX, TASK_P50, TASK_SIGMA, Request, Task, mean_life_s
from dsec.testing.sim.control import Api
from dsec.testing.sim.engine import Engine
from dsec.testing.sim.judge import Judge
from dsec.testing.sim.node import Node
from dsec.testing.sim.wires import Network, Store

LIVE_A_NODE = 2400
"""Mean at the published peak."""
EARLY_ENDS = 1.25
"""So many more have to begin, as trainers and nodes die and take theirs along."""
LOOK_S = 20.0
STEADY_FROM = 0.6
"""Of the time: what comes after is called steady."""
LABS = 5


class SimConfig(Struct, frozen=True, kw_only=True):
    """What to simulate."""

    seed: int = 0
    nodes: int = 160
    hours: float = 2.0
    apis: int = 3
    report_s: float = 2.0
    faults: float = 1.0
    """How much goes wrong: 1 is some hundred faults in two hours of 160 nodes; 0 nothing."""
    load: float = 1.0
    """Of the published one."""
    random: bool = False
    """Each sandbox goes to any node that has room: what placement is measured against."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What came of it."""

    seed: int
    nodes: int
    hours: float
    invariant_violations: int
    violations: list[str]
    live_peak: int
    created: int
    creates_per_s_peak: int
    imbalance: float
    """The fullest node over the mean, less 1: median over the last part of the time."""
    imbalance_worst: float
    """The largest ever seen, bursts included."""
    locality: float
    """How many times as often as by chance sandboxes came to nodes that had held their environment when they were asked
    for: over the last part of the time, as `imbalance`."""
    locality_from_empty: float
    """The same over all of the time, which begins with no layer anywhere."""
    layer_hits: float
    """Share of sandboxes that came to such nodes in the last part of the time; with `placement` random: what random
    placement has."""
    layer_hits_by_chance: float
    """What it would have been by chance with the layers where they were."""
    layer_fetches: int
    """Times that a node had to fetch an environment's layers."""
    wait_p50_s: float
    wait_p99_s: float
    """From a request to the last of its sandboxes on record at a node."""
    faults: dict[str, int]
    ends: dict[str, int]
    failures: dict[str, int]
    events: int
    digest: str
    wall_s: float


class World:
    """Everything there is."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.engine = engine = Engine(config.seed)
        self.network = Network(engine)
        self.store = Store(engine, self.network)
        self.judge = Judge(self)
        self.store.watch = self.judge.changed
        self.facts = [
            NodeFacts(edge=edge, max_live=3200, max_starting=96, memory_capacity_bytes=3400 * (640 << 20))
            for edge in range(config.nodes)
        ]
        self.nodes = [Node(self, facts) for facts in self.facts]
        self.apis = [Api(self, number) for number in range(config.apis)]
        self.tasks: dict[str, Task] = {}
        self.came: Counter[int] = Counter()
        self.had_layers: dict[int, tuple[frozenset[int], float]] = {}
        """By request: the nodes that held its environment when it was asked for, and their share of all."""
        self.faults: Counter[str] = Counter()
        self._died: dict[str, float] = {}
        self._bus_upset_at = -math.inf
        self._requests = 0
        self._rng = engine.stream("world")
        self._make_projects()

    def _make_projects(self) -> None:
        capacity = self.config.nodes * LIVE_A_NODE
        records, self.quota_projects = [], []
        self.projects: list[str] = []
        for lab in range(LABS):
            limit = capacity // 12 if lab == 0 else None
            records.append(Project(path=f"lab{lab}", quota=Quota(sandboxes=limit), weight=1.0 + lab))
            for team in range(3):
                inner = capacity // 30 if (lab, team) == (1, 0) else None
                path = f"lab{lab}/team{team}"
                records.append(Project(path=path, quota=Quota(sandboxes=inner)))
                self.projects.append(path)
        self.iam = Iam(records)
        self._limits = {each.path: each.quota.sandboxes for each in records if each.quota.sandboxes is not None}
        self.quota_projects = sorted(self._limits)
        self._ledgers = {path: [each for each in lineage(path) if each in self._limits] for path in self.projects}
        self._charges = {path: [(each, 1) for each in ledgers] for path, ledgers in self._ledgers.items()}

    # --- what its inhabitants ask -----------------------------------------------------------------------------------

    def ledgers(self, project: str) -> Sequence[str]:
        return self._ledgers[project]

    def charges(self, project: str) -> Sequence[tuple[str, int]]:
        """The same, with what a sandbox costs."""
        return self._charges[project]

    def limit(self, ledger: str) -> int:
        return self._limits[ledger]

    def node(self, edge: int) -> Node:
        return self.nodes[edge]

    def next_request(self) -> int:
        self._requests += 1
        return self._requests

    def dead_for(self, instance: str) -> float:
        """How long an apiserver's process has been dead, seconds; 0 where it lives."""
        if any(api.up and api.instance == instance for api in self.apis):
            return 0.0
        return self.engine.now - self._died.get(instance, self.engine.now)

    # --- what the judge asks ----------------------------------------------------------------------------------------

    @property
    def placed(self) -> list[Node]:
        """Nodes that take sandboxes."""
        return [node for node in self.nodes if node.up and node.claim is not None and not node.cordoned]

    @property
    def steady(self) -> bool:
        """It is the last part of the time: the cluster was filled before."""
        return self.engine.now > STEADY_FROM * self.config.hours * 3600

    def fenced(self, node: Node) -> bool:
        record: Claim | None = self.store.values.get(f"claim/{node.edge}", (0, None))[1]
        return record is None or node.claim is None or record.lost or record.incarnation != node.claim.incarnation

    def well(self, node: Node, for_s: float) -> bool:
        """Nothing has happened to it, or to its network, for so long."""
        return node.up and node.claim is not None and self.engine.now - node.upset_at > for_s

    def bus_well(self, for_s: float) -> bool:
        """No apiserver was killed or cut off for so long."""
        return self.engine.now - self._bus_upset_at > for_s

    def told_of(self) -> list[Request]:
        return [request for task in self.tasks.values() for request in task.requests]

    # --- what happens -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        for node in self.nodes:
            self.engine.after(self._rng.uniform(0, 2), node.start)
        for api in self.apis:
            self.engine.after(self._rng.uniform(0, 2), api.start)
        self.engine.after(8.0, self._task)
        self.engine.after(LOOK_S, self._look)
        if self.config.faults > 0:
            self._next_fault()

    def _task(self) -> None:
        """A trainer begins; the next one comes by chance."""
        config = self.config
        scale = config.nodes / PRODUCTION_NODES
        rate = EARLY_ENDS * config.load * config.nodes * LIVE_A_NODE / mean_life_s()  # sandboxes a second
        mean = TASK_P50 * math.exp(TASK_SIGMA**2 / 2) * scale
        size = min(TASK_MAX, TASK_P50 * math.exp(TASK_SIGMA * self._rng.gauss(0.0, 1.0))) * scale
        number = len(self.tasks)
        task = Task(self, number, max(1, round(size)))
        self.tasks[task.run] = task
        self.engine.after(self._rng.expovariate(rate / mean), self._task)

    def _look(self) -> None:
        self.judge.look()
        self.engine.after(LOOK_S, self._look)

    def _next_fault(self) -> None:
        mean_s = 7200 / (200 * self.config.faults) * max(1.0, PRODUCTION_NODES / self.config.nodes / 8)
        if mean_s < 1e9:  # else never
            self.engine.after(self._rng.expovariate(1 / mean_s), self._fault)

    def _fault(self) -> None:
        """One of the things that happen to clusters."""
        self._next_fault()
        rng = self._rng
        kinds = ["kill", "reboot", "cut", "cut_bus", "slow", "flap", "api_kill", "api_cut", "drain", "rack"]
        weights = [6, 1, 3, 3, 3, 1, 2, 2, 1, 0.5]
        kind = rng.choices(kinds, weights)[0]
        self.faults[kind] += 1
        node = rng.choice(self.nodes)
        if kind in ("kill", "reboot"):
            self._down(node, reboot=kind == "reboot")
        elif kind in ("cut", "cut_bus"):
            self._cut([node], rng.choice([4.0, 15.0, 60.0, 180.0]), bus=kind == "cut_bus")
        elif kind == "slow":
            node.slow, node.upset_at = 20.0, self.engine.now
            self.engine.after(rng.uniform(30, 300), self._heal_slow, node)
        elif kind == "flap":
            for n in range(5):
                self.engine.after(n * 15.0, self._cut, [node], 5.0)
        elif kind == "rack":
            self._cut(rng.sample(self.nodes, max(1, self.config.nodes // 10)), rng.choice([10.0, 45.0]))
        elif kind == "drain":
            node.cordoned, node.upset_at = True, self.engine.now
            self.engine.after(rng.uniform(60, 600), self._uncordon, node)
        elif kind == "api_kill":
            self._api_down()
        else:
            self._api_cut(rng.choice([2.0, 10.0, 40.0]))

    def _down(self, node: Node, *, reboot: bool) -> None:
        if node.up:
            if reboot:
                node.reboot()
            else:
                node.kill()
            self.engine.after(self._rng.uniform(60, 300) if reboot else self._rng.uniform(1, 20), self._up, node)

    def _up(self, node: Node) -> None:
        node.upset_at = self.engine.now
        if not node.up:
            node.start()

    def _cut(self, nodes: list[Node], seconds: float, *, bus: bool = False) -> None:
        cut = self.network.cut_bus if bus else self.network.cut
        for node in nodes:
            cut.add(node.name)
            node.upset_at = self.engine.now + seconds
        self.engine.after(seconds, self._join, nodes, bus)

    def _join(self, nodes: list[Node], bus: bool) -> None:
        cut = self.network.cut_bus if bus else self.network.cut
        for node in nodes:
            cut.discard(node.name)
            node.upset_at = self.engine.now

    def _heal_slow(self, node: Node) -> None:
        node.slow, node.upset_at = 1.0, self.engine.now

    def _uncordon(self, node: Node) -> None:
        node.cordoned, node.upset_at = False, self.engine.now

    def _api_down(self) -> None:
        up = [api for api in self.apis if api.up]
        if len(up) > 1:
            api = self._rng.choice(up)
            self._died[api.instance] = self._bus_upset_at = self.engine.now
            api.kill()
            self.engine.after(self._rng.uniform(1, 30), self._api_up, api)

    def _api_up(self, api: Api) -> None:
        self._bus_upset_at = self.engine.now
        if not api.up:
            api.start()

    def _api_cut(self, seconds: float) -> None:
        api = self._rng.choice(self.apis)
        self._bus_upset_at = self.engine.now + seconds
        self.network.cut_bus.add(api.name)
        self.engine.after(seconds, self._api_joined, api)

    def _api_joined(self, api: Api) -> None:
        self._bus_upset_at = self.engine.now
        self.network.cut_bus.discard(api.name)


def simulate(config: SimConfig, progress: Callable[[float, int], None] = lambda now, live: None) -> Outcome:
    """Run it to its end. The same configuration gives the same outcome, `wall_s` apart. `progress`: called each second
    of virtual time, with that and how many are live."""
    began = time.perf_counter()
    world = World(config)
    world.begin()
    collects = gc.isenabled()
    gc.disable()  # nothing here makes cycles, and to look through all sandboxes again and again takes most of the time
    try:
        world.engine.run(config.hours * 3600, lambda: progress(world.engine.now, world.judge.live))
    finally:
        if collects:
            gc.enable()
    judge = world.judge
    judge.look()
    judge.end()
    waits = sorted(judge.waits)
    return Outcome(
        seed=config.seed,
        nodes=config.nodes,
        hours=config.hours,
        invariant_violations=len(judge.violations),
        violations=judge.violations[:20],
        live_peak=judge.live_peak,
        created=sum(judge.creates.values()),
        creates_per_s_peak=max(judge.creates.values(), default=0),
        imbalance=round(statistics.median(judge.imbalance), 4) if judge.imbalance else 0.0,
        imbalance_worst=round(judge.imbalance_burst, 4),
        locality=round(judge.locality_steady.over_chance, 3),
        locality_from_empty=round(judge.locality.over_chance, 3),
        layer_hits=round(judge.locality_steady.rate, 4),
        layer_hits_by_chance=round(judge.locality_steady.rate_by_chance, 4),
        layer_fetches=sum(node.fetches for node in world.nodes),
        wait_p50_s=round(waits[len(waits) // 2], 4) if waits else 0.0,
        wait_p99_s=round(waits[len(waits) * 99 // 100], 4) if waits else 0.0,
        faults=dict(sorted(world.faults.items())),
        ends=dict(sorted(judge.ends.items())),
        failures=dict(sorted(judge.failures.items())),
        events=world.engine.events,
        digest=world.engine.digest(),
        wall_s=round(time.perf_counter() - began, 2),
    )
