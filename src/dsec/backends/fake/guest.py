"""The fake guest: the other end of a channel, in Python, with the real protocol.

Owns: frames in and out, windows, what is kept until it is acknowledged, the resync; as native/guest does it, so
that the edge's side is exercised whole. What a command is comes from `commands`; a file call runs over the file
system in memory.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import struct
import time
from collections.abc import Callable

from dsec.backends.fake import calls, commands
from dsec.backends.fake.end import GuestEnd
from dsec.backends.fake.files import FileSystem, fail
from dsec.backends.fake.terminal import Terminal
from dsec.spec.operations import EndKind, ExecFlag, Kind, OpEnd, OpRequest, Stage
from dsec.wire.frames import (
    MAX_DATA,
    MAX_OPS,
    WINDOW,
    Flag,
    FrameType,
    encode,
)
from dsec.wire.messages import encode_exit

_U64 = struct.Struct("<Q")
_TWO_U32 = struct.Struct("<II")


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
        takes = request.flags & (ExecFlag.STDIN | ExecFlag.PTY) or request.kind in (Kind.WRITE, Kind.CONNECT)
        self.input_eof = not takes
        self.terminal = Terminal(request.pty_size or 0) if request.flags & ExecFlag.PTY else None
        self.input_changed = asyncio.Event()
        self.began = time.monotonic()
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.left_s: float | None = None
        # the process
        self.fs: FileSystem = guest.fs
        self.hostname = guest.hostname
        self.ports = guest.ports
        self.argv = list(request.argv)
        self.env: dict[bytes, bytes] = {}
        for pair in request.env:
            name, _, value = pair.partition(b"=")
            self.env[name] = value
        if self.terminal is not None:
            self.env.setdefault(b"TERM", b"xterm-256color")
        self.cwd = request.cwd or b"/"
        self.uid = self.gid = 0

    # --- as a process ------------------------------------------------------------------------------------------------

    async def out(self, data: bytes) -> None:
        await self._emit(False, data)

    async def err(self, data: bytes) -> None:
        await self._emit(not self.request.flags & (ExecFlag.MERGE | ExecFlag.PTY), data)

    async def _emit(self, stderr: bool, data: bytes) -> None:
        if self.terminal is not None:
            data = self._echo() + data.replace(b"\n", b"\r\n")
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

    def _echo(self) -> bytes:
        echo = b"" if self.terminal is None else bytes(self.terminal.echo)
        if self.terminal is not None:
            self.terminal.echo.clear()
        return echo

    def type_in(self, data: bytes, eof: bool) -> None:
        """Input of a terminal: taken at once."""
        terminal = self.terminal
        assert terminal is not None
        terminal.typed(data)
        if eof:
            terminal.close()
        self.input += terminal.ready
        terminal.ready.clear()
        self.input_eof |= terminal.ended
        self.input_changed.set()
        if terminal.interrupted:
            self.kill(EndKind.SIGNALED, signal.SIGINT)

    async def stdin(self) -> bytes:
        while True:
            if self.terminal is not None and self.terminal.echo:
                await self._emit(False, b"")
            if self.input or self.input_eof:
                break
            self.input_changed.clear()
            await self.input_changed.wait()
        data = bytes(self.input)
        self.input.clear()
        if data and self.terminal is None:
            self.input_written += len(data)
            self.guest.send(FrameType.STDIN_ACK, self.op, _U64.pack(self.input_written))
        return data

    # --- its life ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        if self.request.timeout_ms:
            self.left_s = self.request.timeout_ms / 1000
            self.hold(self.guest.held)
        self.task = loop.create_task(self._run())
        self.task.add_done_callback(self._never_ran)

    def hold(self, held: bool) -> None:
        """Its timeout stands still, or goes on."""
        loop = asyncio.get_running_loop()
        if held and self.timer is not None:
            self.left_s = max(0.0, self.timer.when() - loop.time())
            self.timer.cancel()
            self.timer = None
        elif not held and self.timer is None and self.left_s is not None and self.finished is None:
            self.timer = loop.call_later(self.left_s, self.kill, EndKind.TIMEOUT)

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
                await self._call()
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

    async def _call(self) -> None:
        if self.request.kind is Kind.CONNECT:
            try:
                await calls.connection(self)
            except OSError as error:
                raise StartFailed(Stage.CONNECT, error.errno or errno.EIO) from None
        else:
            await calls.file_call(self)

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
        self.frozen = self.held = False
        self.operations: dict[int, FakeOperation] = {}
        self.highest = 0
        self.ports: set[int] = set()
        """Where a command listens."""
        self.dead = False
        self.on_death: Callable[[], None] = lambda: None
        self._next_pid = 2
        self._channel: GuestEnd | None = None

    def attach(self, sock: socket.socket) -> None:
        """A fresh channel; the one before is let go, after what it had brought already: between two edges there is
        time for that.
        """
        if self._channel is not None:
            self._channel.drain()
            self._channel.close()
        self._channel = GuestEnd(self, sock)

    def fall_silent(self) -> None:
        """As one that is in hostile hands, or whose kernel stands still."""
        if self._channel is not None:
            self._channel.fall_silent()

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
        try:
            lines = self.fs.open_for_reading(b"/etc/passwd").split()
        except OSError:  # the sandbox removed it
            lines = []
        known = {fields[0]: fields for fields in (line.split(b":") for line in lines) if len(fields) > 3}
        known[b"root"] = [b"root", b"", b"0", b"0"]  # whatever the file says, as in the real guest
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

    def hold(self, since_ns: int) -> None:
        """Timeouts stand still from now on; 0: they go on."""
        self.held = since_ns != 0
        for operation in self.operations.values():
            operation.hold(self.held)

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
