"""A backend double with faults: a machine that keeps a set of resources, on which edges die, backends fail and callers
leave."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from edge_kit import Room

from dsec.edge.config import EdgeConfig, SystemClock
from dsec.edge.node import Edge
from dsec.journal.records import BatchRecord, Journal, Record
from dsec.ports import Handle, InstanceEnd, Operation, Usage
from dsec.spec.operations import OpRequest
from dsec.spec.sandbox import SandboxSpec

KINDS = ("cgroup", "subvolume", "guest")
NOT_NOW = shutil.ignore_patterns("sync.*")
"""What an edge that takes over on the same boot doesn't need, and the dead one's thread may just be removing."""


class Machine:
    """What outlives an edge, and where the faults are injected."""

    def __init__(self) -> None:
        self.resources: set[tuple[str, str]] = set()
        self.made: list[str] = []
        self.incarnation = 0
        self.steps: list[str] = []
        self.kill_at: int | None = None
        self.fail_at: int | None = None
        self.cancel_at: int | None = None
        self.cancel: asyncio.Task[None] | None = None
        self.killed = asyncio.Event()
        self.instances: dict[str, Double] = {}

    def step(self, what: str) -> bool:
        """Count a step; False: the edge died here."""
        self.steps.append(what)
        at = len(self.steps)
        if at == self.kill_at:
            self.incarnation += 1
            self.killed.set()
            return False
        if at == self.cancel_at and self.cancel is not None:
            self.cancel.cancel()
        return True

    def of(self, sandbox_id: str) -> set[str]:
        return {kind for owner, kind in self.resources if owner == sandbox_id}

    def owners(self) -> set[str]:
        return {owner for owner, _ in self.resources}


class NoChannel:
    """A guest that nobody talks to."""

    def __init__(self) -> None:
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, request: OpRequest) -> Operation:
        raise NotImplementedError

    def find(self, key: bytes) -> Operation | None:
        return None

    def operations(self) -> Sequence[Operation]:
        return []

    async def ping(self) -> float:
        return 0.0

    def lost(self) -> asyncio.Future[str]:
        return self._lost

    async def close(self) -> None:
        pass


class Double:
    """An instance."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.channel = NoChannel()
        self.end: asyncio.Future[InstanceEnd] = asyncio.get_running_loop().create_future()

    def ended(self) -> Awaitable[InstanceEnd]:
        return self.end

    def usage(self) -> Usage:
        return Usage()


class FaultyBackend:
    """`ports.Backend` over a `Machine`, one an edge."""

    name: ClassVar[str] = "faulty"
    api_version: ClassVar[int] = 1
    epoch = 5

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._incarnation = machine.incarnation

    async def open(self, known: dict[str, Handle]) -> dict[str, Double]:
        machine = self._machine
        running = {sandbox_id for sandbox_id in known if machine.of(sandbox_id) == set(KINDS)}
        machine.resources = {resource for resource in machine.resources if resource[0] in running}
        machine.instances = {sandbox_id: Double(sandbox_id) for sandbox_id in running}
        return dict(machine.instances)

    def check(self, spec: SandboxSpec) -> None:
        pass

    def reserve(self, sandbox_id: str, spec: SandboxSpec, tenant: int = 0, capture: str = "") -> Handle:
        return {"names": sandbox_id}

    async def create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> Double:
        assert handle == {"names": sandbox_id}
        await self._step(f"create {sandbox_id}: begin")
        self._machine.made.append(sandbox_id)
        for kind in KINDS:
            self._machine.resources.add((sandbox_id, kind))
            await self._step(f"create {sandbox_id}: {kind}")
        instance = self._machine.instances[sandbox_id] = Double(sandbox_id)
        return instance

    async def destroy(self, sandbox_id: str, handle: Handle) -> None:
        await self._step(f"destroy {sandbox_id}: begin")
        for kind in reversed(KINDS):
            self._machine.resources.discard((sandbox_id, kind))
            await self._step(f"destroy {sandbox_id}: {kind}")
        self._machine.instances.pop(sandbox_id, None)

    async def close(self, *, keep: bool) -> None:
        pass

    async def _step(self, what: str) -> None:
        if self._incarnation != self._machine.incarnation or not self._machine.step(what):
            await asyncio.get_running_loop().create_future()  # this edge is dead: it never comes back from here
        if len(self._machine.steps) == self._machine.fail_at:
            raise RuntimeError(f"injected at {what}")
        await asyncio.sleep(0)


def count_journal_steps(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Each write of records is a step before it is submitted and one when it is durable; a dead edge writes nothing."""
    born: dict[int, int] = {}
    put, put_lazily, put_batch, init = Journal.put, Journal.put_lazily, Journal.put_batch, Journal.__init__

    def new_init(self: Journal, *args: Any, **options: Any) -> None:
        born[id(self)] = machine.incarnation
        init(self, *args, **options)

    def alive(self: Journal) -> bool:
        return born[id(self)] == machine.incarnation

    def stepped(self: Journal, what: str, write: Any, item: Record | BatchRecord) -> asyncio.Future[None]:
        outer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not alive(self) or not machine.step(f"{what}: before"):
            return outer

        def written(inner: asyncio.Future[None]) -> None:
            if alive(self) and machine.step(f"{what}: after") and not outer.done():
                outer.set_result(inner.result())

        write(self, item).add_done_callback(written)
        return outer

    def new_put(self: Journal, record: Record) -> asyncio.Future[None]:
        return stepped(self, f"record {record.id} {record.state}", put, record)

    def new_put_batch(self: Journal, batch: BatchRecord) -> asyncio.Future[None]:
        return stepped(self, "batch", put_batch, batch)

    def new_put_lazily(self: Journal, record: Record) -> None:
        if alive(self) and machine.step(f"record {record.id} {record.state}: before"):
            put_lazily(self, record)

    monkeypatch.setattr(Journal, "__init__", new_init)
    monkeypatch.setattr(Journal, "put", new_put)
    monkeypatch.setattr(Journal, "put_batch", new_put_batch)
    monkeypatch.setattr(Journal, "put_lazily", new_put_lazily)


async def open_edge(machine: Machine, state: Path) -> Edge:
    config = EdgeConfig(max_starting=8, max_ending=8, create_timeout_s=20.0)
    return await Edge.open(
        {"container": FaultyBackend(machine)}, state, clock=SystemClock(), config=config, capacity=Room()
    )


async def abandon(edge: Edge) -> None:
    """What the kernel does when the process of a dead edge is gone: nobody is told anything."""
    await edge._tasks.close()
    await edge._journal.close()
    edge._state.close()
