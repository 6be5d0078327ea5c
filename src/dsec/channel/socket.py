"""`ports.GuestChannel` over a non-blocking unix socket (SOCK_SEQPACKET, or SOCK_STREAM for a VM's port).

Owns: the socket, the table of operations, what is kept of ended ones. The event loop calls `_readable`; it takes a
bounded number of frames, hands them to the session, and at the end settles (spools, acknowledges) and wakes each
operation that changed once. No task runs for a frame, an operation or a channel, except one that drops what has ended
(`dsec.channel.ended`).

How it ends: `close` (the guest goes on, readers get `Unavailable`), the guest closes it or dies (unfinished
operations are `OutcomeUnknown`), or the guest breaks the protocol (the same, and `on_broken` says why).

A frame that the guest didn't take before the edge died is lost: a START then never ran, and a RELEASE is forgotten,
so that the next edge finds the operation again. `ping` is a barrier for whom that matters.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

from dsec.channel.ended import EndedOperations
from dsec.channel.operation import GuestOperation, again
from dsec.channel.poller import poller
from dsec.channel.spool import Spool
from dsec.errors import DsecError, Internal, InvalidRequest, OutcomeUnknown, QuotaExceeded, Unavailable
from dsec.news import News
from dsec.ports import Clock
from dsec.spec.operations import ExecFlag, Kind, OpRequest
from dsec.wire.frames import HEADER_SIZE, MAX_FRAME, MAX_OPS, Frame, ProtocolError, StreamDecoder, decode_all
from dsec.wire.session import Ended, Known, Output, Pong, Session, Started, Status, Synced

log = logging.getLogger(__name__)

_BURST = 8
"""Frames taken before other channels get their turn: at most 512 KiB of output, spooled or not."""
_LIKELY_LAST = 4 << 10
"""After a packet below this there is rarely another: to look costs more than to be told again where there is."""
_QUEUE_HIGH = 1 << 20
_QUEUE_MAX = 16 << 20
"""Bytes queued for a guest that doesn't read but makes us answer: then it is broken."""

_PTY = int(ExecFlag.PTY)
_CHANNEL_EVENTS = (Known, Synced, Pong, Status)
_local = threading.local()


def _buffer() -> memoryview:
    """One receive buffer a thread, not one a channel: what is kept of it is copied."""
    found: memoryview | None = getattr(_local, "buffer", None)
    if found is None:
        found = _local.buffer = memoryview(bytearray(MAX_FRAME + 1))
    return found


