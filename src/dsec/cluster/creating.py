"""Creations: from a request to the edges that the scheduler chooses, and to an answer.

Owns the I/O around `plan/scheduler.py`. Invariants:

- A request with a key (or a name) is on record in the bucket `dsec_made` before anything of it is sent: whoever comes
  with the same key, to any apiserver, is led to the same edges, whose own records then say which sandbox it is.
  Another node gets it only when the first has refused it or is lost, and after the record says so by compare-and-set.
- An order without an answer is repeated to the same edge, under the same key, until there is one or the edge is lost.
- A creation goes on without its caller.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from urllib.parse import quote

import aiohttp
import msgspec
from multidict import CIMultiDict

from dsec.cluster.asking import Answered, ask_of, comes_again, digest_of, hash_of, item_of, record_key, short
from dsec.cluster.bus import Bucket
from dsec.cluster.nodes import Nodes
from dsec.cluster.runs import ClusterRuns
from dsec.cluster.upstream import NotSent, Upstream
from dsec.cluster.wire import REFUSED, RUN, Made, Member, RunNews
from dsec.edge.client import Principal
from dsec.edge.kept import BatchItem
from dsec.errors import Conflict, DsecError, SandboxLost, Unavailable
from dsec.plan.fencing import Claim, over
from dsec.plan.placement import Ask
from dsec.plan.scheduler import Failure, Order, Part, Scheduler, Wanted
from dsec.spec.sandbox import SandboxSpec

DEADLINE_S = 60.0
RETRY_S = 0.3
NAMED_WIDTH = 64
"""Named ones of a batch at the same time."""
log = logging.getLogger("dsec.cluster")
_encode = msgspec.json.Encoder().encode
_item = msgspec.json.Decoder(BatchItem).decode


class _Taken(Exception):
    """Another apiserver decides about this request now."""


class _Job:
    """A request in the scheduler, its record, and what may be where."""

    def __init__(self, principal: Principal, name: str | None, revision: int, record: Made) -> None:
        self.principal = principal
        self.name = name
        self.revision = revision
        self.record = record
        self.ticket = 0
        self.doubt = {part.edge for part in record.parts}
        """Edges to which something was sent that may have arrived: that they can't be reached proves nothing."""
        self.lock = asyncio.Lock()
        self.wanting: list[Part] = []
        """To be put on record."""
        self.order: Callable[[Order], Awaitable[None]]
        self.failed: Callable[[Failure], None]
        self.tasks: set[asyncio.Task[None]] = set()


