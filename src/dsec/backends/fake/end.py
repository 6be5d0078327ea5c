"""The fake guest's end of one channel: frames in and out, the welcome. What they do is the guest's business."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
import struct
import time
from collections import deque
from typing import TYPE_CHECKING

from dsec.spec.operations import EndKind
from dsec.wire.frames import (
    MAX_FRAME,
    PROTOCOL_VERSION,
    Flag,
    Frame,
    FrameType,
    ProtocolError,
    RequestJoiner,
    decode_all,
    encode,
)
from dsec.wire.messages import OpState, decode_request, encode_opstate

if TYPE_CHECKING:
    from dsec.backends.fake.guest import FakeGuest, FakeOperation

_U64 = struct.Struct("<Q")
_TWO_U64 = struct.Struct("<QQ")
_TWO_U32 = struct.Struct("<II")
_TWO_U16 = struct.Struct("<HH")
_HELLO = struct.Struct("<HHIQ")
_WELCOME = struct.Struct("<HHIQQ")


class GuestEnd:
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

    def fall_silent(self) -> None:
        """Hear and say nothing more; the connection stays."""
        self.synced = False
        self._loop.remove_reader(self._fd)

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
                for frame in decode_all(packet):
                    self._take(frame)
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
            case FrameType.HOLD:
                guest.hold(_U64.unpack(frame.payload)[0])
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
            case FrameType.RESIZE if operation.terminal is not None:
                operation.terminal.resize(*_TWO_U16.unpack(frame.payload))
            case FrameType.RESIZE:
                self.send(encode(FrameType.REFUSED, frame.op, _TWO_U32.pack(errno.ENOTTY, 0)))
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
                pty_size=0 if operation.terminal is None else operation.terminal.size,
                age_ms=int((time.monotonic() - operation.began) * 1000),
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
        if operation.terminal is not None and operation.finished is None:
            operation.type_in(data, bool(frame.flags & Flag.EOF))
        if operation.finished is not None or operation.terminal is not None:
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

    def _signal(self, operation: FakeOperation, number: int, scope: int) -> None:
        if scope == 2:
            operation.kill(EndKind.KILLED)
        else:
            operation.kill(EndKind.SIGNALED, number)
