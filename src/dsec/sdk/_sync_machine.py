"""The sync client. Generated from the async one by tools/generate_sync.py: change that one and run the
tool."""

from __future__ import annotations

from dsec.sdk._machine import AsyncCheckpoints, AsyncConsole
from dsec.sdk._portal import Wrapper, call
from dsec.spec.sandbox import SandboxInfo
from dsec.spec.screen import Checkpoint, ConsolePiece


class Console(Wrapper):
    """A full machine's serial console; `sandbox.console`. Calls raise `Unsupported` where a sandbox has none,
    `SandboxNotFound`, `SandboxEnded`, `Unavailable`, and `RequestTimeout` after `request_timeout_s`."""

    _async: AsyncConsole

    def __init__(self, inner: AsyncConsole) -> None:
        """Not for callers."""
        self._async = inner

    def read(self, after: int = -1, *, wait_s: float = 0.0, request_timeout_s: float | None = None) -> ConsolePiece:
        """What was printed from the offset `after` on (-1: all that the server kept, 256 KiB at most). `wait_s`: wait
        so long, 60 s at most, for a first byte. What was printed while no server was there is lost."""
        return call(self._async.read(after, wait_s=wait_s, request_timeout_s=request_timeout_s))

    def write(self, data: str | bytes, *, request_timeout_s: float | None = None) -> None:
        """Type on it. Not repeated where the connection breaks (`OutcomeUnknown`)."""
        return call(self._async.write(data, request_timeout_s=request_timeout_s))

    def wait_for(self, text: str, *, after: int = -1, timeout_s: float = 60.0) -> str:
        """All that was printed from `after` on once it holds `text`. Raises `RequestTimeout` where that takes longer
        than `timeout_s`, with the last of it."""
        return call(self._async.wait_for(text, after=after, timeout_s=timeout_s))


class Checkpoints(Wrapper):
    """What a full machine can go back to; `sandbox.checkpoints`. Calls raise `Unsupported` where a sandbox can't,
    `SandboxNotFound`, `SandboxEnded`, `Unavailable`, and `RequestTimeout` after `request_timeout_s`. They need an API
    key."""

    _async: AsyncCheckpoints

    def __init__(self, inner: AsyncCheckpoints) -> None:
        """Not for callers."""
        self._async = inner

    def create(self, name: str, *, request_timeout_s: float | None = None) -> Checkpoint:
        """Keep memory, devices and disk as they are now; the machine stands still for some tens of milliseconds. They
        end with the sandbox, and with the server. Raises `Conflict` where the name is taken, `QuotaExceeded`."""
        return call(self._async.create(name, request_timeout_s=request_timeout_s))

    def all(self, *, request_timeout_s: float | None = None) -> list[Checkpoint]:
        """In the order in which they were made."""
        return call(self._async.all(request_timeout_s=request_timeout_s))

    def delete(self, name: str, *, request_timeout_s: float | None = None) -> None:
        """Raises `NotFound`."""
        return call(self._async.delete(name, request_timeout_s=request_timeout_s))

    def revert(self, name: str, *, request_timeout_s: float | None = None) -> SandboxInfo:
        """Go back: what happened inside since then is undone, commands that ran then go on. Raises `NotFound`."""
        return call(self._async.revert(name, request_timeout_s=request_timeout_s))
