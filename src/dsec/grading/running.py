"""What the judge asks of whatever runs programs for it: one command in a place of its own.

A runner promises: the command runs as an unprivileged user in a fresh place without network, with `/tmp` as its home
and working directory; nothing of it is left when `run` returns or is cancelled; it is ended soon after it has used
`limits.cpu_s` of CPU time, and at `limits.wall_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from msgspec import Struct

from dsec.errors import CreateFailed, InvalidRequest, QuotaExceeded
from dsec.grading.tools import NOT_FOUND
from dsec.spec.causes import Cause
from dsec.spec.judging import JudgeLimits
from dsec.spec.sandbox import ExecStatus

_LONGEST_NAME = 255


class Job(Struct, frozen=True, kw_only=True):
    """One command."""

    project: str
    environment: str
    argv: tuple[str, ...]
    files: Mapping[bytes, bytes] = {}
    """Path -> content, there before the command begins: anybody may read and execute them."""
    stdin: bytes = b""
    limits: JudgeLimits = JudgeLimits()
    fetch: tuple[bytes, ...] = ()
    """Files to bring back, as the submission's own user may read them."""
    fetch_bytes: int = 64 << 20
    """The most that is brought back in all; what is beyond is left out."""


class Ran(Struct, frozen=True, kw_only=True):
    """How a command ended."""

    status: ExecStatus
    stdout: bytes = b""
    stderr: bytes = b""
    fetched: dict[bytes, bytes] = {}
    """What there was of the files that were asked for."""

    @property
    def missing(self) -> bool:
        """The command itself wasn't there."""
        return self.status.exit_code == NOT_FOUND and self.status.cause is Cause.START_FAILED


def check_files(paths: Iterable[bytes]) -> None:
    """Raise `InvalidRequest` for files that can't be beside each other: one below another, or with a name that is too
    long for one."""
    known = set(paths)
    for path in known:
        parts = path.split(b"/")
        long = any(len(part) > _LONGEST_NAME for part in parts)
        if long or any(b"/".join(parts[:count]) in known for count in range(1, len(parts))):
            why = "has a name that is too long" if long else "lies below another file"
            shown = path[:200].decode(errors="replace")
            raise InvalidRequest(f"the file {shown!r} {why}", field="files")


class Runner(Protocol):
    """Runs commands for the judge."""

    async def run(self, job: Job) -> Ran:
        """Cancelling it ends the command. Raises `EnvironmentNotFound`, `InvalidRequest`, `SandboxEnded` (its details
        have the `cause`) and whatever the platform can fail with."""
        ...


class FirstOf:
    """Runs by the first runner, and by the second what the first has no room for."""

    def __init__(self, first: Runner, second: Runner) -> None:
        self._first = first
        self._second = second

    async def run(self, job: Job) -> Ran:
        """See `Runner`."""
        try:
            return await self._first.run(job)
        except (QuotaExceeded, CreateFailed):  # it has begun nothing then
            return await self._second.run(job)
