"""Shell sessions: what callers ask for and what they get."""

from __future__ import annotations

import base64
from typing import Annotated

from msgspec import Meta, Struct

from dsec.spec.sandbox import Key, Seconds

MIB = 1 << 20
SessionName = Annotated[str, Meta(min_length=1, max_length=100)]


class SessionSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A shell session to open: one bash on a terminal of its own, which keeps its state from command to command."""

    name: SessionName = "default"
    cwd: str | None = None
    env: dict[str, str] = {}
    """Laid over the sandbox's own; TERM is `dumb` unless it is here, so that programs write plain text."""
    user: str | None = None


class SessionInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A session."""

    name: str
    busy: bool = False
    """A command runs in it."""
    ended: bool = False
    """Its shell is gone: it left by `exit`, or was ended."""
    exit_code: int | None = None
    """Of its shell, where it ended by itself."""
    log_bytes: int = 0
    """Of its log, as far as the server has read it."""


class SessionCommand(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A command for a session."""

    command: str
    """Bash text of up to 1 MiB, any number of lines."""
    key: Key | None = None
    """Idempotency key: the same one again returns the command's result (of the last 256 in the session)."""
    command_timeout_s: Seconds | None = None
    """Then it is interrupted, and where that doesn't help its foreground processes are killed. None: no limit."""
    output_bytes: Annotated[int, Meta(ge=0, le=64 * MIB)] = 1 * MIB
    """So much of the output comes with the result; the rest is in the session's log."""


class SessionResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a command in a session."""

    exit_code: int | None
    """None where it could not be learned: the shell was ended under it by force."""
    output: str = ""
    """Both streams, as on a terminal; a view with replacement characters where it isn't UTF-8."""
    output_b64: str | None = None
    """The bytes, where `output` isn't the same."""
    timed_out: bool = False
    """It was stopped for its `command_timeout_s`."""
    output_limit: bool = False
    """It was stopped because it wrote more than 64 MiB."""
    truncated: bool = False
    """There was more output: read the log from `log_from` to `log_to`."""
    ended: bool = False
    """The shell is gone, by the command's doing (`exit`) or because it could not be stopped otherwise. Open the
    session again for a fresh one."""
    log_from: int = 0
    log_to: int = 0

    @property
    def data(self) -> bytes:
        """The output's bytes."""
        return self.output.encode() if self.output_b64 is None else base64.b64decode(self.output_b64)


class SessionInput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Text for the program in a session's foreground."""

    data: str
    """Typed as it is: end a line with a newline."""


class SessionInterrupt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stop for the command that runs in a session."""

    grace_s: Annotated[float, Meta(ge=0, le=600)] = 2.0
    """How long ^C may take to work before the foreground processes are killed."""


class SessionLog(Struct, frozen=True):
    """A part of a session's output."""

    data: bytes
    next_offset: int
    """Where to read on."""
