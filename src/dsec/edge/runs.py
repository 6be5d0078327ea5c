"""Runs and their leases: who may speak for a training job, and what becomes of its sandboxes when nobody does.

Owns the runs of a node. Invariants:

- A run's epoch only grows; opening a run begins one, and what clients of an earlier epoch ask for is refused
  (`RunFenced`). Any number of clients share the current one.
- A lease lapses once: a renewal that comes first moves it, one that comes later makes a lapsed run go on. Nothing is
  applied twice.
- While the server was away nobody could renew: after a restart every lease is whole again. While it stood still nobody
  was heard: a lease that is found to have ended in that time gets as much time again, for what waits to be read.
- Sandboxes that are still being made when the lease lapses meet the same policy as soon as they run.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from dsec.edge.lives import Lives
from dsec.edge.pauses import Pauses
from dsec.edge.sandbox import Sandbox
from dsec.edge.tasks import Tasks, log, quiet
from dsec.edge.timers import Due, Timers
from dsec.errors import DsecError
from dsec.journal.run_store import RunStore
from dsec.plan import leases
from dsec.ports import Clock
from dsec.spec.causes import Cause
from dsec.spec.runs import RunInfo, RunRequest
from dsec.spec.sandbox import PausedBy, State

if TYPE_CHECKING:
    from dsec.edge.client import Created

_A_TURN = 16
"""Sandboxes that a lapse reaches in one turn of the event loop."""
_STOOD_STILL_S = 0.5
"""Later than this no timer is, but where the process or its machine stood still."""


class Runs:
    """For the event loop."""

    def __init__(self, *, store: RunStore, lives: Lives, pauses: Pauses, clock: Clock, tasks: Tasks) -> None:
        self._store = store
        self._lives = lives
        self._pauses = pauses
        self._clock = clock
        self._tasks = tasks
        self._timers = Timers(clock, tasks, self._lapse)
        self._due: dict[Due, float] = {}
        """Of those that a timer is set for."""
        self._runs = store.all()

    def start(self) -> None:
        """Leases count from now."""
        self._timers.start()
        for (project, name), run in self._runs.items():
            if not run.lapsed:
                self._set(project, leases.renewed(run, self._clock.now()))
                self._lapses_in((project, name), run.lease_s)

    def open(self, project: str, asked: RunRequest) -> RunInfo:
        """A new epoch of the run begins, its first one where there is no such run."""
        known = self._runs.get((project, asked.name))
        return self._renewed(project, leases.opened(known, asked, self._clock.now()))

    def get(self, project: str, name: str) -> RunInfo:
        """Raises `NotFound`."""
        run = self._runs.get((project, name))
        return leases.check(run, name, run.epoch if run is not None else 0)

    def list(self, project: str) -> list[RunInfo]:
        """By name."""
        return [run for (owner, _), run in sorted(self._runs.items()) if owner == project]

    def renew(self, project: str, name: str, epoch: int) -> RunInfo:
        """Its lease is whole again; a lapsed run goes on. Raises `NotFound`, `RunFenced`."""
        run = leases.check(self._runs.get((project, name)), name, epoch)
        return self._renewed(project, leases.renewed(run, self._clock.now()))

    def hear(self, project: str, run: RunInfo) -> None:
        """The cluster's record of a run, which is kept elsewhere: opened or renewed by whomever."""
        if leases.supersedes(run, self._runs.get((project, run.name))):
            self._renewed(project, run)

    def check(self, project: str, name: str, epoch: int) -> None:
        """Whether a client of this epoch may speak for the run. Raises `NotFound`, `RunFenced`."""
        leases.check(self._runs.get((project, name)), name, epoch)

    def close(self) -> None:
        """Idempotent."""
        self._store.close()

    def _renewed(self, project: str, run: RunInfo) -> RunInfo:
        self._set(project, run)
        self._lapses_in((project, run.name), run.lease_s)
        return run

    def _lapses_in(self, key: Due, seconds: float) -> None:
        due = self._due[key] = self._clock.monotonic() + seconds
        self._timers.set(key, due)

    def _set(self, project: str, run: RunInfo) -> None:
        self._store.put(project, run)
        self._runs[project, run.name] = run

    def _lapse(self, key: Due) -> None:
        project, name = key
        run = self._runs[key]
        late_s = self._clock.monotonic() - self._due.pop(key)
        if late_s > _STOOD_STILL_S:
            log.warning("the server stood still for %.1f s: the lease of the run %s goes on", late_s, name)
            self._lapses_in(key, min(late_s, run.lease_s))
            return
        self._set(project, leases.lapsed(run))
        log.info("the lease of the run %s lapsed: %s", name, run.on_lapse)
        if run.on_lapse == "keep":
            return
        self._tasks.spawn(self._apply_all(project, run))

    async def _apply_all(self, project: str, run: RunInfo) -> None:
        """A few in each turn of the event loop, so that a large run's lapse doesn't hold up the others."""
        applied = 0
        for sandbox in list(self._lives.sandboxes.values()):
            if sandbox.record.project != project or sandbox.record.run != run.name:
                continue
            now = self._runs.get((project, run.name))
            if now is None or not now.lapsed:
                return  # somebody came back meanwhile
            self._apply(sandbox, run)
            applied += 1
            if applied % _A_TURN == 0:
                await asyncio.sleep(0)

    def _apply(self, sandbox: Sandbox, run: RunInfo) -> None:
        if run.on_lapse == "stop":
            quiet(self._lives.end(sandbox, Cause.LEASE_LAPSED, f"the lease of the run {run.name!r} lapsed"))
        elif sandbox.ready is not None:
            sandbox.ready.add_done_callback(functools.partial(self._made, sandbox, run))
        elif sandbox.state is State.RUNNING:
            try:
                quiet(self._pauses.pause(sandbox, PausedBy.LEASE))
            except DsecError as error:
                log.warning("sandbox %s runs on without a lease: %s", sandbox.id, error)

    def _made(self, sandbox: Sandbox, run: RunInfo, _: asyncio.Future[Created]) -> None:
        now = self._runs.get((sandbox.record.project, run.name))
        if now is not None and now.lapsed and sandbox.state is State.RUNNING:
            self._apply(sandbox, run)
