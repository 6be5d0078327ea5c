"""Sandboxes that come from other nodes, under the ids that they have, and those that leave.

Owns what was made anew here. Invariants: a sandbox that came is served only when all of its log has been done again; an
edge that dies in the middle ends it when it is back, and so does a failure (`moved`: it can be rebuilt elsewhere); one
that leaves has a snapshot of everything, since when nothing was done to it; it has ended, and its log is in the
cluster, before anybody is told that it left; it is made again from that snapshot, or not at all.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from dsec.edge.client import EdgeClient, Principal
from dsec.edge.config import EdgeConfig
from dsec.edge.lives import Lives
from dsec.edge.naming import Naming
from dsec.edge.rebuild import Base, Replay, chain_of, grounds_of, networks_of, starts_of
from dsec.edge.specs import learn, resolve
from dsec.edge.trajectory import REUSABLE, Trajectories
from dsec.errors import Conflict, DsecError, NotFound, Unavailable, Unsupported
from dsec.journal.records import Journal, Record
from dsec.ports import Backend
from dsec.spec.causes import Cause
from dsec.spec.ids import edge_of
from dsec.spec.sandbox import SandboxSpec, State
from dsec.spec.trajectory import EntryType, RebuildRequest, Rebuilt, parse

MOST_REMEMBERED = 1000
SNAPSHOT_S = 10.0
"""How long a snapshot that a sandbox can't be without is looked for."""
_GONE = frozenset({Cause.NODE_LOST, Cause.MOVED})
log = logging.getLogger("dsec.edge")


class Generations(Protocol):
    """Where logs are copied to."""

    def begin(self, sandbox_id: str, generation: int) -> None: ...
    def shipped(self, sandbox_id: str) -> asyncio.Future[None]: ...


class Resident(Struct, frozen=True, kw_only=True):
    """A sandbox, as who drains a node has to know it."""

    id: str
    project: str
    gone: bool = False
    """It has left already, and nobody may have it yet."""


