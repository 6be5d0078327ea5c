"""Virtual time: events in the order of their times, and of their making where those are equal.

Nothing here knows what is simulated. Every random number comes from a stream that is named, so that another event more
in one place doesn't change what happens in all others. `digest` sums up all events that happened, in order.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable
from random import Random
from typing import Any


class Engine:
    """The queue of events."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.events = 0
        self._seed = seed
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._seen = array("d")

    def stream(self, name: str) -> Random:
        """Random numbers of its own."""
        return Random(f"{self._seed}/{name}")

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """An event to come; one in the past happens next."""
        self._made += 1
        heapq.heappush(self._heap, (max(when, self.now), self._made, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, call, *args)

    def note(self, value: float) -> None:
        """Something that the digest should know besides."""
        self._seen.append(value)

    def run(self, until: float) -> None:
        """All events up to a time."""
        heap, seen = self._heap, self._seen
        while heap and heap[0][0] <= until:
            self.now, made, call, args = heapq.heappop(heap)
            self.events += 1
            seen.append(self.now)
            seen.append(made)
            if len(seen) > 65536:
                self._hash.update(seen.tobytes())
                del seen[:]
            call(*args)
        self.now = until

    def digest(self) -> str:
        """Of all that happened so far."""
        self._hash.update(self._seen.tobytes())
        del self._seen[:]
        return self._hash.hexdigest()
