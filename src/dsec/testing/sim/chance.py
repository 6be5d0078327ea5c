"""Placement at random: what locality and balance are measured against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from dsec.plan.placement import Ask, Placer, Share

TRIES = 20
"""So many nodes are drawn for a sandbox before there is said to be no room."""


class RandomPlacer(Placer):
    """Each sandbox goes to any node that suits and has room, each as likely as another."""

    def place_many(self, ask: Ask, count: int, exclude: Collection[int] = ()) -> list[Share]:
        nodes = self._nodes_for(ask.kind).plain
        plan: Counter[int] = Counter()
        for _ in range(count):
            drawn = (nodes[int(self._random() * len(nodes))] for _ in range(TRIES * bool(nodes)))
            node = next((n for n in drawn if n.fits(ask.memory_bytes, 1) and n.edge not in exclude), None)
            if node is None:
                break
            self._put(node, ask, 1)
            plan[node.edge] += 1
        return [Share(edge, n) for edge, n in plan.items()]
