"""What the watcher makes of the nodes' reports: who is well, slow, silent, flapping, lost.

Pure and soft: rebuilt from reports, never stored. Times are the watcher's own monotonic clock at arrival, so that no
node's clock matters. The rules:

- *silent*: no report for `silent_s`. Nothing new is placed there; calls are told to come again.
- *due*: silent for `lost_s`. The watcher asks for it to be fenced (`Verdict.FENCE`); only the fence makes it lost
  (`lost`), and only a new claim brings it back. No verdict while the watcher itself is cut off or stood still, or while
  more than `mass` of all nodes went silent together, which says more about the network between than about the nodes:
  those are fenced after `mass_lost_s`.
- *flapping*: it went silent `flaps` times within `flap_s`. Until it was well for `calm_s` it gets only what no calmer
  node is there for; to join again makes it no calmer.
- *slow*: its creations take `slow_ratio` times the cluster's median, at least `slow_ms`, `slow_reports` reports in a
  row. It gets nothing until it is better, but once in `probe_s` a little, to find out. So is one whose last `follies`
  answers were none that an edge gives.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from enum import Enum

from msgspec import Struct

from dsec.spec.cluster import NodeFacts, NodeReport, sane


class WatchPolicy(Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    silent_s: float = 3.0
    lost_s: float = 30.0
    mass: float = 0.34
    mass_lost_s: float = 300.0
    flaps: int = 3
    flap_s: float = 600.0
    calm_s: float = 120.0
    slow_ratio: float = 5.0
    slow_ms: float = 500.0
    slow_reports: int = 3
    probe_s: float = 10.0
    follies: int = 3


class Health(Enum):
    """Of one node."""

    WELL = "well"
    SLOW = "slow"
    FLAPPING = "flapping"
    SILENT = "silent"
    LOST = "lost"


class Verdict(Enum):
    """What `tick` asks its caller to do."""

    SILENT = "silent"
    FENCE = "fence"


class Change(Struct, frozen=True):
    """A node about which something is to be done."""

    edge: int
    incarnation: int
    verdict: Verdict


class _Watched:
    __slots__ = ("facts", "flaps", "follies", "health", "heard", "probed", "report", "slow", "well_since")

    def __init__(self, facts: NodeFacts, now: float) -> None:
        self.facts = facts
        self.report: NodeReport | None = None
        self.health = Health.WELL
        self.heard = now
        self.well_since = now
        self.flaps: deque[float] = deque(maxlen=16)
        self.slow = 0
        self.follies = 0
        self.probed = now


class Watch:
    """One watcher. Not thread-safe; every call is synchronous."""

    def __init__(self, policy: WatchPolicy | None = None) -> None:
        self.policy = policy or WatchPolicy()
        self._nodes: dict[int, _Watched] = {}
        self._median_ms = 0.0
        self._connected_since: float | None = None
        self._looked = 0.0

    def join(self, facts: NodeFacts, now: float) -> None:
        """A node has claimed its number, again or for the first time. What is known of its flapping stays."""
        before = self._nodes.get(facts.edge)
        node = self._nodes[facts.edge] = _Watched(facts, now)
        if before is not None:
            node.flaps = before.flaps
            if self._flaps(node, now):
                node.health = Health.FLAPPING

    def connected(self, now: float, connected: bool) -> None:
        """Whether the watcher itself hears the cluster, said once a second or so: after a gap every node's silence
        begins anew. Not to be called for `silent_s` is a gap too: the watcher itself stood still."""
        if not connected:
            self._connected_since = None
        elif self._connected_since is None or now - self._looked >= self.policy.silent_s:
            self._connected_since = now
        self._looked = now

    def hear(self, report: NodeReport, now: float) -> tuple[NodeReport, bool] | None:
        """A report has come. Returns it with its numbers bounded, and whether the node may be given sandboxes; None
        where it is to be ignored: the node is unknown or lost, or speaks for another incarnation."""
        node = self._nodes.get(report.edge)
        if node is None or node.health is Health.LOST:
            return None
        known = node.report
        if known is not None and report.incarnation < known.incarnation:
            return None
        report = sane(report)
        if node.health is Health.SILENT:
            node.well_since = now
        node.heard = now
        node.report = report
        node.health = self._judge(node, now)
        return report, self._placeable(node, now)

    def again(self, edge: int, now: float) -> bool:
        """It says what it said last. False, and nothing done, where that may change what it is taken for."""
        node = self._nodes.get(edge)
        if node is None or node.health is not Health.WELL or node.slow or node.follies or node.report is None:
            return False
        if node.report.create_ms > max(self.policy.slow_ms, self.policy.slow_ratio * self._median_ms):
            return False
        node.heard = now
        return True

    def behaved(self, edge: int, well: bool, now: float) -> bool:
        """What the node answered to an order was an edge's answer, or wasn't. Returns whether it is to get nothing for
        now."""
        node = self._nodes.get(edge)
        if node is None:
            return False
        node.follies = 0 if well else node.follies + 1
        if node.follies < self.policy.follies:
            return False
        node.probed = now
        return True

    def lost(self, edge: int) -> None:
        """The node's incarnation was fenced (by whomever)."""
        node = self._nodes.get(edge)
        if node is not None:
            node.health = Health.LOST

    def forget(self, edge: int) -> None:
        """It was taken out of the cluster. Idempotent."""
        self._nodes.pop(edge, None)

    def health(self, edge: int) -> Health | None:
        """None: not known."""
        node = self._nodes.get(edge)
        return None if node is None else node.health

    def report(self, edge: int) -> NodeReport | None:
        """Its last one."""
        node = self._nodes.get(edge)
        return None if node is None else node.report

    def quiet(self, edge: int, now: float) -> float:
        """Seconds since its last report; infinite where there was none, or it is lost."""
        node = self._nodes.get(edge)
        heard = node is not None and node.report is not None and node.health is not Health.LOST
        return now - node.heard if node is not None and heard else math.inf

    def edges(self) -> list[int]:
        """All that aren't lost."""
        return sorted(edge for edge, node in self._nodes.items() if node.health is not Health.LOST)

    def tick(self, now: float) -> list[Change]:
        """Once a second or so: who has fallen silent, and who is due to be fenced."""
        policy, changes = self.policy, []
        if self._connected_since is None:
            return []
        silent = []
        alive = [n for n in self._nodes.values() if n.health is not Health.LOST]
        for node in alive:
            quiet = now - max(node.heard, self._connected_since)
            if quiet < policy.silent_s:
                continue
            silent.append((node, quiet))
            if node.health is not Health.SILENT:
                node.health = Health.SILENT
                node.flaps.append(now)
                changes.append(self._change(node, Verdict.SILENT))
        limit = policy.mass_lost_s if len(silent) > max(1, policy.mass * len(alive)) else policy.lost_s
        changes += [self._change(node, Verdict.FENCE) for node, quiet in silent if quiet >= limit]
        speeds = [n.report.create_ms for n in alive if n.report is not None and n.report.create_ms > 0]
        self._median_ms = statistics.median(speeds) if speeds else 0.0
        return changes

    def _change(self, node: _Watched, verdict: Verdict) -> Change:
        incarnation = node.report.incarnation if node.report is not None else 0
        return Change(node.facts.edge, incarnation, verdict)

    def _judge(self, node: _Watched, now: float) -> Health:
        policy, report = self.policy, node.report
        assert report is not None
        if self._flaps(node, now):
            return Health.FLAPPING
        limit = max(policy.slow_ms, policy.slow_ratio * self._median_ms)
        slow = report.create_ms > limit and self._median_ms > 0
        node.slow = node.slow + 1 if slow else 0
        return Health.SLOW if node.slow >= policy.slow_reports or node.follies >= policy.follies else Health.WELL

    def _flaps(self, node: _Watched, now: float) -> bool:
        if not node.flaps:
            return False
        policy = self.policy
        recent = sum(1 for at in node.flaps if now - at < policy.flap_s)
        return recent >= policy.flaps and now - node.well_since < policy.calm_s

    def _placeable(self, node: _Watched, now: float) -> bool:
        if node.health is Health.SLOW and now - node.probed >= self.policy.probe_s:
            node.probed = now
            return True
        return node.health in (Health.WELL, Health.FLAPPING)
