"""What the edge knows of one command. Owns nothing: `commands` makes it, keeps it and lets it go."""

from __future__ import annotations

import asyncio
from typing import Any

from dsec.edge.outcome import Asked
from dsec.edge.recorder import Recorder
from dsec.errors import DsecError, OutcomeUnknown
from dsec.ports import Operation, Usage
from dsec.spec.sandbox import ExecStatus


class Command:
    """One command of a sandbox, for as long as the edge knows it."""

    __slots__ = (
        "asked",
        "before",
        "began",
        "durable",
        "entry",
        "failure",
        "guest_key",
        "key",
        "operation",
        "reads",
        "recorder",
        "signalled",
        "starting",
        "status",
    )

    def __init__(self, key: str, guest_key: bytes | None, asked: Asked, before: Usage) -> None:
        self.key = key
        self.guest_key = guest_key
        self.asked = asked
        self.before = before
        self.began: float | None = None
        """When it was asked for, on the monotonic clock; None where an earlier edge was."""
        self.operation: Operation | None = None
        self.starting: asyncio.Task[None] | None = None
        self.signalled = 0
        self.reads = 0
        self.status: ExecStatus | None = None
        self.failure: DsecError | None = None
        self.entry = 0
        """Number of its `exec` in the trajectory; 0 where an earlier edge wrote it for a command without a key."""
        self.recorder: Recorder | None = None
        self.durable: asyncio.Future[Any] | None = None
        """Its result is on disk, where the sandbox wants that."""

    def live(self) -> Operation:
        """Its operation; callers have waited for `starting`."""
        if self.operation is None:
            raise OutcomeUnknown("the command's start was cut off")
        return self.operation
