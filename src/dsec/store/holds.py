"""Which layers work in progress stands on, so that collecting garbage leaves them.

Invariant: a layer that somebody holds has its files. A layer is held before it is looked for, and removed only under
the lock under which it is held: who finds it keeps it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Holds:
    """Of one store of layers. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count: Counter[str] = Counter()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Work begins: what it touches (`add`, in this task or in threads that it started) is held to its end."""
        mine: set[str] = set()
        token = _current.set((self, mine))
        try:
            yield
        finally:
            _current.reset(token)
            with self._lock:
                self._count.subtract(mine)
                self._count += Counter()  # what is at zero goes

    def add(self, layer: str) -> None:
        """It is about to be looked at. Nothing where no work is open."""
        holder, mine = _current.get((None, set()))
        if holder is self and layer not in mine:
            with self._lock:
                mine.add(layer)
                self._count[layer] += 1

    def held(self) -> set[str]:
        """All of them."""
        with self._lock:
            return set(self._count)

    def remove(self, layer: str, remove: Callable[[], None], *, unless: Callable[[], bool]) -> bool:
        """Remove it by `remove`, and nobody can hold it meanwhile. False: somebody holds it, or `unless` says so, which
        is asked after that."""
        with self._lock:
            if self._count[layer] or unless():
                return False
            remove()
            return True


_current: ContextVar[tuple[Holds | None, set[str]]] = ContextVar("work on layers")
