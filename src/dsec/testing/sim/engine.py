"""Virtual time: events in the order of their times, and of their making where those are equal.

What happens within the present second waits in a heap; what is later in a list for each second, so that the ends of
hundreds of thousands of sandboxes cost nothing until they are near. Nothing here knows what is simulated. Every random
number comes from a stream that is named, so that another event more in one place doesn't change what happens in all
others. `digest` sums up all events that happened, in order.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable
from random import Random
from typing import Any

_Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]
"""When, the how many-th that was made, and what to call."""


class Engine:
    """The queue of events."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.events = 0
        self._seed = seed
        self._heap: list[_Event] = []
        """Events before `_edge`."""
        self._edge = 0.0
        """A whole second, the first of `_later`."""
        self._later: dict[int, list[_Event]] = {}
        """By second, in no order."""
        self._made = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._seen = array("d")

    def stream(self, name: str) -> Random:
        """Random numbers of its own."""
        return Random(f"{self._seed}/{name}")

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """An event to come; one in the past happens next."""
        self._put(max(when, self.now), call, args)

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """An event so many seconds from now, 0 or more."""
        self._put(self.now + delay_s, call, args)

    def note(self, value: float) -> None:
        """Something that the digest should know besides."""
        self._seen.append(value)

    def run(self, until: float, each_second: Callable[[], None] = lambda: None) -> None:
        """All events up to a time. `each_second`: called between the seconds; it makes no events."""
        heap, pop, note = self._heap, heapq.heappop, self._seen.append
        while True:
            while heap and heap[0][0] <= until:
                self.now, made, call, args = pop(heap)
                self.events += 1
                note(self.now)
                note(made)
                call(*args)
            if heap or self._edge > until:
                break
            self._sum_up()
            each_second()
            heap += self._later.pop(int(self._edge), ())
            heapq.heapify(heap)
            self._edge += 1.0
        self.now = until

    def digest(self) -> str:
        """Of all that happened so far."""
        self._sum_up()
        return self._hash.hexdigest()

    def _put(self, when: float, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._made = made = self._made + 1
        if when < self._edge:
            heapq.heappush(self._heap, (when, made, call, args))
            return
        second = int(when)
        there = self._later.get(second)
        if there is None:
            self._later[second] = [(when, made, call, args)]
        else:
            there.append((when, made, call, args))

    def _sum_up(self) -> None:
        self._hash.update(self._seen.tobytes())
        del self._seen[:]
