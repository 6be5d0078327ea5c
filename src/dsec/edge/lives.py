"""The life of every sandbox of a node, from the queue to its last trace.

Owns the records of live sandboxes and every change of their state (by the table in `dsec.lifecycle`). Invariants:

- A change is decided in one synchronous step; the I/O that follows runs in tasks of the edge's own, so that a caller
  that goes away tears nothing.
- On disk, `starting` with its handle comes before the backend makes anything, `ending` with its cause before it
  removes anything, `ended` only when nothing is left: after a crash at any point `recover` finishes what was begun.
- A sandbox is taken down once, whatever the number of reasons; removal that fails is tried again, and the sandbox
  stays on record.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from msgspec.structs import replace

from dsec.edge.adopting import adopt_pause
from dsec.edge.client import Created
from dsec.edge.config import Capacity, EdgeConfig
from dsec.edge.context import REQUEST_ID, work_on
from dsec.edge.gate import Gate
from dsec.edge.network import Networks
from dsec.edge.notes import Notes
from dsec.edge.patience import create_timeout_s
from dsec.edge.removal import Removals
from dsec.edge.sandbox import Sandbox, ended_error, info_of
from dsec.edge.tasks import Tasks, bug, log, quiet
from dsec.edge.timers import Due, Timers
from dsec.edge.tripwires import Tripwires
from dsec.errors import AdmissionTimeout, CreateFailed, DsecError, Unavailable
from dsec.journal.records import PRUNE_STEP, Journal, Record
from dsec.lifecycle import Event, next_state
from dsec.plan.expiry import expiry
from dsec.ports import Backend, Clock, Instance, InstanceEnd, Usage, is_under_way
from dsec.spec.causes import Cause
from dsec.spec.events import EventType
from dsec.spec.sandbox import PausedBy, SandboxInfo, State

T = TypeVar("T")


class Lives:
    """All sandboxes that haven't ended."""

    def __init__(
        self,
        *,
        backends: Mapping[str, Backend],
        journal: Journal,
        clock: Clock,
        config: EdgeConfig,
        capacity: Capacity,
        tasks: Tasks,
        tenant: Callable[[str], int],
        notes: Notes,
        networks: Networks,
        tripwires: Tripwires,
    ) -> None:
        """`tenant`: the number of a project."""
        self.networks = networks
        self.sandboxes: dict[str, Sandbox] = {}
        self.names: dict[tuple[str, str, str], Sandbox] = {}
        self.created_total = 0
        self.failed_total = 0
        self._backends = backends
        self._journal = journal
        self._clock = clock
        self._config = config
        self._tasks = tasks
        self._tenant = tenant
        self.notes = notes
        self._tripwires = tripwires
        self.gate = Gate(config, capacity, self._admitted)
        self.timers = Timers(clock, tasks, self._due)
        self.removals = Removals(
            journal=journal, clock=clock, config=config, tasks=tasks, timers=self.timers, removed=self._removed
        )
        self.empty = asyncio.Event()
        self.none_starts = asyncio.Event()
        self.wake: Callable[[Sandbox], None] | None = None  # set by `dsec.edge.pauses`, both
        self.pause: Callable[[Sandbox, PausedBy], asyncio.Future[None]] | None = None

    @property
    def stuck(self) -> int:
        """Sandboxes whose removal failed at least once."""
        return sum(1 for sandbox in self.sandboxes.values() if sandbox.removal_failures)

    def used_layers(self) -> set[str] | None:
        """What live sandboxes stand on; None where the record of one is too old to say."""
        specs = [sandbox.record.spec for sandbox in self.sandboxes.values()]
        return {layer for spec in specs for layer in spec.layers} if all(spec.layers for spec in specs) else None

    # --- beginning ---

    def enter(
        self,
        record: Record,
        backend: Backend,
        token: str,
        deadline_s: float | None,
        *,
        capture: str = "",
        again: bool = False,
    ) -> asyncio.Future[Created]:
        """Queue a new sandbox that begins with `capture`; `again`: one of its id may have been tried before. The future
        resolves when it runs, or fails with why it doesn't. Raises what `Gate.check` raises."""
        self.gate.check(record.spec.memory_bytes)
        now = self._clock.monotonic()
        sandbox = Sandbox(record, backend, now)
        sandbox.token, sandbox.capture, sandbox.again = token, capture, again
        sandbox.request_id = REQUEST_ID.get()
        sandbox.ready = ready = asyncio.get_running_loop().create_future()
        quiet(ready)
        self._keep(sandbox)
        self.gate.enter(sandbox)
        if sandbox.state is State.QUEUED:
            wait_s = self._config.deadline_s if deadline_s is None else max(0.0, deadline_s)
            self.timers.set(("queue", sandbox.id), now + wait_s)
            if self.gate.queued == 1:
                self.timers.set(("pump", ""), now + self._config.recheck_s)
        return ready

    def _admitted(self, sandbox: Sandbox) -> None:
        """The gate lets it start."""
        now = self._clock.monotonic()
        self.timers.set(("queue", sandbox.id), None)
        record = sandbox.record
        sandbox.due = None if record.spec.ttl_s is None else now + record.spec.ttl_s
        sandbox.record = replace(
            record,
            state=next_state(record.state, Event.ADMITTED),
            queue_ms=(now - sandbox.queued_at) * 1e3,
            expires_at=None if record.spec.ttl_s is None else self._clock.now() + record.spec.ttl_s,
        )
        self.notes.tally.queue.observe(now - sandbox.queued_at)
        self._tasks.spawn(self._bring_up(sandbox, now))

    async def _bring_up(self, sandbox: Sandbox, began: float) -> None:
        work_on(sandbox.id, sandbox.request_id)  # who let it in is somebody else
        failure: DsecError | None = None
        try:
            instance, record_s = await self._make(sandbox)
            self._runs(sandbox, instance, began, record_s)
        except TimeoutError:
            failure = CreateFailed("the sandbox did not answer in time", remedy="Try again.")
        except DsecError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  a backend's bug must not leave behind what it made
            failure = bug(f"the backend {sandbox.record.backend!r} failed", error)
        finally:
            self.gate.started()
            if not self.gate.starting:
                self.none_starts.set()
        if failure is not None:
            self._failed(sandbox, failure)

    async def _make(self, sandbox: Sandbox) -> tuple[Instance, float]:  # and how long it took to put it on record
        record, backend = sandbox.record, sandbox.backend
        handle = backend.reserve(record.id, record.spec, self._tenant(record.project), sandbox.capture)
        sandbox.record = record = replace(record, handle=handle)
        began = self._clock.monotonic()
        await self.notes.begin(record, again=sandbox.again)
        await self._journal.put(record)
        record_s = self._clock.monotonic() - began
        async with sandbox.made_within(create_timeout_s(backend, record.spec, self._config.create_timeout_s)):
            instance = await backend.create(record.id, record.spec, record.handle)
            if record.network:
                await self.networks.begin(sandbox, instance)
            await self._tripwires.arm(record.id, record.spec, instance, fresh=True)
            return instance, record_s

    def _runs(self, sandbox: Sandbox, instance: Instance, began: float, record_s: float) -> None:
        sandbox.instance = instance
        now = self._clock.monotonic()
        create_ms = (now - began) * 1e3
        state = next_state(sandbox.state, Event.STARTED)
        record = replace(sandbox.record, state=state, create_ms=create_ms)
        if state is State.ENDING:  # deleted while it was made
            sandbox.record = record
            self._queue_end(sandbox)
            return
        self.watch(sandbox, instance)
        self._journal.put_lazily(record)
        sandbox.record = record
        self.created_total += 1
        self.notes.created(sandbox, instance, now - began, record_s)
        sandbox.active_at = sandbox.usage_at = sandbox.running_at = now
        sandbox.usage = Usage()  # its counters begin now
        self.set_expiry(sandbox)
        ready, sandbox.ready = sandbox.ready, None
        token, sandbox.token = sandbox.token, None
        if ready is not None and not ready.done():
            ready.set_result(Created(sandbox.info(token)))

    def _failed(self, sandbox: Sandbox, failure: DsecError) -> None:
        sandbox.ending_at = self._clock.monotonic()
        record = sandbox.record
        if record.cause is None:  # else it was ended meanwhile
            self.failed_total += 1
            self.notes.tally.refused[failure.code] += 1
        cause, message = record.cause or Cause.CREATE_FAILED, record.message or failure.message
        sandbox.record = replace(record, state=next_state(record.state, Event.FAILED), cause=cause, message=message)
        self._settle_ready(sandbox, failure)
        self._queue_end(sandbox)

    # --- ending ---

    def end(self, sandbox: Sandbox, cause: Cause, message: str = "") -> asyncio.Future[SandboxInfo]:
        """End it, if it isn't ending already; the future (shared: shield it) resolves when nothing is left."""
        future = self.ended(sandbox)
        if sandbox.state not in (State.ENDING, State.ENDED):
            sandbox.request_id = REQUEST_ID.get()
            self._end(sandbox, Event.END, cause, message)
        return future

    def _end(self, sandbox: Sandbox, event: Event, cause: Cause, message: str) -> None:
        before = sandbox.state
        sandbox.record = replace(
            sandbox.record, state=next_state(before, event), cause=cause, message=message, paused=None
        )
        if sandbox.ready is not None:
            self._settle_ready(sandbox, ended_error(sandbox.record))
        sandbox.ending_at = self._clock.monotonic()
        if sandbox.ending is not None:
            sandbox.ending.set()
        if before is State.QUEUED:
            self.gate.leave_queue(sandbox)
            self.timers.set(("queue", sandbox.id), None)
            self._tasks.spawn(self._end_queued(sandbox))
        elif before in (State.RUNNING, State.PAUSED):
            self._queue_end(sandbox)
        else:  # the task that makes it goes on to take it down
            sandbox.give_up()

    async def _end_queued(self, sandbox: Sandbox) -> None:
        """Nothing was made; the record only says why, for who asks again."""
        sandbox.record = replace(sandbox.record, ended_at=self._clock.now())
        try:
            await self._journal.put(sandbox.record)
        except DsecError as error:
            log.warning("sandbox %s: its end is not on record: %s", sandbox.id, error)
        self._forget(sandbox)

    def _queue_end(self, sandbox: Sandbox) -> None:
        self._tripwires.disarm(sandbox.id)
        self.notes.ending(sandbox)
        self.networks.end(sandbox)
        self.timers.set(("life", sandbox.id), None)
        self.timers.set(("lost", sandbox.id), None)
        self.removals.add(sandbox)

    def _removed(self, sandbox: Sandbox) -> None:
        self.gate.left(sandbox)
        self.notes.ended(sandbox, self._clock.monotonic())
        self._forget(sandbox)

    def ended(self, sandbox: Sandbox) -> asyncio.Future[SandboxInfo]:
        """Resolves (shared: shield it) when nothing of it is left; fails where an attempt to remove it failed."""
        if sandbox.ended is None:
            sandbox.ended = asyncio.get_running_loop().create_future()
            quiet(sandbox.ended)
        return sandbox.ended

    async def until_ending(self, sandbox: Sandbox, timeout_s: float) -> bool:
        """Wait until its end is decided; False where that doesn't happen within `timeout_s`."""
        if not sandbox.up:
            return True
        if sandbox.ending is None:
            sandbox.ending = asyncio.Event()
        return await wait_for(sandbox.ending, timeout_s)

    def _settle_ready(self, sandbox: Sandbox, failure: DsecError) -> None:
        ready, sandbox.ready, sandbox.token = sandbox.ready, None, None
        if ready is not None and not ready.done():
            ready.set_exception(failure)

    # --- by itself ---

    def watch(self, sandbox: Sandbox, instance: Instance) -> None:
        sandbox.gone = self._future(instance.ended())
        sandbox.gone.add_done_callback(functools.partial(self._gone, sandbox))
        sandbox.lost = self._future(instance.channel.lost())
        sandbox.lost.add_done_callback(functools.partial(self._lost, sandbox))

    def _future(self, awaitable: Awaitable[T]) -> asyncio.Future[T]:
        if isinstance(awaitable, asyncio.Future):
            return awaitable  # no task each for thousands of idle sandboxes

        async def wait() -> T:
            return await awaitable

        return self._tasks.spawn(wait())

    def _gone(self, sandbox: Sandbox, future: asyncio.Future[InstanceEnd]) -> None:
        if not sandbox.up or future.cancelled():
            return
        error = future.exception()
        end = InstanceEnd(Cause.NODE_LOST, f"the backend lost sight of it: {error}") if error else future.result()
        self._end(sandbox, Event.GONE, end.cause, end.message)

    def _lost(self, sandbox: Sandbox, future: asyncio.Future[str]) -> None:
        """Its channel is of no use any more. Most likely its end is about to be reported, with a better reason: wait a
        moment."""
        if sandbox.up and not future.cancelled():
            self.timers.set(("lost", sandbox.id), self._clock.monotonic() + self._config.lost_grace_s)

    # --- time ---

    def renew(self, sandbox: Sandbox, ttl_s: float | None) -> asyncio.Future[None]:
        """Its TTL counts from now. Raises as `Sandbox.here`. The future resolves when that is durable."""
        sandbox.here()
        paused = sandbox.record.paused
        now, wall = self._clock.monotonic(), self._clock.now()
        if paused is not None:  # it counts from the resume
            now, wall = sandbox.paused_at, paused.at
        sandbox.due = None if ttl_s is None else now + ttl_s
        sandbox.record = replace(sandbox.record, expires_at=None if ttl_s is None else wall + ttl_s)
        if paused is None:
            self.set_expiry(sandbox)
        self.notes.events.add(sandbox.id, EventType.RENEWED, {"ttl_s": ttl_s})
        return self._journal.put(sandbox.record)

    def use(self, sandbox: Sandbox) -> None:
        """A request begins to use it; `unuse` when it is over."""
        sandbox.requests += 1

    def unuse(self, sandbox: Sandbox) -> None:
        sandbox.requests -= 1
        sandbox.active_at = self._clock.monotonic()
        # A TTL that is set stays right; an idle TTL is looked at when it is due, not moved with every request.

    def set_expiry(self, sandbox: Sandbox) -> None:
        """Its times have changed."""
        first = expiry(ttl_due=sandbox.due, idle_ttl_s=sandbox.record.spec.idle_ttl_s, idle_since=sandbox.active_at)
        self.timers.set(("life", sandbox.id), None if first is None else first.due)

    def _expire(self, sandbox: Sandbox) -> None:
        now = self._clock.monotonic()
        if self._in_use(sandbox):
            sandbox.active_at = now
        first = expiry(ttl_due=sandbox.due, idle_ttl_s=sandbox.record.spec.idle_ttl_s, idle_since=sandbox.active_at)
        if first is None or first.due > now:
            self.set_expiry(sandbox)
        elif sandbox.record.spec.on_ttl != "pause" or self.pause is None:
            self._end(sandbox, Event.END, first.cause, "")
        else:
            try:
                quiet(self.pause(sandbox, PausedBy.TTL))
            except DsecError as error:
                self._end(sandbox, Event.END, first.cause, f"it can't be paused: {error.message}")

    def _in_use(self, sandbox: Sandbox) -> bool:
        if sandbox.requests:
            return True
        instance = sandbox.instance
        return instance is not None and any(is_under_way(each) for each in instance.channel.operations())

    def _due(self, key: Due) -> None:
        what, sandbox = key[0], self.sandboxes.get(key[1])
        if what == "pump":
            self.gate.pump()
            if self.gate.queued:
                self.timers.set(key, self._clock.monotonic() + self._config.recheck_s)
        elif what == "prune":
            self.timers.set(key, self._clock.monotonic() + self._config.prune_interval_s)
            self._tasks.spawn(self._prune())
        elif sandbox is None:
            return
        elif what == "queue":
            self._refuse(sandbox)
        elif what == "remove":
            self.removals.retry(sandbox)
        elif not sandbox.up:
            return
        elif what == "life" and sandbox.state is State.RUNNING:
            self._expire(sandbox)
        elif what == "lost" and sandbox.lost is not None:
            why = sandbox.lost.exception() or sandbox.lost.result()
            self._end(sandbox, Event.GONE, Cause.GUEST_EXITED, f"the channel to its guest broke: {why}")

    def _refuse(self, sandbox: Sandbox) -> None:
        """Its deadline passed in the queue. Nothing was made, nothing goes on record."""
        if not self.gate.leave_queue(sandbox):
            return
        wait = self.gate.wait
        sandbox.record = replace(sandbox.record, state=next_state(sandbox.state, Event.FAILED))
        self.notes.tally.refused[AdmissionTimeout.code] += 1
        self.refuse(
            sandbox,
            AdmissionTimeout(
                f"no capacity before the deadline: {wait.value if wait else 'creations before it took their time'}",
                remedy="Try again later, or wait longer (deadline_s).",
            ),
        )

    def refuse(self, sandbox: Sandbox, why: DsecError) -> None:
        """One that has left the queue is not made."""
        self._settle_ready(sandbox, why)
        self._forget(sandbox)

    async def _prune(self) -> None:
        while await self._journal.prune(self._clock.now()) >= PRUNE_STEP:
            pass
        await self.notes.prune(self._clock.now() - self._config.keep_ended_s, self._journal)

    # --- membership ---

    def _keep(self, sandbox: Sandbox) -> None:
        record = sandbox.record
        self.sandboxes[record.id] = sandbox
        sandbox.wake = self.wake
        if record.name is not None:
            self.names[record.project, record.run, record.name] = sandbox
        self.empty.clear()

    def _forget(self, sandbox: Sandbox) -> None:
        record = sandbox.record
        self.sandboxes.pop(record.id, None)
        if record.name is not None and self.names.get((record.project, record.run, record.name)) is sandbox:
            del self.names[record.project, record.run, record.name]
        ended, sandbox.ended = sandbox.ended, None
        if ended is not None and not ended.done():
            ended.set_result(info_of(record))
        sandbox.let_go()
        if not self.sandboxes:
            self.empty.set()

    # --- across incarnations ---

    async def recover(self) -> list[Sandbox]:
        """Open the backends with what is on record; returns the sandboxes that run on. The others are finished in the
        background."""
        by_backend: dict[str, list[Record]] = {name: [] for name in self._backends}
        for record in self._journal.live():
            if record.backend not in by_backend:
                raise Unavailable(
                    f"there are sandboxes of the backend {record.backend!r} on record, which this server doesn't serve",
                    remedy="Start it with that backend, or end them first.",
                )
            by_backend[record.backend].append(record)
        adopted = []
        for name, backend in self._backends.items():
            records = by_backend[name]
            instances = await backend.open({record.id: record.handle for record in records})
            for record in records:
                sandbox = Sandbox(record, backend, self._clock.monotonic())
                self._keep(sandbox)
                self.gate.take_in(sandbox)
                self.notes.events.resume(record.id)
                if self._adopt(sandbox, instances.get(record.id)):
                    adopted.append(sandbox)
        self.notes.events.resumed()
        self.timers.start()
        self.timers.set(("prune", ""), self._clock.monotonic() + self._config.prune_interval_s)
        return adopted

    def _adopt(self, sandbox: Sandbox, found: Instance | InstanceEnd | None) -> bool:
        record = sandbox.record
        end = found if isinstance(found, InstanceEnd) else None
        instance = None if isinstance(found, InstanceEnd) else found
        sandbox.instance = instance
        if record.state is State.ENDING:
            self._queue_end(sandbox)
            return False
        if instance is None:
            if end is None and record.state is State.STARTING:
                end = InstanceEnd(Cause.CREATE_FAILED, "the server went down while it was made")
            elif end is None:
                end = InstanceEnd(Cause.NODE_LOST, "it was gone when the server came back")
            # Where there is an end it was made, and its caller may have it: that it runs goes on record a moment later.
            sandbox.record = replace(
                record, state=next_state(record.state, Event.GONE), cause=end.cause, message=end.message, paused=None
            )
            self._queue_end(sandbox)
            return False
        if record.state is State.STARTING:
            sandbox.record = replace(record, state=next_state(record.state, Event.STARTED))
            self._journal.put_lazily(sandbox.record)
        adopt_pause(sandbox, self.notes, self._clock)
        self.watch(sandbox, instance)
        if sandbox.state is State.RUNNING:
            self.set_expiry(sandbox)
        self.notes.events.add(sandbox.id, EventType.ADOPTED, {})
        return True


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """False where it isn't set within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
