"""What commands and batches give back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec import Struct

from dsec.errors import DsecError
from dsec.spec.causes import Cause
from dsec.spec.sandbox import ExecStatus

S = TypeVar("S")


class CommandResult(Struct, frozen=True, kw_only=True):
    """How a command ended and what it wrote. A non-zero exit code is a result like any other; `check` raises for it."""

    exit_code: int
    """0..255; 128 + signal when it was ended by a signal; 127 or 126 where it could not be started."""
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    cause: Cause = Cause.EXITED
    infra: bool = False
    """The platform is at fault: the result says nothing about the command."""
    signal: int | None = None
    message: str = ""
    truncated: bool = False
    """Output was lost to `output_bytes`."""
    dropped_bytes: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    throttled_s: float = 0.0
    """How long it wanted CPU that its sandbox's limit withheld."""
    max_rss_bytes: int = 0
    key: str = ""
    """Idempotency key: names the command in `commands.attach`."""

    @property
    def stdout(self) -> str:
        """Text of stdout: UTF-8, with U+FFFD in place of what isn't."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Text of stderr, likewise."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """It exited by itself with code 0."""
        return self.exit_code == 0 and self.cause is Cause.EXITED

    def check(self) -> CommandResult:
        """The result itself if `ok`. Raises `CommandFailed`."""
        if not self.ok:
            raise CommandFailed(self)
        return self


class CommandFailed(DsecError):
    """Raised by `CommandResult.check` alone; the result is in `result`."""

    code = "command_failed"
    http_status = 400

    def __init__(self, result: CommandResult) -> None:
        tail = result.stderr.strip().rpartition("\n")[2][:300]
        reason = result.message or tail
        super().__init__(
            f"the command ended with exit code {result.exit_code} ({result.cause})" + (f": {reason}" if reason else "")
        )
        self.result = result
        self.infra = result.infra  # type: ignore[misc]


class Output(Struct, frozen=True):
    """A piece of a running command's output."""

    data: bytes
    stderr: bool = False

    @property
    def text(self) -> str:
        """As text; a character that is cut by the end of the piece becomes U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class CreateResult(Generic[S]):
    """One item of `create_many`, as it is ready: a sandbox or an error."""

    index: int
    """Of its spec."""
    sandbox: S | None = None
    error: DsecError | None = None

    def unwrap(self) -> S:
        """The sandbox. Raises the error."""
        if self.error is not None:
            raise self.error
        assert self.sandbox is not None
        return self.sandbox


@dataclass(frozen=True, slots=True)
class RunResult:
    """One item of `run_many`, as its command has ended: a result or an error."""

    index: int
    """Of the command."""
    result: CommandResult | None = None
    error: DsecError | None = None

    def unwrap(self) -> CommandResult:
        """The result. Raises the error."""
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


def make_result(status: ExecStatus, stdout: bytes, stderr: bytes, key: str) -> CommandResult:
    """A result of the status on the wire and the output that came before it."""
    return CommandResult(
        exit_code=status.exit_code,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        cause=status.cause,
        infra=status.infra,
        signal=status.signal,
        message=status.message,
        truncated=status.truncated,
        dropped_bytes=status.dropped_bytes,
        cpu_s=status.cpu_s,
        wall_s=status.wall_s,
        throttled_s=status.throttled_s,
        max_rss_bytes=status.max_rss_bytes,
        key=key,
    )
