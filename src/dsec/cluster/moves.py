"""Sandboxes that left the node in their id: where they are, their logs in the streams, rebuilding, draining.

Owns the bucket `dsec_moved`, a record `moved/<id>` each, which every apiserver follows; it is read again where the edge
that should have a sandbox doesn't know it, or is lost. Invariants: at any time one node may have a sandbox: the one of
its record, or else that in its id. The record names another before that one is asked, by compare-and-set, and only when
the node before has said that it doesn't have it (it then refuses older orders), or was fenced. A log is read from the
last generation that was made whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct
from multidict import CIMultiDict

from dsec.cluster.asking import Answered, account_for, ask_of, name_key
from dsec.cluster.bus import Bucket, Bus
from dsec.cluster.handing import PATH, Order, Question, Residents, Standing
from dsec.cluster.logs import KEEP_S, SHARDS, Chain, assemble, shard_of, stream_of, subject_of, subjects_of
from dsec.cluster.nodes import Nodes
from dsec.cluster.quotas import Quotas, Share
from dsec.cluster.routes import edge_for
from dsec.cluster.runs import ClusterRuns
from dsec.cluster.upstream import NotSent, Upstream
from dsec.cluster.wire import REFUSED, RUN, Made, Member, RunNews
from dsec.edge.client import Principal
from dsec.edge.moving import Resident
from dsec.errors import (
    Conflict,
    DsecError,
    ErrorBody,
    Internal,
    QuotaExceeded,
    SandboxLost,
    SandboxNotFound,
    Unavailable,
    from_body,
)
from dsec.plan.scheduler import Part
from dsec.spec.sandbox import SandboxInfo, SandboxSpec
from dsec.spec.snapshots import SnapshotRequest
from dsec.spec.trajectory import RebuildRequest
from dsec.tasks import ended

TRIES = 4
"""Nodes that are asked for one sandbox."""
HISTORY = 8
AGAIN_S = 0.5
WAIT_S = 120.0
"""How long a rebuild waits for one of the same sandbox that somebody else asked for."""
DEADLINE_S = 60.0
"""For a share of its quota."""
DRAIN_WIDTH = 4
DRAIN_RETRY_S = 1.0
_encode = msgspec.json.Encoder().encode
_standing = msgspec.json.Decoder(Standing).decode
_residents = msgspec.json.Decoder(Residents).decode
_error = msgspec.json.Decoder(ErrorBody).decode


class Moved(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of a sandbox that isn't where its id says."""

    edge: int
    generation: int
    before: tuple[tuple[int, int], ...] = ()
    """Who had it, and as which generation, the last first."""
    at: float = 0.0


