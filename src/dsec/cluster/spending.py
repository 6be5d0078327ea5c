"""What projects' quotas bound besides creations: forks, graders, builds, function calls, judge runs, SandboxFusion's
programs.

Invariants: nothing of these reaches a node beyond the shares that this apiserver holds. A fork's child is spent as a
creation is, whether or not there is a quota now: it counts until its node's report has it, or nobody can have it any
more. So is a build of E2B's, which goes on after its request, and which its node reports as if it were one sandbox.
What is over with its request (calls, programs of the judge, graders, builds of ours: their steps run one after the
other) counts for as long as that request is open here: whatever ends it, a client, a node or this process that goes,
ends both; and its node runs no more of it at a time than was granted.

Calls and programs of a project that no quota bounds are passed on unread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct, structs

from dsec.api.batch import deadline
from dsec.api.exchange import MAX_BATCH_BYTES, Exchange
from dsec.api.functions import MSGPACK
from dsec.cluster.asking import account_for
from dsec.cluster.creating import DEADLINE_S
from dsec.cluster.quotas import Quotas
from dsec.cluster.upstream import Upstream
from dsec.cluster.wire import Member
from dsec.edge.client import Principal
from dsec.edge.forks import MAX_CHILDREN
from dsec.errors import ErrorBody, InvalidRequest, Unavailable, from_body
from dsec.plan.quota import account_of
from dsec.spec.building import BACKEND, BuildLimits
from dsec.spec.functions import FunctionLimits
from dsec.spec.grading import VerifySpec
from dsec.spec.judging import JudgeLimits
from dsec.spec.sandbox import GIB, MIB, SandboxInfo

PATIENCE_S = 10.0
"""Calls are over soon: where the quota is used up, they wait so long for those before them."""
PLACES = 16
"""Of a node that doesn't say how many calls it runs at once."""
CALLS = "fncall"
"""The backend on which calls and programs of the judge count."""
_LONG = 64 << 10
"""What is longer is looked at in a thread."""
_info = msgspec.json.Decoder(SandboxInfo).decode
_error = msgspec.json.Decoder(ErrorBody).decode
_verify = msgspec.json.Decoder(VerifySpec)


class Asked(Struct, frozen=True):
    """What a request runs: so many, of which each may use so much."""

    count: int
    cpus: float
    memory_bytes: int


class _Fork(Struct):
    """As much of a fork as is looked at, in every client's form."""

    count: Annotated[int, Meta(ge=1, le=MAX_CHILDREN)] = 1


class _Function(Struct, frozen=True):
    limits: FunctionLimits = FunctionLimits()


class _Batch(Struct):
    """As much of a `FunctionBatch` as is looked at."""

    function: _Function
    calls: list[Raw]


class _Judged(Struct):
    """As much of a `JudgeSpec`."""

    cases: list[Raw]
    limits: JudgeLimits = JudgeLimits()


class _Config(Struct, frozen=True):
    provided_data: Any = None


class _Program(Struct):
    """As much of a SandboxFusion request."""

    memory_limit_MB: int = -1
    config: _Config = _Config()


class _Build(Struct):
    """As much of a `BuildOptions` as is looked at."""

    limits: BuildLimits = BuildLimits()


_fork = msgspec.json.Decoder(_Fork)
_options = msgspec.json.Decoder(_Build)