class SocketChannel:
    """One edge incarnation's channel into one sandbox. Use `open`."""

    session_kind: ClassVar[type[Session]] = Session

    def __init__(
        self,
        sock: socket.socket,
        *,
        clock: Clock,
        spool: Spool | None = None,
        on_broken: Callable[[str], None] | None = None,
        on_eof: Callable[[], None] | None = None,
        token: bytes = b"",
    ) -> None:
        self._socket = sock
        self._clock = clock
        self._spool = spool
        self._on_broken = on_broken
        self._on_eof = on_eof
        self._loop = asyncio.get_running_loop()
        self._spooled = spool.sizes() if spool else {}
        incarnation = secrets.randbits(64)
        self.session = self.session_kind(incarnation, self._spooled, machine=bool(token))
        self.status = Status()
        """Of a virtual machine, as it last said: a claim of code that is hostile."""
        self._token = token
        stream = sock.type == socket.SOCK_STREAM
        self._decoder = StreamDecoder(incarnation if token else None) if stream else None
        self._operations: dict[int, GuestOperation] = {}
        self._by_key: dict[bytes, GuestOperation] = {}
        self._ended = EndedOperations(clock)
        self._changed: dict[int, GuestOperation] = {}
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._releases: list[bytes] = []
        """RELEASE frames that leave with the next frame, or in the event loop's next turn: a client that releases its
        last command with its next one wakes the guest once."""
        self._room = News()
        self._pings: dict[int, tuple[float, asyncio.Future[float]]] = {}
        self._live: asyncio.Future[None] = self._loop.create_future()
        self._error: DsecError | None = None
        self._loss: asyncio.Future[str] = self._loop.create_future()
        sock.setblocking(False)
        self._fd = sock.fileno()
        self._poller = poller()
        self._poller.add(self._fd, self._readable)

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        *,
        clock: Clock,
        spool: Spool | None = None,
        on_broken: Callable[[str], None] | None = None,
        on_eof: Callable[[], None] | None = None,
        token: bytes = b"",
        introduce: Callable[[int], bytes] | None = None,
    ) -> Self:
        """Greet the guest and take over what it runs; owns `sock` from now on. The caller bounds the time.

        `on_broken(reason)`: the guest broke the protocol. `on_eof()`: it closed the channel, or died. `token`: of a
        virtual machine's port, whose stream may be in the middle of an earlier edge's frame. `introduce(number)`: what
        comes before it; a REFUSED of that number answers it.
        Raises `OutcomeUnknown` where the guest is gone or speaks nonsense.
        """
        channel = cls(sock, clock=clock, spool=spool, on_broken=on_broken, on_eof=on_eof, token=token)
        try:
            before = introduce(channel.session.incarnation) if introduce else b""
            channel.send(before + channel._token + channel.session.hello())
            await channel._live
        except BaseException:
            await channel.close()
            raise
        return channel

    # --- GuestChannel ------------------------------------------------------------------------------------------------

    @property
    def congested(self) -> bool:
        return self._queued > _QUEUE_HIGH

    async def start(self, request: OpRequest) -> GuestOperation:
        """As in `ports.GuestChannel`; a key that is known gives the operation that has it. Raises `InvalidRequest`
        for a request that
        cannot travel, too."""
        await self.drained()
        if request.key is not None and (known := self._by_key.get(request.key)):
            return known
        if self._error is not None:
            raise again(self._error)
        if self.session.live >= MAX_OPS and not self._ended.drop_oldest(unread=True):
            raise QuotaExceeded(
                f"{MAX_OPS} commands are live or kept in this sandbox", remedy="Wait for some, or release ended ones."
            )
        try:
            op, frames = self.session.start(request)
        except ValueError as error:
            raise InvalidRequest(f"the guest cannot take this: {error}") from error
        spool = self._spool.of(op) if self._spool and request.key is not None else None
        operation = GuestOperation(
            self,
            op,
            key=request.key,
            kind=request.kind,
            spool=spool,
            pty=bool(int(request.flags) & _PTY),
            started_at=self._clock.now(),
        )
        self._operations[op] = operation
        if request.key is not None:
            self._by_key[request.key] = operation
        for frame in frames:
            self.send(frame)
        return operation

    def find(self, key: bytes) -> GuestOperation | None:
        return self._by_key.get(key)

    def operations(self) -> Sequence[GuestOperation]:
        return list(self._operations.values())

    async def ping(self) -> float:
        """As in `ports.GuestChannel`. Raises `OutcomeUnknown` where the guest is gone."""
        await self.drained()
        if self._error is not None:
            raise again(self._error)
        token, frame = self.session.ping()
        answer: asyncio.Future[float] = self._loop.create_future()
        self._pings[token] = (self._clock.monotonic(), answer)
        try:
            self.send(frame)
            return await answer
        finally:
            self._pings.pop(token, None)

    def hold(self, since_ns: int) -> None:
        """The sandbox stands still since then (CLOCK_MONOTONIC), so that no timeout inside passes; 0: it goes on. It
        goes before whatever is queued for the guest."""
        if self._error is not None:
            return
        frame = self.session.hold(since_ns)
        if self._queue and self._decoder is None:
            try:
                self._socket.send(frame)
                return
            except OSError as error:
                log.debug("a hold waits behind other frames: %s", error)
        self.send(frame)

    def lost(self) -> asyncio.Future[str]:
        """As in `ports.GuestChannel`; shared: don't cancel it."""
        return self._loss

    async def close(self) -> None:
        self._send_releases()
        self._finish(Unavailable("the channel was closed", remedy="Attach again by key."))
        self._ended.close()
        for table in (self._operations, self._by_key, self._changed):
            table.clear()  # they refer to this: what readers don't hold is freed at once, not by a collection

    # --- in ----------------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        buffer = _buffer()
        try:
            for _ in range(_BURST):
                try:
                    size = self._socket.recv_into(buffer)
                except BlockingIOError:
                    break
                except OSError:
                    size = 0
                if not size:
                    self._settle()
                    self._lost()
                    return
                packet = buffer[:size]
                for frame in decode_all(packet) if self._decoder is None else self._decoder.feed(packet):
                    self._take(frame)
                if size < _LIKELY_LAST:
                    break
            self._settle()
        except ProtocolError as error:
            self._broken(str(error))

    def _take(self, frame: Frame) -> None:
        event = self.session.receive(frame)
        if event is None:
            return
        if isinstance(event, _CHANNEL_EVENTS):
            self._take_channel_event(event)
            return
        operation = self._operations.get(event.op)
        if operation is None:
            return
        self._changed[event.op] = operation
        try:
            if isinstance(event, Output):
                operation.note_output(event.stderr, event.data)
            elif isinstance(event, Started):
                operation.note_started(event.pid)
            elif isinstance(event, Ended):
                self._ended.add(operation)
                operation.note_end(event.end, self._clock.monotonic())
        except Exception:  # a bug of who looks on (`ports.Tap`): readers are woken, and frames behind it taken
            log.exception("operation %d: what looks on failed", event.op)

    def _take_channel_event(self, event: Known | Synced | Pong | Status) -> None:
        match event:
            case Known():
                self._resume(event)
            case Synced():
                self._synced()
            case Status():
                self.status = event
            case Pong():
                asked = self._pings.get(event.token)
                if asked is not None and not asked[1].done():
                    asked[1].set_result(self._clock.monotonic() - asked[0])

    def _settle(self) -> None:
        """The burst is over: each operation that changed is spooled, acknowledged, woken."""
        if not self._changed:
            return
        changed, self._changed = self._changed, {}
        for operation in changed.values():
            try:
                operation.settle()
            except OSError as error:
                operation.fail(Internal(f"the output cannot be kept: {error.strerror}"))
                operation.ended_at = self._clock.monotonic()
                self._ended.add(operation)
                self._release(operation.op)
            operation.wake()
            if operation.end is not None:
                operation.rest()
                if operation.orphan and not operation.busy:
                    self.forget(operation)
        if self._ended:
            self._ended.retain(sweep=self._error is None)

    # --- resync ------------------------------------------------------------------------------------------------------

    def _resume(self, event: Known) -> None:
        state = event.state
        sizes = self._spooled.get(event.op, (0, 0))
        whole = sizes[0] >= state.stdout_base and sizes[1] >= state.stderr_base  # else what was spooled is lost
        if self._spool and not whole:
            self._spool.of(event.op).remove(unseen=True)
        operation = GuestOperation(
            self,
            event.op,
            key=state.key,
            kind=state.kind,
            spool=self._spool.of(event.op, sizes) if self._spool and state.key is not None and whole else None,
            starts=(event.stdout_from, event.stderr_from),
            owed=state,
            pid=state.pid or None,
            orphan=state.key is None,
            pty=state.pty_size > 0,
            started_at=self._clock.now() - state.age_ms / 1000,
        )
        self._operations[event.op] = operation
        if state.key is not None:
            self._by_key[state.key] = operation

    def _synced(self) -> None:
        kept = {operation.op for operation in self._by_key.values()}
        for op in self._spooled.keys() - kept:
            if self._spool:
                self._spool.of(op).remove(unseen=True)
        self._spooled = {}
        for operation in self.operations():
            if operation.orphan and operation.kind is not Kind.EXEC:
                self.forget(operation)  # half a file call: its caller is gone and nobody can go on with it
            else:
                self._changed[operation.op] = operation
        if not self._live.done():
            self._live.set_result(None)

    def forget(self, operation: GuestOperation) -> None:
        """Release: here and in the guest. Idempotent."""
        if self._operations.pop(operation.op, None) is None:
            return
        self._ended.discard(operation.op)
        self._changed.pop(operation.op, None)
        if operation.key is not None:
            self._by_key.pop(operation.key, None)
        self._release(operation.op)
        operation.drop()

    # --- out ---------------------------------------------------------------------------------------------------------

    def _release(self, op: int) -> None:
        frame = self.session.release(op)
        if frame and self._error is None:
            self._releases.append(frame)
            if len(self._releases) == 1:
                self._loop.call_soon(self._send_releases)

    def _send_releases(self) -> None:
        if self._releases and self._error is None:
            frames, self._releases = b"".join(self._releases), []
            self._send(frames)

    def send(self, frame: bytes) -> None:
        """Send now or as soon as the socket takes it. Empty frames and those after the end are dropped."""
        if not frame or self._error is not None:
            return
        if self._releases:
            if len(frame) + len(self._releases) * HEADER_SIZE <= MAX_FRAME:
                frame = b"".join((*self._releases, frame))
                self._releases = []
            else:
                self._send_releases()
        self._send(frame)

    def _send(self, frame: bytes) -> None:
        if not self._queue:
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the guest is gone; reading says so after what it still had to say
            if sent == len(frame):
                return
            frame = frame[sent:]
            self._loop.add_writer(self._fd, self._writable)
        self._queue.append(frame)
        self._queued += len(frame)
        if self._queued > _QUEUE_MAX:
            self._loop.call_soon(self._broken, "it makes us answer but doesn't read")

    def _writable(self) -> None:
        while self._queue:
            frame = self._queue[0]
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                break
            except OSError:
                self._queue.clear()
                self._queued = 0
                break
            self._queued -= sent
            if sent < len(frame):
                self._queue[0] = frame[sent:]
                break
            self._queue.popleft()
        if not self._queue:
            self._loop.remove_writer(self._fd)
        if self._queued <= _QUEUE_HIGH // 2:
            self._room.tell()

    async def drained(self) -> None:
        """Wait while too much is queued for the guest."""
        while self._queued > _QUEUE_HIGH:
            await self._room.wait()

    # --- the end -----------------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        gone = OutcomeUnknown("the guest is gone; its unfinished commands may or may not have run")
        if self._finish(gone):
            self._loss.set_result("its end was closed")
            if self._on_eof:
                self._on_eof()

    def _broken(self, reason: str) -> None:
        lost = OutcomeUnknown(f"the guest broke its protocol and was cut off: {reason}")
        if self._finish(lost):
            self._loss.set_result(f"it broke the protocol: {reason}")
            if self._on_broken:
                self._on_broken(reason)

    def _finish(self, error: DsecError) -> bool:
        if self._error is not None:
            return False
        self._error = error
        self._poller.remove(self._fd)
        if self._queue:
            self._loop.remove_writer(self._fd)
        self._queue.clear()
        self._queued = 0
        self._socket.close()
        for operation in self._operations.values():
            operation.fail(error)
            operation.rest()
        for _, answer in self._pings.values():
            if not answer.done():
                answer.set_exception(again(error))
        if not self._live.done():
            self._live.set_exception(again(error))
            self._live.exception()  # `open` may have been cancelled: then nobody else looks
        self._room.tell()
        return True
