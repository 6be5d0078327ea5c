"""The part of an edge in process that is about full machines: `dsec.edge.screened.Screened`.

Invariants: whatever is done to a screen resumes a paused sandbox, as a command does; a revert replaces the instance in
one step that its caller's going away doesn't cut, begins again what serves and watches the one before, and ends the
sandbox where it fails.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from dsec.edge.commands import Commands
from dsec.edge.lives import Lives
from dsec.edge.sandbox import Sandbox
from dsec.edge.tasks import Tasks
from dsec.edge.tripwires import Tripwires
from dsec.errors import CreateFailed, DsecError, Unsupported
from dsec.journal.records import Journal
from dsec.ports import Usage
from dsec.screen_ports import CheckpointHost, ScreenHost
from dsec.spec.causes import Cause
from dsec.spec.events import EventType
from dsec.spec.screen import Checkpoint, ConsolePiece, Input

MOST_WAIT_S = 60.0


class ScreenCalls:
    """A base of `dsec.edge.node.Edge`, which sets the attributes."""

    _commands: Commands
    _journal: Journal
    _lives: Lives
    _tasks: Tasks
    _tripwires: Tripwires

    @abstractmethod
    def _usable(self, sandbox_id: str) -> Sandbox:
        """A live sandbox."""

    async def screenshot(self, sandbox_id: str) -> bytes:
        async with self._screen(sandbox_id) as screen:
            return await screen.screenshot()

    async def send_input(self, sandbox_id: str, inputs: Sequence[Input]) -> None:
        async with self._screen(sandbox_id) as screen:
            await asyncio.shield(self._tasks.spawn(screen.input(inputs)))

    async def read_console(self, sandbox_id: str, after: int = -1, wait_s: float = 0.0) -> ConsolePiece:
        async with self._screen(sandbox_id) as screen:
            offset, data = await screen.read_console(after, min(wait_s, MOST_WAIT_S))
            return ConsolePiece(offset=offset, data=data)

    async def write_console(self, sandbox_id: str, data: bytes) -> None:
        async with self._screen(sandbox_id) as screen:
            await screen.write_console(data)

    async def checkpoint(self, sandbox_id: str, name: str) -> Checkpoint:
        sandbox = self._usable(sandbox_id)
        host = _checkpoints(sandbox)
        sandbox.here()
        made = await asyncio.shield(self._tasks.spawn(host.checkpoint(sandbox.id, sandbox.record.handle, name)))
        self._lives.notes.events.add(
            sandbox.id, EventType.CHECKPOINT, {"name": name, "memory_bytes": made.memory_bytes}
        )
        return made

    def checkpoints(self, sandbox_id: str) -> list[Checkpoint]:
        sandbox = self._usable(sandbox_id)
        return _checkpoints(sandbox).checkpoints(sandbox.id)

    def drop_checkpoint(self, sandbox_id: str, name: str) -> None:
        sandbox = self._usable(sandbox_id)
        _checkpoints(sandbox).drop_checkpoint(sandbox.id, name)

    async def revert(self, sandbox_id: str, name: str) -> None:
        sandbox = self._usable(sandbox_id)
        host = _checkpoints(sandbox)
        sandbox.running()
        handle = host.reserve_revert(sandbox.id, sandbox.record.handle, name)
        await asyncio.shield(self._tasks.spawn(self._revert(sandbox, host, handle, name)))

    async def _revert(self, sandbox: Sandbox, host: CheckpointHost, handle: dict[str, object], name: str) -> None:
        before = sandbox.record.handle
        sandbox.record = replace(sandbox.record, handle=handle)
        sandbox.instance = sandbox.commands = None  # who asks meanwhile is told to wait
        await self._journal.put(sandbox.record)
        try:
            instance = await host.revert(sandbox.id, sandbox.record.spec, handle, before)
        except DsecError as error:
            self._lives.end(sandbox, Cause.PLATFORM_KILLED, f"it could not go back to {name!r}: {error.message}")
            raise
        if not sandbox.up:  # deleted meanwhile, with nothing there to remove
            await sandbox.backend.destroy(sandbox.id, handle)
            raise CreateFailed("the sandbox was ended while it went back to a checkpoint")
        sandbox.instance = instance
        sandbox.usage = Usage()
        self._lives.watch(sandbox, instance)
        self._commands.adopt(sandbox)
        await self._lives.networks.go_on(sandbox, instance)
        await self._tripwires.adopt(sandbox)
        self._lives.notes.events.add(sandbox.id, EventType.REVERTED, {"name": name})

    @asynccontextmanager
    async def _screen(self, sandbox_id: str) -> AsyncIterator[ScreenHost]:
        sandbox = self._usable(sandbox_id)
        instance = sandbox.running()
        if not isinstance(instance, ScreenHost):
            raise Unsupported(
                f"a sandbox of the backend {sandbox.record.backend!r} has no screen",
                remedy="Full machines (backend vm) have one.",
            )
        self._lives.use(sandbox)
        try:
            yield instance
        finally:
            self._lives.unuse(sandbox)


def _checkpoints(sandbox: Sandbox) -> CheckpointHost:
    if not isinstance(sandbox.backend, CheckpointHost):
        raise Unsupported(
            f"a sandbox of the backend {sandbox.record.backend!r} can't go back to a checkpoint",
            remedy="Full machines (backend vm) can; others can be forked.",
        )
    return sandbox.backend
