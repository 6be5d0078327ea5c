"""One live sandbox in memory: its record and what belongs to this edge incarnation alone. Kept small: a node has
thousands, idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from dsec.edge.client import Created
from dsec.errors import DsecError, SandboxEnded, SandboxLost, Unavailable
from dsec.journal.records import Record
from dsec.ports import Backend, Instance, InstanceEnd, Usage
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxInfo, State

if TYPE_CHECKING:
    from dsec.edge.command import Command
    from dsec.edge.requests import Environ


class Sandbox:
    """A sandbox that hasn't ended. `dsec.edge.lives` alone changes its record."""

    __slots__ = (
        "_making",
        "active_at",
        "again",
        "backend",
        "capture",
        "commands",
        "due",
        "ended",
        "ending",
        "ending_at",
        "environ",
        "gone",
        "instance",
        "lost",
        "network_env",
        "paused_at",
        "queued_at",
        "ready",
        "record",
        "removal_failures",
        "request_id",
        "requests",
        "running_at",
        "token",
        "usage",
        "usage_at",
        "wake",
    )

    def __init__(self, record: Record, backend: Backend, now: float) -> None:
        self.record = record
        self.backend = backend
        self.instance: Instance | None = None
        self.ready: asyncio.Future[Created] | None = None
        """Resolves when it runs; None once that is decided."""
        self._making: asyncio.Timeout | None = None
        self.ended: asyncio.Future[SandboxInfo] | None = None
        """Resolves when nothing of it is left; made by who waits first."""
        self.ending: asyncio.Event | None = None
        """Set when its end is decided; made by who waits first."""
        self.gone: asyncio.Future[InstanceEnd] | None = None
        self.lost: asyncio.Future[str] | None = None
        self.token: str | None = None
        """In clear only until the creator has it."""
        self.network_env: dict[str, str] | None = None
        """Variables of its network's gateways."""
        self.environ: Environ | None = None
        """What commands have that name no variables and no user of their own."""
        self.queued_at = now
        self.running_at: float | None = None
        """Until its first command has a result."""
        self.ending_at = now
        self.request_id = ""
        """Of who asked for its making, then for its end."""
        self.due: float | None = None
        """When its ttl_s passes, on the monotonic clock."""
        self.requests = 0
        self.active_at = now
        self.commands: dict[bytes | int, Command] | None = None
        self.usage: Usage | None = None
        self.usage_at = 0.0
        self.removal_failures = 0
        self.capture = ""
        """Of files that it begins with."""
        self.again = False
        """One of this id may have been tried before."""
        self.paused_at = 0.0
        """While it is paused, since when, on the monotonic clock."""
        self.wake: Callable[[Sandbox], None] | None = None
        """Resumes it, at once; raises `Conflict` where a request may not."""

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def state(self) -> State:
        return self.record.state

    def info(self, token: str | None = None) -> SandboxInfo:
        return info_of(self.record, token)

    @asynccontextmanager
    async def made_within(self, timeout_s: float) -> AsyncIterator[None]:
        """In here it is made. Raises TimeoutError; `ended_error` where it is given up."""
        if self.state is not State.STARTING:
            raise ended_error(self.record)
        try:
            async with asyncio.timeout(timeout_s) as self._making:
                yield
        except TimeoutError:
            if self.state is not State.STARTING:
                raise ended_error(self.record) from None
            raise
        finally:
            self._making = None

    def give_up(self) -> None:
        """Go on with its making no more: it has an end already, and a machine's first boot may take minutes."""
        if self._making is not None and not self._making.expired():
            self._making.reschedule(0.0)

    def let_go(self) -> None:
        """It has ended: what refers back to it would keep it, and all that it had, until a collection of garbage."""
        self.instance = self.gone = self.lost = self.commands = self.wake = None

    @property
    def up(self) -> bool:
        """It runs, or is paused."""
        return self.record.state in (State.RUNNING, State.PAUSED)

    def running(self) -> Instance:
        """Its instance, for a request that needs it: resumes a paused one. Raises `Conflict` where a tripwire paused
        it, and as `here`."""
        self.rouse()
        return self.here()

    def rouse(self) -> None:
        """Resume it if it is paused. Raises `Conflict` where a tripwire paused it."""
        if self.record.state is State.PAUSED and self.wake is not None:
            self.wake(self)

    def here(self) -> Instance:
        """Its instance, which may be paused. Raises `Unavailable` while it starts, `SandboxEnded` or `SandboxLost` once
        it ends."""
        if self.up and self.instance is not None:
            return self.instance
        if self.record.state in (State.ENDING, State.ENDED):
            raise ended_error(self.record)
        raise Unavailable(f"sandbox {self.id} is still {self.record.state}", remedy="Wait until it runs.")


def info_of(record: Record, token: str | None = None) -> SandboxInfo:
    """A record as callers see it."""
    return SandboxInfo(
        id=record.id,
        state=record.state,
        spec=record.spec,
        created_at=record.created_at,
        expires_at=record.expires_at,
        paused=record.paused,
        ended_at=record.ended_at,
        cause=record.cause,
        infra=record.cause is not None and record.cause.infra,
        message=record.message,
        create_ms=record.create_ms,
        queue_ms=record.queue_ms,
        accel=record.handle.get("accel", ""),
        token=token,
    )


_WHY = {
    Cause.DELETED: "it was deleted",
    Cause.TTL: "its ttl_s passed",
    Cause.IDLE_TTL: "its idle_ttl_s passed",
    Cause.LEASE_LAPSED: "its run's lease lapsed",
    Cause.SHUTDOWN: "the server was told to end its sandboxes",
    Cause.TRIPWIRE: "a tripwire ended it",
    Cause.GUEST_EXITED: "its first process ended",
    Cause.CREATE_FAILED: "it could not be made",
    Cause.NODE_LOST: "its node lost it",
    Cause.PLATFORM_KILLED: "the platform ended it",
    Cause.MOVED: "another node is to have it",
}


def ended_error(record: Record) -> DsecError:
    """What a call on an ending or ended sandbox gets: the platform's fault is told apart from everything else."""
    cause = record.cause or Cause.NODE_LOST
    why = _WHY.get(cause, cause.value) + (f": {record.message}" if record.message else "")
    if cause.infra:
        return SandboxLost(
            f"sandbox {record.id} is gone: {why}",
            remedy="The platform is at fault: repeat the work in a fresh sandbox.",
            cause=cause.value,
        )
    return SandboxEnded(f"sandbox {record.id} has ended: {why}", remedy="Create another one.", cause=cause.value)
