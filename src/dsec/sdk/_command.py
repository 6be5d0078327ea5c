"""One command that runs in a sandbox: its stream over as many connections as it takes, its stdin, its end.

Invariants: output is handed on once and in order, whatever breaks; stdin is taken once; a command that is known to have
started is attached to and never started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from dsec.errors import (
    DsecError,
    ErrorBody,
    NotFound,
    OutcomeUnknown,
    SandboxNotFound,
    Unavailable,
    from_body,
)
from dsec.sdk._answers import Answer, cut_errors
from dsec.sdk._results import CommandResult, Output, make_result
from dsec.sdk._transport import Body, Retry, Transport, timed_out
from dsec.spec.sandbox import ExecStatus
from dsec.wire.exec_stream import MEDIA_TYPE, ClientKind, ServerDecoder, ServerKind, encode
from dsec.wire.frames import ProtocolError

if TYPE_CHECKING:
    from yarl import URL

T = TypeVar("T")
OnOutput = Callable[[bytes], Awaitable[None] | None]
Scope = Literal["leader", "group", "all"]

_JSON = {"Content-Type": "application/json"}
_FRAMES = {"Content-Type": MEDIA_TYPE}
_OCTETS = {"Content-Type": "application/octet-stream"}
_STDIN_CHUNK = 256 << 10
_STDIN_WRITE = 96 << 10
"""What the connection doesn't take of one write at once is copied; so small, the copy's memory is not mapped afresh."""
_STDIN_POST = 4 << 20
"""Of stdin in one request: it is kept until the server has taken it."""
_RELEASES_A_REQUEST = 64
_PATIENCE_MS = 1000
"""How long the server may hold output of a command whose caller wants the result alone: then it comes in one piece."""
_ENCODER = msgspec.json.Encoder()


class _Started(Struct, frozen=True):
    key: str
    pid: int | None = None
    attached: bool = False


class _Taken(Struct, frozen=True):
    offset: int


_STARTED = msgspec.json.Decoder(_Started)
_STATUS = msgspec.json.Decoder(ExecStatus)
_ERROR = msgspec.json.Decoder(ErrorBody)


class ExecCalls:
    """The addresses of one sandbox's exec calls, and the keys that wait to be released there."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self.transport = transport
        self.path = f"/v1/sandboxes/{sandbox_id}/exec"
        self._start: tuple[URL, URL] | None = None
        self.done: list[str] = []
        """Keys chosen by this client whose results have arrived."""

    def start_url(self, patient: bool) -> URL:
        """Of a start. `patient`: the result is wanted, not the output as it comes."""
        if self._start is None:
            self._start = (self.transport.url(self.path), self.transport.url(self.path, hold_ms=_PATIENCE_MS))
        return self._start[patient]

    def interactive_url(self) -> URL:
        """Of the start of a command that somebody types to: output is not held."""
        return self.transport.url(self.path, hold_ms=0)

    def url(self, key: str, verb: str = "", **query: object) -> URL:
        """Of a call on the command of a key."""
        return self.transport.url(f"{self.path}/{quote(key, safe='')}{verb}", **query)

    def take_done(self) -> list[str]:
        """Keys to release with the next request."""
        taken = self.done[:_RELEASES_A_REQUEST]
        del self.done[:_RELEASES_A_REQUEST]
        return taken

    async def finished(self, key: str) -> None:
        """The result of a command whose key was chosen by this client has arrived."""
        self.done.append(key)
        if len(self.done) > _RELEASES_A_REQUEST:  # a burst that no later command follows
            keys, self.done = self.done, []
            url = self.transport.url(f"{self.path}:release")
            body = _ENCODER.encode({"keys": keys})
            await self.transport.call("POST", url, type(None), body=body, headers=_JSON)


