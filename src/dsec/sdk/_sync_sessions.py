"""The sync client. Generated from the async one by tools/generate_sync.py: change that one and run the
tool."""

from __future__ import annotations

from collections.abc import Mapping

from dsec.sdk._network import AsyncNetworkAccess, Grants
from dsec.sdk._portal import Wrapper, call
from dsec.sdk._sessions import AsyncSession, AsyncSessions
from dsec.spec.network import NetworkInfo
from dsec.spec.sessions import SessionInfo, SessionLog, SessionResult


class Session(Wrapper):
    """One shell session. It outlives this object and this process: `sandbox.sessions.get` finds it by its name.

    All calls raise `NotFound` where it was closed, `SandboxNotFound`, `SandboxEnded`, `OutcomeUnknown`, `Unavailable`,
    and `RequestTimeout` after `request_timeout_s`.
    """

    _async: AsyncSession

    def __init__(self, inner: AsyncSession) -> None:
        """Not for callers."""
        self._async = inner

    @property
    def name(self) -> str:
        return self._async.name

    def run(
        self,
        command: str,
        *,
        command_timeout_s: float | None = None,
        output_bytes: int = 1 << 20,
        key: str | None = None,
        request_timeout_s: float | None = None,
    ) -> SessionResult:
        """Run a command, any bash text, in the session's shell; returns when it has ended, whatever the exit code.

        `command_timeout_s`: then it is interrupted, and where that doesn't help its foreground processes are killed
        (`timed_out` in the result). `output_bytes`: so much of the output comes with the result, the rest is in the
        log. `key`: the same key again returns the same result. `request_timeout_s` limits this call alone: the command
        goes on.

        Raises `Conflict` where a command runs already (`session_busy` in `details`) or the shell has ended
        (`session_ended`), `InvalidRequest`.
        """
        return call(
            self._async.run(
                command,
                command_timeout_s=command_timeout_s,
                output_bytes=output_bytes,
                key=key,
                request_timeout_s=request_timeout_s,
            )
        )

    def send(self, data: str, *, request_timeout_s: float | None = None) -> None:
        """Type something for the program in the foreground; end a line with a newline. Raises `Conflict` where none
        runs."""
        return call(self._async.send(data, request_timeout_s=request_timeout_s))

    def interrupt(self, *, grace_s: float = 2.0, request_timeout_s: float | None = None) -> SessionInfo:
        """Stop the command that runs, if any: ^C, after `grace_s` SIGKILL for what is in the foreground; a shell that
        doesn't come back even then is ended (`ended` in the answer)."""
        return call(self._async.interrupt(grace_s=grace_s, request_timeout_s=request_timeout_s))

    def info(self, *, request_timeout_s: float | None = None) -> SessionInfo:
        """Whether it is busy, whether its shell has ended."""
        return call(self._async.info(request_timeout_s=request_timeout_s))

    def read_log(self, offset: int = 0, *, limit: int = 1 << 20, request_timeout_s: float | None = None) -> SessionLog:
        """Output from an offset of the log on, at most `limit` bytes (16 MiB), also of commands that have ended. Waits
        for nothing: the same `next_offset` again means that there is no more by now."""
        return call(self._async.read_log(offset, limit=limit, request_timeout_s=request_timeout_s))

    def close(self, *, request_timeout_s: float | None = None) -> None:
        """End the shell with everything that it started, and forget the log. Idempotent."""
        return call(self._async.close(request_timeout_s=request_timeout_s))


class Sessions(Wrapper):
    """The shell sessions of one sandbox; `sandbox.sessions`."""

    _async: AsyncSessions

    def __init__(self, inner: AsyncSessions) -> None:
        """Not for callers."""
        self._async = inner

    def open(
        self,
        name: str = "default",
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        request_timeout_s: float | None = None,
    ) -> Session:
        """The session of this name, or a new one; one whose shell has ended is replaced by a fresh one.

        `env` is laid over the sandbox's own. Raises `Unsupported` where the image has no bash, `Conflict` where the
        name is a session's with other arguments, `InvalidRequest` for a user or directory that can't be used.
        """
        return Session(call(self._async.open(name, cwd=cwd, env=env, user=user, request_timeout_s=request_timeout_s)))

    def get(self, name: str = "default", *, request_timeout_s: float | None = None) -> Session:
        """The session of a name, opened by this process or another. Raises `NotFound`."""
        return Session(call(self._async.get(name, request_timeout_s=request_timeout_s)))

    def list(self, *, request_timeout_s: float | None = None) -> list[SessionInfo]:
        """The sessions that are open, also those that an earlier server opened."""
        return call(self._async.list(request_timeout_s=request_timeout_s))


class NetworkAccess(Wrapper):
    """`sandbox.network`. Changes take effect at once, for open connections too; they need an API key.

    All calls raise `SandboxNotFound`, `SandboxEnded`, `PermissionDenied` (the key can't grant that), `Unavailable`, and
    `RequestTimeout` after `request_timeout_s`.
    """

    _async: AsyncNetworkAccess

    def __init__(self, inner: AsyncNetworkAccess) -> None:
        """Not for callers."""
        self._async = inner

    def get(self, *, request_timeout_s: float | None = None) -> NetworkInfo:
        """The policy as it is now, and what was reached under it."""
        return call(self._async.get(request_timeout_s=request_timeout_s))

    def update(self, grants: Grants, *, request_timeout_s: float | None = None) -> NetworkInfo:
        """Change some permissions (True: grant, False: take away, or options) and leave the others as they are.

        Raises `InvalidRequest`, `Unsupported` too: nothing was changed then.
        """
        return call(self._async.update(grants, request_timeout_s=request_timeout_s))

    def set(self, grants: Grants, *, request_timeout_s: float | None = None) -> NetworkInfo:
        """Replace the whole policy; an empty one reaches nothing. Raises as `update`."""
        return call(self._async.set(grants, request_timeout_s=request_timeout_s))
