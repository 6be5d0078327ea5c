"""When a sandbox is due: deadlines on the monotonic clock, and the rule that says which of its two TTLs comes first.

Pure. Invariant: a deadline that was moved or dropped is never reported (each change makes a new generation), so a
renewal and the expiry can't race: whoever comes first in the event loop decides, the other finds it decided.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

from msgspec import Struct

from dsec.spec.causes import Cause

_SLACK = 64

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """A set of keys with a due time each; every operation is O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._current: dict[K, int] = {}
        self._generation = 0

    def __len__(self) -> int:
        return len(self._current)

    def set(self, key: K, due: float | None) -> None:
        """`key` is now due at `due`, whatever was said before; None: never."""
        if due is None:
            self._current.pop(key, None)
        else:
            self._generation += 1
            self._current[key] = self._generation
            heapq.heappush(self._heap, (due, self._generation, key))
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def next_due(self) -> float | None:
        """When to call `pop_due`; None: nothing is ever due."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[K]:
        """Take out what is due at `now`, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                del self._current[entry[2]]
                due.append(entry[2])
        return due

    def _is_current(self, entry: tuple[float, int, K]) -> bool:
        return self._current.get(entry[2]) == entry[1]


class Expiry(Struct, frozen=True):
    """When a sandbox ends, and why."""

    due: float
    cause: Cause


def expiry(*, ttl_due: float | None, idle_ttl_s: float | None, idle_since: float | None) -> Expiry | None:
    """Which end comes first (times on one clock, seconds), or None for never. `idle_since` None: it is in use now."""
    idle_due = idle_since + idle_ttl_s if idle_ttl_s is not None and idle_since is not None else None
    if idle_due is not None and (ttl_due is None or idle_due < ttl_due):
        return Expiry(idle_due, Cause.IDLE_TTL)
    return None if ttl_due is None else Expiry(ttl_due, Cause.TTL)
