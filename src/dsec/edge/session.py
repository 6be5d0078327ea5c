"""One shell session: reading its log, typing to it.

Invariants: the log is read while somebody waits for something in it, by one task for all who do; silence is never taken
for a log's end: how long it is by now is asked of the guest's channel, which knows what an earlier edge had.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

from dsec.edge.client import Execution
from dsec.edge.shell import Machine, Run
from dsec.edge.tasks import bug, quiet
from dsec.errors import DsecError, Unavailable
from dsec.news import News
from dsec.spec.causes import Cause
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import ExecStatus
from dsec.spec.sessions import SessionInfo

READY_S = 30.0
RESYNC_S = 30.0
"""A guest that hasn't sent again what it had for so long doesn't answer."""
INTERRUPT = b"\x03"


class Session:
    """One session. Made by `Sessions`."""

    def __init__(self, name: str, execution: Execution, secret: str) -> None:
        self.name = name
        self.execution = execution
        self.machine = Machine(secret)
        self.typing = asyncio.Lock()
        """Held while something is typed: who has it knows where in the terminal's input that goes."""
        self.status: ExecStatus | None = None
        """How its shell ended."""
        self.failure: DsecError | None = None
        self._reader: asyncio.Task[None] | None = None
        self._news = News()
        self._waiting = 0

    @property
    def ended(self) -> bool:
        return self.status is not None

    @property
    def busy(self) -> bool:
        return self.machine.current is not None and not self.ended

    def info(self) -> SessionInfo:
        status = self.status
        return SessionInfo(
            name=self.name,
            busy=self.busy,
            ended=self.ended,
            exit_code=status.exit_code if status is not None and status.cause is Cause.EXITED else None,
            log_bytes=self.machine.size,
        )

    async def until(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Read the log until `done`, or until the shell has ended; False: the time passed first. Any number of callers
        at once.

        Raises what reading the log raises.
        """
        self._waiting += 1
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read())
            quiet(self._reader)
        try:
            async with asyncio.timeout(timeout_s):
                while not (done() or self.ended):
                    if self.failure is not None:
                        raise self.failure
                    await self._news.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
            if not self._waiting and self._reader is not None:
                self._reader.cancel()
                self._reader = None
        return True

    async def catch_up(self) -> None:
        """Read what the log holds by now. Raises as `size_of`, and what reading the log raises."""
        size, over = await size_of(self.execution)
        if not await self.until(lambda: self.machine.size >= size and not over, RESYNC_S):
            raise Unavailable("the session's log wasn't read in time", remedy="Try again later.")

    async def type(self, data: bytes) -> None:
        """Send to the terminal. Raises what `Execution.write_stdin` raises."""
        async with self.typing:
            await self.execution.write_stdin(data)

    async def interrupt(self, run: Run) -> None:
        """Type ^C, once the command runs: before, it would take the typed line away and stop nothing."""
        run.stopped = True
        if await self.until(lambda: run.start is not None, READY_S) and not run.done:
            await self.type(INTERRUPT)

    async def _read(self) -> None:
        try:
            events = cast("AsyncGenerator[Chunk | ExecStatus]", self.execution.events(self.machine.size))
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, ExecStatus):
                        self.status = event
                    elif not event.stderr:
                        self.machine.feed(event.data)
                    self._news.tell()
        except DsecError as error:
            self.failure = error
            self._news.tell()
        except Exception as error:  # noqa: BLE001 (who waits must hear of it)
            self.failure = bug("reading a session's log failed", error)
            self._news.tell()


async def size_of(execution: Execution) -> tuple[int, bool]:
    """How much of a log there is by now, and whether that is all. A guest that is late is waited for: silence isn't the
    end of what an earlier edge's session wrote. Raises `Unavailable` where it stays away, and as `Execution.resynced`.
    """
    try:
        async with asyncio.timeout(RESYNC_S):
            return await execution.resynced()
    except TimeoutError:
        raise Unavailable(
            f"the sandbox hasn't sent its session's output again for {RESYNC_S:.0f} s",
            remedy="Try again later; if this stays so, make another sandbox.",
        ) from None
