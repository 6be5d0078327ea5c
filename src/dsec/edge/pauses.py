"""Pausing and resuming: the one notion of a sandbox that stands still, whoever asked for it.

Owns the moves between `running` and `paused`. Invariants:

- A move is one synchronous step: frozen and `paused` in memory together, thawed and `running` together. So two requests
  that resume at once, or a pause and a request, take turns; there is nothing in between.
- Time stands still while it is paused: its TTLs, the timeouts of its commands (the guest is told) and their wall time.
- A request that needs the sandbox resumes it (`Sandbox.running`), unless a tripwire paused it. Looking at it (info,
  list, usage, events) and deleting it don't.
- A request that was under way when the pause came waits, and goes on with the resume; nothing of it is lost.
- On record after the freeze: what an edge finds frozen is paused, what it finds running runs on.

Memory is given back behind the pause, one sandbox at a time, so that pausing hundreds at once costs the others little.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from msgspec.structs import replace

from dsec.edge.lives import Lives
from dsec.edge.sandbox import Sandbox
from dsec.edge.tasks import Tasks, log, quiet
from dsec.errors import Conflict, Unavailable, Unsupported
from dsec.journal.records import Journal
from dsec.lifecycle import Event, next_state
from dsec.ports import Clock, PausableHost
from dsec.spec.events import EventType
from dsec.spec.sandbox import Paused, PausedBy, State


class Pauses:
    """For the event loop."""

    def __init__(self, *, lives: Lives, journal: Journal, clock: Clock, tasks: Tasks) -> None:
        self._lives = lives
        self._journal = journal
        self._clock = clock
        self._tasks = tasks
        self._queue: deque[Sandbox] = deque()
        self._paging: asyncio.Task[None] | None = None
        lives.wake, lives.pause = self.wake, self.pause

    def pause(self, sandbox: Sandbox, by: PausedBy, rule: str = "") -> asyncio.Future[None]:
        """Freeze it; the future resolves when that is on record. One that is paused stays so, but a tripwire's pause
        takes the place of another. Raises `Unsupported`, `Unavailable`, and as `Sandbox.here`."""
        instance = sandbox.here()
        if not isinstance(instance, PausableHost):
            raise Unsupported(f"the backend {sandbox.record.backend!r} can't pause a sandbox")
        paused = Paused(self._clock.now(), by, rule)
        if sandbox.record.paused is not None:
            if by is not PausedBy.TRIPWIRE or sandbox.record.paused.by is by:
                return self._journal.put(sandbox.record)
            paused = replace(paused, at=sandbox.record.paused.at)
        else:
            try:
                instance.freeze(True)
            except OSError as error:
                raise Unavailable(f"sandbox {sandbox.id} can't be frozen: {error.strerror}") from error
            sandbox.paused_at = self._clock.monotonic()
            self._lives.timers.set(("life", sandbox.id), None)
            self._queue.append(sandbox)
            if self._paging is None:
                self._paging = self._tasks.spawn(self._page_out())
        state = sandbox.state if sandbox.state is State.PAUSED else next_state(sandbox.state, Event.PAUSE)
        sandbox.record = replace(sandbox.record, state=state, paused=paused)
        data: dict[str, Any] = {"by": by.value}
        if rule:
            data["rule"] = rule
        self._lives.notes.events.add(sandbox.id, EventType.PAUSED, data)
        return self._journal.put(sandbox.record)

    def wake(self, sandbox: Sandbox) -> None:
        """A request needs it. Raises `Conflict` where a tripwire paused it: nothing inside answers."""
        paused = sandbox.record.paused
        if paused is not None and paused.by is PausedBy.TRIPWIRE:
            raise Conflict(
                f"sandbox {sandbox.id} is paused by the tripwire {paused.rule!r}",
                remedy="Look at its events; then resume it (POST .../tripwires/resume) or delete it.",
                rule=paused.rule,
            )
        quiet(self.resume(sandbox))

    def resume(self, sandbox: Sandbox) -> asyncio.Future[None]:
        """Let it go on, whoever paused it; one that runs, runs. The future resolves when that is on record. Raises
        `Unavailable`, and as `Sandbox.here`."""
        instance = sandbox.here()
        paused = sandbox.record.paused
        if paused is None or not isinstance(instance, PausableHost):
            return self._journal.put(sandbox.record)
        try:
            instance.freeze(False)
        except OSError as error:
            raise Unavailable(f"sandbox {sandbox.id} can't be thawed: {error.strerror}") from error
        now = self._clock.monotonic()
        stood_s = now - sandbox.paused_at
        ttl_s = sandbox.record.spec.ttl_s
        if sandbox.due is not None:
            sandbox.due += stood_s
            if paused.by is PausedBy.TTL and ttl_s is not None:
                sandbox.due = max(sandbox.due, now + ttl_s)
        sandbox.active_at = now
        sandbox.record = replace(
            sandbox.record,
            state=next_state(sandbox.state, Event.RESUME),
            paused=None,
            expires_at=None if sandbox.due is None else self._clock.now() + (sandbox.due - now),
        )
        self._lives.set_expiry(sandbox)
        data: dict[str, Any] = {"paused_s": round(self._clock.now() - paused.at, 3)}
        if paused.rule:
            data["rule"] = paused.rule
        self._lives.notes.events.add(sandbox.id, EventType.RESUMED, data)
        return self._journal.put(sandbox.record)

    async def _page_out(self) -> None:
        try:
            while self._queue:
                sandbox = self._queue.popleft()
                instance = sandbox.instance
                if sandbox.state is not State.PAUSED or not isinstance(instance, PausableHost):
                    continue
                began = self._clock.monotonic()
                try:
                    out = await instance.page_out()
                except OSError as error:
                    log.warning("sandbox %s: its memory stays: %s", sandbox.id, error)
                    continue
                if sandbox.state is State.PAUSED:
                    data = {
                        "before_bytes": out.before_bytes,
                        "after_bytes": out.after_bytes,
                        "compressed_bytes": out.compressed_bytes,
                        "ms": round((self._clock.monotonic() - began) * 1e3, 1),
                    }
                    self._lives.notes.events.add(sandbox.id, EventType.PAGED_OUT, data)
        finally:
            self._paging = None