class Spending:
    """For the event loop."""

    def __init__(self, upstream: Upstream, quotas: Quotas) -> None:
        self._upstream = upstream
        self._quotas = quotas

    def bounds(self, principal: Principal | None) -> bool:
        """Whether what a caller asks for is to be counted."""
        return principal is not None and self._quotas.bound(principal.project)

    # --- what becomes sandboxes -------------------------------------------------------------------------------------

    async def fork(  # noqa: PLR0917
        self,
        x: Exchange,
        member: Member,
        principal: Principal,
        sandbox_id: str,
        elsewhere: Callable[[], Awaitable[bool]],
        key_header: str,
    ) -> None:
        """A fork, ours or E2B's, with all its children or none. `elsewhere`, `key_header`: as `Upstream.forward`."""
        body = await x.body()
        count, until = x.decode(_fork, body or b"{}").count, _until(x)
        info = await self._parent(member, principal, sandbox_id, elsewhere)
        account = account_for(info.spec, principal.project)
        await self._spend(
            account,
            count,
            until,
            member,
            principal,
            lambda: self._upstream.forward(x, member, principal, key_header=key_header, body=body, elsewhere=elsewhere),
        )

    async def template(self, x: Exchange, member: Member, principal: Principal, key_header: str) -> None:
        """The start of one of E2B's builds."""
        await self._spend(
            _build_account(principal.project, BuildLimits()),
            1,
            time.monotonic() + DEADLINE_S,
            member,
            principal,
            lambda: self._upstream.forward(x, member, principal, key_header=key_header),
        )

    async def _spend(  # noqa: PLR0917
        self,
        account: str,
        count: int,
        until: float,
        member: Member,
        principal: Principal,
        forward: Callable[[], Awaitable[int]],
    ) -> None:
        """All of them or none. `forward` returns the status that its node answered."""
        edge = member.claim.edge
        await self._quotas.pace(principal.project, count, until)
        if await self._quotas.room(account, count, until) < count:
            raise self._quotas.exceeded(account)
        self._quotas.spend(account, edge, count)
        try:
            status = await forward()
        except Unavailable:  # it can't have arrived
            self._quotas.unspent(account, edge, count)
            raise
        if 400 <= status < 500:  # refused before the first one; what went wrong later may have made some
            self._quotas.unspent(account, edge, count)

    async def _parent(
        self, member: Member, principal: Principal, sandbox_id: str, elsewhere: Callable[[], Awaitable[bool]]
    ) -> SandboxInfo:
        """Of what a node is to make more. Raises what the node says."""
        status, answer = await self._upstream.json(member, "GET", f"/v1/sandboxes/{sandbox_id}", principal)
        if status == 200:
            return _info(answer)
        if status == 404 and await elsewhere():
            raise Unavailable("this sandbox has just moved to another node", remedy="Try again at once.")
        try:
            raise from_body(_error(answer))
        except msgspec.MsgspecError:
            raise self._upstream.unreachable(member, f"it answered {status}") from None

    # --- what is over with its request ------------------------------------------------------------------------------

    async def verify(
        self,
        x: Exchange,
        member: Member,
        principal: Principal,
        sandbox_id: str,
        elsewhere: Callable[[], Awaitable[bool]],
    ) -> None:
        """A verification with all its graders."""
        body = await x.body(MAX_BATCH_BYTES)
        spec = x.decode(_verify, body)
        info = await self._parent(member, principal, sandbox_id, elsewhere)
        grader = spec.grader
        account = account_of(principal.project, info.spec.backend, grader.cpus, grader.memory_bytes)
        async with self._granted(principal.project, account, spec.repeats) as granted:
            if granted < spec.repeats:
                raise self._quotas.exceeded(account)
            await self._upstream.forward(x, member, principal, body=body, elsewhere=elsewhere)

    async def build(self, x: Exchange, member: Member, principal: Principal) -> None:
        """A build of a Dockerfile, or of a layer of packages: one of its sandboxes at a time."""
        limits = x.decode(_options, x.raw("options") or b"{}").limits
        account = _build_account(principal.project, limits)
        async with self._granted(principal.project, account, 1, soon=False):
            await self._upstream.forward(x, member, principal)

    async def run(self, x: Exchange, kind: str, member: Member, principal: Principal, key_header: str) -> None:
        """Calls of `kind`: as many at a time as the quota has room for."""
        body = await x.body(MAX_BATCH_BYTES)
        binary = x.content_type == MSGPACK
        asked = await asyncio.to_thread(_asked, kind, body, binary) if len(body) > _LONG else _asked(kind, body, binary)
        account = account_of(principal.project, CALLS, asked.cpus, asked.memory_bytes)
        at_once = min(asked.count, member.facts.places or PLACES)
        async with self._granted(principal.project, account, at_once, paced=asked.count) as granted:
            bounded = structs.replace(principal, at_once=granted)
            await self._upstream.forward(x, member, bounded, key_header=key_header, body=body)

    @asynccontextmanager
    async def _granted(
        self, project: str, account: str, count: int, *, paced: int | None = None, soon: bool = True
    ) -> AsyncIterator[int]:
        """How many of `count` may run at a time, at least one: they count for as long as the block runs. `paced`: how
        many the project's rate is charged, where that isn't `count`. `soon`: what holds the room now is over in
        moments, so it is waited for. Raises as `Quotas.pace`, `.room` and `.held`."""
        until = time.monotonic() + DEADLINE_S
        await self._quotas.pace(project, count if paced is None else paced, until)
        if soon:
            granted = await self._quotas.room_soon(account, count, time.monotonic() + PATIENCE_S)
        else:
            granted = await self._quotas.room(account, count, until)
        async with self._quotas.held(account, granted):
            yield granted


def _build_account(project: str, limits: BuildLimits) -> str:
    return account_of(project, BACKEND, limits.cpus, limits.memory_bytes)


def runs_programs(raw: str) -> str:
    """Of SandboxFusion's calls: which kind of those that run something this is, or ''."""
    name = raw.rpartition("/")[2]
    return name if name in ("run_code", "submit") else ""


def _until(x: Exchange) -> float:
    """When a request has waited long enough (`time.monotonic`). Raises `InvalidRequest`."""
    wait_s = deadline(x)
    return time.monotonic() + (DEADLINE_S if wait_s is None else wait_s)


def _asked(kind: str, body: bytes, binary: bool) -> Asked:
    """By the same decoder as the node's, so that it reads no other number. Raises `InvalidRequest`."""
    try:
        if kind == "functions":
            decode = msgspec.msgpack.decode if binary else msgspec.json.decode
            batch = decode(body, type=_Batch)
            limits = batch.function.limits
            return Asked(max(1, len(batch.calls)), limits.cpus, limits.memory_bytes)
        if kind == "judge":
            judged = msgspec.json.decode(body, type=_Judged)
            return Asked(max(1, len(judged.cases)), 1.0, judged.limits.memory_bytes)
        program = msgspec.json.decode(body, type=_Program)
        memory = max(16, program.memory_limit_MB) * MIB if program.memory_limit_MB > 0 else GIB
        return Asked(1 if kind == "run_code" else _tests(program.config.provided_data), 1.0, memory)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body: {error}") from None


def _tests(given: Any) -> int:
    """Of a problem that came with a submission; of several, the most. Raises `MsgspecError`."""
    found = 1
    for row in given if isinstance(given, list) else [given]:
        tests = row.get("test") if isinstance(row, dict) else None
        if isinstance(tests, str):
            tests = msgspec.json.decode(tests, type=list[Raw])
        found = max(found, len(tests) if isinstance(tests, list) else 1)
    return found