class AsyncCommand:
    """A command that was started: iterate over its output, write to its stdin, end it, wait for it.

    `async for output in command` gives `Output` pieces as they come. `wait` gives the result with the output that was
    not iterated over. The command goes on when this handle, or the process that holds it, goes away; `async with` ends
    it whole instead.
    """

    def __init__(
        self,
        calls: ExecCalls,
        key: str,
        body: bytes | None,
        *,
        own_key: bool,
        stdin: bytes | None = None,
        interactive: bool = False,
        seen: tuple[int, int] = (0, 0),
    ) -> None:
        """Not for callers: use `commands.start` or `attach`."""
        self.key: str = key
        """Names it in `commands.attach`, also from another process."""
        self.pid: int | None = None
        """Inside the sandbox; None where it could not be started."""
        self._calls = calls
        self._transport = calls.transport
        self._body = body
        """The spec; None: it was started by somebody else."""
        self._own_key = own_key
        self._patient = False
        self._interactive = interactive
        self._input = stdin
        self._started = False
        self._queue: deque[tuple[ServerKind, bytes]] = deque()
        self._seen = list(seen)
        """Bytes of stdout and stderr received."""
        self._status: ExecStatus | None = None
        self._failure: DsecError | None = None
        self._result: CommandResult | None = None
        self._answer: Answer | None = None
        self._decoder = ServerDecoder()
        self._retry: Retry | None = None
        self._connected_at = 0.0
        self._stdin_at: int | None = None if body is None else 0
        self._stdin_turn: asyncio.Lock | None = None

    # --- output -----------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Output]:
        return self._outputs()

    async def wait(self, *, request_timeout_s: float | None = None) -> CommandResult:
        """Wait for the end. The result holds the output that was not iterated over before. Again: the same result.

        `request_timeout_s` limits the wait, not the command. Raises as `commands.run` does.
        """
        return await limited(self.collect(None, None), request_timeout_s, key=self.key)

    # --- input and signals ------------------------------------------------------------------------------------------

    async def write_stdin(self, data: bytes | memoryview | str, *, request_timeout_s: float | None = None) -> None:
        """Send to its stdin; returns when the command, or the pipe to it, has taken it. Data is sent once even if the
        connection breaks. Data for a command that ended or closed its stdin is dropped."""
        if isinstance(data, str):
            data = data.encode()
        await limited(self._send_stdin(data, eof=False), request_timeout_s)

    async def close_stdin(self, *, request_timeout_s: float | None = None) -> None:
        """End its stdin. Idempotent."""
        await limited(self._send_stdin(b"", eof=True), request_timeout_s)

    async def resize(self, cols: int, rows: int, *, request_timeout_s: float | None = None) -> None:
        """The size of its terminal. Raises `InvalidRequest` where it has none; no error where it has ended."""
        if self._status is None:
            await self._transport.call(
                "POST",
                self._calls.url(self.key, "/resize"),
                type(None),
                body=_ENCODER.encode({"cols": cols, "rows": rows}),
                headers=_JSON,
                request_timeout_s=request_timeout_s,
            )

    async def kill(
        self, scope: Scope = "all", *, signal: int | None = None, request_timeout_s: float | None = None
    ) -> None:
        """End it. `scope` "all": everything that it started, double forks included, by SIGKILL; "group": its process
        group, "leader": it alone, both by `signal` (default 15). No error where it has ended already."""
        if self._status is not None:
            return
        number = signal if signal is not None else (9 if scope == "all" else 15)
        await self._transport.call(
            "POST",
            self._calls.url(self.key, "/signal"),
            type(None),
            body=_ENCODER.encode({"signal": number, "scope": scope}),
            headers=_JSON,
            request_timeout_s=request_timeout_s,
        )

    async def release(self, *, request_timeout_s: float | None = None) -> None:
        """Let the server forget it, its output and its result; a running one is ended whole. Idempotent."""
        await self._transport.call("DELETE", self._calls.url(self.key), type(None), request_timeout_s=request_timeout_s)

    async def detach(self) -> None:
        """Close the connection; the command goes on. `commands.attach(key)` finds it again."""
        self._disconnect()

    def _disconnect(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    async def __aenter__(self) -> AsyncCommand:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disconnect()
        await self.release()

    # --- the stream -------------------------------------------------------------------------------------------------

    async def collect(self, on_stdout: OnOutput | None, on_stderr: OnOutput | None) -> CommandResult:
        """Not for callers: read to the end."""
        if self._result is not None:
            return self._result
        self._patient = on_stdout is None and on_stderr is None
        stdout: list[bytes] = []
        stderr: list[bytes] = []
        async for kind, payload in self._stream():
            if kind is ServerKind.STDOUT:
                stdout.append(payload)
                if on_stdout is not None:
                    await _notify(on_stdout, payload)
            elif kind is ServerKind.STDERR:
                stderr.append(payload)
                if on_stderr is not None:
                    await _notify(on_stderr, payload)
        assert self._status is not None
        self._result = make_result(self._status, b"".join(stdout), b"".join(stderr), self.key)
        return self._result

    async def _outputs(self) -> AsyncGenerator[Output]:
        async for kind, payload in self._stream():
            if kind is ServerKind.STDOUT:
                yield Output(payload)
            elif kind is ServerKind.STDERR:
                yield Output(payload, stderr=True)

    async def _stream(self) -> AsyncGenerator[tuple[ServerKind, bytes]]:
        """Output frames up to the end, over as many connections as it takes. Can be left and entered again."""
        queue = self._queue
        while True:
            while queue:
                yield queue.popleft()
            if self._status is not None:
                return
            await self._read()

    async def open(self) -> None:
        """Not for callers: read until the command is known to have started, or failed to."""
        while not self._started:
            await self._read()

    async def _read(self) -> None:
        """Read once and queue the frames that came; connect first where there is no connection. Raises the error of an
        ERROR frame, and again if called again."""
        if self._failure is not None:
            raise self._failure
        answer = self._answer
        if answer is None:
            answer = self._answer = await self._connect()
            self._connected_at = time.monotonic()
            self._decoder = ServerDecoder()
        cut: BaseException | None = None
        data = b""
        try:
            data = await answer.read_some()
        except cut_errors() as error:
            cut = error
        except BaseException:
            self._disconnect()  # cancelled; a later call attaches again
            raise
        if not data:
            self._disconnect()
            self._retry = self._retry or Retry(self._transport)
            stood_s = time.monotonic() - self._connected_at
            await self._retry.wait(cut or ConnectionResetError("the answer was cut"), stood_s=stood_s)
            return
        try:
            frames = self._decoder.feed(data)
        except ProtocolError as error:
            self._disconnect()
            raise Unavailable(f"the answer is not that of a dsec server of this version: {error}") from error
        for frame in frames:
            kind, payload = frame
            if kind is not ServerKind.STARTED:  # that alone is said again by each connection, also by one that is cut
                self._retry = None
            if kind is ServerKind.STDOUT or kind is ServerKind.STDERR:
                self._seen[kind is ServerKind.STDERR] += len(payload)
                self._queue.append(frame)
            elif kind is ServerKind.STARTED:
                self._started = True
                self.pid = _STARTED.decode(payload).pid
            elif kind is ServerKind.END:
                self._status = _STATUS.decode(payload)
                self._started = True
                await self._whole(answer)
                if not self._own_key:
                    await self._calls.finished(self.key)
            else:
                self._failure = from_body(_ERROR.decode(payload))
                self._failure.details.setdefault("request_id", answer.header("X-Request-Id") or "")
                self._started = True
                await self._whole(answer)
                if not self._queue:
                    raise self._failure

    async def _whole(self, answer: Answer) -> None:
        """The last frame has come: see the body's end too, so that the connection can be used again."""
        if not answer.at_end:
            with contextlib.suppress(*cut_errors()):
                await answer.read_some()
        self._disconnect()

    async def _connect(self) -> Answer:
        calls, transport = self._calls, self._transport
        if self._started or self._body is None:
            hold_ms = 0 if self._interactive else None
            url = calls.url(self.key, stdout_from=self._seen[0], stderr_from=self._seen[1], hold_ms=hold_ms)
            try:
                return await transport.send("GET", url, retry=self._retry)
            except NotFound as error:
                if not self._started or isinstance(error, SandboxNotFound):
                    raise
                raise OutcomeUnknown("the server lost the command while it ran", key=self.key) from error
        headers = _JSON if self._input is None else _FRAMES
        body: Body = self._body if self._input is None else _framed(self._body, self._input)
        done = calls.take_done()
        if not done or self._interactive:
            calls.done += done
            url = calls.interactive_url() if self._interactive else calls.start_url(self._patient)
            return await transport.send("POST", url, body=body, headers=headers, retry=self._retry)
        try:
            return await transport.send(
                "POST",
                calls.start_url(self._patient),
                body=body,
                headers={**headers, "X-Dsec-Release": ",".join(done)},
                retry=self._retry,
            )
        except BaseException:
            calls.done += done
            raise

    async def _send_stdin(self, data: bytes | memoryview, *, eof: bool) -> None:
        if self._stdin_turn is None:
            self._stdin_turn = asyncio.Lock()
        async with self._stdin_turn:
            if self._status is not None:
                return
            at = self._stdin_at
            self._stdin_at = None  # until it is known again: this may be cancelled
            if at is None:
                at = (await self._post_stdin(memoryview(b""), None, False)).offset
            view = memoryview(data)
            for i in range(0, len(view) or 1, _STDIN_POST):
                part = view[i : i + _STDIN_POST]
                await self._post_stdin(part, at, eof and i + len(part) == len(view))
                at += len(part)
            self._stdin_at = at

    async def _post_stdin(self, data: memoryview, offset: int | None, eof: bool) -> _Taken:
        url = self._calls.url(self.key, "/stdin", offset=offset, eof=eof)
        headers = _OCTETS
        body: Body
        if len(data) <= _STDIN_CHUNK:
            body = bytes(data)
        else:  # as the connection takes it: a copy of all of it costs more than sending it
            headers = {**_OCTETS, "Content-Length": str(len(data))}

            async def body() -> AsyncGenerator[memoryview]:
                for i in range(0, len(data), _STDIN_WRITE):
                    yield data[i : i + _STDIN_WRITE]

        return await self._transport.call("POST", url, _Taken, body=body, headers=headers)


def _framed(spec: bytes, stdin: bytes) -> Body:
    """Spec and whole stdin as a request body; large ones are made frame by frame."""
    if len(stdin) <= _STDIN_CHUNK:
        return b"".join((encode(ClientKind.SPEC, spec), encode(ClientKind.STDIN, stdin), encode(ClientKind.STDIN_END)))

    async def frames() -> AsyncGenerator[bytes]:
        yield encode(ClientKind.SPEC, spec)
        for i in range(0, len(stdin), _STDIN_CHUNK):
            yield encode(ClientKind.STDIN, stdin[i : i + _STDIN_CHUNK])
        yield encode(ClientKind.STDIN_END)

    return frames


async def limited(work: Awaitable[T], request_timeout_s: float | None, **details: object) -> T:
    if request_timeout_s is None:
        return await work
    try:
        async with asyncio.timeout(request_timeout_s):
            return await work
    except TimeoutError:
        raise timed_out(request_timeout_s, **details) from None


async def _notify(callback: OnOutput, data: bytes) -> None:
    answer = callback(data)
    if inspect.isawaitable(answer):
        await answer
