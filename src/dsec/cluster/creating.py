"""Creations: from a request to the edges that the scheduler chooses, and to an answer.

Owns the I/O around `plan/scheduler.py` and single creations; `batches.py` does many. Invariants:

- A request with a key (or a name) is on record (`jobs.py`) before anything of it is sent: whoever comes with the same
  key, to any apiserver, is led to the same edges, whose own records then say which sandbox it is. Another node gets it
  only when the first has refused it or is lost, and after the record says so by compare-and-set.
- An order without an answer is repeated to the same edge, under the same key, until there is one or the edge is lost.
- A creation goes on without its caller, who hears of its fate, or that it isn't known, `LATE_S` after the deadline at
  the latest.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from urllib.parse import quote

import msgspec
from msgspec import Struct
from multidict import CIMultiDict

from dsec.cluster.asking import Answered, account_for, ask_of, comes_again, digest_of, is_sound, record_key
from dsec.cluster.jobs import Job, Known, Records, Taken
from dsec.cluster.nodes import Nodes
from dsec.cluster.quotas import Quotas
from dsec.cluster.runs import ClusterRuns
from dsec.cluster.upstream import NotSent, Upstream
from dsec.cluster.wire import RUN, Member, RunNews
from dsec.edge.client import Principal
from dsec.errors import CreateFailed, DsecError, SandboxLost, Unavailable, Unsupported
from dsec.plan.fencing import Claim
from dsec.plan.placement import Ask
from dsec.plan.scheduler import Failure, Order, Scheduler, Wanted
from dsec.spec.sandbox import SandboxSpec

DEADLINE_S = 60.0
LATE_S = 15.0
"""So long after its deadline a caller hears that a node hasn't answered."""
RETRY_S = 0.3
_encode = msgspec.json.Encoder().encode


class Form(Struct, frozen=True):
    """A creation as another's client wrote it, for the edge to read; its key goes as `Idempotency-Key`."""

    target: str
    body: bytes


