"""Forks: children that begin with their parent's files, each somebody of its own; and captures for snapshots.

Invariants: all children of one call begin with the same moment; a child's id, host name, tokens and machine id are its
own; a container's child has new processes (its memory is not kept), a machine's goes on with its parent's, the commands
that the server started among them, under the same keys; a paused parent isn't resumed; a capture is dropped when nobody
needs it any more, also when its caller went away.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from msgspec.structs import replace

from dsec.channel import files
from dsec.edge.client import Created
from dsec.edge.kept import BatchItem
from dsec.edge.lives import Lives
from dsec.edge.naming import Naming
from dsec.edge.sandbox import Sandbox
from dsec.edge.tasks import Tasks, log
from dsec.errors import Conflict, DsecError, FileError, FileMissing, InvalidRequest, Unsupported
from dsec.journal.records import Record
from dsec.ports import Captured, CaptureHost, ForkHost, is_under_way
from dsec.spec.events import EventType
from dsec.spec.sandbox import State

MAX_CHILDREN = 256
_MACHINE_ID = b"/etc/machine-id"


class Forks:
    """For the event loop."""

    def __init__(self, *, lives: Lives, naming: Naming, tasks: Tasks, adopt: Callable[[Sandbox], None]) -> None:
        """`adopt`: take over the commands that run in a sandbox."""
        self._lives = lives
        self._naming = naming
        self._tasks = tasks
        self._adopt = adopt

    @asynccontextmanager
    async def captured(self, sandbox: Sandbox, *, at_rest: bool = False) -> AsyncIterator[Captured]:
        """See `EdgeClient.captured`; raises as `Sandbox.here`, too."""
        before = self._settled(sandbox)
        backend = sandbox.backend
        if not isinstance(backend, CaptureHost):
            raise Unsupported(f"the backend {sandbox.record.backend!r} can't keep a sandbox's files")
        if at_rest and not before:
            raise _restless(sandbox)
        captured = await backend.capture(sandbox.id, sandbox.record.handle)
        try:
            seq = before if before == self._settled(sandbox) else 0
            if at_rest and not seq:
                raise _restless(sandbox)
            yield replace(captured, seq=seq)
        finally:
            await asyncio.shield(backend.drop(captured.name))

    def _settled(self, sandbox: Sandbox) -> int:
        """The number of the last entry of its trajectory where nothing is under way inside, no program; else 0."""
        instance = sandbox.here()
        busy = any(is_under_way(each) for each in instance.channel.operations()) or instance.usage().pids > 1
        chain = self._lives.notes.trajectories.store.chain(sandbox.id)
        return 0 if busy or chain is None else chain.seq

    async def fork(self, sandbox: Sandbox, count: int, deadline_s: float | None) -> list[BatchItem]:
        """See `EdgeClient.fork`."""
        if not 1 <= count <= MAX_CHILDREN:
            raise InvalidRequest(f"a fork makes 1 to {MAX_CHILDREN} children", field="count")
        return await asyncio.shield(self._tasks.spawn(self._fork(sandbox, count, deadline_s)))

    async def _fork(self, sandbox: Sandbox, count: int, deadline_s: float | None) -> list[BatchItem]:
        parent = sandbox.record
        async with self._moment(sandbox) as name:
            making = [self._child(parent, name, deadline_s) for _ in range(count)]
            made = await asyncio.gather(*making, return_exceptions=True)
        items = []
        for index, each in enumerate(made):
            if isinstance(each, Created):
                items.append(BatchItem(index=index, sandbox=each.sandbox))
            elif isinstance(each, DsecError):
                items.append(BatchItem(index=index, error=each.body()))
            else:
                raise each
        children = [item.sandbox.id for item in items if item.sandbox is not None]
        self._lives.notes.events.add(parent.id, EventType.FORKED, {"children": children})
        return items

    @asynccontextmanager
    async def _moment(self, sandbox: Sandbox) -> AsyncIterator[str]:
        """A name of it as it is now: with all that runs in it, or of its files alone."""
        backend = sandbox.backend
        if not isinstance(backend, ForkHost):
            async with self.captured(sandbox) as captured:
                yield captured.name
            return
        sandbox.here()
        name = await backend.split(sandbox.id, sandbox.record.handle)
        try:
            yield name
        finally:
            await asyncio.shield(backend.drop(name))

    async def _child(self, parent: Record, name: str, deadline_s: float | None) -> Created:
        created = await asyncio.shield(self._naming.clone(parent, name, deadline_s))
        child = self._lives.sandboxes.get(created.sandbox.id)
        if child is not None and child.state is State.RUNNING:
            if isinstance(child.backend, ForkHost):
                self._adopt(child)
            else:
                await self._renew_machine_id(child)
            self._lives.notes.events.add(child.id, EventType.FORKED, {"parent": parent.id})
        return created

    @staticmethod
    async def _renew_machine_id(child: Sandbox) -> None:
        """Where it has one: two forks are not one machine."""
        channel = child.here().channel
        try:
            if (await files.stat(channel, _MACHINE_ID, user="root", follow=True)).size:
                await files.write_file(channel, _MACHINE_ID, _once(f"{os.urandom(16).hex()}\n".encode()), user="root")
        except FileMissing:
            return
        except FileError as error:
            log.warning("sandbox %s keeps its parent's machine id: %s", child.id, error)


def _restless(sandbox: Sandbox) -> Conflict:
    return Conflict(
        f"a command, a session or a left-over program is under way in sandbox {sandbox.id}",
        remedy="Wait for it, or end it.",
    )


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
