"""Taking sandboxes down: paced, once each, again where it failed.

Owns the queue of those whose end is decided. Invariants: the cause is durable before anything is removed; a sandbox is
reported as ended only when nothing of it is left and that is durable; what could not be removed stays on record and is
tried again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from dsec.edge.client import DeleteItem
from dsec.edge.config import EdgeConfig
from dsec.edge.context import work_on
from dsec.edge.sandbox import Sandbox
from dsec.edge.tasks import Tasks, bug, log
from dsec.edge.timers import Timers
from dsec.errors import DsecError, Unavailable
from dsec.journal.records import Journal
from dsec.lifecycle import Event, next_state
from dsec.ports import Clock

RETRY_S = 0.2
MAX_RETRY_S = 60.0
DELETE_WIDTH = 64
"""Of one request, at the same time."""


class Removals:
    """At most `max_ending` removals at the same time, oldest first."""

    def __init__(
        self,
        *,
        journal: Journal,
        clock: Clock,
        config: EdgeConfig,
        tasks: Tasks,
        timers: Timers,
        removed: Callable[[Sandbox], None],
    ) -> None:
        """`removed`: told of each sandbox of which nothing is left."""
        self.pending = 0
        """Those that are not gone yet, failed ones included."""
        self.active = 0
        self.idle = asyncio.Event()
        """Set when a removal ends and no other is under way."""
        self._journal = journal
        self._clock = clock
        self._width = config.max_ending
        self._tasks = tasks
        self._timers = timers
        self._removed = removed
        self._queue: deque[Sandbox] = deque()

    def add(self, sandbox: Sandbox) -> None:
        """A sandbox in the state `ending`; once each."""
        self.pending += 1
        self.retry(sandbox)

    def retry(self, sandbox: Sandbox) -> None:
        """Its time to be tried again has come."""
        self._queue.append(sandbox)
        self._pump()

    def _pump(self) -> None:
        while self._queue and self.active < self._width:
            self.active += 1
            self._tasks.spawn(self._take_down(self._queue.popleft()))

    async def _take_down(self, sandbox: Sandbox) -> None:
        work_on(sandbox.id, sandbox.request_id)
        try:
            try:
                await self._journal.put(sandbox.record)
            except DsecError as error:  # resources matter more than the record of why
                log.warning("sandbox %s: its cause is not on record: %s", sandbox.id, error)
            await sandbox.backend.destroy(sandbox.id, sandbox.record.handle)
            if sandbox.instance is not None:
                await sandbox.instance.channel.close()
            ended = replace(sandbox.record, state=next_state(sandbox.state, Event.CLEANED), ended_at=self._clock.now())
            await self._journal.put(ended)
        except DsecError as error:
            self._still_there(sandbox, error)
        except Exception as error:  # noqa: BLE001  what can't be removed stays on record and is tried again
            self._still_there(sandbox, bug(f"the backend {sandbox.record.backend!r} failed to remove it", error))
        else:
            sandbox.record = ended
            self.pending -= 1
            self._removed(sandbox)
        finally:
            self.active -= 1
            self._pump()
            if not self.active:
                self.idle.set()

    def _still_there(self, sandbox: Sandbox, error: DsecError) -> None:
        delay_s = min(MAX_RETRY_S, RETRY_S * 2 ** min(sandbox.removal_failures, 16))
        sandbox.removal_failures += 1
        log.warning("sandbox %s: removal failed (%s); again in %g s", sandbox.id, error, delay_s)
        waiting, sandbox.ended = sandbox.ended, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(
                Unavailable(
                    f"sandbox {sandbox.id} could not be removed yet: {error.message}",
                    remedy="The server goes on trying; delete it again to wait for it.",
                )
            )
        self._timers.set(("remove", sandbox.id), self._clock.monotonic() + delay_s)


async def delete_each(sandbox_ids: list[str], delete: Callable[[str], Awaitable[None]]) -> list[DeleteItem]:
    """Delete many, some at a time; one that fails says why and holds up no other."""
    results = [DeleteItem(id=sandbox_id) for sandbox_id in sandbox_ids]
    todo = iter(range(len(sandbox_ids)))

    async def work() -> None:
        for index in todo:
            try:
                await delete(sandbox_ids[index])
            except DsecError as error:
                results[index] = DeleteItem(id=sandbox_ids[index], error=error.body())

    await asyncio.gather(*(work() for _ in range(min(DELETE_WIDTH, len(sandbox_ids)))))
    return results
