"""A command that has ended, out of its sandbox's trajectory: `dsec.edge.client.Execution` without a guest."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from dsec.edge.trajectory import Recorded
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import ExecStatus

_PIECE = 64 << 10


class RecordedCommand:
    """What is on record of it; the same for whoever asks, however often."""

    __slots__ = ("_recorded", "attached")

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self.attached = True

    @property
    def key(self) -> str:
        return self._recorded.key

    @property
    def stdin_offset(self) -> int:
        return self._recorded.stdin_bytes

    async def started(self) -> int | None:
        return None

    async def resynced(self) -> tuple[int, bool]:
        return len(self._recorded.stdout), True

    async def events(self, stdout_from: int = 0, stderr_from: int = 0) -> AsyncGenerator[Chunk | ExecStatus, None]:
        """Its output as far as it was kept, then its status (`truncated` where that isn't all)."""
        streams = ((False, self._recorded.stdout, stdout_from), (True, self._recorded.stderr, stderr_from))
        for stderr, data, begin in streams:
            for at in range(max(0, begin), len(data), _PIECE):
                yield Chunk(stderr, at, data[at : at + _PIECE])
        yield self._recorded.status

    async def write_stdin(self, data: bytes, offset: int | None = None) -> int:
        """It has ended: what comes now is dropped."""
        return self._recorded.stdin_bytes

    async def close_stdin(self) -> None:
        """It has ended."""
