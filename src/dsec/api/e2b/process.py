"""The Process service of E2B's data plane: commands and terminals, named by their pid inside.

Owns nothing: commands are the edge's. Invariants: a command is ended whole when its `Connect-Timeout-Ms` is over, and
goes on when its client goes away; output is passed on as it comes, nothing of it is kept beyond what the edge keeps.
"""

from __future__ import annotations

import base64
import os
import signal as signals
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Struct

from dsec.api.e2b import rpc
from dsec.api.e2b.call import Call
from dsec.api.e2b.errors import RpcError
from dsec.api.e2b.filesystem import text_of
from dsec.api.e2b.users import Users
from dsec.api.held import HOLD_S
from dsec.edge.client import EdgeClient, Execution
from dsec.errors import InvalidRequest, NotFound
from dsec.spec.causes import Cause
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import ExecSpec, ExecStatus, PtySize
from dsec.wire.connect import Code

UNLIMITED_BYTES = 1 << 40
"""Output cap of a command: nothing of it is kept here, so none is needed."""
STILL_KEPT = -1
KEEPALIVE = b'{"event":{"keepalive":{}}}'
_SHELL = "/bin/bash"
_SIGNALS = {"SIGNAL_SIGKILL": signals.SIGKILL, "SIGNAL_SIGTERM": signals.SIGTERM, "9": signals.SIGKILL}
_encode = msgspec.json.Encoder().encode


class Config(Struct):
    cmd: str = ""
    args: list[str] = []
    envs: dict[str, str] = {}
    cwd: str | None = None


class Size(Struct):
    cols: Annotated[int, Meta(ge=0, le=65535)] = 0
    rows: Annotated[int, Meta(ge=0, le=65535)] = 0


class Pty(Struct):
    size: Size = msgspec.field(default_factory=Size)


class Selector(Struct):
    pid: int | None = None
    tag: str | None = None


class Input(Struct):
    """Bytes for stdin or a terminal, in base64."""

    stdin: bytes | None = None
    pty: bytes | None = None


class StartRequest(Struct):
    process: Config
    pty: Pty | None = None
    tag: str | None = None
    stdin: bool | None = None


class SelectRequest(Struct):
    """Connect, CloseStdin."""

    process: Selector


class InputRequest(Struct):
    process: Selector
    input: Input


class ProcessSignal(Struct):
    process: Selector
    signal: str | int = ""


class UpdateRequest(Struct):
    process: Selector
    pty: Pty | None = None


class InputData(Struct):
    input: Input


class StreamItem(Struct):
    """One message of StreamInput."""

    start: SelectRequest | None = None
    data: InputData | None = None
    keepalive: dict[str, Any] | None = None


class Nothing(Struct):
    pass


class RunningConfig(Struct, frozen=True):
    cmd: str
    args: list[str]


class RunningProcess(Struct, frozen=True):
    pid: int
    config: RunningConfig


class Running(Struct, frozen=True):
    """Answer to List."""

    processes: list[RunningProcess]


