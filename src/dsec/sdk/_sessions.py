"""Shell sessions in a sandbox: named bashes on terminals, which keep their state from command to command.

Every command has an idempotency key, chosen here where the caller gives none: a connection that breaks is made again,
and the command runs once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
from msgspec import Struct

from dsec.errors import InvalidRequest
from dsec.sdk._answers import cut_errors
from dsec.sdk._transport import Retry, Transport, timed_out
from dsec.spec.sessions import (
    SessionCommand,
    SessionInfo,
    SessionInput,
    SessionInterrupt,
    SessionLog,
    SessionResult,
    SessionSpec,
)

if TYPE_CHECKING:
    from yarl import URL

_JSON = {"Content-Type": "application/json"}
_ENCODER = msgspec.json.Encoder()


class _Sessions(Struct, frozen=True):
    sessions: list[SessionInfo]


class AsyncSession:
    """One shell session. It outlives this object and this process: `sandbox.sessions.get` finds it by its name.

    All calls raise `NotFound` where it was closed, `SandboxNotFound`, `SandboxEnded`, `OutcomeUnknown`, `Unavailable`,
    and `RequestTimeout` after `request_timeout_s`.
    """

    def __init__(self, transport: Transport, sandbox_id: str, name: str) -> None:
        """Not for callers: use `sandbox.sessions`."""
        self._transport = transport
        self._path = f"/v1/sandboxes/{sandbox_id}/sessions/{quote(name, safe='')}"
        self.name: str = name

    async def run(
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
        request = SessionCommand(
            command=command,
            key=key or self._transport.new_key(),
            command_timeout_s=command_timeout_s,
            output_bytes=output_bytes,
        )
        url = self._transport.url(f"{self._path}/run")
        return await self._transport.call(
            "POST", url, SessionResult, body=_encoded(request), headers=_JSON, request_timeout_s=request_timeout_s
        )

    async def send(self, data: str, *, request_timeout_s: float | None = None) -> None:
        """Type something for the program in the foreground; end a line with a newline. Raises `Conflict` where none
        runs."""
        await self._transport.call(
            "POST",
            self._transport.url(f"{self._path}/input"),
            type(None),
            body=_encoded(SessionInput(data=data)),
            headers=_JSON,
            replay=False,
            request_timeout_s=request_timeout_s,
        )

    async def interrupt(self, *, grace_s: float = 2.0, request_timeout_s: float | None = None) -> SessionInfo:
        """Stop the command that runs, if any: ^C, after `grace_s` SIGKILL for what is in the foreground; a shell that
        doesn't come back even then is ended (`ended` in the answer)."""
        return await self._transport.call(
            "POST",
            self._transport.url(f"{self._path}/interrupt"),
            SessionInfo,
            body=_encoded(SessionInterrupt(grace_s=grace_s)),
            headers=_JSON,
            request_timeout_s=request_timeout_s,
        )

    async def info(self, *, request_timeout_s: float | None = None) -> SessionInfo:
        """Whether it is busy, whether its shell has ended."""
        url = self._transport.url(self._path)
        return await self._transport.call("GET", url, SessionInfo, request_timeout_s=request_timeout_s)

    async def read_log(
        self, offset: int = 0, *, limit: int = 1 << 20, request_timeout_s: float | None = None
    ) -> SessionLog:
        """Output from an offset of the log on, at most `limit` bytes (16 MiB), also of commands that have ended. Waits
        for nothing: the same `next_offset` again means that there is no more by now."""
        url = self._transport.url(f"{self._path}/log", offset=offset, limit=limit)
        try:
            async with asyncio.timeout(request_timeout_s):
                return await self._read_log(url)
        except TimeoutError:
            raise timed_out(request_timeout_s or 0.0) from None

    async def close(self, *, request_timeout_s: float | None = None) -> None:
        """End the shell with everything that it started, and forget the log. Idempotent."""
        url = self._transport.url(self._path)
        await self._transport.call("DELETE", url, type(None), request_timeout_s=request_timeout_s)

    async def _read_log(self, url: URL) -> SessionLog:
        retry = Retry(self._transport)
        while True:
            response = await self._transport.open("GET", url, retry=retry)
            try:
                return SessionLog(await response.read(), int(response.headers["X-Dsec-Next-Offset"]))
            except cut_errors() as error:
                await retry.wait(error)


class AsyncSessions:
    """The shell sessions of one sandbox; `sandbox.sessions`."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        """Not for callers."""
        self._transport = transport
        self._id = sandbox_id
        self._path = f"/v1/sandboxes/{sandbox_id}/sessions"

    async def open(
        self,
        name: str = "default",
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        request_timeout_s: float | None = None,
    ) -> AsyncSession:
        """The session of this name, or a new one; one whose shell has ended is replaced by a fresh one.

        `env` is laid over the sandbox's own. Raises `Unsupported` where the image has no bash, `Conflict` where the
        name is a session's with other arguments, `InvalidRequest` for a user or directory that can't be used.
        """
        spec = SessionSpec(name=name, cwd=cwd, env=dict(env) if env else {}, user=user)
        await self._transport.call(
            "POST",
            self._transport.url(self._path),
            SessionInfo,
            body=_encoded(spec),
            headers=_JSON,
            request_timeout_s=request_timeout_s,
        )
        return AsyncSession(self._transport, self._id, name)

    async def get(self, name: str = "default", *, request_timeout_s: float | None = None) -> AsyncSession:
        """The session of a name, opened by this process or another. Raises `NotFound`."""
        session = AsyncSession(self._transport, self._id, name)
        await session.info(request_timeout_s=request_timeout_s)
        return session

    async def list(self, *, request_timeout_s: float | None = None) -> list[SessionInfo]:
        """The sessions that are open, also those that an earlier server opened."""
        url = self._transport.url(self._path)
        return (await self._transport.call("GET", url, _Sessions, request_timeout_s=request_timeout_s)).sessions


def _encoded(value: object) -> bytes:
    try:
        return _ENCODER.encode(value)
    except (UnicodeEncodeError, TypeError) as error:
        raise InvalidRequest(f"this can't be sent as JSON: {error}") from None
