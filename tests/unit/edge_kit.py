"""What the tests of the edge share: an edge over the fake backend (the real channel and guest protocol), with plenty
of room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from dsec.backends.fake import FakeBackend, FakeHost
from dsec.edge.client import Execution
from dsec.edge.config import EdgeConfig, SystemClock
from dsec.edge.node import Edge
from dsec.ports import Backend, Clock
from dsec.spec.sandbox import ExecStatus, SandboxSpec

GIB = 1 << 30
PATIENCE_S = 120.0
"""For what comes at once on a machine that does nothing else."""


class Room:
    """`Capacity` that tests turn."""

    def __init__(self) -> None:
        self.memory = 64 * GIB
        self.memory_free = 64 * GIB
        self.disk_free = 64 * GIB

    def memory_total_bytes(self) -> int:
        return self.memory

    def memory_free_bytes(self) -> int:
        return self.memory_free

    def disk_free_bytes(self) -> int:
        return self.disk_free


class Kit:
    """A state directory and a fake machine, on which edges come and go."""

    def __init__(self, root: Path, clock: Clock | None = None, config: EdgeConfig | None = None) -> None:
        self.root = root
        self.state = root / "state"
        self.clock = clock or SystemClock()
        self.config = config or EdgeConfig(max_starting=8, max_ending=8)
        self.room = Room()
        self.host = FakeHost(root / "spool", frozenset({"base", "other"}))

    def backend(self) -> Backend:
        return FakeBackend(self.host, self.clock)

    async def open(self) -> Edge:
        return await Edge.open(
            {"container": self.backend()}, self.state, clock=self.clock, config=self.config, capacity=self.room
        )

    @asynccontextmanager
    async def edge(self, *, keep: bool = False) -> AsyncIterator[Edge]:
        edge = await self.open()
        try:
            yield edge
        finally:
            await edge.close(keep=keep)

    def left(self) -> set[str]:
        """What there is of sandboxes on the machine."""
        spools = {path.name for path in self.host.spool_root.iterdir()} if self.host.spool_root.exists() else set()
        return set(self.host.guests) | spools


def spec(**fields: object) -> SandboxSpec:
    return SandboxSpec(**{"environment": "base", **fields})  # type: ignore[arg-type]


async def finish(execution: Execution, stdout_from: int = 0) -> tuple[bytes, bytes, ExecStatus]:
    """A command's whole output and its status."""
    output = (bytearray(), bytearray())
    async for event in execution.events(stdout_from):
        if isinstance(event, ExecStatus):
            return bytes(output[0]), bytes(output[1]), event
        output[event.stderr].extend(event.data)
    raise AssertionError("the events ended without a status")


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that is about to happen, bounded."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  what it looks at belongs to others
            await asyncio.sleep(0.002)
