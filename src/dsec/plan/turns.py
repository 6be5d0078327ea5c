"""Whose turn it is: a few places, many callers. Pure.

Places go to the caller who holds the fewest, among equals to the one who has waited longest since its last one; so
none gets more than its share by asking for more, and long work of one doesn't hold up short work of another. A caller
is a path (project, submission): the rule holds at each level of it, so that a project doesn't gain by sending many
submissions. Where all want more than there is, a project of weight 2 holds twice what one of weight 1 does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
Path = tuple[Hashable, ...]


class _Level(Generic[T]):
    """One caller: what waits below it, and how many places are held there."""

    __slots__ = ("below", "held", "last", "waiting", "weight")

    def __init__(self, last: int, weight: float = 1.0) -> None:
        self.below: dict[Hashable, _Level[T]] = {}
        self.waiting: deque[T] = deque()
        self.held = 0
        self.weight = weight
        self.last = last
        """When a place was last given here, else just before it came: who comes back all the time gains nothing."""

    @property
    def idle(self) -> bool:
        return not (self.held or self.waiting or self.below)

    def has_waiting(self) -> bool:
        return bool(self.waiting) or any(each.has_waiting() for each in self.below.values())


class Turns(Generic[T]):
    """Tickets of callers that wait for a place."""

    def __init__(self, places: int, weight: Callable[[Hashable], float] = lambda _: 1.0) -> None:
        """`weight`: of who is first in a path, more than 0; asked when it comes."""
        self.places = places
        self._weight = weight
        self.held = 0
        self._given = 0
        self._top: _Level[T] = _Level(0)

    def wait(self, caller: Path, ticket: T) -> None:
        """Ask for a place."""
        self._made(caller)[-1].waiting.append(ticket)

    def forget(self, caller: Path, ticket: T) -> bool:
        """The ticket no longer waits; False: it didn't."""
        try:
            levels = self._levels(caller)
            levels[-1].waiting.remove(ticket)
        except (KeyError, ValueError):
            return False
        self._trim(caller, levels)
        return True

    def give(self) -> T | None:
        """The next ticket that gets a place; None: no place is free, or nobody waits."""
        if self.held >= self.places:
            return None
        level = self._top
        levels = []
        while not level.waiting:
            ready = [each for each in level.below.values() if each.has_waiting()]
            if not ready:
                return None
            level = min(ready, key=lambda each: ((each.held + 1) / each.weight, each.last))
            levels.append(level)
        self._count(levels)
        return level.waiting.popleft()

    def take(self, caller: Path) -> bool:
        """A place without a ticket, where one is free and nobody waits."""
        if self.held >= self.places or self._top.has_waiting():
            return False
        self._count(self._made(caller)[1:])
        return True

    def _count(self, levels: list[_Level[T]]) -> None:
        self._given += 1
        self.held += 1
        for each in levels:
            each.held += 1
            each.last = self._given

    def free(self, caller: Path) -> None:
        """A place that was given is free again."""
        self.held -= 1
        levels = self._levels(caller)
        for each in levels[1:]:
            each.held -= 1
        self._trim(caller, levels)

    def _made(self, caller: Path) -> list[_Level[T]]:
        levels = [self._top]
        for name in caller:
            level = levels[-1].below.get(name)
            if level is None:
                weight = self._weight(name) if len(levels) == 1 else 1.0
                level = levels[-1].below[name] = _Level(self._given - 1, weight)
            levels.append(level)
        return levels

    def _levels(self, caller: Path) -> list[_Level[T]]:
        levels = [self._top]
        for name in caller:
            levels.append(levels[-1].below[name])
        return levels

    @staticmethod
    def _trim(caller: Path, levels: list[_Level[T]]) -> None:
        for name, above, level in zip(reversed(caller), reversed(levels[:-1]), reversed(levels[1:]), strict=True):
            if level.idle:
                del above.below[name]
