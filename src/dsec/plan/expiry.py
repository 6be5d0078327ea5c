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
        self._current: dict[K, tuple[float, int, int]] = {}
        """When it is due, the generation of that, and the generation of its entry in the heap: what is only put off
        again and again has one entry, which is moved when it comes up."""
        self._generation = 0

    def __len__(self) -> int:
        return len(self._current)

    def set(self, key: K, due: float | None) -> None:
        """`key` is now due at `due`, whatever was said before; None: never."""
        if due is None:
            self._current.pop(key, None)
        else:
            self._generation = new = self._generation + 1
            known = self._current.get(key)
            if known is not None and known[0] <= due:
                self._current[key] = (due, new, known[2])
                return
            self._current[key] = (due, new, new)
            heapq.heappush(self._heap, (due, new, key))
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def next_due(self) -> float | None:
        """When to call `pop_due`; None: nothing is ever due."""
        while self._heap:
            if self._settle():
                return self._heap[0][0]
        return None

    def pop_due(self, now: float) -> list[K]:
        """Take out what is due at `now`, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            if self._settle():
                key = heapq.heappop(self._heap)[2]
                del self._current[key]
                due.append(key)
        return due

    def _settle(self) -> bool:
        """Whether the heap's first entry says what is true; else it is dropped, or moved to where it belongs."""
        _, generation, key = self._heap[0]
        known = self._current.get(key)
        if known is None or known[2] != generation:
            heapq.heappop(self._heap)
            return False
        if known[1] == generation:
            return True
        self._current[key] = (known[0], known[1], known[1])
        heapq.heapreplace(self._heap, (known[0], known[1], key))
        return False

    def _is_current(self, entry: tuple[float, int, K]) -> bool:
        known = self._current.get(entry[2])
        return known is not None and known[2] == entry[1]


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
