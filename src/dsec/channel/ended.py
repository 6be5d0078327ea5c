"""Operations that have ended and are kept, for whoever still asks what became of them.

Those with a key are kept until they are released: a result that was dropped would make its command run again. Of those
without, the last RETAIN_COUNT are, for at most RETAIN_S. One task drops them, while there are any.
"""

from __future__ import annotations

import asyncio

from dsec.channel.operation import GuestOperation
from dsec.ports import Clock

RETAIN_COUNT = 32
RETAIN_S = 120.0


class EndedOperations:
    """A channel's, which is told to forget those that have to go, and calls `discard` then."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: dict[int, GuestOperation] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._kept)

    def add(self, operation: GuestOperation) -> None:
        self._kept[operation.op] = operation

    def discard(self, op: int) -> None:
        self._kept.pop(op, None)

    def close(self) -> None:
        """Keep nothing any more. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self._kept.clear()

    def drop_oldest(self, *, unread: bool) -> bool:
        """Make room for one; False: there is none to drop. `unread`: also one whose result nobody took."""
        for operation in self._kept.values():
            if operation.key is None and not operation.busy and (unread or operation.was_read):
                operation.forget()
                return True
        return False

    def retain(self, *, sweep: bool) -> None:
        """Drop what is too many now, and later (`sweep`) what is too old."""
        while len(self._kept) > RETAIN_COUNT and self.drop_oldest(unread=False):
            pass
        if sweep and self._sweeper is None and self._keyless():
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    def _keyless(self) -> list[GuestOperation]:
        return [each for each in self._kept.values() if each.key is None]

    async def _sweep(self) -> None:
        """Release what ended RETAIN_S ago. Lives while there is something to wait for."""
        try:
            while times := [operation.ended_at for operation in self._keyless()]:
                await self._clock.sleep(max(1.0, min(times) + RETAIN_S - self._clock.monotonic()))
                now = self._clock.monotonic()
                for operation in self._keyless():
                    if operation.ended_at + RETAIN_S <= now and not operation.busy:
                        operation.forget()
        finally:
            self._sweeper = None
