"""Runs of a cluster: their epochs by compare-and-set in one bucket, their leases on the edges that have sandboxes of
them.

A lease lapses on each edge by its own clock, from the last renewal that it heard; so an edge that is cut off pauses its
part, and goes on with the next request. An edge hears of a run with the first sandbox, and of renewals while it has
some.
"""

from __future__ import annotations

import asyncio
import hashlib
import time

from msgspec import Struct
from msgspec.structs import replace

from dsec.cluster.bus import Bucket, Bus
from dsec.cluster.nodes import Nodes
from dsec.cluster.wire import RunNews
from dsec.errors import Unavailable
from dsec.plan import leases
from dsec.spec.runs import RunInfo, RunRequest
from dsec.tasks import ended


class RunRecord(Struct, frozen=True):
    """A run on record."""

    project: str
    run: RunInfo


class ClusterRuns:
    """For the event loop."""

    def __init__(self, bus: Bus, bucket: Bucket[RunRecord], nodes: Nodes) -> None:
        self._bus = bus
        self._bucket = bucket
        self._nodes = nodes
        self._known: dict[tuple[str, str], RunInfo] = {}
        self.ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._bucket.follow(self._changed, self.ready.set), name="runs")

    async def close(self) -> None:
        """Idempotent."""
        await ended([self._task])

    async def open(self, project: str, asked: RunRequest) -> RunInfo:
        """A new epoch. Raises `Unavailable`."""
        while True:
            revision, record = await self._bucket.get(_key(project, asked.name))
            run = leases.opened(record.run if record is not None else None, asked, time.time())
            if await self._put(project, run, revision):
                return run

    async def renew(self, project: str, name: str, epoch: int) -> RunInfo:
        """Raises `NotFound`, `RunFenced`, `Unavailable`."""
        while True:
            revision, record = await self._bucket.get(_key(project, name))
            known = leases.check(record.run if record is not None else None, name, epoch)
            run = leases.renewed(known, time.time())
            if await self._put(project, run, revision):
                return run

    async def get(self, project: str, name: str) -> RunInfo:
        """Raises `NotFound`, `Unavailable`."""
        _, record = await self._bucket.get(_key(project, name))
        run = record.run if record is not None else None
        return _now(leases.check(run, name, run.epoch if run is not None else 0))

    def find(self, project: str, name: str) -> RunInfo | None:
        return self._known.get((project, name))

    def list(self, project: str) -> list[RunInfo]:
        """By name. Raises `Unavailable` before they are known."""
        if not self.ready.is_set():
            raise Unavailable("this server has just begun to learn about the cluster", remedy="Try again.")
        return [_now(run) for (owner, _), run in sorted(self._known.items()) if owner == project]

    async def check(self, project: str, name: str, epoch: int) -> None:
        """Whether a client of this epoch may speak for the run. Raises `NotFound`, `RunFenced`, `Unavailable`."""
        known = self._known.get((project, name))
        if known is None or known.epoch < epoch:  # this apiserver may hear of it a moment later
            _, record = await self._bucket.get(_key(project, name))
            known = record.run if record is not None else None
        leases.check(known, name, epoch)

    async def _put(self, project: str, run: RunInfo, revision: int) -> bool:
        if await self._bucket.put_if(_key(project, run.name), revision, RunRecord(project, run)) is None:
            return False
        self._known[project, run.name] = run
        for edge in self._nodes.with_run(project, run.name):
            await self._bus.publish(f"dsec.edge.{edge}.runs", RunNews(project, run))
        return True

    def _changed(self, _: str, record: RunRecord | None, __: int) -> None:
        if record is not None:
            known = self._known.get((record.project, record.run.name))
            if leases.supersedes(record.run, known):
                self._known[record.project, record.run.name] = record.run


def _key(project: str, name: str) -> str:
    """Names may hold what keys of a bucket may not."""
    return hashlib.sha256(f"{project}\0{name}".encode()).hexdigest()[:40]


def _now(run: RunInfo) -> RunInfo:
    return replace(run, lapsed=True) if run.expires_at < time.time() and not run.lapsed else run
