"""Commands in a sandbox: run to the end, or started and talked to.

Every command has an idempotency key, chosen here where the caller gives none. So a connection that breaks is made again
and the output goes on at the byte where it stopped; nothing runs twice. A key that was chosen here is released (the
server forgets the command) with the next request after the result has arrived; a caller's own key is kept until
`release`, for a later process to find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from dsec.errors import InvalidRequest
from dsec.sdk._command import AsyncCommand, ExecCalls, OnOutput, limited
from dsec.sdk._results import CommandResult
from dsec.sdk._transport import Transport
from dsec.spec.sandbox import ExecSpec, ProcessInfo, PtySize

_SHELL = ("/bin/sh", "-c")
_ENCODER = msgspec.json.Encoder()


class _Processes(Struct, frozen=True):
    processes: list[ProcessInfo]


class AsyncCommands:
    """Runs commands in one sandbox; `sandbox.commands`."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        """Not for callers."""
        self._calls = ExecCalls(transport, sandbox_id)

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        command_timeout_s: float | None = None,
        output_bytes: int | None = None,
        merge_stderr: bool = False,
        kill_leftovers: bool = False,
        key: str | None = None,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        request_timeout_s: float | None = None,
    ) -> CommandResult:
        """Run a command to its end and return its result, whatever the exit code.

        `command`: argv, run as it is; a str is run by `["/bin/sh", "-c", command]`. `env` is laid over the sandbox's.
        `stdin`: its whole input (none: /dev/null). `command_timeout_s`: its wall time, then it is ended whole (cause
        `command_timeout`; None: the sandbox's default). `output_bytes`: cap of its output, likewise. `merge_stderr`:
        stderr goes into stdout. `kill_leftovers`: end the background processes that it leaves. `key`: idempotency key;
        the same key again returns the same result and runs nothing. `on_stdout`, `on_stderr`: called with each piece
        (bytes) as it comes, may be coroutines; the result holds all output all the same.

        `request_timeout_s` limits this call, not the command: after `RequestTimeout` it goes on (its key is in the
        error's `details`), as it does when this call is cancelled. Raises `SandboxNotFound`, `SandboxEnded`,
        `OutcomeUnknown` (the sandbox died under it), `InvalidRequest`, `Conflict` (the key was used for another
        command), `Unavailable`.
        """
        spec = ExecSpec(
            argv=argv_of(command),
            env=dict(env) if env else {},
            cwd=cwd,
            user=user,
            stdin=stdin is not None,
            command_timeout_s=command_timeout_s,
            output_bytes=output_bytes,
            merge_stderr=merge_stderr,
            kill_leftovers=kill_leftovers,
            key=key,
        )
        running = self._command(spec, stdin.encode() if isinstance(stdin, str) else stdin)
        work = running.collect(on_stdout, on_stderr)
        return await work if request_timeout_s is None else await limited(work, request_timeout_s, key=running.key)

    async def start(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        command_timeout_s: float | None = None,
        output_bytes: int | None = None,
        merge_stderr: bool = False,
        kill_leftovers: bool = False,
        pty: PtySize | None = None,
        key: str | None = None,
        request_timeout_s: float | None = None,
    ) -> AsyncCommand:
        """Start a command and return a handle once it runs (or failed to start: the result says so).

        `stdin`: keep it open for `write_stdin`. `pty`: run it on a terminal of this size (`resize` changes it): what is
        written to its stdin is typed, all output is stdout. The rest: see `run`; `request_timeout_s` limits the start.
        """
        spec = ExecSpec(
            argv=argv_of(command),
            env=dict(env) if env else {},
            cwd=cwd,
            user=user,
            stdin=stdin,
            command_timeout_s=command_timeout_s,
            output_bytes=output_bytes,
            merge_stderr=merge_stderr,
            kill_leftovers=kill_leftovers,
            pty=pty,
            key=key,
        )
        running = self._command(spec, None)
        await limited(running.open(), request_timeout_s, key=running.key)
        return running

    async def attach(
        self,
        key: str,
        *,
        stdout_from: int = 0,
        stderr_from: int = 0,
        interactive: bool = False,
        request_timeout_s: float | None = None,
    ) -> AsyncCommand:
        """The handle of a command that was started under `key`, by this process or another. Its output comes from the
        given byte offsets on. `interactive`: somebody types to it, output is not held back to be sent together. Raises
        `NotFound`."""
        running = AsyncCommand(
            self._calls, key, None, own_key=True, interactive=interactive, seen=(stdout_from, stderr_from)
        )
        await limited(running.open(), request_timeout_s, key=key)
        return running

    def take_done(self) -> list[str]:
        """Not for callers: keys to release with the next request."""
        return self._calls.take_done()

    async def finished(self, key: str) -> None:
        """Not for callers: the result of a command with a key of ours has arrived."""
        await self._calls.finished(key)

    async def list(self, *, request_timeout_s: float | None = None) -> list[ProcessInfo]:
        """The running commands, oldest first, whoever started them."""
        url = self._calls.transport.url(self._calls.path)
        answer = await self._calls.transport.call("GET", url, _Processes, request_timeout_s=request_timeout_s)
        return answer.processes

    def _command(self, spec: ExecSpec, stdin: bytes | None) -> AsyncCommand:
        own_key = spec.key is not None
        key = spec.key or self._calls.transport.new_key()
        try:
            body = _ENCODER.encode(spec if own_key else msgspec.structs.replace(spec, key=key))
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(
                f"argv, env and cwd are Unicode text here: {error}", remedy="write other bytes to a file and name that"
            ) from None
        return AsyncCommand(self._calls, key, body, own_key=own_key, stdin=stdin, interactive=spec.pty is not None)


def argv_of(command: str | Sequence[str]) -> list[str]:
    """A command as callers write it: a str is for the shell."""
    return [*_SHELL, command] if isinstance(command, str) else list(command)