class Creations:
    """For the event loop."""

    def __init__(
        self, nodes: Nodes, upstream: Upstream, made: Bucket[Made], runs: ClusterRuns, *, instance: str
    ) -> None:
        self._nodes = nodes
        self._scheduler: Scheduler = nodes.scheduler
        self._upstream = upstream
        self._made = made
        self._runs = runs
        self._instance = instance
        self._jobs: dict[int, _Job] = {}
        self._pumping = False
        nodes.changed = self.pump

    # --- the scheduler ----------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what can be sent."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while True:
                out = self._scheduler.pump(time.monotonic())
                for failure in out.failures:
                    job = self._jobs.get(failure.ticket)
                    if job is not None:
                        job.failed(failure)
                for order in out.orders:
                    job = self._jobs.get(order.ticket)
                    if job is not None:
                        task = asyncio.ensure_future(job.order(order))
                        job.tasks.add(task)
                        task.add_done_callback(job.tasks.discard)
                if not out.failures and not out.orders:
                    return
        finally:
            self._pumping = False

    def _is_open(self, order: Order) -> bool:
        return order.part in self._scheduler.open_parts(order.ticket)

    def _answered(self, order: Order, taken: int) -> None:
        if self._is_open(order):
            self._scheduler.answered(order.ticket, order.part, taken)
            self.pump()

    async def _begin(self, job: _Job, ask: Ask, count: int, deadline: float) -> None:
        wanted = Wanted(project=job.principal.project, ask=ask, count=count, deadline=deadline)
        job.ticket = self._scheduler.submit(wanted, list(job.record.parts))
        self._jobs[job.ticket] = job
        self.pump()

    def _finish(self, job: _Job) -> None:
        self._jobs.pop(job.ticket, None)
        self._scheduler.withdraw(job.ticket)

    # --- records ----------------------------------------------------------------------------------------------------

    async def _own(self, principal: Principal, name: str | None, digest: str, *, named: bool) -> _Job:
        """A job whose record says that this apiserver decides. Raises `Conflict` where the key was for something else,
        `Unavailable`."""
        new = Made(digest=digest, owner=self._instance)
        if name is None:
            return _Job(principal, None, 0, new)
        while True:
            revision, there = await self._made.get(name)
            if there is not None:
                if there.digest != digest and not named:
                    raise Conflict(
                        "the key was used for a different request",
                        remedy="A key goes with one request; use a new one.",
                    )
                new = Made(digest=digest, owner=self._instance, parts=there.parts)
            done = await self._made.put_if(name, revision, new)
            if done is not None:
                return _Job(principal, name, done, new)

    async def _note(self, job: _Job, part: Part) -> None:
        """Put on record where a part goes, before it goes. Raises `_Taken`, `Unavailable`."""
        if job.name is None:
            return
        job.wanting.append(part)
        async with job.lock:
            if part not in job.wanting:
                return  # one before wrote it too
            new, job.wanting = job.wanting, []
            begins = {each.first for each in new}
            parts = (*(each for each in job.record.parts if each.first not in begins), *new)
            record = Made(digest=job.record.digest, owner=self._instance, parts=parts)
            revision = await self._made.put_if(job.name, job.revision, record)
            if revision is None:
                raise _Taken
            job.revision, job.record = revision, record

    # --- one --------------------------------------------------------------------------------------------------------

    async def one(
        self, principal: Principal, spec: SandboxSpec, *, key: str | None, deadline_s: float | None
    ) -> Answered:
        """A single creation. Raises `Unsupported`, `AdmissionTimeout`, `Conflict`, `Unavailable`."""
        self._nodes.alive()  # raises before the nodes are known
        deadline = time.monotonic() + (DEADLINE_S if deadline_s is None else deadline_s)
        name = record_key(principal.project, spec, key)
        key = key if key is not None else secrets.token_urlsafe(24)
        while True:
            try:
                return await self._attempt(principal, spec, name, key, deadline)
            except _Taken:
                await asyncio.sleep(RETRY_S)

    async def _attempt(
        self, principal: Principal, spec: SandboxSpec, name: str | None, key: str, deadline: float
    ) -> Answered:
        body = _encode(spec)
        job = await self._own(principal, name, digest_of(body), named=spec.name is not None)
        done: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        last: list[Answered] = []

        def end(answer: Answered | Exception) -> None:
            if not done.done():
                if isinstance(answer, Answered):
                    done.set_result(answer)
                else:
                    done.set_exception(answer)

        def failed(failure: Failure) -> None:
            # What the last node said is more to the point than that all refused.
            end(last[-1] if last and isinstance(failure.error, Unavailable) else failure.error)

        async def order(each: Order) -> None:
            try:
                await self._note(job, each.part)
                answer = await self._send_one(job, each, spec, body, key, deadline, last)
            except (_Taken, DsecError) as error:
                end(error)
                return
            if answer is not None:
                end(answer)
            self._answered(each, 0 if answer is None else 1)

        job.order, job.failed = order, failed
        done.add_done_callback(lambda _: self._finish(job))
        done.add_done_callback(_seen)
        await self._begin(job, ask_of(spec, principal.project), 1, deadline)
        return await asyncio.shield(done)

    async def _send_one(  # noqa: PLR0917
        self,
        job: _Job,
        order: Order,
        spec: SandboxSpec,
        body: bytes,
        key: str,
        deadline: float,
        last: list[Answered],
    ) -> Answered | None:
        """The edge's answer; None where it refuses the order (what it says is added to `last`), or the order is
        over."""
        edge = order.part.edge
        while self._is_open(order):
            left = max(0.1, deadline - time.monotonic())
            target = f"/v1/sandboxes?key={quote(key, safe='')}&deadline_s={left:.3f}"
            try:
                member = self._nodes.member(edge, "")
                headers = self._headers(member, job.principal, spec.run, 1)
                async with self._upstream.ask(member, "POST", target, headers=headers, data=body) as response:
                    answer = Answered(response.status, await response.read())
                    if REFUSED in response.headers:
                        job.doubt.discard(edge)
                        last.append(answer)
                        return None
                    if not comes_again(answer):
                        return answer
            except NotSent:
                if edge not in job.doubt:
                    return None
            except (aiohttp.ClientError, OSError):
                job.doubt.add(edge)
            except SandboxLost:
                pass  # the scheduler hears of it too, and the order is over
            await asyncio.sleep(RETRY_S)
        return None

    # --- many -------------------------------------------------------------------------------------------------------

    async def many(
        self, principal: Principal, specs: list[SandboxSpec], *, key: str | None, deadline_s: float | None
    ) -> AsyncIterator[BatchItem]:
        """An item each, as they are ready. Raises as `one`, before the first item."""
        self._nodes.alive()
        ready: asyncio.Queue[BatchItem] = asyncio.Queue()
        deadline = time.monotonic() + (DEADLINE_S if deadline_s is None else deadline_s)
        on_record = key is not None
        key = key if key is not None else secrets.token_urlsafe(24)
        groups: dict[Ask, list[int]] = {}
        for index, spec in enumerate(specs):
            if spec.name is None:
                groups.setdefault(ask_of(spec, principal.project), []).append(index)
        starts = [
            self._group(principal, [specs[i] for i in indexes], indexes, f"{key}.{n}", deadline, ready, on_record)
            for n, (_, indexes) in enumerate(groups.items())
        ]
        await asyncio.gather(*starts)
        width = asyncio.Semaphore(NAMED_WIDTH)
        for index, spec in enumerate(specs):
            if spec.name is not None:
                _keep(self._named(principal, index, spec, f"{key}.n{index}", deadline, ready, width))
        for _ in specs:
            yield await ready.get()

    async def _named(  # noqa: PLR0917
        self,
        principal: Principal,
        index: int,
        spec: SandboxSpec,
        key: str,
        deadline: float,
        ready: asyncio.Queue[BatchItem],
        width: asyncio.Semaphore,
    ) -> None:
        """One of a batch that has a name, which leads to the node of that name."""
        async with width:
            try:
                answer = await self.one(
                    principal, spec, key=short(key), deadline_s=max(0.1, deadline - time.monotonic())
                )
                ready.put_nowait(item_of(index, answer))
            except DsecError as error:
                ready.put_nowait(BatchItem(index=index, error=error.body()))

    async def _group(  # noqa: PLR0917
        self,
        principal: Principal,
        specs: list[SandboxSpec],
        indexes: list[int],
        key: str,
        deadline: float,
        ready: asyncio.Queue[BatchItem],
        on_record: bool,
    ) -> None:
        """Those of a batch that need the same of a node: one request of the scheduler's."""
        body = _encode(specs)
        name = "b" + hash_of(f"{principal.project}\0{key}") if on_record else None
        job = await self._own(principal, name, digest_of(body), named=False)
        told: set[int] = set()
        last: list[BatchItem] = []

        def tell(place: int, item: BatchItem) -> None:
            if place not in told:
                told.add(place)
                ready.put_nowait(BatchItem(index=indexes[place], sandbox=item.sandbox, error=item.error))
                if len(told) == len(specs):
                    self._finish(job)

        def fail(first: int, count: int, error: DsecError) -> None:
            for place in range(first, first + count):
                tell(place, BatchItem(index=place, error=error.body()))

        def failed(failure: Failure) -> None:
            if last and isinstance(failure.error, Unavailable):
                for place in range(failure.first, failure.first + failure.count):
                    tell(place, last[-1])
            else:
                fail(failure.first, failure.count, failure.error)

        async def order(each: Order) -> None:
            part = each.part
            try:
                await self._note(job, part)
                taken = await self._send_many(job, each, specs, key, deadline, tell, last)
            except _Taken:
                taken_over = Unavailable("another server goes on with this batch", remedy="Ask again with its key.")
                fail(part.first, part.count, taken_over)
                taken = True
            except DsecError as error:
                fail(part.first, part.count, error)
                taken = True
            self._answered(each, part.count if taken else 0)

        job.order, job.failed = order, failed
        await self._begin(job, ask_of(specs[0], principal.project), len(specs), deadline)

    async def _send_many(  # noqa: PLR0917
        self,
        job: _Job,
        order: Order,
        specs: list[SandboxSpec],
        key: str,
        deadline: float,
        tell: Callable[[int, BatchItem], None],
        last: list[BatchItem],
    ) -> bool:
        """Whether the edge took the part; False: it refused it whole, or the order is over before anything was told.
        What was begun and is lost with its node is told as lost."""
        part, edge = order.part, order.part.edge
        some = specs[part.first : part.first + part.count]
        alike = all(each is some[0] or each == some[0] for each in some)
        body = _encode({"spec": some[0], "count": len(some)} if alike else {"specs": some})
        begun = 0
        while self._is_open(order) or begun:
            if over(self._claim(edge), part.incarnation):
                for place in range(part.first, part.first + part.count):
                    lost = SandboxLost("its node was lost while it was made", remedy="Create it again.")
                    tell(place, BatchItem(index=place, error=lost.body()))
                return True
            left = max(0.1, deadline - time.monotonic())
            target = f"/v1/sandboxes:batch?key={short(f'{key}.{part.first}')}&deadline_s={left:.3f}"
            try:
                member = self._nodes.member(edge, "")
                headers = self._headers(member, job.principal, some[0].run, part.count)
                async with self._upstream.ask(member, "POST", target, headers=headers, data=body) as response:
                    if response.status == 200:
                        async for line in response.content:
                            item = _item(line)
                            if begun == 0:
                                begun = 1
                                self._answered(order, part.count)
                            tell(part.first + item.index, item)
                        return True
                    answer = Answered(response.status, await response.read())
                    if REFUSED in response.headers:
                        job.doubt.discard(edge)
                        last.append(item_of(0, answer))
                        return False
                    if not comes_again(answer):
                        for place in range(part.first, part.first + part.count):
                            tell(place, item_of(place, answer))
                        return True
            except NotSent:
                if edge not in job.doubt and not begun:
                    return False
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError):
                job.doubt.add(edge)
            except SandboxLost:
                pass
            await asyncio.sleep(RETRY_S)
        return False

    # --- small parts ------------------------------------------------------------------------------------------------

    def _claim(self, edge: int) -> Claim:
        claim = self._scheduler.claim(edge)
        assert claim is not None
        return claim

    def _headers(self, member: Member, principal: Principal, run: str | None, count: int) -> CIMultiDict[str]:
        headers = CIMultiDict(
            {
                "authorization": f"Bearer {self._upstream.bearer(member, principal)}",
                "content-type": "application/json",
                "x-dsec-count": str(count),
            }
        )
        known = self._runs.find(principal.project, run) if run is not None else None
        if known is not None:
            headers[RUN] = _encode(RunNews(principal.project, known)).decode()
        return headers


def _seen(future: asyncio.Future[Answered]) -> None:
    """Its exception may have no reader left."""
    if not future.cancelled():
        future.exception()


_kept: set[asyncio.Task[None]] = set()


def _keep(work: Coroutine[None, None, None]) -> None:
    """Let it go on without its caller."""
    task = asyncio.ensure_future(work)
    _kept.add(task)
    task.add_done_callback(_kept.discard)
