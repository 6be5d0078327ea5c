"""The part of an edge in process that finds sandboxes, pauses and resumes them: `dsec.edge.kept.Kept`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from dsec.edge.access import Access, no_sandbox
from dsec.edge.client import Principal
from dsec.edge.forks import Forks
from dsec.edge.kept import BatchItem, PauseItem
from dsec.edge.lives import Lives
from dsec.edge.pauses import Pauses
from dsec.edge.runs import Runs
from dsec.edge.sandbox import Sandbox, ended_error
from dsec.errors import DsecError, Unavailable
from dsec.journal.records import Journal, Record
from dsec.ports import Captured
from dsec.spec.events import EventType
from dsec.spec.runs import RunInfo, RunRequest
from dsec.spec.sandbox import PausedBy, SandboxInfo, State
from dsec.spec.snapshots import SnapshotInfo
from dsec.spec.trajectory import EntryType

_AT_ONCE = 16
"""Of many sandboxes, so many are paused or resumed in one turn of the event loop."""


class KeptCalls:
    """A base of `dsec.edge.node.Edge`, which sets the attributes."""

    _access: Access
    _forks: Forks
    _journal: Journal
    _lives: Lives
    _open: bool
    _pauses: Pauses
    _runs: Runs

    async def pause(self, sandbox_id: str) -> SandboxInfo:
        self._check_open()
        sandbox = self._live(sandbox_id)
        await asyncio.shield(self._pauses.pause(sandbox, PausedBy.CALLER))
        return sandbox.info()

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        self._check_open()
        sandbox = self._live(sandbox_id)
        sandbox.running()
        await asyncio.shield(self._journal.put(sandbox.record))
        return sandbox.info()

    async def pause_many(
        self,
        project: str,
        *,
        ids: Sequence[str] | None = None,
        run: str | None = None,
        labels: Mapping[str, str] | None = None,
        resume: bool = False,
    ) -> list[PauseItem]:
        self._check_open()
        from_state = State.PAUSED if resume else State.RUNNING
        wanted = list(ids) if ids is not None else self._matching(project, run, labels or {}, from_state)

        async def one(sandbox_id: str) -> PauseItem:
            try:
                self._access.authorize(Principal(project), sandbox_id)
                await (self.resume if resume else self.pause)(sandbox_id)
            except DsecError as error:
                return PauseItem(id=sandbox_id, error=error.body())
            return PauseItem(id=sandbox_id)

        done = list[PauseItem]()
        queue = iter(wanted)

        async def work() -> None:
            for sandbox_id in queue:
                done.append(await one(sandbox_id))

        # Each is a step that nothing interrupts: all in one turn of the event loop would hold up everybody else.
        await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
        return done

    async def fork(self, sandbox_id: str, count: int, *, deadline_s: float | None = None) -> list[BatchItem]:
        return await self._forks.fork(self._usable(sandbox_id), count, deadline_s)

    def captured(self, sandbox_id: str, *, at_rest: bool = False) -> AbstractAsyncContextManager[Captured]:
        return self._forks.captured(self._usable(sandbox_id), at_rest=at_rest)

    def note_snapshot(self, sandbox_id: str, captured: Captured, made: SnapshotInfo) -> None:
        if sandbox_id in self._lives.sandboxes:
            data: dict[str, Any] = {"name": made.name, "layer": made.layer, "at": captured.seq, "removed": made.removed}
            data |= {"kept": made.kept, "built_by": made.built_by}
            self._lives.notes.events.add(sandbox_id, EventType.SNAPSHOT, data)

    def note_session(
        self, sandbox_id: str, kind: EntryType, data: dict[str, Any], *, env: dict[str, str] | None = None
    ) -> int:
        if sandbox_id not in self._lives.sandboxes:
            return 0
        return self._lives.notes.trajectories.session(sandbox_id, kind, data, env)

    def open_run(self, project: str, asked: RunRequest) -> RunInfo:
        self._check_open()
        return self._runs.open(project, asked)

    def run(self, project: str, name: str) -> RunInfo:
        return self._runs.get(project, name)

    def runs(self, project: str) -> list[RunInfo]:
        return self._runs.list(project)

    def renew_run(self, project: str, name: str, epoch: int) -> RunInfo:
        self._check_open()
        return self._runs.renew(project, name, epoch)

    def check_run(self, project: str, name: str, epoch: int) -> None:
        self._runs.check(project, name, epoch)

    def _matching(self, project: str, run: str | None, labels: Mapping[str, str], state: State) -> list[str]:
        return [
            sandbox.id
            for sandbox in self._lives.sandboxes.values()
            if sandbox.record.project == project
            and sandbox.state is state
            and (run is None or sandbox.record.run == run)
            and all(sandbox.record.spec.labels.get(name) == value for name, value in labels.items())
        ]

    def _record(self, sandbox_id: str) -> Record | None:
        sandbox = self._lives.sandboxes.get(sandbox_id)
        return sandbox.record if sandbox is not None else self._journal.get(sandbox_id)

    def _live(self, sandbox_id: str) -> Sandbox:
        """Raises `SandboxNotFound`, `SandboxEnded`, `SandboxLost`."""
        sandbox = self._lives.sandboxes.get(sandbox_id)
        if sandbox is not None:
            return sandbox
        record = self._journal.get(sandbox_id)
        raise no_sandbox(sandbox_id) if record is None else ended_error(record)

    def _usable(self, sandbox_id: str) -> Sandbox:
        """As `_live`; raises `Unavailable` where the edge is closing, too."""
        self._check_open()
        return self._live(sandbox_id)

    def _check_open(self) -> None:
        if not self._open:
            raise Unavailable("the server is stopping", remedy="Try again when it is back.")