class Creations:
    """For the event loop."""

    def __init__(self, nodes: Nodes, upstream: Upstream, records: Records, runs: ClusterRuns, quotas: Quotas) -> None:
        self.nodes = nodes
        self.scheduler: Scheduler = nodes.scheduler
        self.upstream = upstream
        self.records = records
        self.quotas = quotas
        self._runs = runs
        self._jobs: dict[int, Job] = {}
        self._pumping = False
        nodes.changed = self.pump
        quotas.call(self.pump)

    # --- the scheduler ----------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what can be sent."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while True:
                out = self.scheduler.pump(time.monotonic())
                for failure in out.failures:
                    job = self._jobs.get(failure.ticket)
                    if job is not None:
                        job.failed(failure)
                for order in out.orders:
                    job = self._jobs.get(order.ticket)
                    if job is not None:
                        job.wanting.append(order.part)  # all of them first: one write puts them on record
                        task = asyncio.ensure_future(job.order(order))
                        job.tasks.add(task)
                        task.add_done_callback(job.tasks.discard)
                for need in out.needs:
                    self.quotas.need(need)
                if not out.failures and not out.orders:
                    return
        finally:
            self._pumping = False

    def answered(self, order: Order, taken: int) -> None:
        """What the node said of an order; nothing where it is over."""
        if self.scheduler.is_open(order):
            self.scheduler.answered(order.ticket, order.part, taken)
            self.pump()

    def begin(self, job: Job, ask: Ask, account: str, count: int, deadline: float) -> None:
        """Into the scheduler. Raises `Unsupported`, `Unavailable`."""
        project = job.principal.project
        wanted = Wanted(project=project, account=account, ask=ask, count=count, deadline=deadline)
        try:
            job.ticket = self.scheduler.submit(wanted, list(job.record.parts))
        except Unsupported as error:
            raise self.nodes.lacking(ask.features) or error from None
        self._jobs[job.ticket] = job
        self.pump()

    def finish(self, job: Job) -> None:
        """Nobody waits for the rest. Idempotent."""
        self._jobs.pop(job.ticket, None)
        self.scheduler.withdraw(job.ticket)

    # --- one --------------------------------------------------------------------------------------------------------

    async def one(
        self,
        principal: Principal,
        spec: SandboxSpec,
        *,
        key: str | None,
        deadline_s: float | None,
        form: Form | None = None,
    ) -> Answered:
        """A single creation. `form`: how it is put to the edge, where `spec` says only what it needs.
        Raises `Unsupported`, `AdmissionTimeout`, `Conflict`, `QuotaExceeded`, `Unavailable`."""
        self.nodes.alive()  # raises before the nodes are known
        deadline = time.monotonic() + (DEADLINE_S if deadline_s is None else deadline_s)
        name = record_key(principal.project, spec, key)
        key = key if key is not None else secrets.token_urlsafe(24)
        body = _encode(spec) if form is None else form.body
        digest, named = digest_of(body), spec.name is not None
        await self.quotas.pace(principal.project, 1, deadline)
        job = self.records.unwritten(principal, name, digest)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic()) + LATE_S):
                while True:
                    try:
                        return await self._attempt(job, spec, form or Form("", body), key, deadline)
                    except Taken:
                        await asyncio.sleep(RETRY_S)
                    except Known:
                        pass
                    job = await self.records.own(principal, name, digest, named=named)
        except TimeoutError:
            raise unanswered() from None

    async def _attempt(self, job: Job, spec: SandboxSpec, form: Form, key: str, deadline: float) -> Answered:
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
                await self.records.note(job, each.part)
            except (Taken, Known, DsecError) as error:
                self.scheduler.unsent(each)
                end(error)
                return
            try:
                answer = await self._send_one(job, each, spec, form, key, deadline, last)
            except DsecError as error:
                end(error)
                return
            if answer is not None:
                end(answer)
            self.answered(each, 0 if answer is None else 1)

        job.order, job.failed = order, failed
        done.add_done_callback(lambda _: self.finish(job))
        done.add_done_callback(_seen)
        project = job.principal.project
        self.begin(job, ask_of(spec, project), account_for(spec, project), 1, deadline)
        return await asyncio.shield(done)

    async def _send_one(  # noqa: PLR0917
        self,
        job: Job,
        order: Order,
        spec: SandboxSpec,
        form: Form,
        key: str,
        deadline: float,
        last: list[Answered],
    ) -> Answered | None:
        """The edge's answer; None where it refuses the order (what it says is added to `last`), or the order is
        over."""
        edge = order.part.edge
        while self.scheduler.is_open(order):
            left = max(0.1, deadline - time.monotonic())
            target = f"/v1/sandboxes?key={quote(key, safe='')}&deadline_s={left:.3f}"
            try:
                member = self.nodes.member(edge, "")
                headers = self.headers(member, job.principal, spec.run, 1)
                if form.target:
                    target, headers["idempotency-key"] = form.target, key
                response = await self.upstream.call(member, "POST", target, headers, form.body)
                answer = Answered(response.status, response.body)
                if response.refused:
                    job.doubt.discard(edge)
                    if answer.status != 503 or not last:  # a node that refused once takes nothing of it again
                        last.append(answer)
                    return None
                if not comes_again(answer):
                    sound = bool(form.target) or job.repeated or is_sound(answer, edge)
                    self.scheduler.behaved(edge, sound, time.monotonic())
                    if not sound:
                        raise CreateFailed(f"edge {edge} answered what no edge does", remedy="Create it again.")
                    return answer
            except NotSent:
                if edge not in job.doubt:
                    return None
            except OSError:
                job.doubt.add(edge)
            except SandboxLost:
                pass  # the scheduler hears of it too, and the order is over
            await asyncio.sleep(RETRY_S)
        return None

    # --- small parts ------------------------------------------------------------------------------------------------

    def claim(self, edge: int) -> Claim:
        claim = self.scheduler.claim(edge)
        assert claim is not None
        return claim

    def headers(self, member: Member, principal: Principal, run: str | None, count: int) -> CIMultiDict[str]:
        headers = CIMultiDict(
            {
                "authorization": f"Bearer {self.upstream.bearer(member, principal)}",
                "content-type": "application/json",
                "x-dsec-count": str(count),
            }
        )
        known = self._runs.find(principal.project, run) if run is not None else None
        if known is not None:
            headers[RUN] = _encode(RunNews(principal.project, known)).decode()
        return headers


def unanswered() -> Unavailable:
    """Nothing is known of a creation `LATE_S` after its deadline."""
    return Unavailable(
        "the node that was asked for it has not answered", remedy="Ask again with the same key: it may be there."
    )


def _seen(future: asyncio.Future[Answered]) -> None:
    """Its exception may have no reader left."""
    if not future.cancelled():
        future.exception()
