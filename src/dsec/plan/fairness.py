"""Who is next when there isn't room for all: weighted fair queueing between projects, level by level.

Pure. Projects are paths (`lab/team/run`); at each level siblings share by their weights whatever the number of their
children, so that making sub-projects gains nothing. Within one project it is first come, first served. The currency is
sandboxes (`cost`): a burst of 32,000 waits behind nobody and nobody behind it for more than its share. A project that
was idle begins at the present, it saves nothing up. Every request has a deadline; what is past it is handed out by
`expired` and never by `pop`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from dsec.plan.expiry import Deadlines

T = TypeVar("T")


class _Level:
    """A project: its own requests, and its children."""

    __slots__ = ("active", "children", "listed", "name", "now", "parent", "start", "waiting", "weight")

    def __init__(self, name: str, parent: _Level | None, weight: float) -> None:
        self.name = name
        self.parent = parent
        self.weight = weight
        self.start = 0.0
        """Of its next request, in the parent's virtual time."""
        self.now = 0.0
        """Virtual time of its children."""
        self.children: dict[str, _Level] = {}
        self.active: list[tuple[float, str]] = []
        """Heap of (start, name) of its children; an entry that isn't its child's current one is skipped."""
        self.listed = False
        """Whether the parent's heap has an entry for it."""
        self.waiting: OrderedDict[int, None] = OrderedDict()
        """Numbers of the requests of its own, oldest first."""

    def first(self) -> _Level | None:
        """The child whose turn it is."""
        while self.active:
            start, name = self.active[0]
            child = self.children.get(name)
            if child is not None and child.listed and child.start == start:
                return child
            heapq.heappop(self.active)
        return None

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or self.first() is not None

    def enlist(self) -> None:
        """Into the parent's heap, at its start."""
        assert self.parent is not None
        self.listed = True
        heapq.heappush(self.parent.active, (self.start, self.name))


_OWN = ""
"""The name under which a project's own requests compete with its children's."""


class FairQueue(Generic[T]):
    """Requests that wait. Every operation costs the depth of the tree times a logarithm."""

    def __init__(self, weight: Callable[[str], float] = lambda project: 1.0) -> None:
        """`weight`: of a project among its siblings, more than 0; asked when it begins to wait."""
        self._weight = weight
        self._root = _Level("", None, 1.0)
        self._items: dict[int, tuple[T, _Level]] = {}
        self._deadlines: Deadlines[int] = Deadlines()
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, number: int) -> bool:
        return number in self._items

    def items(self) -> Iterator[T]:
        """All that wait."""
        return (item for item, _ in self._items.values())

    def push(self, project: str, item: T, *, deadline: float | None = None) -> int:
        """Wait; returns a number that names the request."""
        self._numbers += 1
        level = self._leaf(project)
        level.waiting[self._numbers] = None
        self._items[self._numbers] = (item, level)
        self._deadlines.set(self._numbers, deadline)
        each = level
        while each.parent is not None and not each.listed:
            each.start = max(each.start, each.parent.now)
            each.enlist()
            each = each.parent
        return self._numbers

    def peek(self) -> tuple[int, T] | None:
        """The number and item of whoever is next."""
        level = self._root
        while not level.waiting:
            child = level.first()
            if child is None:
                return None
            level = child
        number = next(iter(level.waiting))
        return number, self._items[number][0]

    def served(self, number: int, cost: float, *, done: bool) -> None:
        """A request got `cost` sandboxes; `done`: nothing of it waits any more. Unknown numbers are ignored: it may
        have expired."""
        found = self._items.get(number)
        if found is None:
            return
        level = found[1]
        if done:
            self._remove(number)
        each = level
        while each.parent is not None:
            each.parent.now = max(each.parent.now, each.start)
            each.start += cost / each.weight
            each.listed = False
            if each.busy:
                each.enlist()
            each = each.parent
        self._rest()

    def withdraw(self, number: int) -> T | None:
        """The caller has gone; None where it isn't waiting."""
        found = self._items.get(number)
        if found is None:
            return None
        self._remove(number)
        each = found[1]
        while each.parent is not None and not each.busy:
            each.listed = False
            each = each.parent
        self._rest()
        return found[0]

    def expired(self, now: float) -> list[T]:
        """Take out what is past its deadline."""
        out = []
        for number in self._deadlines.pop_due(now):
            item = self.withdraw(number)
            if item is not None:
                out.append(item)
        return out

    def next_deadline(self) -> float | None:
        """When to call `expired`."""
        return self._deadlines.next_due()

    def _leaf(self, project: str) -> _Level:
        level, path = self._root, ""
        for part in [*project.split("/"), _OWN]:
            path = f"{path}/{part}".strip("/")
            child = level.children.get(part)
            if child is None:
                weight = 1.0 if part == _OWN else max(1e-6, self._weight(path))
                child = level.children[part] = _Level(part, level, weight)
            level = child
        return level

    def _remove(self, number: int) -> None:
        _, level = self._items.pop(number)
        self._deadlines.set(number, None)
        del level.waiting[number]

    def _rest(self) -> None:
        """Nobody waits: there are no debts, and nothing to remember."""
        if not self._items:
            self._root = _Level("", None, 1.0)
