"""A dsec server, reached over HTTP, as a `ports.Backend`: so that whatever runs over a backend, the conformance suite
above all, runs through SDK and API too.

Invariants: a sandbox here is one of the server's, found again by a label that holds the id that our caller chose; every
operation has a key on the server, so that it is attached to and read from any offset, and is kept until `release`.
Nothing is answered from memory that the server could be asked: the protocol's few calls that are not asynchronous
(`find`, `usage`) ask through the sync client, so the server has to be another process.

What HTTP, or the SDK, can't express raises `Unsupported`: argv and environment that are no text, offsets of stdin, a
limit of open files per command. `check` finds nothing, because a server checks what it is asked to create. A failed
start says why in words, not by stage and errno. A failed file call raises its error from `Operation.read` as it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from typing import ClassVar

import msgspec

from dsec import AsyncClient, AsyncCommand, AsyncSandbox, Client, CommandResult
from dsec.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    SandboxEnded,
    SandboxLost,
    SandboxNotFound,
    Unsupported,
)
from dsec.ports import Handle, InstanceEnd, Operation, Tap, Usage
from dsec.spec.causes import Cause
from dsec.spec.operations import Chunk, EndKind, ExecFlag, FileFlag, Kind, OpEnd, OpRequest
from dsec.spec.sandbox import SandboxInfo, SandboxSpec, State
from dsec.wire.entries import encode_entry

LABEL = "dsec.testing"
FREE_AGAIN = "dsec.session/"
"""Keys that begin so are free again once they are released, as a guest's are: the server keeps no result of them."""
_SCOPES = ("leader", "group", "all")
_POLL_S = 0.02
_ON_PURPOSE = frozenset({Cause.DELETED, Cause.SHUTDOWN})
_KINDS = {
    Cause.START_FAILED: EndKind.START_FAILED,
    Cause.COMMAND_TIMEOUT: EndKind.TIMEOUT,
    Cause.OUTPUT_LIMIT: EndKind.OUTPUT_LIMIT,
}


@contextlib.contextmanager
def _guest_errors() -> Iterator[None]:
    """A sandbox that is gone is told to the channel's users as the ports say."""
    try:
        yield
    except (SandboxEnded, SandboxLost, SandboxNotFound) as error:
        raise OutcomeUnknown(error.message, **error.details) from error


class _Remote:
    pty = False

    def watch(self, tap: Tap) -> None:
        raise Unsupported("what passes is the server's to record", remedy="Its trajectory has it.")

    async def resynced(self) -> int:
        raise Unsupported("what its guest sends again is the server's to know")


class RemoteCommand(_Remote):
    """`ports.Operation`: a command under its key on the server."""

    kind = Kind.EXEC

    def __init__(self, channel: RemoteChannel, op: int, key: bytes | None, name: str, handle: AsyncCommand | None):
        self.op = op
        self.key = key
        self.name = name
        self.stdin_offset = 0
        self.started_at = time.time()
        self._channel = channel
        self._handle = asyncio.ensure_future(self._opened(handle))
        self._follower = asyncio.ensure_future(self._follow())
        self._follower.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def pid(self) -> int | None:
        return self._handle.result().pid if _succeeded(self._handle) else None

    @property
    def end(self) -> OpEnd | None:
        return self._follower.result() if _succeeded(self._follower) else None

    async def started(self) -> int | None:
        with _guest_errors():
            return (await asyncio.shield(self._handle)).pid

    async def read(self, stdout_from: int = 0, stderr_from: int = 0) -> AsyncGenerator[Chunk | OpEnd, None]:
        at = [stdout_from, stderr_from]
        with _guest_errors():
            commands = self._channel.sandbox.commands
            reader = await commands.attach(self.name, stdout_from=stdout_from, stderr_from=stderr_from)
            try:
                async for piece in reader:
                    yield Chunk(piece.stderr, at[piece.stderr], piece.data)
                    at[piece.stderr] += len(piece.data)
                await reader.wait()
                end = await asyncio.shield(self._follower)  # which has counted for itself
            finally:
                await reader.detach()
        yield end

    async def write(self, data: bytes, offset: int | None = None) -> int:
        if offset is not None:
            raise Unsupported("the SDK keeps offsets of stdin to itself")
        with _guest_errors():
            await (await asyncio.shield(self._handle)).write_stdin(data)
        self.stdin_offset += len(data)
        return self.stdin_offset

    async def close_stdin(self) -> None:
        with _guest_errors():
            await (await asyncio.shield(self._handle)).close_stdin()

    async def resize(self, cols: int, rows: int) -> None:
        raise InvalidRequest("it has no terminal")

    async def signal(self, signal: int, scope: int = 0) -> None:
        name = _SCOPES[scope] if scope < len(_SCOPES) else str(scope)
        with _guest_errors():
            await (await asyncio.shield(self._handle)).kill(name, signal=signal)  # type: ignore[arg-type]

    async def release(self) -> None:
        self._channel.forget(self)
        await self.let_go()
        with contextlib.suppress(SandboxEnded, SandboxLost, SandboxNotFound):
            if _succeeded(self._handle):
                await self._handle.result().release()

    async def let_go(self) -> None:
        """Close the connections; the command goes on."""
        self._follower.cancel()
        await asyncio.wait([self._follower])
        if _succeeded(self._handle):
            await self._handle.result().detach()
        self._handle.cancel()

    async def _opened(self, handle: AsyncCommand | None) -> AsyncCommand:
        return handle or await self._channel.sandbox.commands.attach(self.name)

    async def _follow(self) -> OpEnd:
        """Read along to the end."""
        counts = [0, 0]
        with _guest_errors():
            handle = await asyncio.shield(self._handle)
            async for piece in handle:
                counts[piece.stderr] += len(piece.data)
            return _end_of(await handle.wait(), counts)


