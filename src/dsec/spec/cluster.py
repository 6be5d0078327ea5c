"""What nodes of a cluster say of themselves, as values: the wire form of heartbeats and the input of `plan/`.

Nothing here is trusted: a node may lie or be broken, so `sane` bounds every number before anything decides by it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

MAX_EDGES = 1 << 16
MAX_LIVE = 1 << 20
MAX_MEMORY = 1 << 50
MAX_NODE_LIVE = 1 << 16
MAX_NODE_STARTING = 1 << 12
MAX_CREATE_MS = 1e7
MAX_SAID = 256
"""Features or labels of one node."""
MAX_NAMED = 4096
"""Projects, runs, layers or placers that one report may name."""

Natural = Annotated[int, Meta(ge=0)]
EdgeNumber = Annotated[int, Meta(ge=0, lt=MAX_EDGES)]


class NodeFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node is; changes only when it joins again."""

    edge: EdgeNumber
    backends: tuple[str, ...] = ("container",)
    features: tuple[str, ...] = ()
    """Of kernel and hardware, as `dsec doctor` names them."""
    labels: dict[str, str] = {}
    """The operator's; `burst=true` marks nodes for overflow alone."""
    max_live: Natural = 3200
    max_starting: Natural = 64
    memory_capacity_bytes: Natural = 0
    """Sum of limits that may be promised."""
    places: Natural = 0
    """So many function calls, and programs of the judge, run at once; 0: it doesn't say."""


class Charged(Struct, frozen=True, array_like=True):
    """What a node says of one holder of a quota and one account."""

    taken: Natural
    """Creations that it took since its instance began; refused ones don't count."""
    live: Natural


class NodeReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A heartbeat: what a node carries now."""

    edge: EdgeNumber
    instance: str
    """The process that says it; a node that joins again has another."""
    incarnation: Natural
    """The claim under which it serves (`plan/fencing.py`)."""
    live: Natural = 0
    """Everything that isn't ended, starting and ending ones included."""
    starting: Natural = 0
    queued: Natural = 0
    memory_committed_bytes: Natural = 0
    short: bool = False
    """Nothing starts: real memory or disk has run low."""
    busy: Annotated[float, Meta(ge=0)] = 0.0
    """Share of its cores that work, 0..1."""
    create_ms: Annotated[float, Meta(ge=0)] = 0.0
    """Median of its last creations; 0: there were none."""
    draining: bool = False
    projects: dict[str, Natural] = {}
    """Live sandboxes of each."""
    runs: dict[str, Natural] = {}
    """Live sandboxes of each run (`project` NUL `run`); the largest where there are many."""
    layers: tuple[str, ...] = ()
    """Environments whose layers it holds."""
    taken: dict[str, Natural] = {}
    """Creations that came from each placer since this instance began: what its own memory of recent placements may
    forget."""
    charged: dict[str, dict[str, Charged]] = {}
    """By holder, by account (`plan/quota.py`)."""


def sane_facts(facts: NodeFacts) -> NodeFacts:
    """The facts of a node with no more room, and no more to say, than one can have."""
    return replace(
        facts,
        max_live=min(facts.max_live, MAX_NODE_LIVE),
        max_starting=min(facts.max_starting, MAX_NODE_STARTING),
        memory_capacity_bytes=min(facts.memory_capacity_bytes, MAX_MEMORY),
        features=facts.features[:MAX_SAID],
        labels=dict(list(facts.labels.items())[:MAX_SAID]),
    )


def brief(report: NodeReport) -> NodeReport:
    """Without its details."""
    return replace(report, projects={}, runs={}, layers=(), charged={})


def filled(report: NodeReport, last: NodeReport) -> NodeReport:
    """A brief report with the details of an earlier one."""
    return replace(report, projects=last.projects, runs=last.runs, layers=last.layers, charged=last.charged)


def sane(report: NodeReport) -> NodeReport:
    """The report with numbers that cannot be cut to what can: a node that lies attracts no more than its size."""
    if (
        report.starting <= report.live <= MAX_LIVE
        and report.queued <= MAX_LIVE
        and report.memory_committed_bytes <= MAX_MEMORY
        and 0 <= report.busy <= 1
        and 0 <= report.create_ms < MAX_CREATE_MS
        and len(report.runs) <= MAX_NAMED
        and len(report.layers) <= MAX_NAMED
    ):
        return report
    live = min(report.live, MAX_LIVE)
    return replace(
        report,
        live=live,
        starting=min(report.starting, live),
        queued=min(report.queued, MAX_LIVE),
        memory_committed_bytes=min(report.memory_committed_bytes, MAX_MEMORY),
        busy=min(report.busy, 1.0) if report.busy == report.busy else 1.0,  # NaN is busy
        create_ms=report.create_ms if 0 <= report.create_ms < MAX_CREATE_MS else MAX_CREATE_MS,
        runs=dict(list(report.runs.items())[:MAX_NAMED]) if len(report.runs) > MAX_NAMED else report.runs,
        layers=report.layers[:MAX_NAMED],
    )