class Moving:
    """For the event loop."""

    def __init__(
        self,
        edge: EdgeClient,
        *,
        number: int,
        lives: Lives,
        naming: Naming,
        trajectories: Trajectories,
        journal: Journal,
        backends: Mapping[str, Backend],
        config: EdgeConfig,
    ) -> None:
        """`number`: of this edge."""
        self._edge = edge
        self._number = number
        self._lives = lives
        self._naming = naming
        self._trajectories = trajectories
        self._journal = journal
        self._backends = backends
        self._config = config
        self._coming: set[str] = set()
        self._came: OrderedDict[str, tuple[RebuildRequest, Rebuilt]] = OrderedDict()

    def coming(self, sandbox_id: str) -> bool:
        """Whether it is being made anew here: nobody may use it yet."""
        return sandbox_id in self._coming

    def standing(self, sandbox_id: str) -> Literal["here", "coming", "gone"]:
        """Whether this node has it, or had it till it ended for good; `gone`: it doesn't, and it may be rebuilt
        elsewhere."""
        if sandbox_id in self._coming:
            return "coming"
        record = self._record(sandbox_id)
        if record is None or (record.state in (State.ENDING, State.ENDED) and record.cause in _GONE):
            return "gone"
        failed = record.cause is Cause.CREATE_FAILED and edge_of(sandbox_id) != self._number
        return "gone" if failed else "here"

    def came(self, request: RebuildRequest) -> Rebuilt | None:
        """What a rebuild of this sandbox here found, if it was this one: asked again, it isn't done again."""
        known = self._came.get(request.sandbox)
        return known[1] if known is not None and known[0] == request else None

    async def take_in(  # noqa: PLR0917
        self,
        request: RebuildRequest,
        principal: Principal,
        lines: list[bytes],
        bodies: Mapping[str, bytes],
        generation: int,
        generations: Generations,
    ) -> Rebuilt:
        """Make a sandbox anew from its log. `bodies`: what that names, by digest. Raises as `EdgeClient.rebuild`, and
        `Conflict` where this node has had it."""
        sandbox_id = request.sandbox
        if self.standing(sandbox_id) != "gone" or self._record(sandbox_id) is not None:
            raise Conflict(f"this node has had sandbox {sandbox_id} before", remedy="Rebuild it on another node.")
        entries = chain_of(lines, sandbox_id)
        for network in networks_of(entries):
            self._edge.check_grants(principal, network)
        replay, names = await self._best(request, principal, lines, bodies)

        async def make(spec: SandboxSpec) -> str:
            generations.begin(sandbox_id, generation)
            return (await self._naming.create_as(sandbox_id, spec, principal.project)).sandbox.id

        self._coming.add(sandbox_id)
        try:
            rebuilt = await replay.run(make)
            self._trajectories.rebuilt(sandbox_id, generation, len(entries), names)
            await generations.shipped(sandbox_id)
        except BaseException:
            await asyncio.shield(self._end(sandbox_id, "its rebuild here failed"))
            raise
        finally:
            self._coming.discard(sandbox_id)
        self._came[sandbox_id] = request, rebuilt
        if len(self._came) > MOST_REMEMBERED:
            self._came.popitem(last=False)
        return rebuilt

    async def _best(
        self, request: RebuildRequest, principal: Principal, lines: list[bytes], bodies: Mapping[str, bytes]
    ) -> tuple[Replay, list[str]]:
        """A replay from the last snapshot that can be had here, and the names of all that it stands on. Raises
        `Unavailable` where one that it can't be without isn't to be had."""
        entries = chain_of(lines, request.sandbox)
        before = grounds_of(entries)
        restore = functools.partial(self._trajectories.restore, bodies.get)

        async def begin(base: Base | None) -> tuple[Replay, list[str]]:
            replay = Replay(
                self._edge, entries, request, blob=bodies.get, keep=self._config.trajectory_output_bytes,
                restore=restore, base=base, in_place=True,
            )  # fmt: skip
            spec = replay.spec()
            names = before if base is None else [*before, base.name]
            # layers may be used where a name here stands for them
            named = [replace(spec, environment=name, layers=[]) for name in names]
            await learn(named, principal.project, self._backends)
            await learn([spec], principal.project, self._backends)
            resolve(spec, principal.project, self._backends)
            return replay, names

        *others, last = starts_of(entries, request)
        for base in others:
            with suppress(NotFound, Unsupported):
                return await begin(base)
        deadline = time.monotonic() + SNAPSHOT_S
        while True:
            try:
                return await begin(last)
            except (NotFound, Unsupported) as error:
                if last is None:
                    raise
                if time.monotonic() >= deadline:
                    raise Unavailable(
                        f"the snapshot {last.name} that sandbox {request.sandbox} left its node with can't be had: "
                        f"{error.message}",
                        remedy="Try again; a rebuild with from_start does without it what its log can do again.",
                    ) from error
            await asyncio.sleep(0.5)

    async def hand_over(self, sandbox_id: str, generations: Generations) -> None:
        """End one that another node is to have. Raises `Conflict` while a command runs in it, and where something was
        done to it since its last snapshot; `Unavailable` where its log isn't in the cluster (then it has ended all the
        same, and can be handed over again)."""
        sandbox = self._lives.sandboxes.get(sandbox_id)
        if sandbox is not None and sandbox.state in (State.RUNNING, State.PAUSED):
            running = [each for each in self._edge.processes(sandbox_id) if not each.key.startswith(REUSABLE)]
            if running or sandbox.requests:
                raise Conflict(
                    f"{len(running) or 'some'} commands run in sandbox {sandbox_id}", remedy="Wait for them."
                )
            if not self._trajectories.saved(sandbox_id):
                raise Conflict(
                    f"no snapshot holds all that was done to sandbox {sandbox_id}", remedy="Take one, at rest."
                )
            ended = self._lives.end(sandbox, Cause.MOVED)
            shipped = generations.shipped(sandbox_id)
            await asyncio.shield(ended)
            await shipped
        elif sandbox is None and self.standing(sandbox_id) == "gone":
            await generations.shipped(sandbox_id)
        else:
            raise Conflict(f"sandbox {sandbox_id} is being made or has ended", remedy="Wait a moment.")

    def residents(self) -> list[Resident]:
        """What a drain of this node has to move."""
        live = [each.record for each in self._lives.sandboxes.values()]
        found = [Resident(id=record.id, project=record.project) for record in live if record.cause is None]
        left = [record for record in self._journal.ended_by(Cause.MOVED) if record.id not in self._lives.sandboxes]
        return [*found, *(Resident(id=record.id, project=record.project, gone=True) for record in left)]

    async def end_unfinished(self) -> None:
        """What an edge that died was making anew here."""
        for sandbox_id in list(self._lives.sandboxes):
            if edge_of(sandbox_id) != self._number and not self._finished(sandbox_id):
                log.warning("sandbox %s was being made anew when this server went down", sandbox_id)
                await self._end(sandbox_id, "the server went down while it was made anew here")

    def _finished(self, sandbox_id: str) -> bool:
        return any(
            b'"rebuilt"' in line and parse(line).type == EntryType.REBUILT
            for _, line in self._trajectories.store.lines(sandbox_id)
        )

    async def _end(self, sandbox_id: str, why: str) -> None:
        sandbox = self._lives.sandboxes.get(sandbox_id)
        if sandbox is not None:
            with suppress(DsecError):
                await self._lives.end(sandbox, Cause.MOVED, why)

    def _record(self, sandbox_id: str) -> Record | None:
        sandbox = self._lives.sandboxes.get(sandbox_id)
        return sandbox.record if sandbox is not None else self._journal.get(sandbox_id)
