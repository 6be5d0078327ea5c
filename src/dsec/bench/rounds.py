"""Interleaved rounds: every contestant has a turn in each round, so that a noisy machine is noisy for all. Pure but for
the clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Mapping

from msgspec import Struct


class Turn(Struct, frozen=True):
    """One contestant's turn in one round."""

    count: int
    seconds: float
    failures: int = 0
    error: str = ""

    @property
    def rate(self) -> float:
        """Successes a second."""
        return (self.count - self.failures) / self.seconds


async def interleave(
    contestants: Mapping[str, Callable[[], Awaitable[Turn]]], rounds: int, told: Callable[[int, str, Turn], None]
) -> dict[str, list[Turn]]:
    """Run `rounds` rounds; the first contestant of a round is another one each time. `told` hears of each turn."""
    names = list(contestants)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            turn = await contestants[name]()
            turns[name].append(turn)
            told(index, name, turn)
    return turns


def median_rate(turns: list[Turn]) -> float:
    """Of all rounds."""
    return statistics.median(turn.rate for turn in turns)


def ratio(turns: Mapping[str, list[Turn]], name: str, other: str) -> float | None:
    """Median over the rounds of `name`'s rate by `other`'s in the same round; None where the other never succeeded."""
    pairs = zip(turns[name], turns.get(other, ()), strict=False)
    ratios = [ours.rate / theirs.rate for ours, theirs in pairs if theirs.rate > 0]
    return statistics.median(ratios) if ratios else None


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
