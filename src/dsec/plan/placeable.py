"""One node as a placer sees it: the last report, and what was placed there since.

Pure. `load`, `live`, `memory`, `starts` and `window` are what `weigh` made of both.
"""

from __future__ import annotations

from dsec.spec.cluster import NodeFacts, NodeReport

Kind = tuple[str, frozenset[str], frozenset[tuple[str, str]]]
"""Backend, features and labels that are asked for."""


class Node:
    """One node as this placer sees it."""

    __slots__ = (
        "burst",
        "capacity",
        "cordoned",
        "edge",
        "facts",
        "in_runs",
        "layers",
        "live",
        "load",
        "max_live",
        "memory",
        "ok",
        "overlaid",
        "placeable",
        "report",
        "sent",
        "sent_bytes",
        "starts",
        "unsteady",
        "window",
    )

    def __init__(self, facts: NodeFacts) -> None:
        self.edge = facts.edge
        self.facts = facts
        self.report: NodeReport | None = None
        self.burst = facts.labels.get("burst") == "true"
        self.cordoned = False
        self.placeable = False
        self.unsteady = False
        self.overlaid = False
        """Something was placed there since its last report."""
        self.max_live = max(1, facts.max_live)
        self.capacity = max(1, facts.memory_capacity_bytes)
        self.window = 1.0
        self.sent = 0
        self.sent_bytes = 0
        self.live = self.memory = 0
        self.starts = 0.0
        self.load = 0.0
        self.ok = False
        self.layers: set[str] = set()
        self.in_runs: dict[str, int] = {}
        """The report's own until something is placed there."""

    def weigh(self, *, start_window: float, busy_from: float) -> None:
        """How full it is, from the report and what was sent since; `Policy` has what the arguments mean."""
        report = self.report
        if report is None:
            return
        sent = self.sent
        self.live = report.live + report.queued + sent
        self.memory = report.memory_committed_bytes + self.sent_bytes
        self.starts = report.starting + report.queued + sent
        self.window = 0.0 if report.short or report.draining else self.facts.max_starting * start_window
        load = max(self.live / self.max_live, self.memory / self.capacity)
        if report.busy > busy_from:
            load += report.busy - busy_from
        self.load = load

    def fits(self, memory_bytes: int, count: int) -> bool:
        """Whether it has room for so many of so much each."""
        return (
            self.live + count <= self.max_live
            and self.starts + count <= self.window
            and self.memory + count * memory_bytes <= self.capacity
        )

    def suits(self, kind: Kind) -> bool:
        """Whether it is such a node, with room or without."""
        backend, features, labels = kind
        facts = self.facts
        return (
            backend in facts.backends
            and (not features or features.issubset(facts.features))
            and all(facts.labels.get(name) == value for name, value in labels)
        )


def steady(nodes: list[Node]) -> list[Node]:
    """Without those that come and go, where there are others."""
    return [node for node in nodes if not node.unsteady] or nodes