class ProcessService:
    """Handlers by the RPC's name; each answers its exchange or raises before it began."""

    def __init__(self, edge: EdgeClient, users: Users) -> None:
        self._edge = edge
        self._users = users
        self.unary = {
            "List": self.list,
            "SendInput": self.send_input,
            "SendSignal": self.send_signal,
            "CloseStdin": self.close_stdin,
            "Update": self.update,
        }
        self.streams = {"Start": self.start, "Connect": self.connect, "StreamInput": self.stream_input}

    async def start(self, sandbox_id: str, call: Call) -> None:
        """Start a command; stream its pid, output and end."""
        request = await rpc.single(call.x, StartRequest)
        execution = await self._edge.exec(sandbox_id, await self._spec(sandbox_id, request, call))
        await rpc.stream(
            call,
            _events(execution, request.process.cmd, started=True),
            _terminal_message if request.pty is not None else _message,
            keepalive=KEEPALIVE,
            hold_s=HOLD_S if request.pty is None else 0.0,
            deadline_s=None,  # the command's own timeout ends it
        )

    async def connect(self, sandbox_id: str, call: Call) -> None:
        """Stream a running command: its pid, what is kept of its output and what comes, its end."""
        request = await rpc.single(call.x, SelectRequest)
        timeout_s = call.timeout_s()
        pid = _pid(request.process)
        execution = await self._find(sandbox_id, pid)
        terminal = any(process.pid == pid and process.pty for process in self._edge.processes(sandbox_id))
        await rpc.stream(
            call,
            _events(execution, "", started=False),
            _terminal_message if terminal else _message,
            keepalive=KEEPALIVE,
            hold_s=0.0 if terminal else HOLD_S,
            deadline_s=timeout_s,
        )

    async def list(self, sandbox_id: str, call: Call) -> Running:
        """Running commands."""
        await rpc.unary(call.x, Nothing)
        return Running(
            [
                RunningProcess(each.pid, RunningConfig("".join(argv[:1]), argv[1:]))
                for each in self._edge.processes(sandbox_id)
                for argv in [[text_of(os.fsencode(argument)) for argument in each.argv]]
            ]
        )

    async def send_input(self, sandbox_id: str, call: Call) -> Nothing:
        """Bytes for stdin or a terminal."""
        request = await rpc.unary(call.x, InputRequest)
        execution = await self._find(sandbox_id, _pid(request.process))
        await execution.write_stdin(_bytes(request.input))
        return Nothing()

    async def stream_input(self, sandbox_id: str, call: Call) -> None:
        """The same, many times in one request."""
        execution: Execution | None = None
        async with aclosing(rpc.messages(call.x)) as items:
            async for payload in items:
                item = rpc.decode(payload, StreamItem)
                if item.start is not None:
                    execution = await self._find(sandbox_id, _pid(item.start.process))
                elif item.data is not None:
                    if execution is None:
                        raise InvalidRequest("the first message is `start`, with the process")
                    await execution.write_stdin(_bytes(item.data.input))
        await rpc.finish_single(call.x, {})

    async def close_stdin(self, sandbox_id: str, call: Call) -> Nothing:
        """End of input."""
        request = await rpc.unary(call.x, SelectRequest)
        await (await self._find(sandbox_id, _pid(request.process))).close_stdin()
        return Nothing()

    async def send_signal(self, sandbox_id: str, call: Call) -> Nothing:
        """SIGKILL ends all that the command started; SIGTERM goes to its process group."""
        request = await rpc.unary(call.x, ProcessSignal)
        name = str(request.signal)
        number = _SIGNALS.get(name) or (signals.SIGTERM if name == "15" else None)
        if number is None:
            raise InvalidRequest(f"the signal {name[:40]!r} is none of SIGNAL_SIGKILL, SIGNAL_SIGTERM")
        execution = await self._find(sandbox_id, _pid(request.process))
        scope = "all" if number is signals.SIGKILL else "group"
        await self._edge.signal(sandbox_id, execution.key, int(number), scope)
        return Nothing()

    async def update(self, sandbox_id: str, call: Call) -> Nothing:
        """The size of a terminal."""
        request = await rpc.unary(call.x, UpdateRequest)
        execution = await self._find(sandbox_id, _pid(request.process))
        if request.pty is not None:
            size = request.pty.size
            await self._edge.resize(sandbox_id, execution.key, size.cols, size.rows)
        return Nothing()

    async def _find(self, sandbox_id: str, pid: int) -> Execution:
        try:
            return await self._edge.attach_pid(sandbox_id, pid)
        except NotFound as error:
            if type(error) is not NotFound:
                raise
            raise RpcError(Code.NOT_FOUND, f"process with pid {pid} not found") from None

    async def _spec(self, sandbox_id: str, request: StartRequest, call: Call) -> ExecSpec:
        config = request.process
        if not config.cmd:
            raise InvalidRequest("the process has no cmd")
        user = await self._users.find(sandbox_id, call.user())
        cwd = config.cwd
        if cwd:
            raw, _ = await self._users.path(sandbox_id, cwd, user.name)
            cwd = raw.decode("utf-8", "surrogateescape")
        else:
            workdir = self._edge.get(sandbox_id).spec.workdir
            cwd = user.home if workdir == "/" and user.home_exists else workdir
        pty = request.pty
        return ExecSpec(
            argv=[config.cmd, *config.args],
            env=config.envs if pty is None else {"TERM": "xterm-256color", **config.envs},
            cwd=cwd,
            user=user.name,
            stdin=bool(request.stdin) and pty is None,
            command_timeout_s=call.timeout_s(),
            output_bytes=UNLIMITED_BYTES,
            pty=None if pty is None else PtySize(cols=pty.size.cols, rows=pty.size.rows),
        )


async def _events(execution: Execution, cmd: str, *, started: bool) -> AsyncGenerator[int | Chunk | ExecStatus]:
    """Pid, output, status. Raises `RpcError` for a command that never ran or whose time is over."""
    pid = await execution.started()
    if pid is not None:
        yield pid
    kept = 0 if started else STILL_KEPT
    events = cast("AsyncGenerator[Chunk | ExecStatus]", execution.events(kept, kept))
    async with aclosing(events):
        async for event in events:
            if type(event) is ExecStatus:
                _check(event, cmd)
            yield event


def _check(status: ExecStatus, cmd: str) -> None:
    if status.cause is Cause.COMMAND_TIMEOUT:
        raise RpcError(Code.DEADLINE_EXCEEDED, f"the command was ended: {status.message}")
    if status.cause is Cause.START_FAILED:
        message = f"the command did not start: {status.message}"
        if cmd == _SHELL and status.exit_code == 127:
            message = (
                f"the image has no {_SHELL}, and E2B's client runs every command in it: install bash in the "
                "environment, or use dsec's own client, which runs any program"
            )
        raise RpcError(Code.INVALID_ARGUMENT, message)


def _message(event: int | Chunk | ExecStatus) -> bytes:
    if type(event) is Chunk:
        stream = b"stderr" if event.stderr else b"stdout"
        return b'{"event":{"data":{"%s":"%s"}}}' % (stream, base64.b64encode(event.data))
    if isinstance(event, int):
        return b'{"event":{"start":{"pid":%d}}}' % event
    return _end_message(cast("ExecStatus", event))


def _terminal_message(event: int | Chunk | ExecStatus) -> bytes:
    if type(event) is Chunk:
        return b'{"event":{"data":{"pty":"%s"}}}' % base64.b64encode(event.data)
    return _message(event)


def _end_message(status: ExecStatus) -> bytes:
    """A process that a signal ended has no exit code for E2B's client, which says -1; here it is the shell's 128+n."""
    end: dict[str, Any] = {
        "exitCode": status.exit_code,
        "exited": status.cause is Cause.EXITED,
        "status": f"exit status {status.exit_code}" if status.signal is None else f"signal: {status.signal}",
    }
    if status.message:
        end["error"] = status.message
    return _encode({"event": {"end": end}})


def _pid(selector: Selector) -> int:
    if selector.pid is None:
        raise InvalidRequest("a process is named by its pid here")
    return selector.pid


def _bytes(data: Input) -> bytes:
    return data.stdin or data.pty or b""
