"""What a template says of its sandboxes: their size, the program that is started in each, and when that is ready."""

from __future__ import annotations

import asyncio
import contextlib
import re

from msgspec.structs import replace

from dsec.builder.templates import CPUS, DISK_MB, MEMORY_MB, READY, START, number_of
from dsec.edge.client import EdgeClient
from dsec.errors import BuildFailed, DsecError, NotFound
from dsec.spec.sandbox import MIB, ExecSpec, ExecStatus, SandboxSpec
from dsec.store.format import ImageConfig
from dsec.store.service import LayerService

READY_S = 45.0
"""How long a sandbox may take until its ready command says so; E2B's client waits for 60 s."""
_EVERY_S = 0.25
_MAX_KNOWN = 10_000
_SLEEP = re.compile(r"\s*sleep\s+[0-9.]+\s*")


class Starter:
    """Starts templates' programs."""

    def __init__(self, edge: EdgeClient, layers: LayerService) -> None:
        self._edge = edge
        self._layers = layers
        self._configs: dict[str, ImageConfig] = {}
        """Of topmost layers that were asked for."""

    async def config(self, name: str, project: str) -> ImageConfig:
        """What the topmost layer of an environment says. Raises `EnvironmentNotFound`."""
        top = (await self._layers.find_environment(project, name)).layers[0]
        known = self._configs.get(top)
        if known is None:
            known = ImageConfig()
            with contextlib.suppress(NotFound):  # a layer of the first version says nothing
                known = (await asyncio.to_thread(self._layers.layers.manifest, top)).config
            if len(self._configs) >= _MAX_KNOWN:
                self._configs.clear()
            self._configs[top] = known
        return known

    @staticmethod
    def sized(spec: SandboxSpec, config: ImageConfig) -> SandboxSpec:
        """The spec with the template's size."""
        cpus, memory, disk = (number_of(config, label) for label in (CPUS, MEMORY_MB, DISK_MB))
        return replace(
            spec,
            cpus=float(cpus) if cpus else spec.cpus,
            memory_bytes=memory * MIB if memory else spec.memory_bytes,
            disk_bytes=max(spec.disk_bytes, disk * MIB) if disk else spec.disk_bytes,
        )

    async def start(self, sandbox_id: str, config: ImageConfig) -> None:
        """Start the template's program and wait until it is ready. Where it never is, the sandbox is ended and
        `BuildFailed` raised."""
        command, ready = config.labels.get(START), config.labels.get(READY)
        try:
            if command:
                await self._edge.exec(sandbox_id, _shell(command, key="dsec-start"))
            if ready and not _SLEEP.fullmatch(ready):
                await self._wait(sandbox_id, ready)
        except BaseException:
            with contextlib.suppress(DsecError):
                await asyncio.shield(asyncio.ensure_future(self._edge.delete(sandbox_id)))
            raise

    async def _wait(self, sandbox_id: str, ready: str) -> None:
        try:
            async with asyncio.timeout(READY_S):
                code = await self._exit_code(sandbox_id, ready)
                while code:
                    await asyncio.sleep(_EVERY_S)
                    code = await self._exit_code(sandbox_id, ready)
        except TimeoutError:
            raise BuildFailed(
                f"the template is not ready after {READY_S:g} s: {ready[:200]!r} still fails",
                remedy="See that its start command works.",
            ) from None

    async def _exit_code(self, sandbox_id: str, command: str) -> int:
        execution = await self._edge.exec(sandbox_id, _shell(command, timeout_s=READY_S))
        async for event in execution.events():
            if isinstance(event, ExecStatus):
                return event.exit_code
        return 1


def _shell(command: str, *, key: str | None = None, timeout_s: float | None = None) -> ExecSpec:
    return ExecSpec(argv=["/bin/bash", "-l", "-c", command], key=key, command_timeout_s=timeout_s)
