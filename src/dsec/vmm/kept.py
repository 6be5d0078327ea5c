"""Memory that machines take of the host beside what is promised to sandboxes: templates, stems, moments."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from dsec.errors import Unsupported


class Kept:
    """What is there, by names; counted against the node's memory once it is told who counts."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._promise: Callable[[int], None] | None = None

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self._bytes.values())

    def count_with(self, promise: Callable[[int], None]) -> None:
        """`promise(change)`: that much more is taken from now on, or less."""
        self._promise = promise
        self._tell(self.bytes)

    def put(self, name: str, size: int) -> None:
        """It is there, and takes so much."""
        before = self._bytes.get(name, 0)
        self._bytes[name] = size
        self._tell(size - before)

    def drop(self, name: str) -> None:
        """It is gone. Idempotent."""
        self._tell(-self._bytes.pop(name, 0))

    def _tell(self, change: int) -> None:
        if self._promise is not None and change:
            with contextlib.suppress(Unsupported):  # more than the node promises in all: it is there already
                self._promise(change)


def held_bytes(*fds: int) -> int:
    """Memory that files in memory take."""
    return sum(os.fstat(fd).st_blocks * 512 for fd in fds)
