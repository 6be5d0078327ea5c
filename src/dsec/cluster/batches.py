"""Creations of many in one call: cut into what needs the same of a node, planned as one, sent to each node as one
request, and answered line by line as the nodes answer.

Invariants: each place of the batch is told once, `LATE_S` after the deadline at the latest: what is made goes on then,
for whoever comes with the same key. What a node says of a sandbox is passed on as it is: it is read so far
that it is known to be one JSON value, no further.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence

import aiohttp
import msgspec
from msgspec import Raw, Struct

from dsec.cluster.asking import Answered, account_for, ask_of, comes_again, digest_of, hash_of, short
from dsec.cluster.creating import DEADLINE_S, LATE_S, RETRY_S, Creations, unanswered
from dsec.cluster.jobs import Known, Taken
from dsec.cluster.upstream import NotSent
from dsec.cluster.wire import REFUSED
from dsec.edge.client import Principal
from dsec.errors import DsecError, SandboxLost, Unavailable
from dsec.plan.fencing import over
from dsec.plan.placement import Ask
from dsec.plan.scheduler import Failure, Order
from dsec.spec.sandbox import SandboxSpec

NAMED_WIDTH = 64
"""Named ones of a batch at the same time."""
_encode = msgspec.json.Encoder().encode


class _Line(Struct, frozen=True):
    """An edge's line about one sandbox: `dsec.edge.kept.BatchItem`, unread."""

    index: int
    sandbox: Raw = Raw()
    error: Raw = Raw()


_line = msgspec.json.Decoder(_Line).decode


class Batch:
    """One call: its lines, as they are ready."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._told = bytearray(size)
        self._ready: list[bytes] = []
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def give_up_at(self, late: float) -> None:
        """What isn't told by then (`time.monotonic`) is told as unknown."""
        if self._left:
            left = max(0.0, late - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left, self._give_up)

    def sandbox(self, index: int, info: bytes | Raw) -> None:
        self._put(index, b'{"index":%d,"sandbox":%b}\n' % (index, bytes(info)))

    def error(self, index: int, body: bytes | Raw) -> None:
        self._put(index, b'{"index":%d,"error":%b}\n' % (index, bytes(body)))

    def _put(self, index: int, line: bytes) -> None:
        if self._told[index]:
            return
        self._told[index] = 1
        self._ready.append(line)
        self._left -= 1
        if not self._left and self._timer is not None:
            self._timer.cancel()
        self._news.set()

    def _give_up(self) -> None:
        body = _encode(unanswered().body())
        for index in range(len(self._told)):
            self.error(index, body)

    async def lines(self) -> AsyncIterator[bytes]:
        """Some at a time, until all are there."""
        while self._ready or self._left:
            await self._news.wait()
            self._news.clear()
            ready, self._ready = self._ready, []
            yield b"".join(ready)


class Batches:
    """For the event loop."""

    def __init__(self, creations: Creations) -> None:
        self._creations = creations

    async def many(
        self, principal: Principal, specs: Sequence[SandboxSpec], *, key: str | None, deadline_s: float | None
    ) -> Batch:
        """Begin; the answers come by themselves. Raises as `Creations.one`, then nothing was begun."""
        self._creations.nodes.alive()
        batch = Batch(len(specs))
        deadline = time.monotonic() + (DEADLINE_S if deadline_s is None else deadline_s)
        on_record = key is not None
        key = key if key is not None else secrets.token_urlsafe(24)
        named = [index for index, spec in enumerate(specs) if spec.name is not None]
        groups = _groups(specs, principal.project)
        await self._creations.quotas.pace(principal.project, len(specs) - len(named), deadline)
        late = deadline + LATE_S
        try:
            async with asyncio.timeout(max(0.0, late - time.monotonic())):
                await asyncio.gather(
                    *(
                        _Group(self._creations, batch, principal, specs, indexes, f"{key}.{n}", deadline).begin(
                            ask, account, on_record=on_record
                        )
                        for n, ((ask, account), indexes) in enumerate(groups.items())
                    )
                )
        except TimeoutError:
            raise unanswered() from None
        batch.give_up_at(late)
        width = asyncio.Semaphore(NAMED_WIDTH)
        for index in named:
            _keep(self._named(principal, index, specs[index], f"{key}.n{index}", deadline, batch, width))
        return batch

    async def _named(  # noqa: PLR0917
        self,
        principal: Principal,
        index: int,
        spec: SandboxSpec,
        key: str,
        deadline: float,
        batch: Batch,
        width: asyncio.Semaphore,
    ) -> None:
        """One that has a name, which leads to the node of that name."""
        async with width:
            left = max(0.1, deadline - time.monotonic())
            try:
                answer = await self._creations.one(principal, spec, key=short(key), deadline_s=left)
            except DsecError as error:
                batch.error(index, _encode(error.body()))
            else:
                (batch.sandbox if answer.status < 300 else batch.error)(index, answer.body)


