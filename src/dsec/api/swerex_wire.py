"""What SWE-ReX's client sends and reads, as values; its exceptions, as they travel.

Owns the names of the other side. Fields that are not known are ignored, as that client's own server does.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from msgspec import Struct

from dsec.errors import DsecError, FileError, FileMissing, InvalidRequest

PROMPT = "SHELLPS1PREFIX"
"""What the client knows a shell's prompt by (`expect_string`)."""


class CreateSession(Struct, frozen=True):
    startup_source: list[str] = []
    session: str = "default"
    session_type: Literal["bash"] = "bash"
    startup_timeout: float = 1.0


class SessionCreated(Struct, frozen=True):
    output: str = ""
    session_type: str = "bash"


class Action(Struct, frozen=True):
    """A command (`bash`) or an interrupt (`bash_interrupt`)."""

    command: str = ""
    session: str = "default"
    timeout: float | None = None
    is_interactive_command: bool = False
    is_interactive_quit: bool = False
    check: Literal["silent", "raise", "ignore"] = "raise"
    error_msg: str = ""
    expect: list[str] = []
    action_type: Literal["bash", "bash_interrupt"] = "bash"
    n_retry: int = 3


class Observation(Struct, frozen=True):
    output: str = ""
    exit_code: int | None = None
    failure_reason: str = ""
    expect_string: str = ""
    session_type: str = "bash"


class CloseSession(Struct, frozen=True):
    session: str = "default"
    session_type: Literal["bash"] = "bash"


class Closed(Struct, frozen=True):
    session_type: str = "bash"


class Command(Struct, frozen=True):
    command: str | list[str]
    timeout: float | None = None
    shell: bool = False
    check: bool = False
    error_msg: str = ""
    env: dict[str, str] | None = None
    cwd: str | None = None
    merge_output_streams: bool = False


class CommandDone(Struct, frozen=True):
    stdout: str
    stderr: str
    exit_code: int | None


class ReadFile(Struct, frozen=True):
    path: str
    encoding: str | None = None
    errors: str | None = None


class FileContent(Struct, frozen=True):
    content: str


class WriteFile(Struct, frozen=True):
    content: str
    path: str


class Empty(Struct, frozen=True):
    pass


class Alive(Struct, frozen=True):
    is_alive: bool
    message: str = ""


class Transfer(Struct, frozen=True):
    """An exception on its way."""

    message: str
    class_path: str
    traceback: str = ""
    extra_info: dict[str, Any] = {}


class Failure(Struct, frozen=True):
    """The answer of status 511."""

    swerexception: Transfer


class Refusal(Struct, frozen=True):
    """The answer to a request that was not admitted."""

    detail: str


class SwerexError(Exception):
    """An exception of the client's, to be raised there."""

    def __init__(self, name: str, message: str, **extra: Any) -> None:
        super().__init__(message)
        self.class_path = name if "." in name else f"swerex.exceptions.{name}"
        self.message = message
        self.extra = extra

    def body(self) -> Failure:
        """The answer of status 511 that the client turns into the exception."""
        return Failure(Transfer(self.message, self.class_path, extra_info=self.extra))


def as_swerex(error: DsecError) -> SwerexError:
    """An error of ours as the client's nearest exception; `extra_info` has our code and whether the platform is at
    fault."""
    name = "SwerexException"
    if isinstance(error, FileMissing):
        name = "builtins.FileNotFoundError"
    elif isinstance(error, FileError):
        name = _OS_ERRORS.get(str(error.details.get("errno")), "builtins.OSError")
    elif isinstance(error, InvalidRequest):
        name = "builtins.ValueError"
    extra = {"code": error.code, "infra": error.infra, "retryable": error.retryable, "details": error.details}
    return SwerexError(name, str(error), **extra)


_OS_ERRORS = {
    "EISDIR": "builtins.IsADirectoryError",
    "ENOTDIR": "builtins.NotADirectoryError",
    "EACCES": "builtins.PermissionError",
    "EEXIST": "builtins.FileExistsError",
}
_ANSI = re.compile(r"\x1b[@-_][0-?]*[ -/]*[@-~]")


def as_text(output: bytes) -> str:
    """Output as the client's own server shows it: bytes that aren't UTF-8 escaped, terminal sequences gone."""
    return _ANSI.sub("", output.decode("utf-8", "backslashreplace")).replace("\r\n", "\n")
