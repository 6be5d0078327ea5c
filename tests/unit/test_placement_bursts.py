"""Tasks of the published size that come to an empty cluster: nodes stay even within what bursts may, and of the layers
that are there about as much is met as that leaves room for."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from dsec.plan.placement import Ask, Placer
from dsec.spec.cluster import NodeFacts, NodeReport

NODES = 160
ENVIRONMENTS = 2000
MIB = 1 << 20
BUSY_BEAT_S = 0.2
CAP = 1.15
FROM = 100
"""So many on a node, on average, before unevenness is judged: below, a few more or less say nothing."""


class Nodes:
    """What they have; nothing ends in these minutes."""

    def __init__(self, placers: list[Placer]) -> None:
        self.placers = placers
        self.live = [0] * NODES
        self.taken: list[Counter[str]] = [Counter() for _ in range(NODES)]
        self.runs: list[Counter[str]] = [Counter() for _ in range(NODES)]
        self.layers: list[dict[str, None]] = [{} for _ in range(NODES)]
        self.news = set(range(NODES))

    def beat(self) -> None:
        """All of which something is new."""
        for edge in sorted(self.news):
            report = NodeReport(
                edge=edge,
                instance="i",
                incarnation=1,
                live=self.live[edge],
                layers=tuple(self.layers[edge]),
                taken=dict(self.taken[edge]),
                runs=dict(self.runs[edge]),
            )
            for placer in self.placers:
                placer.observe(report)
        self.news.clear()

    def take(self, placer: Placer, ask: Ask, count: int) -> dict[int, int]:
        shares = {share.edge: share.count for share in placer.place_many(ask, count)}
        for edge, of in shares.items():
            self.live[edge] += of
            self.taken[edge][placer.name] += of
            self.runs[edge][ask.run] += of
            self.layers[edge][ask.environment] = None
        self.news.update(shares)
        return shares


@pytest.mark.parametrize("seed", range(4))
def test_bursts_from_empty(seed: int) -> None:
    rng = random.Random(seed)
    placers = [Placer(name, random.Random(f"{seed}{name}")) for name in "abc"]
    for placer in placers:
        for edge in range(NODES):
            placer.join(NodeFacts(edge=edge, memory_capacity_bytes=1 << 60))
    nodes = Nodes(placers)
    nodes.beat()
    now = beaten = hits = chance = reachable = worst = 0.0
    for task in range(40):
        size = max(1, round(min(16_000, 2528 * math.exp(0.896 * rng.gauss(0, 1)))))
        fan = max(1, min(size, round(3 * math.exp(1.743 * rng.gauss(0, 1)))))
        for part in range(fan):
            now += rng.expovariate(1 / 0.05)
            if now - beaten > BUSY_BEAT_S:
                nodes.beat()
                beaten = now
            count = size // fan + (part < size % fan)
            ask = Ask(memory_bytes=MIB, environment=f"e{int(ENVIRONMENTS * rng.random() ** 2)}", run=f"r{task}")
            had = [edge for edge in range(NODES) if ask.environment in nodes.layers[edge]]
            full = CAP * (sum(nodes.live) + count) / NODES
            reachable += min(count, sum(max(0.0, full - nodes.live[edge]) for edge in had))
            shares = nodes.take(rng.choice(placers), ask, count)
            assert sum(shares.values()) == count
            hits += sum(shares.get(edge, 0) for edge in had)
            chance += count * len(had) / NODES
            mean = sum(nodes.live) / NODES
            if mean >= FROM:
                worst = max(worst, max(nodes.live) / mean - 1)
        now += rng.expovariate(1 / 5.0)
    assert worst <= CAP - 1
    assert hits > 0.65 * reachable
    assert hits > 1.2 * chance
