"""Bytes between two sockets, both ways, on the event loop without a task or a buffer of its own for each connection.

Owns both sockets from the moment that it is made until its end. Invariants: memory per connection is bounded (what one
receive brought and the other side didn't take yet); the end of one direction is passed on and the other goes on;
`ended` is called once, with both sockets closed and no callback left on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Protocol

from dsec.egress.http1 import Refused
from dsec.spec.network import Reason

CHUNK = 256 << 10
_buffer = bytearray(CHUNK)
_view = memoryview(_buffer)
"""One for all: what was received is sent at once, or copied."""
_RST = struct.pack("ii", 1, 0)


class Meter(Protocol):
    """What counts and bounds the bytes of a permission."""

    def take(self, size: int) -> float:
        """Count bytes; how many seconds to wait before more are read. Raises `Refused` where it is too much."""
        ...


class Gate(Protocol):
    """What a client's bytes have to pass."""

    def feed(self, data: bytes) -> bytes:
        """What may go on. Raises `Refused`."""
        ...

    @property
    def raw(self) -> bool:
        """From now on everything passes."""
        ...


def reset(sock: socket.socket) -> None:
    """Close a connection the hard way: its other side sees a reset."""
    with contextlib.suppress(OSError):  # gone already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
    sock.close()


class Splice:
    """One pair of connected, non-blocking sockets."""

    def __init__(
        self,
        inside: socket.socket,
        outside: socket.socket,
        *,
        meter: Meter | None,
        gate: Gate | None,
        answers: Callable[[bytes], None] | None,
        ended: Callable[[Reason, str], None],
    ) -> None:
        """`gate`: what comes from inside passes it; None: as it is. `answers`: sees the first bytes from outside."""
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._meter = meter
        self.out = _Direction(self, inside, outside, gate)
        self.back = _Direction(self, outside, inside, None)
        self.back.first = answers
        self.active_at = self._loop.time()
        self.over = False

    def start(self, first: bytes = b"") -> None:
        """Begin. `first`: from inside, has passed the gate."""
        self.out.start(first)
        if not self.over:
            self.back.start(b"")

    @property
    def half_closed(self) -> bool:
        return self.out.done or self.back.done

    def cut(self, reason: Reason, text: str = "") -> None:
        """End both directions now; the programs see a reset. Idempotent."""
        self._end(reason, text, hard=True)

    def released(self) -> None:
        """Something that the gate held may pass now."""
        if not self.over:
            self.out.move(b"")

    # --- for the directions ---

    def count(self, size: int) -> float:
        """Bytes were moved; how long to wait."""
        self.active_at = self._loop.time()
        return 0.0 if self._meter is None else self._meter.take(size)

    def direction_done(self) -> None:
        if self.out.done and self.back.done:
            self._end(Reason.GRANTED, "", hard=False)

    def _end(self, reason: Reason, text: str, *, hard: bool) -> None:
        if self.over:
            return
        self.over = True
        for each in (self.out, self.back):
            each.stop()
        for each in (self.out, self.back):
            if hard:
                reset(each.source)
            else:
                each.source.close()
        self._ended(reason, text)


class _Direction:
    """From `source` to `sink`."""

    __slots__ = (
        "_eof",
        "_gate",
        "_loop",
        "_pending",
        "_reading",
        "_sink",
        "_splice",
        "_timer",
        "_writing",
        "count",
        "done",
        "first",
        "source",
    )

    def __init__(self, splice: Splice, source: socket.socket, sink: socket.socket, gate: Gate | None) -> None:
        self._splice = splice
        self._loop = splice._loop
        self.source = source
        self._sink = sink
        self._gate = gate
        self._pending: memoryview | None = None
        self._eof = self._reading = self._writing = False
        self._timer: asyncio.TimerHandle | None = None
        self.first: Callable[[bytes], None] | None = None
        self.count = 0
        self.done = False

    def start(self, first: bytes) -> None:
        self._read_on()
        if first:
            self.move(first, passed=True)

    def stop(self) -> None:
        """No callback is left afterwards."""
        if self._reading:
            self._loop.remove_reader(self.source)
        if self._writing:
            self._loop.remove_writer(self._sink)
        if self._timer is not None:
            self._timer.cancel()
        self._reading = self._writing = False
        self._timer = self._pending = None

    def _readable(self) -> None:
        try:
            size = self.source.recv_into(_view)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._splice.cut(Reason.RESET, error.strerror or "")
            return
        if size == 0:
            self._eof = True
            self._pause()
            self._finish()
            return
        if self.first is not None:
            first, self.first = self.first, None
            first(bytes(_view[:64]))
        if self._gate is None:
            self._send(_view[:size])
        else:
            self.move(bytes(_view[:size]))

    def move(self, data: bytes, *, passed: bool = False) -> None:
        """Through the gate, unless it has passed it."""
        if self._gate is not None and not passed:
            try:
                data = self._gate.feed(data)
            except Refused as refused:
                self._splice.cut(refused.reason, str(refused))
                return
            if self._gate.raw:
                self._gate = None
        if data:
            self._send(memoryview(data))

    def _send(self, data: memoryview) -> None:
        size = len(data)
        if self._pending is not None:  # what the gate let go of while the other side didn't read
            self._pending = memoryview(bytes(self._pending) + bytes(data))
        else:
            try:
                sent = self._sink.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self._splice.cut(Reason.RESET, error.strerror or "")
                return
            if sent < size:
                self._pending = memoryview(bytes(data[sent:]))
                self._pause()
                self._loop.add_writer(self._sink, self._writable)
                self._writing = True
        self.count += size
        try:
            wait_s = self._splice.count(size)
        except Refused as refused:
            self._splice.cut(refused.reason, str(refused))
            return
        if wait_s > 0 and self._timer is None:
            self._pause()
            self._timer = self._loop.call_later(wait_s, self._waited)

    def _waited(self) -> None:
        self._timer = None
        self._read_on()

    def _writable(self) -> None:
        pending = self._pending
        if pending is None:
            return
        try:
            sent = self._sink.send(pending)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._splice.cut(Reason.RESET, error.strerror or "")
            return
        self._splice.active_at = self._loop.time()
        if sent < len(pending):
            self._pending = pending[sent:]
            return
        self._pending = None
        self._loop.remove_writer(self._sink)
        self._writing = False
        if self._eof:
            self._finish()
        else:
            self._read_on()

    def _pause(self) -> None:
        if self._reading:
            self._loop.remove_reader(self.source)
            self._reading = False

    def _read_on(self) -> None:
        if not self._reading and not self._eof and self._pending is None and self._timer is None:
            self._loop.add_reader(self.source, self._readable)
            self._reading = True

    def _finish(self) -> None:
        """All that came has gone on, and no more comes."""
        if self._pending is not None:
            return
        with contextlib.suppress(OSError):  # its other side has closed already
            self._sink.shutdown(socket.SHUT_WR)
        self.done = True
        self._splice.direction_done()