class RemoteFileCall(_Remote):
    """`ports.Operation`: a file call. It has no key, and one reader."""

    key = None
    pid = None

    def __init__(self, channel: RemoteChannel, op: int, request: OpRequest):
        self.op = op
        self.started_at = time.time()
        self.stdin_offset = 0
        self.kind = request.kind
        self.end: OpEnd | None = None
        self._request = request
        self._files = channel.sandbox.files
        self._channel = channel
        self._user = None if request.user is None else os.fsdecode(request.user)
        self._input: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._writing = asyncio.ensure_future(self._write()) if request.kind is Kind.WRITE else None

    async def started(self) -> int | None:
        return None

    async def read(self, stdout_from: int = 0, stderr_from: int = 0) -> AsyncGenerator[Chunk | OpEnd, None]:
        at = 0
        with _guest_errors():
            if self.kind is Kind.READ:
                request = self._request
                pieces = self._files.read_stream(
                    request.path or b"", offset=request.offset or 0, length=request.length, user=self._user
                )
                async for data in pieces:
                    yield Chunk(False, at, data)
                    at += len(data)
            elif self._writing is not None:
                await asyncio.shield(self._writing)
            else:
                data = await self._answer()
                if data:
                    yield Chunk(False, 0, data)
                at = len(data)
        self.end = OpEnd(kind=EndKind.EXITED, stdout_bytes=at)
        yield self.end

    async def write(self, data: bytes, offset: int | None = None) -> int:
        await self._put(data)
        self.stdin_offset += len(data)
        return self.stdin_offset

    async def close_stdin(self) -> None:
        await self._put(None)

    async def resize(self, cols: int, rows: int) -> None:
        raise InvalidRequest("it has no terminal")

    async def signal(self, signal: int, scope: int = 0) -> None:
        raise Unsupported("file calls take no signals over HTTP")

    async def release(self) -> None:
        self._channel.forget(self)
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    async def _put(self, data: bytes | None) -> None:
        assert self._writing is not None
        put = asyncio.ensure_future(self._input.put(data))
        try:
            await asyncio.wait([put, self._writing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            put.cancel()
        if self._writing.done() and self._writing.exception() is not None:
            self.end = OpEnd(kind=EndKind.START_FAILED)  # whoever reads hears why

    async def _write(self) -> int:
        async def content() -> AsyncGenerator[bytes, None]:
            while (data := await self._input.get()) is not None:
                yield data

        request, flags = self._request, self._request.file_flags
        return await self._files.write(
            request.path or b"",
            content(),
            mode=request.mode,
            parents=FileFlag.PARENTS in flags,
            append=FileFlag.APPEND in flags,
            exclusive=FileFlag.EXCLUSIVE in flags,
            user=self._user,
        )

    async def _answer(self) -> bytes:
        request, flags, files = self._request, self._request.file_flags, self._files
        path, user = request.path or b"", self._user
        match request.kind:
            case Kind.STAT:
                return encode_entry(await files.stat(path, follow=FileFlag.FOLLOW in flags, user=user))
            case Kind.LIST:
                return b"".join(map(encode_entry, await files.list(path, depth=request.depth or 1, user=user)))
            case Kind.MOVE:
                await files.move(path, request.path2 or b"", exclusive=FileFlag.EXCLUSIVE in flags, user=user)
            case Kind.REMOVE:
                await files.remove(path, recursive=FileFlag.RECURSIVE in flags, user=user)
            case Kind.MKDIR:
                await files.mkdir(path, mode=request.mode, parents=FileFlag.PARENTS in flags, user=user)
        return b""


class RemoteChannel:
    """`ports.GuestChannel` of one sandbox."""

    def __init__(self, sandbox: AsyncSandbox, instance: RemoteInstance, sync: Client):
        self.sandbox = sandbox
        self._instance = instance
        self._sync = sync
        self._numbers = itertools.count(1)
        self._live: dict[int, RemoteCommand | RemoteFileCall] = {}
        self._commands: dict[str, RemoteCommand] = {}

    @property
    def congested(self) -> bool:
        return True

    async def start(self, request: OpRequest) -> Operation:
        if request.kind is not Kind.EXEC:
            call = RemoteFileCall(self, next(self._numbers), request)
            self._live[call.op] = call
            return call
        name = FREE_AGAIN + (secrets.token_hex(16) if request.key is None else f"key-{request.key.hex()}")
        with _guest_errors():
            handle = await self._start(request, name)
        known = self._commands.get(name)
        if known is not None:
            await handle.detach()
            return known
        return self._keep(RemoteCommand(self, next(self._numbers), request.key, name, handle))

    async def _start(self, request: OpRequest, name: str) -> AsyncCommand:
        limit = self.sandbox.info.spec.open_files
        if request.open_files not in (None, limit):
            raise Unsupported(f"this sandbox's commands have {limit} open files", remedy="Say so in its spec.")
        env = dict(_text(variable).split("=", 1) for variable in request.env)
        commands = self.sandbox.commands
        try:
            return await commands.start(
                [_text(word) for word in request.argv],
                env=env,
                cwd=None if request.cwd is None else _text(request.cwd),
                user=None if request.user is None else _text(request.user),
                stdin=ExecFlag.STDIN in request.flags,
                command_timeout_s=None if request.timeout_ms is None else request.timeout_ms / 1000,
                output_bytes=request.output_cap,
                merge_stderr=ExecFlag.MERGE in request.flags,
                kill_leftovers=ExecFlag.KILL_LEFTOVERS in request.flags,
                key=name,
            )
        except Conflict:  # a channel looks at the key alone: whoever has it is attached to
            return await commands.attach(name)

    def find(self, key: bytes) -> RemoteCommand | None:
        name = f"{FREE_AGAIN}key-{key.hex()}"
        try:
            self._sync.connect(self.sandbox.id).commands.attach(name).detach()
        except NotFound:
            return None
        return self._commands.get(name) or self._keep(RemoteCommand(self, next(self._numbers), key, name, None))

    def operations(self) -> Sequence[Operation]:
        """Those that this object has started or found."""
        return list(self._live.values())

    async def ping(self) -> float:
        began = time.monotonic()
        await self.sandbox.refresh()
        return time.monotonic() - began

    async def lost(self) -> str:
        return (await self._instance.ended()).message

    async def close(self) -> None:
        for operation in list(self._live.values()):
            if isinstance(operation, RemoteCommand):
                await operation.let_go()
            else:
                await operation.release()
        self._live.clear()
        self._commands.clear()

    def forget(self, operation: RemoteCommand | RemoteFileCall) -> None:
        """It is released."""
        self._live.pop(operation.op, None)
        if isinstance(operation, RemoteCommand) and self._commands.get(operation.name) is operation:
            del self._commands[operation.name]

    def _keep(self, command: RemoteCommand) -> RemoteCommand:
        self._live[command.op] = self._commands[command.name] = command
        return command


class RemoteInstance:
    """`ports.Instance`: asks until the server says that the sandbox ended."""

    def __init__(self, sandbox_id: str, sandbox: AsyncSandbox, sync: Client):
        self.sandbox_id = sandbox_id
        self.sandbox = sandbox
        self.channel = RemoteChannel(sandbox, self, sync)
        self._sync = sync
        self._watcher: asyncio.Task[InstanceEnd] | None = None

    def ended(self) -> Awaitable[InstanceEnd]:
        self._watcher = self._watcher or asyncio.create_task(self._watch())
        return asyncio.shield(self._watcher)

    def usage(self) -> Usage:
        return self._sync.connect(self.sandbox.id).usage()

    async def close(self) -> None:
        """Let go of it."""
        if self._watcher is not None:
            self._watcher.cancel()
        await self.channel.close()

    async def _watch(self) -> InstanceEnd:
        while True:
            info = await self.sandbox.refresh()
            if info.cause is not None:
                return InstanceEnd(info.cause, info.message)
            await asyncio.sleep(_POLL_S)


class RemoteBackend:
    """`ports.Backend` over one server."""

    name: ClassVar[str] = "remote"
    api_version: ClassVar[int] = 1

    def __init__(self, url: str, api_key: str, *, run: str = LABEL):
        """`run`: that its sandboxes belong to. No other sandbox is touched."""
        self.epoch = 0
        self._client = AsyncClient(url, api_key)
        self._sync = Client(url, api_key)
        self._run = run
        self._instances: dict[str, RemoteInstance] = {}
        self._creating: dict[str, asyncio.Task[AsyncSandbox]] = {}

    def sandbox(self, sandbox_id: str) -> AsyncSandbox:
        """The server's sandbox under the id that our caller chose. Raises KeyError."""
        return self._instances[sandbox_id].sandbox

    async def open(self, known: dict[str, Handle]) -> Mapping[str, RemoteInstance | InstanceEnd]:
        self.epoch = (await self._client.node())["backends"]["container"]
        found: dict[str, RemoteInstance | InstanceEnd] = {}
        strays = []
        for info in await self._client.list(run=self._run, states=list(State)):
            sandbox_id = info.spec.labels[LABEL]
            if info.state in (State.ENDING, State.ENDED):
                if sandbox_id in known and info.cause not in _ON_PURPOSE:
                    found[sandbox_id] = InstanceEnd(info.cause or Cause.NODE_LOST, info.message)
            elif sandbox_id in known:
                found[sandbox_id] = self._serve(sandbox_id, await self._client.connect(info.id))
            else:
                strays.append(info)
        await self._kill(strays)
        return found

    def check(self, spec: SandboxSpec) -> None:
        """The server checks when it creates."""

    def reserve(self, sandbox_id: str, spec: SandboxSpec, tenant: int = 0, capture: str = "") -> Handle:
        return {}

    async def create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> RemoteInstance:
        ours = msgspec.structs.replace(spec, run=self._run, labels={**spec.labels, LABEL: sandbox_id})
        creating = self._creating[sandbox_id] = asyncio.create_task(self._client.create(ours))
        sandbox = await asyncio.shield(creating)
        del self._creating[sandbox_id]
        return self._serve(sandbox_id, sandbox)

    def _serve(self, sandbox_id: str, sandbox: AsyncSandbox) -> RemoteInstance:
        instance = self._instances[sandbox_id] = RemoteInstance(sandbox_id, sandbox, self._sync)
        return instance

    async def destroy(self, sandbox_id: str, handle: Handle) -> None:
        creating = self._creating.pop(sandbox_id, None)
        if creating is not None:  # its caller went away; what may come of it has to be known
            await asyncio.wait([creating])
        instance = self._instances.pop(sandbox_id, None)
        await self._kill(await self._client.list(run=self._run, labels={LABEL: sandbox_id}))
        if instance is not None:
            await instance.close()

    async def close(self, *, keep: bool) -> None:
        for instance in self._instances.values():
            await instance.close()
        self._instances.clear()
        if not keep:
            await self._kill(await self._client.list(run=self._run))
        await self._client.close()
        self._sync.close()

    async def _kill(self, sandboxes: Sequence[SandboxInfo]) -> None:
        for error in (await self._client.kill_many(sandboxes)).values() if sandboxes else ():
            raise error


def _succeeded(future: asyncio.Future[object] | asyncio.Task[object]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise Unsupported("over HTTP the arguments and environment of a command are text") from None


def _end_of(result: CommandResult, counts: Sequence[int]) -> OpEnd:
    """The guest's report out of a caller's result, as far as that goes."""
    kind = _KINDS.get(result.cause)
    if kind is None and result.cause is Cause.KILLED and result.signal == 9:
        kind = EndKind.KILLED
    elif kind is None:
        kind = EndKind.EXITED if result.signal is None else EndKind.SIGNALED
    return OpEnd(
        kind=kind,
        code=result.signal or result.exit_code,
        message=result.message,
        truncated=result.truncated,
        cpu_us=round(result.cpu_s * 1e6),
        wall_us=round(result.wall_s * 1e6),
        max_rss_bytes=result.max_rss_bytes,
        stdout_bytes=counts[0],
        stderr_bytes=counts[1],
        dropped_bytes=result.dropped_bytes,
    )
