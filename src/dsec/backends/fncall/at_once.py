"""A call that begins in the step that asked for it and is told by a callback: without a task, a queue or a generator.

Invariant: what it holds is given back once, when it was told or is let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from dsec.backends.fncall.run import Ended, Run


class CallAtOnce:
    """Of a run that has begun. `told` is called at its end, unless it was let go before."""

    __slots__ = ("_held", "_told")

    def __init__(self, run: Run, told: Callable[[asyncio.Future[Ended]], None], held: ExitStack) -> None:
        """`held` gives everything back, the run first."""
        self._told = told
        self._held = held
        run.done.add_done_callback(self._done)

    def let_go(self) -> None:
        """Nobody wants the result: end the call. Idempotent."""
        self._held.close()

    def _done(self, future: asyncio.Future[Ended]) -> None:
        if future.cancelled():  # by `let_go`
            return
        try:
            self._told(future)  # first: giving back is work that nobody waits for
        finally:
            self._held.close()
