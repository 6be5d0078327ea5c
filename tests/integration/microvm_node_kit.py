"""A backend of microVMs alone, without a server: for what goes wrong around machines."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsec.app import open_machines
from dsec.backends.container.host import Host
from dsec.backends.microvm.backend import MicroVmBackend
from dsec.configuration import Config
from dsec.edge.config import SystemClock
from dsec.ports import Captured, Handle
from dsec.spec.sandbox import SandboxSpec
from dsec.vmm.instance import MachineInstance

needs = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed"),
]
SPEC = SandboxSpec(environment="debian", backend="microvm", memory_bytes=256 << 20, disk_bytes=512 << 20, pids=128)
PATIENCE_S = 140.0


class Node:
    """A backend, and machines that end with the test."""

    def __init__(self, backend: MicroVmBackend) -> None:
        self.backend = backend
        self.handles: dict[str, Handle] = {}
        self._specs: dict[str, SandboxSpec] = {}

    def reserve(self, name: str = "", *, capture: str = "", spec: SandboxSpec = SPEC) -> str:
        """The name of one that is not there yet."""
        name = name or f"box{len(self.handles)}"
        self._specs[name] = spec
        self.handles[name] = self.backend.reserve(name, spec, capture=capture)
        return name

    async def create(self, name: str) -> MachineInstance:
        async with asyncio.timeout(4 * PATIENCE_S):
            return await self.backend.create(name, self._specs[name], self.handles[name])

    async def make(self, name: str = "", *, capture: str = "") -> MachineInstance:
        return await self.create(self.reserve(name, capture=capture))

    async def capture(self, name: str) -> Captured:
        return await self.backend.capture(name, self.handles[name])

    async def filled(self) -> list[int]:
        """The spare ones' VMMs, when there are as many as there shall be."""
        async with asyncio.timeout(PATIENCE_S):
            while self.backend.node.spares.count < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return self.ready()

    def ready(self) -> list[int]:
        """Those that there are."""
        return [spare.machine.pid for ready in self.backend.node.spares._ready.values() for spare in ready]

    def stems(self) -> list[int]:
        return [stem.machine.pid for stem in self.backend.node.stems._stems.values()]


@asynccontextmanager
async def node_on(
    config: Config, host: Host, templates: Path | None = None, *, suspend: bool = False
) -> AsyncIterator[Node]:
    """One that leaves nothing. `templates`: where they are kept (default: its own)."""
    found = open_machines(config, host, templates)
    assert found is not None
    backend = MicroVmBackend(found, SystemClock(), suspend=suspend)
    await backend.open({})
    node = Node(backend)
    try:
        yield node
    finally:
        for name, handle in node.handles.items():
            await backend.destroy(name, handle)
        await backend.close(keep=False)
    assert not found.machines.names()