class _Group:
    """Those of a batch that need the same of a node: one request of the scheduler's."""

    def __init__(  # noqa: PLR0917
        self,
        creations: Creations,
        batch: Batch,
        principal: Principal,
        specs: Sequence[SandboxSpec],
        indexes: Sequence[int],
        key: str,
        deadline: float,
    ) -> None:
        self._creations = creations
        self._batch = batch
        self._principal = principal
        self._specs = [specs[index] for index in indexes]
        self._indexes = indexes
        self._key = key
        self._deadline = deadline
        self._told = bytearray(len(indexes))
        self._untold = len(indexes)
        self._last = b""
        """What the last node that refused a part said."""

    async def begin(self, ask: Ask, account: str, *, on_record: bool) -> None:
        """Raises as `Creations.one`."""
        specs = self._specs
        alike = all(each is specs[0] for each in specs)
        digest = digest_of(_encode([specs[0], len(specs)] if alike else specs))
        name = "b" + hash_of(f"{self._principal.project}\0{self._key}") if on_record else None
        self._job = job = await self._creations.records.own(self._principal, name, digest, named=False)
        job.order, job.failed = self._order, self._failed
        self._creations.begin(job, ask, account, len(specs), self._deadline)

    # --- what becomes of them ---------------------------------------------------------------------------------------

    def _once(self, place: int) -> bool:
        """Whether nothing was said of it before."""
        if self._told[place]:
            return False
        self._told[place] = 1
        self._untold -= 1
        if not self._untold:
            self._creations.finish(self._job)
        return True

    def _fail(self, first: int, count: int, error: bytes) -> None:
        for place in range(first, first + count):
            if self._once(place):
                self._batch.error(self._indexes[place], error)

    def _failed(self, failure: Failure) -> None:
        # What the last node said is more to the point than that all refused.
        said = self._last if isinstance(failure.error, Unavailable) else b""
        self._fail(failure.first, failure.count, said or _encode(failure.error.body()))

    def _hear(self, first: int, data: bytes) -> int:
        """A line of an edge's answer; how many places it tells. Raises `msgspec.MsgspecError`."""
        line = _line(data)
        place = first + line.index
        if not 0 <= line.index < len(self._told) - first:
            raise msgspec.ValidationError("it tells of what it wasn't asked for")
        if self._once(place):
            if bytes(line.sandbox):
                self._batch.sandbox(self._indexes[place], line.sandbox)
            else:
                self._batch.error(self._indexes[place], line.error)
        return 1

    # --- one part ---------------------------------------------------------------------------------------------------

    async def _order(self, order: Order) -> None:
        part = order.part
        try:
            await self._creations.records.note(self._job, part)
        except (Taken, Known):
            self._creations.scheduler.unsent(order)
            taken_over = Unavailable("another server goes on with this batch", remedy="Ask again with its key.")
            self._fail(part.first, part.count, _encode(taken_over.body()))
            return
        except DsecError as error:
            self._creations.scheduler.unsent(order)
            self._fail(part.first, part.count, _encode(error.body()))
            return
        try:
            taken = await self._send(order)
        except DsecError as error:
            self._fail(part.first, part.count, _encode(error.body()))
            taken = True
        self._creations.answered(order, part.count if taken else 0)

    async def _send(self, order: Order) -> bool:
        """Whether the edge took the part; False: it refused it whole, or the order is over before anything was told.
        What was begun and is lost with its node is told as lost."""
        creations, job = self._creations, self._job
        part, edge = order.part, order.part.edge
        some = self._specs[part.first : part.first + part.count]
        alike = all(each is some[0] for each in some)
        body = _encode({"spec": some[0], "count": len(some)} if alike else {"specs": some})
        begun = False
        while creations.scheduler.is_open(order) or begun:
            if over(creations.claim(edge), part.incarnation):
                lost = SandboxLost("its node was lost while it was made", remedy="Create it again.")
                self._fail(part.first, part.count, _encode(lost.body()))
                return True
            left = max(0.1, self._deadline - time.monotonic())
            target = f"/v1/sandboxes:batch?key={short(f'{self._key}.{part.first}')}&deadline_s={left:.3f}"
            try:
                member = creations.nodes.member(edge, "")
                headers = creations.headers(member, self._principal, some[0].run, part.count)
                async with creations.upstream.ask(member, "POST", target, headers=headers, data=body) as response:
                    if response.status == 200:
                        heard = 0
                        async for line in response.content:
                            if not begun:
                                begun = True
                                creations.answered(order, part.count)
                            heard += self._hear(part.first, line)
                        if heard >= part.count:
                            return True
                    else:
                        answer = Answered(response.status, await response.read())
                        if REFUSED in response.headers:
                            job.doubt.discard(edge)
                            if answer.status != 503 or not self._last:  # what the caller did wrong is said first
                                self._last = answer.body
                            return False
                        if not comes_again(answer):
                            self._fail(part.first, part.count, answer.body)
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


def _groups(specs: Sequence[SandboxSpec], project: str) -> dict[tuple[Ask, str], list[int]]:
    """Indexes of those without a name, by what they ask for and are charged to."""
    groups: dict[tuple[Ask, str], list[int]] = {}
    before, same = None, []
    for index, spec in enumerate(specs):
        if spec.name is not None:
            continue
        if spec is not before:
            before, same = spec, groups.setdefault((ask_of(spec, project), account_for(spec, project)), [])
        same.append(index)
    return groups


_kept: set[asyncio.Task[None]] = set()


def _keep(work: Coroutine[None, None, None]) -> None:
    """Let it go on without its caller."""
    task = asyncio.ensure_future(work)
    _kept.add(task)
    task.add_done_callback(_kept.discard)
