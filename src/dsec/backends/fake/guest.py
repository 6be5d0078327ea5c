"""The fake guest: the other end of a channel, in Python, with the real protocol.

Owns: frames in and out, windows, what is kept until it is acknowledged, the resync; as native/guest does it, so
that the edge's side is exercised whole. What a command is comes from `commands`; a file call runs over the file
system in memory.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

from dsec.backends.fake import commands
from dsec.backends.fake.files import FileSystem, fail
from dsec.spec.operations import EndKind, ExecFlag, FileFlag, Kind, OpEnd, OpRequest, Stage
from dsec.wire.entries import encode_entry
from dsec.wire.frames import (
    MAX_DATA,
    MAX_FRAME,
    MAX_OPS,
    PROTOCOL_VERSION,
    WINDOW,
    Flag,
    Frame,
    FrameType,
    ProtocolError,
    RequestJoiner,
    decode,
    encode,
)
from dsec.wire.messages import OpState, decode_request, encode_exit, encode_opstate

_U64 = struct.Struct("<Q")
_TWO_U64 = struct.Struct("<QQ")
_TWO_U32 = struct.Struct("<II")
_HELLO = struct.Struct("<HHIQ")
_WELCOME = struct.Struct("<HHIQQ")


class StartFailed(Exception):
    """An operation could not start."""

    def __init__(self, stage: Stage, code: int) -> None:
        super().__init__(stage, code)
        self.stage = stage
        self.code = code


class _Stream:
    """Output that was not acknowledged."""

    def __init__(self) -> None:
        self.base = self.end = 0
        self.held = bytearray()


class FakeOperation:
    """One operation inside; also the `commands.Process` of a command."""

    def __init__(self, guest: FakeGuest, op: int, request: OpRequest, pid: int) -> None:
        self.guest = guest
        self.op = op
        self.request = request
        self.pid = pid
        self.started = False
        self.finished: OpEnd | None = None
        self.reason: tuple[EndKind, int] | None = None
        self.streams = (_Stream(), _Stream())
        self.dropped = 0
        self.room = asyncio.Event()
        self.input = bytearray()
        self.input_received = 0
        self.input_written = 0
        self.input_eof = not (request.flags & ExecFlag.STDIN or request.kind is Kind.WRITE)
        self.input_changed = asyncio.Event()
        self.began = time.monotonic()
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        # the process
        self.fs: FileSystem = guest.fs
        self.hostname = guest.hostname
        self.argv = list(request.argv)
        self.env: dict[bytes, bytes] = {}
        for pair in request.env:
            name, _, value = pair.partition(b"=")
            self.env[name] = value
        self.cwd = request.cwd or b"/"
        self.uid = self.gid = 0

    # --- as a process ------------------------------------------------------------------------------------------------

    async def out(self, data: bytes) -> None:
        await self._emit(False, data)

    async def err(self, data: bytes) -> None:
        await self._emit(not self.request.flags & ExecFlag.MERGE, data)

    async def _emit(self, stderr: bool, data: bytes) -> None:
        cap = self.request.output_cap
        total = self.streams[0].end + self.streams[1].end
        over = cap is not None and total + len(data) > cap
        kept = data[: max(0, cap - total)] if over and cap is not None else data
        for at in range(0, len(kept), MAX_DATA):
            piece = kept[at : at + MAX_DATA]
            while sum(len(stream.held) for stream in self.streams) + len(piece) > WINDOW:
                self.room.clear()
                await self.room.wait()
            stream = self.streams[stderr]
            offset = stream.end
            stream.held += piece
            stream.end += len(piece)
            self.guest.send_output(self, stderr, offset, piece)
        if over:
            self.dropped += len(data) - len(kept)
            self.kill(EndKind.OUTPUT_LIMIT)
            await asyncio.sleep(3600)  # until the cancellation comes

    async def stdin(self) -> bytes:
        while not self.input and not self.input_eof:
            self.input_changed.clear()
            await self.input_changed.wait()
        data = bytes(self.input)
        self.input.clear()
        if data:
            self.input_written += len(data)
            self.guest.send(FrameType.STDIN_ACK, self.op, _U64.pack(self.input_written))
        return data

    # --- its life ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        if self.request.timeout_ms:
            self.timer = loop.call_later(self.request.timeout_ms / 1000, self.kill, EndKind.TIMEOUT)
        self.task = loop.create_task(self._run())
        self.task.add_done_callback(self._never_ran)

    def _never_ran(self, _: asyncio.Task[None]) -> None:
        """It was killed before its first step."""
        if self.finished is None:
            self._finish(*(self.reason or (EndKind.KILLED, 0)), Stage.NONE)

    def kill(self, kind: EndKind, code: int = 0) -> None:
        """End it, for a reason; the first reason stands."""
        if self.finished is None and self.reason is None:
            self.reason = (kind, code)
            if self.task is not None:
                self.task.cancel()

    async def _run(self) -> None:
        kind, code, stage = EndKind.EXITED, 0, Stage.NONE
        try:
            self.uid, self.gid = self.guest.user(self.request.user)
            if self.request.kind is Kind.EXEC:
                code = await self._command()
            else:
                self._note_started()
                await self._file_call()
        except StartFailed as failed:
            kind, code, stage = EndKind.START_FAILED, failed.code, failed.stage
        except OSError as error:
            kind, code, stage = EndKind.START_FAILED, error.errno or errno.EIO, Stage.FILE
        except commands.Signaled as signaled:
            kind, code = EndKind.SIGNALED, signaled.signal
        except asyncio.CancelledError:
            kind, code = self.reason or (EndKind.KILLED, 0)
        self._finish(kind, code, stage)

    async def _command(self) -> int:
        try:
            node = self.fs.find(self.cwd, self.uid, self.gid)
            self.fs.list(self.cwd, 0, 0, 0)
            if not node.allows(self.uid, self.gid, 1):
                raise fail(errno.EACCES)
        except OSError as error:
            raise StartFailed(Stage.CWD, error.errno or errno.EIO) from None
        try:
            command = commands.lookup(self)
        except OSError as error:
            raise StartFailed(Stage.EXEC, error.errno or errno.EIO) from None
        self._note_started()
        try:
            return await command(self)
        except SystemExit as done:
            return int(done.code or 0)

    def _note_started(self) -> None:
        self.started = True
        self.guest.send(FrameType.STARTED, self.op, _TWO_U32.pack(self.pid, 0))

    async def _file_call(self) -> None:
        request, fs, uid, gid = self.request, self.fs, self.uid, self.gid
        path, flags = request.path or b"/", request.file_flags
        match request.kind:
            case Kind.READ:
                data = fs.open_for_reading(path, uid, gid)[request.offset or 0 :]
                await self.out(data if request.length is None else data[: request.length])
            case Kind.WRITE:
                parents, exclusive = bool(flags & FileFlag.PARENTS), bool(flags & FileFlag.EXCLUSIVE)
                fs.check_write(path, uid, gid, parents=parents, exclusive=exclusive)
                parts = bytearray()
                while piece := await self.stdin():
                    parts += piece
                self.guest.check_room(len(parts))
                append = bool(flags & FileFlag.APPEND)
                fs.write(path, bytes(parts), request.mode, uid, gid, append=append)
            case Kind.STAT:
                follow = bool(flags & FileFlag.FOLLOW)
                await self.out(encode_entry(fs.stat(path, uid, gid, follow=follow)))
            case Kind.LIST:
                entries = fs.list(path, request.depth or 1, uid, gid)
                await self.out(b"".join(map(encode_entry, entries)))
            case Kind.MOVE:
                exclusive = bool(flags & FileFlag.EXCLUSIVE)
                fs.move(path, request.path2 or b"", uid, gid, exclusive=exclusive)
            case Kind.REMOVE:
                fs.remove(path, uid, gid, recursive=bool(flags & FileFlag.RECURSIVE))
            case Kind.MKDIR:
                fs.mkdir(path, request.mode, uid, gid, parents=bool(flags & FileFlag.PARENTS))

    def _finish(self, kind: EndKind, code: int, stage: Stage) -> None:
        if self.timer is not None:
            self.timer.cancel()
        wall_us = int((time.monotonic() - self.began) * 1e6)
        self.finished = OpEnd(
            kind=kind,
            code=code,
            stage=stage,
            truncated=self.dropped > 0,
            cpu_us=min(1000, wall_us),
            wall_us=wall_us,
            max_rss_bytes=1 << 20,
            stdout_bytes=self.streams[0].end,
            stderr_bytes=self.streams[1].end,
            dropped_bytes=self.dropped,
        )
        self.guest.cpu_us += self.finished.cpu_us
        self.guest.send_exit(self)


class FakeGuest:
    """A sandbox's inside. Outlives its channel; `attach` hands it a fresh one."""

    def __init__(self, *, hostname: bytes, disk_bytes: int) -> None:
        self.fs = commands.base_system()
        self.hostname = hostname
        self.disk_bytes = disk_bytes
        self.cpu_us = 0
        self.operations: dict[int, FakeOperation] = {}
        self.highest = 0
        self.dead = False
        self.on_death: Callable[[], None] = lambda: None
        self._next_pid = 2
        self._channel: _GuestEnd | None = None

    def attach(self, sock: socket.socket) -> None:
        """A fresh channel; the one before is let go, after what it had brought already: between two edges there is
        time for that.
        """
        if self._channel is not None:
            self._channel.drain()
            self._channel.close()
        self._channel = _GuestEnd(self, sock)

    def die(self) -> None:
        """Everything in it ends at once, unannounced. Idempotent."""
        if self.dead:
            return
        self.dead = True
        if self._channel is not None:
            self._channel.close()
        for operation in list(self.operations.values()):
            operation.kill(EndKind.KILLED)
        self.operations.clear()
        self.on_death()

    def user(self, spec: bytes | None) -> tuple[int, int]:
        """uid and gid of a USER field. Raises `StartFailed`."""
        name, _, group = (spec or b"root").partition(b":")
        known = {line.split(b":")[0]: line.split(b":") for line in self.fs.open_for_reading(b"/etc/passwd").split()}
        if name.isdigit():
            uid, gid = int(name), int(name) if not group else 0
        elif name in known:
            uid, gid = int(known[name][2]), int(known[name][3])
        else:
            raise StartFailed(Stage.USER, errno.ENOENT)
        if group:
            if not group.isdigit() and group not in known:
                raise StartFailed(Stage.USER, errno.ENOENT)
            gid = int(group) if group.isdigit() else int(known[group][3])
        return uid, gid

    def check_room(self, size: int) -> None:
        """Raises ENOSPC where the disk is full."""
        if self.fs.used() + size > self.disk_bytes:
            raise fail(errno.ENOSPC)

    def start(self, op: int, request: OpRequest) -> None:
        """Begin an operation."""
        self.highest = max(self.highest, op)
        if len(self.operations) >= MAX_OPS:
            message = os.strerror(errno.EAGAIN).encode()
            self.send(FrameType.REFUSED, op, _TWO_U32.pack(errno.EAGAIN, 0) + message)
            return
        operation = self.operations[op] = FakeOperation(self, op, request, self._next_pid)
        self._next_pid += 1
        operation.begin()

    # --- out; dropped while no synchronised channel is there, `resync` says it again
    # ------------------------------------

    def send(self, kind: FrameType, op: int, payload: bytes = b"", flags: int = 0) -> None:
        if self._channel is not None and self._channel.synced:
            self._channel.send(encode(kind, op, payload, flags))

    def send_output(self, operation: FakeOperation, stderr: bool, offset: int, data: bytes | bytearray) -> None:
        if operation.op in self.operations:
            self.send(FrameType.OUT, operation.op, _U64.pack(offset) + data, Flag.STDERR if stderr else 0)

    def send_exit(self, operation: FakeOperation) -> None:
        if operation.op in self.operations and operation.finished is not None:
            self.send(FrameType.EXIT, operation.op, encode_exit(operation.finished))

    def resync(self) -> None:
        """After SYNCED: everything that was not acknowledged, again."""
        for operation in list(self.operations.values()):
            for index, stream in enumerate(operation.streams):
                for at in range(0, len(stream.held), MAX_DATA):
                    piece = stream.held[at : at + MAX_DATA]
                    self.send_output(operation, bool(index), stream.base + at, piece)
            self.send_exit(operation)


