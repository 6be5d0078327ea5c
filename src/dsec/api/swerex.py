"""SWE-ReX's REST routes: its stock client's `RemoteDeployment` and `RemoteRuntime`, each over one sandbox.

Served at `/swerex/{sandbox id}/...` for the client's `host`, and at the root for a client that can't name a path (its
`auth_token` is then the sandbox's own token). Invariants: `X-API-Key` is an API key of the sandbox's project or its
token; an exception that the client is to raise travels with status 511; a request id that comes again in
`run_in_session` runs nothing again; `/close` ends the sessions, not the sandbox.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from dsec.api.exchange import Exchange, headers_of
from dsec.api.expect import Expect
from dsec.api.swerex_files import read_file, upload, write_file
from dsec.api.swerex_wire import (
    PROMPT,
    Action,
    Alive,
    Closed,
    CloseSession,
    Command,
    CommandDone,
    CreateSession,
    Empty,
    Observation,
    ReadFile,
    Refusal,
    SessionCreated,
    SwerexError,
    WriteFile,
    as_swerex,
    as_text,
)
from dsec.edge.client import EdgeClient
from dsec.edge.session import Session
from dsec.edge.sessions import COMMAND_BYTES, GRACE_S, Sessions
from dsec.edge.shell import Run
from dsec.errors import (
    Conflict,
    DsecError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PermissionDenied,
    SandboxNotFound,
    Unauthenticated,
)
from dsec.spec.causes import Cause
from dsec.spec.sandbox import ExecSpec, ExecStatus, State
from dsec.spec.sessions import SessionSpec

PREFIX = "/swerex/"
ENDPOINTS = frozenset(
    {
        "is_alive",
        "create_session",
        "run_in_session",
        "close_session",
        "execute",
        "read_file",
        "write_file",
        "upload",
        "close",
    }
)
MAX_BODY_BYTES = 64 << 20
OUTPUT_BYTES = 16 << 20
"""So much of a command's output is in its answer."""
_ACTION = msgspec.json.Decoder(Action)
_KILL_GRACE_S = 0.2


class _NoEndpoint(NotFound):
    """A path that isn't one of these."""


