"""Sandboxes held still for a moment, so that what they have written can be read from outside.

Whoever pauses or resumes one meanwhile wins: this only thaws what it froze, and only where nobody has paused it since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dsec.edge.sandbox import Sandbox
from dsec.errors import Unsupported
from dsec.ports import PausableHost


class Stillness:
    """For the event loop."""

    def __init__(self, find: Callable[[str], Sandbox]) -> None:
        """`find`: the live sandbox of an id, or why there is none."""
        self._find = find
        self._held: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, sandbox_id: str) -> AsyncIterator[None]:
        """Nothing inside runs while the context lasts; a paused one stays paused. Raises `SandboxEnded`, `Unavailable`
        (it still starts), `Unsupported`."""
        sandbox = self._find(sandbox_id)
        instance = sandbox.here()
        if not isinstance(instance, PausableHost):
            raise Unsupported("what it has written can't be read from outside", remedy="Use a container sandbox.")
        if not instance.frozen:
            instance.freeze(True)
        self._held[sandbox_id] += 1
        try:
            yield
        finally:
            self._held[sandbox_id] -= 1
            if not self._held[sandbox_id]:
                del self._held[sandbox_id]
                if instance.frozen and sandbox.record.paused is None and sandbox.instance is instance:
                    instance.freeze(False)