class _GuestEnd:
    """The guest's end of one channel."""

    def __init__(self, guest: FakeGuest, sock: socket.socket) -> None:
        self._guest = guest
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque()
        self._joiner = RequestJoiner()
        self._open = True
        self.synced = False
        sock.setblocking(False)
        self._fd = sock.fileno()
        self._loop.add_reader(self._fd, self._readable)

    def close(self) -> None:
        if self._open:
            self._open = self.synced = False
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._socket.close()

    def send(self, frame: bytes) -> None:
        if not self._queue:
            try:
                self._socket.send(frame)
                return
            except BlockingIOError:
                self._loop.add_writer(self._fd, self._writable)
            except OSError:
                return
        self._queue.append(frame)

    def _writable(self) -> None:
        while self._queue:
            try:
                self._socket.send(self._queue[0])
            except BlockingIOError:
                return
            except OSError:
                self._queue.clear()
                break
            self._queue.popleft()
        self._loop.remove_writer(self._fd)

    def drain(self) -> None:
        """Take what has been sent to us."""
        while self._open and select.select([self._fd], [], [], 0)[0]:
            self._readable()

    def _readable(self) -> None:
        try:
            packet = self._socket.recv(MAX_FRAME + 1)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        try:
            if packet:
                self._take(decode(packet))
                return
        except ProtocolError:
            pass
        self.close()  # the edge is gone, or speaks nonsense: wait for a fresh channel

    def _take(self, frame: Frame) -> None:
        guest = self._guest
        operation = guest.operations.get(frame.op)
        match frame.type:
            case FrameType.HELLO:
                self._welcome(frame.payload)
            case FrameType.PING:
                now = time.time_ns()
                self.send(encode(FrameType.PONG, 0, _TWO_U64.pack(_U64.unpack(frame.payload)[0], now)))
            case FrameType.START:
                payload = self._joiner.add(frame)
                if payload is not None:
                    self._start(frame.op, payload)
            case FrameType.RELEASE:
                if operation is not None:
                    del guest.operations[frame.op]
                    operation.kill(EndKind.KILLED)
            case _ if operation is None:
                pass  # released, crossed
            case FrameType.STDIN:
                self._stdin(operation, frame)
            case FrameType.ACK:
                self._ack(operation, _TWO_U64.unpack(frame.payload))
            case FrameType.SIGNAL:
                self._signal(operation, *_TWO_U32.unpack(frame.payload))
            case _:
                raise ProtocolError(f"{frame.type.name} from an edge")

    def _welcome(self, payload: bytes) -> None:
        version, _, _, incarnation = _HELLO.unpack(payload)
        if version != PROTOCOL_VERSION or self.synced:
            raise ProtocolError("HELLO twice or of another version")
        guest = self._guest
        welcome = _WELCOME.pack(PROTOCOL_VERSION, 0, len(guest.operations), incarnation, guest.highest)
        self.send(encode(FrameType.WELCOME, 0, welcome))
        for operation in guest.operations.values():
            stdout, stderr = operation.streams
            ended = operation.finished is not None
            state = OpState(
                kind=operation.request.kind,
                state=2 if ended else 1 if operation.started else 0,
                key=operation.request.key,
                pid=operation.pid if operation.started else 0,
                stdin_offset=operation.input_received,
                stdout_base=stdout.base,
                stdout_end=stdout.end,
                stderr_base=stderr.base,
                stderr_end=stderr.end,
            )
            self.send(encode(FrameType.OPSTATE, operation.op, encode_opstate(state)))
        self.send(encode(FrameType.SYNCED))
        self.synced = True
        guest.resync()

    def _start(self, op: int, payload: bytes) -> None:
        try:
            request = decode_request(payload)
        except ProtocolError as error:
            refusal = _TWO_U32.pack(errno.EPROTO, 0) + str(error).encode()
            self.send(encode(FrameType.REFUSED, op, refusal))
            return
        if op in self._guest.operations:
            raise ProtocolError("START twice")
        self._guest.start(op, request)

    def _stdin(self, operation: FakeOperation, frame: Frame) -> None:
        offset = _U64.unpack_from(frame.payload)[0]
        if offset > operation.input_received:
            raise ProtocolError("a gap in stdin")
        data = frame.payload[8 + operation.input_received - offset :]
        operation.input_received += len(data)
        if operation.finished is not None:
            operation.input_written = operation.input_received
            self.send(encode(FrameType.STDIN_ACK, frame.op, _U64.pack(operation.input_written)))
            return
        operation.input += data
        operation.input_eof |= bool(frame.flags & Flag.EOF)
        operation.input_changed.set()

    def _ack(self, operation: FakeOperation, offsets: tuple[int, int]) -> None:
        for stream, offset in zip(operation.streams, offsets, strict=True):
            if offset > stream.end:
                raise ProtocolError("ACK of what was never sent")
            if offset > stream.base:
                del stream.held[: offset - stream.base]
                stream.base = offset
        operation.room.set()

    def _signal(self, operation: FakeOperation, signal: int, scope: int) -> None:
        if scope == 2:
            operation.kill(EndKind.KILLED)
        else:
            operation.kill(EndKind.SIGNALED, signal)