class Moves:
    """For the event loop."""

    def __init__(  # noqa: PLR0917
        self,
        bus: Bus,
        bucket: Bucket[Moved],
        made: Bucket[Made],
        nodes: Nodes,
        upstream: Upstream,
        runs: ClusterRuns,
        quotas: Quotas,
    ) -> None:
        self._bus = bus
        self._bucket = bucket
        self._made = made
        self._nodes = nodes
        self._upstream = upstream
        self._runs = runs
        self._quotas = quotas
        self._known: dict[str, Moved] = {}
        self.ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._bucket.follow(self._changed, self.ready.set), name="moves")

    async def close(self) -> None:
        """Idempotent."""
        await ended([self._task])

    # --- where ------------------------------------------------------------------------------------------------------

    def known(self) -> list[str]:
        """Those that aren't where their ids say."""
        return list(self._known)

    def edge_of(self, sandbox_id: str) -> int:
        """The node that may have a sandbox. Raises `SandboxNotFound` for what is no id."""
        known = self._known.get(sandbox_id)
        return edge_for(sandbox_id) if known is None else known.edge

    def is_at_once(self, sandbox_id: str) -> bool:
        """Whether `find` has nothing to look up."""
        with suppress(DsecError):
            self._nodes.member(self.edge_of(sandbox_id), sandbox_id)
            return True
        return False

    async def find(self, sandbox_id: str) -> Member:
        """Where to ask for it. Raises `SandboxNotFound`, `SandboxLost`, `Unavailable`."""
        if not self.ready.is_set():
            raise Unavailable("this server has just begun to learn about the cluster", remedy="Try again.")
        edge = self.edge_of(sandbox_id)
        try:
            return await self._nodes.find(edge, sandbox_id)
        except SandboxLost:
            record = await self._look(sandbox_id)
            if record is None or record.edge == edge:
                raise
            return await self._nodes.find(record.edge, sandbox_id)

    async def elsewhere(self, sandbox_id: str, edge: int) -> bool:
        """Whether a sandbox that this edge doesn't have is another's. Raises `Unavailable`."""
        record = await self._look(sandbox_id)
        return record is not None and record.edge != edge

    async def _look(self, sandbox_id: str) -> Moved | None:
        revision, record = await self._bucket.get(sandbox_id)
        self._changed(sandbox_id, record, revision)
        return record

    def _changed(self, sandbox_id: str, record: Moved | None, _: int) -> None:
        known = self._known.get(sandbox_id)
        if record is None:
            self._known.pop(sandbox_id, None)
        elif known is None or known.generation <= record.generation:
            self._known[sandbox_id] = record

    # --- logs -------------------------------------------------------------------------------------------------------

    async def chain(self, principal: Principal, sandbox_id: str, record: Moved | None = None) -> Chain:
        """What the streams have of a sandbox. Raises `SandboxNotFound` where that is nothing, or another project's,
        `Unavailable`."""
        record = record or self._known.get(sandbox_id)
        owners = [(edge_for(sandbox_id), 0)]
        if record is not None:
            owners = [(record.edge, record.generation), *record.before]
        for edge, generation in owners:
            subject = subject_of(sandbox_id, edge, generation, SHARDS)
            messages = await self._bus.read(stream_of(shard_of(sandbox_id, SHARDS)), subject)
            chain = assemble(messages, sandbox_id, edge, generation)
            if chain.whole:
                if chain.entries[0].data.get("project") != principal.project:
                    break
                return chain
        raise SandboxNotFound(
            f"there is no log of sandbox {sandbox_id[:64]} in the cluster",
            remedy="What its node hadn't published when it was lost is lost.",
        )

    # --- rebuilding -------------------------------------------------------------------------------------------------

    async def rebuild(self, principal: Principal, request: RebuildRequest, *, moves: bool = False) -> Answered:
        """A sandbox once more: where its node has it, a copy under another id, as on one machine; else itself, on
        another node. `moves`: it was there until now, and stays within its quota. Raises `SandboxNotFound`,
        `QuotaExceeded`, `Unavailable`, and what the last node that was asked said."""
        deadline = time.monotonic() + WAIT_S
        while True:
            answer = await self._rebuild_once(principal, request, moves)
            if answer is not None:
                return answer
            if time.monotonic() > deadline:
                raise Unavailable(f"sandbox {request.sandbox} is still being made anew", remedy="Try again later.")
            await asyncio.sleep(AGAIN_S)

    async def _rebuild_once(self, principal: Principal, request: RebuildRequest, moves: bool) -> Answered | None:
        """None: somebody else does it."""
        sandbox_id = request.sandbox
        revision, record = await self._bucket.get(sandbox_id)
        owner = record or Moved(edge=edge_for(sandbox_id), generation=0)
        there, answer = await self._ask_owner(principal, request, owner)
        if there:
            return answer
        chain = await self.chain(principal, sandbox_id, record)
        created = chain.entries[0].data
        fields = {name: value for name, value in created["spec"].items() if name != "env"}
        spec = msgspec.convert(fields, SandboxSpec)
        if moves:
            return await self._place(principal, request, chain, owner, revision, spec, None)
        try:
            async with self._share(principal, spec) as share:
                return await self._place(principal, request, chain, owner, revision, spec, share)
        except QuotaExceeded:
            if (await self._bucket.get(sandbox_id))[0] != revision:
                return None  # the last share is that of somebody who rebuilds the same
            raise

    def _share(self, principal: Principal, spec: SandboxSpec) -> AbstractAsyncContextManager[Share]:
        account = account_for(spec, principal.project)
        return self._quotas.share(principal.project, account, time.monotonic() + DEADLINE_S)

    async def _ask_owner(
        self, principal: Principal, request: RebuildRequest, owner: Moved
    ) -> tuple[bool, Answered | None]:
        """Whether the node that may have it does, and its answer (None: it is just being made anew there). If not, it
        never will by an order of that generation."""
        try:
            member = await self._nodes.find(owner.edge, request.sandbox)
        except SandboxLost:
            return False, None
        question = Question(request=request, generation=owner.generation)
        target = f"{PATH}/{request.sandbox}/standing"
        found = _standing(await self._whole(member, "POST", target, principal, _encode(question)))
        if found.standing != "here":
            return found.standing == "coming", None
        if found.rebuilt is not None:
            return True, Answered(200, _encode(found.rebuilt))
        info = msgspec.json.decode(
            await self._whole(member, "GET", f"/v1/sandboxes/{request.sandbox}", principal), type=SandboxInfo
        )
        target, body = "/v1/sandboxes:rebuild", _encode(request)
        async with self._share(principal, info.spec) as share:
            share.sent(owner.edge)
            status, answer = await self._upstream.json(member, "POST", target, principal, body)
            if 400 <= status < 500:
                share.refused(owner.edge)
        return True, Answered(status, answer)

    async def _place(  # noqa: PLR0917
        self,
        principal: Principal,
        request: RebuildRequest,
        chain: Chain,
        owner: Moved,
        revision: int,
        spec: SandboxSpec,
        share: Share | None,
    ) -> Answered | None:
        ask = ask_of(spec, principal.project)
        tried = {owner.edge, *(edge for edge, _ in owner.before)}
        last: Answered | None = None
        for _ in range(TRIES):
            edge = self._nodes.scheduler.placer.place(ask, tried)
            if edge is None:
                break
            tried.add(edge)
            member = self._nodes.member(edge, request.sandbox)
            before = ((owner.edge, owner.generation), *owner.before)[:HISTORY]
            owner = Moved(edge=edge, generation=owner.generation + 1, before=before, at=time.time())
            new = await self._bucket.put_if(request.sandbox, revision, owner)
            if new is None:
                return None
            revision = new
            self._changed(request.sandbox, owner, revision)
            if share is not None:
                share.sent(edge)
            else:
                self._nodes.scheduler.holder.expect(edge)
            answer, refused = await self._order(member, principal, request, chain, owner, spec)
            if not refused:
                await self._lead(principal, spec, member)
                return answer
            last = answer
            if share is not None:
                share.refused(edge)
            self._nodes.scheduler.placer.failed(edge, ask)
        if last is not None:
            return last
        raise Unavailable("no node has room for this sandbox now", remedy="Try again, or add nodes that suit it.")

    async def _order(  # noqa: PLR0917
        self,
        member: Member,
        principal: Principal,
        request: RebuildRequest,
        chain: Chain,
        owner: Moved,
        spec: SandboxSpec,
    ) -> tuple[Answered, bool]:
        """A node's answer, and whether it refused. Raises `Unavailable` where there is none: it may have begun."""
        order = Order(request=request, generation=owner.generation, key=chain.key)
        headers = CIMultiDict({"authorization": f"Bearer {self._upstream.bearer(member, principal)}"})
        run = self._runs.find(principal.project, spec.run) if spec.run is not None else None
        if run is not None:
            headers[RUN] = _encode(RunNews(principal.project, run)).decode()
        data = b"".join([_encode(order), b"\n", *chain.lines])
        try:
            async with self._upstream.ask(member, "POST", PATH, headers=headers, data=data) as response:
                answer = Answered(response.status, await response.read())
                return answer, REFUSED in response.headers or response.status in (401, 503)
        except NotSent as error:
            return _answered(self._upstream.unreachable(member, error)), True
        except (aiohttp.ClientError, OSError) as error:
            raise self._upstream.unreachable(member, error) from error

    async def _lead(self, principal: Principal, spec: SandboxSpec, member: Member) -> None:
        """Whoever asks for its name is led to where it is now."""
        if spec.name is None:
            return
        key = name_key(principal.project, spec.run, spec.name)
        part = Part(first=0, count=1, edge=member.claim.edge, incarnation=member.claim.incarnation)
        revision, there = await self._made.get(key)
        made = msgspec.structs.replace(there or Made(digest="", owner=""), parts=(part,))
        await self._made.put_if(key, revision, made)

    # --- draining ---------------------------------------------------------------------------------------------------

    async def drain(self, edge: int, deadline_s: float) -> AsyncIterator[dict[str, Any]]:
        """Move all that a node has, a few at a time: what became of each, as it is known. One in which something runs
        is waited for, and stays where no snapshot of it can be had. Raises `NotFound`, `SandboxLost`, `Unavailable`."""
        await self._nodes.cordon(edge, cordoned=True)
        member = self._nodes.member(edge, "")
        deadline = time.monotonic() + deadline_s
        found = _residents(await self._whole(member, "GET", PATH, Principal(""))).residents
        left = [each for each in found if not (each.gone and each.id in self._known)]
        room = asyncio.Semaphore(DRAIN_WIDTH)
        tasks = [asyncio.create_task(self._move(member, each, deadline, room)) for each in left]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()

    async def _move(
        self, member: Member, resident: Resident, deadline: float, room: asyncio.Semaphore
    ) -> dict[str, Any]:
        async with room:
            while True:
                try:
                    edge = await self._move_once(member, resident)
                except DsecError as error:
                    passing = error.infra or isinstance(error, Conflict | Unavailable)
                    if not passing or time.monotonic() >= deadline:
                        return {"id": resident.id, "error": error.body()}
                else:
                    return {"id": resident.id, "edge": edge}
                await asyncio.sleep(DRAIN_RETRY_S)

    async def _move_once(self, member: Member, resident: Resident) -> int:
        principal = Principal(resident.project)
        if not resident.gone:
            name = f"moved-{resident.id}@{time.time_ns() // 1_000_000}"
            asked = SnapshotRequest(name=name, scrub=False, at_rest=True)  # without it, it stays
            target = f"/v1/sandboxes/{resident.id}/snapshot"
            await self._whole(member, "POST", target, principal, _encode(asked))
        await self._whole(member, "POST", f"{PATH}/{resident.id}/leave", principal)
        answer = await self.rebuild(principal, RebuildRequest(sandbox=resident.id), moves=True)
        if answer.status != 200:
            raise _raised(answer.body)
        return self.edge_of(resident.id)

    async def _whole(
        self, member: Member, method: str, target: str, principal: Principal, body: bytes | None = None
    ) -> bytes:
        status, answer = await self._upstream.json(member, method, target, principal, body)
        if status >= 300:
            raise _raised(answer)
        return answer


async def make_streams(bus: Bus, *, replicas: int, most_bytes: int) -> None:
    """The streams of all logs, where they aren't there yet. `most_bytes`: of each; -1: as the servers have room. Raises
    `Unavailable`."""
    for shard in range(SHARDS):
        await bus.stream(stream_of(shard), subjects_of(shard), replicas=replicas, keep_s=KEEP_S, most_bytes=most_bytes)


def _answered(error: DsecError) -> Answered:
    return Answered(error.http_status, _encode(error.body()))


def _raised(body: bytes) -> DsecError:
    try:
        return from_body(_error(body))
    except msgspec.MsgspecError:
        return Internal("a node's answer can't be read")