class Swerex:
    """The routes."""

    def __init__(self, edge: EdgeClient, sessions: Sessions) -> None:
        self._edge = edge
        self._sessions = sessions
        self._json: dict[str, Callable[[str, bytes, str], Awaitable[object]]] = {
            "create_session": self._create_session,
            "run_in_session": self._run_in_session,
            "close_session": self._close_session,
            "execute": self._execute,
            "read_file": self._read_file,
            "write_file": self._write_file,
        }

    @staticmethod
    def claims(raw: str) -> bool:
        """Whether a path is one of these."""
        return raw.startswith(PREFIX) or raw[1:] in ENDPOINTS

    async def __call__(self, x: Exchange, raw: str) -> None:
        """Answer one request."""
        try:
            sandbox_id, endpoint = self._admit(x, raw)
            if endpoint == "is_alive":
                await x.answer(200, self._is_alive(sandbox_id))
            elif endpoint == "close":
                await x.body()
                await x.answer(200, await self._close(sandbox_id))
            elif endpoint == "upload":
                await x.answer(200, await upload(self._edge, sandbox_id, x))
            else:
                body = await x.body(MAX_BODY_BYTES)
                request_id = _header(x, b"x-request-id")
                await x.answer(200, await self._json[endpoint](sandbox_id, body, request_id))
        except SwerexError as error:
            await x.drain()
            await x.answer(511, error.body())
        except (Unauthenticated, PermissionDenied, SandboxNotFound, MethodNotAllowed, _NoEndpoint) as error:
            await x.drain()
            await x.answer(error.http_status, Refusal(str(error)), *headers_of(error))
        except DsecError as error:
            await self.fail(x, raw, error)

    @staticmethod
    async def fail(x: Exchange, raw: str, error: DsecError) -> None:
        """An error as the exception that the client raises."""
        if x.began:
            await x.cut()
            return
        await x.drain()
        await x.answer(511, as_swerex(error).body())

    def _admit(self, x: Exchange, raw: str) -> tuple[str, str]:
        edge = self._edge
        x.principal = edge.authenticate(_header(x, b"x-api-key") or x.bearer())
        if raw.startswith(PREFIX):
            sandbox_id, _, endpoint = raw[len(PREFIX) :].partition("/")
        else:
            sandbox_id, endpoint = x.principal.sandbox_id or "", raw[1:]
            if not sandbox_id:
                raise PermissionDenied(
                    "an API key doesn't say which sandbox is meant",
                    remedy="Use the sandbox's token, or the host http://HOST:PORT/swerex/SANDBOX_ID without a port.",
                )
        edge.authorize(x.principal, sandbox_id)
        if endpoint not in ENDPOINTS:
            raise _NoEndpoint(f"there is no endpoint {endpoint!r}")
        x.only("GET" if endpoint == "is_alive" else "POST")
        return sandbox_id, endpoint

    # --- sessions ---

    def _is_alive(self, sandbox_id: str) -> Alive:
        info = self._edge.get(sandbox_id)
        if info.state in (State.RUNNING, State.PAUSED):
            return Alive(True)
        why = f" ({info.cause.value})" if info.cause is not None else ""
        return Alive(False, f"sandbox {sandbox_id} is {info.state.value}{why}: {info.message}")

    async def _create_session(self, sandbox_id: str, body: bytes, request_id: str) -> SessionCreated:
        request = _decode(CreateSession, body)
        session, existed = await self._sessions.open(sandbox_id, SessionSpec(name=_name(request.session)))
        if existed:
            raise SwerexError("SessionExistsError", f"session {request.session} already exists")
        if not request.startup_source:
            return SessionCreated()
        quoted = [path.replace("'", "'\\''") for path in request.startup_source]
        command = "; ".join(f"source '{path}'" for path in quoted)
        run, _ = await self._sessions.start(sandbox_id, session, command, room=OUTPUT_BYTES)
        if not await session.until(lambda: run.done, request.startup_timeout):
            await self._sessions.close(sandbox_id, request.session)
            raise SwerexError(
                "CommandTimeoutError",
                f"timeout after {request.startup_timeout} seconds while sourcing {', '.join(request.startup_source)}",
            )
        if session.ended:
            raise _shell_gone(session)
        self._sessions.note_result(sandbox_id, session, run)
        return SessionCreated(as_text(run.take()))

    async def _run_in_session(self, sandbox_id: str, body: bytes, request_id: str) -> Observation:
        try:
            action = _ACTION.decode(body)
        except msgspec.DecodeError as error:
            raise SwerexError("builtins.ValueError", f"the request can't be read: {error}") from None
        session = await self._session(sandbox_id, action.session)
        if action.action_type == "bash_interrupt":
            return await self._interrupt(sandbox_id, session, action)
        if action.is_interactive_command or action.is_interactive_quit:
            return await self._interactive(sandbox_id, session, action)
        return await self._normal(sandbox_id, session, action, request_id)

    async def _normal(self, sandbox_id: str, session: Session, action: Action, request_id: str) -> Observation:
        expect = Expect(action.expect)
        await self._check_syntax(sandbox_id, action.command)
        run = await self._start(sandbox_id, session, action.command, request_id or None)
        matched = await self._wait(sandbox_id, session, run, expect, action)
        output = as_text(matched[1])
        if matched[0] != PROMPT:
            if action.check == "raise":
                raise SwerexError("NoExitCodeError", f"{matched[0]!r} came before the end of {action.command!r}")
            return Observation(output, None, expect_string=matched[0])
        if action.check == "ignore":
            return Observation(output, None, expect_string=PROMPT)
        if action.check == "raise" and run.code != 0:
            message = f"Command {action.command!r} failed with exit code {run.code}. Here is the output:\n{output!r}"
            raise SwerexError("NonZeroExitCodeError", _told(action.error_msg, message))
        return Observation(output, run.code, expect_string=PROMPT)

    async def _interactive(self, sandbox_id: str, session: Session, action: Action) -> Observation:
        """Something that doesn't end: a line for the program in the foreground, or the start of one."""
        expect = Expect(action.expect)
        if session.busy:
            await session.catch_up()
        current = session.machine.current
        if current is not None and not session.ended:
            await self._sessions.input(sandbox_id, session, f"{action.command}\n")
            run = current
        else:
            run = await self._start(sandbox_id, session, action.command, None)
        string, data = await self._wait(sandbox_id, session, run, expect, action)
        output = as_text(data)
        if not action.is_interactive_quit:
            output = output.lstrip().removeprefix(action.command).strip()  # some programs echo
        return Observation(output, 0, expect_string=string)

    async def _interrupt(self, sandbox_id: str, session: Session, action: Action) -> Observation:
        if session.busy:
            await session.catch_up()
        run = session.machine.current
        if run is None or session.ended:
            return Observation("", 0, expect_string=PROMPT)
        expect = Expect(action.expect)
        grace_s = _KILL_GRACE_S if action.timeout is None else action.timeout
        for _ in range(max(1, min(action.n_retry, 100))):
            await session.interrupt(run)
            if await session.until(lambda: run.done or expect.search(run.output) is not None, grace_s):
                break
        else:
            await self._sessions.stop(sandbox_id, session, run, grace_s)
        if session.ended:
            raise _shell_gone(session)
        string, data = _matched(run, expect) or (PROMPT, run.take())
        return Observation(as_text(data).strip(), 0, expect_string=string)

    async def _start(self, sandbox_id: str, session: Session, command: str, key: str | None) -> Run:
        try:
            run, known = await self._sessions.start(sandbox_id, session, command, key=key, room=OUTPUT_BYTES)
        except Conflict as error:
            if session.ended:
                raise _shell_gone(session) from None
            raise SwerexError("SwerexException", f"{error.message}: interrupt it first", code=error.code) from None
        if known and run.done:
            raise SwerexError("SwerexException", "this request was answered already")
        return run

    async def _wait(
        self, sandbox_id: str, session: Session, run: Run, expect: Expect, action: Action
    ) -> tuple[str, bytes]:
        """Which string ended the wait, and the output before it."""

        def over() -> bool:
            return run.done or run.size > COMMAND_BYTES or expect.search(run.output) is not None

        if not await session.until(over, action.timeout):
            raise SwerexError(
                "CommandTimeoutError",
                f"timeout after {action.timeout} seconds while running command {action.command!r}",
                output=as_text(bytes(run.output[-OUTPUT_BYTES:])),
            )
        if run.done:
            self._sessions.note_result(sandbox_id, session, run)
        found = _matched(run, expect)
        if found is None and not run.done:
            if session.ended:
                raise _shell_gone(session, run)
            await self._sessions.stop(sandbox_id, session, run, GRACE_S)
            raise SwerexError("SwerexException", f"{action.command!r} was stopped: it wrote over {COMMAND_BYTES} bytes")
        return found or (PROMPT, run.take())

    async def _check_syntax(self, sandbox_id: str, command: str) -> None:
        """As that client's own server does: a command that can't be parsed isn't run."""
        spec = ExecSpec(argv=["bash", "-O", "extglob", "-n"], stdin=True, command_timeout_s=30.0)
        stdout, stderr, status = await self._collect(sandbox_id, spec, command.encode("utf-8", "surrogateescape"))
        if status.exit_code == 0 or status.cause is not Cause.EXITED:
            return
        message = (
            f"Error (exit code {status.exit_code}) while checking bash command \n{command!r}\n"
            f"---- Stderr ----\n{stderr}\n---- Stdout ----\n{stdout}"
        )
        raise SwerexError("BashIncorrectSyntaxError", message, bash_stdout=stdout, bash_stderr=stderr)

    async def _close_session(self, sandbox_id: str, body: bytes, request_id: str) -> Closed:
        request = _decode(CloseSession, body)
        await self._session(sandbox_id, request.session)
        await self._sessions.close(sandbox_id, request.session)
        return Closed()

    async def _close(self, sandbox_id: str) -> Empty:
        for info in await self._sessions.list(sandbox_id):
            await self._sessions.close(sandbox_id, info.name)
        return Empty()

    async def _session(self, sandbox_id: str, name: str) -> Session:
        try:
            return await self._sessions.get(sandbox_id, _name(name))
        except NotFound as error:
            if type(error) is not NotFound:
                raise
            raise SwerexError("SessionDoesNotExistError", f"session {name!r} does not exist") from None

    # --- commands, files ---

    async def _execute(self, sandbox_id: str, body: bytes, request_id: str) -> CommandDone:
        request = _decode(Command, body)
        command = request.command
        if request.shell:
            argv = ["/bin/sh", "-c", *([command] if isinstance(command, str) else command)]
        else:
            argv = [command] if isinstance(command, str) else command
        if not argv:
            raise SwerexError("builtins.ValueError", "the command is empty")
        spec = ExecSpec(
            argv=argv,
            env=request.env or {},
            cwd=request.cwd,
            command_timeout_s=request.timeout,
            merge_stderr=request.merge_output_streams,
        )
        stdout, stderr, status = await self._collect(sandbox_id, spec)
        if status.cause is Cause.COMMAND_TIMEOUT and request.timeout is not None:
            raise SwerexError(
                "CommandTimeoutError",
                f"Timeout ({request.timeout}s) exceeded while running command",
                stdout=stdout,
                stderr=stderr,
            )
        if status.cause is Cause.START_FAILED:
            name = "FileNotFoundError" if status.exit_code == 127 or request.cwd is not None else "PermissionError"
            raise SwerexError(f"builtins.{name}", status.message)
        code = -status.signal if status.signal is not None else status.exit_code
        if request.check and code != 0:
            message = f"Command {command!r} failed with exit code {code}. Stdout:\n{stdout!r}\nStderr:\n{stderr!r}"
            raise SwerexError("NonZeroExitCodeError", _told(request.error_msg, message))
        return CommandDone(stdout, stderr, code)

    async def _read_file(self, sandbox_id: str, body: bytes, request_id: str) -> object:
        return await read_file(self._edge, sandbox_id, _decode(ReadFile, body))

    async def _write_file(self, sandbox_id: str, body: bytes, request_id: str) -> object:
        return await write_file(self._edge, sandbox_id, _decode(WriteFile, body))

    async def _collect(self, sandbox_id: str, spec: ExecSpec, stdin: bytes = b"") -> tuple[str, str, ExecStatus]:
        """Run a command to its end: its output as text, its status."""
        execution = await self._edge.exec(sandbox_id, spec)
        if spec.stdin:
            await execution.write_stdin(stdin)
            await execution.close_stdin()
        output = (bytearray(), bytearray())
        async for event in execution.events():
            if isinstance(event, ExecStatus):
                stdout, stderr = (bytes(part).decode("utf-8", "backslashreplace") for part in output)
                return stdout, stderr, event
            output[event.stderr].extend(event.data)
        raise AssertionError("the events ended without a status")


def _matched(run: Run, expect: Expect) -> tuple[str, bytes] | None:
    """The pattern that the output holds, and the output before it; what comes after it stays."""
    found = expect.search(run.output)
    if found is None:
        return None
    data = run.take(found[2])
    return found[0], data[: found[1]]


def _shell_gone(session: Session, run: Run | None = None) -> SwerexError:
    code = session.info().exit_code
    output = as_text(run.take()) if run is not None else ""
    how = f"with exit code {code}" if code is not None else "by force"
    return SwerexError(
        "SwerexException",
        f"the shell of session {session.name!r} has ended {how}; create the session again. Output:\n{output}",
        code="session_ended",
        exit_code=code,
        output=output,
    )


def _told(error_msg: str, message: str) -> str:
    return f"{error_msg}: {message}" if error_msg else message


def _name(session: str) -> str:
    if not 1 <= len(session) <= 100:
        raise InvalidRequest("a session's name has 1 to 100 characters")
    return session


def _decode(kind: type[Any], body: bytes) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SwerexError("builtins.ValueError", f"the request can't be read: {error}") from None


def _header(x: Exchange, name: bytes) -> str:
    return next((value for key, value in x.scope["headers"] if key == name), b"").decode("latin-1")
