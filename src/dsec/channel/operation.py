"""One operation at the edge: its output for any number of readers, its stdin, its end.

Output, and what is acknowledged to the guest:

- Up to KEEP_BYTES, both streams together, nothing is: the guest keeps all of it, memory has a copy for the readers.
- Beyond that, with a key: everything is written to the spool, then acknowledged. Memory keeps a tail for readers that
  keep up, at most WINDOW bytes; others read the spool.
- Beyond that, without a key, nobody can ask for it again once its readers are gone: what all readers have taken is
  dropped and acknowledged. A slow reader so stops the command by flow control. When the last reader has left, the
  rest is dropped, so that the command goes on. A reader that comes later and wants dropped bytes gets `InvalidRequest`.

Invariant: a reader sees each byte of a stream from its start on exactly once, in order, then the end or an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from dsec.channel.spool import OpSpool
from dsec.errors import DsecError, Internal, InvalidRequest, NotFound, OutcomeUnknown
from dsec.news import News
from dsec.ports import Tap
from dsec.spec.operations import Chunk, Kind, OpEnd
from dsec.wire.frames import MAX_DATA, WINDOW
from dsec.wire.messages import OpState
from dsec.wire.session import Session

KEEP_BYTES = 64 << 10
_ACK_BYTES = 64 << 10
_SIGKILL = 9
_SIGNAL_MAX = 64
_SIZE_MAX = 65535
_ENDED = 2
"""`OpState.state`: its EXIT comes too."""


def again(error: DsecError) -> DsecError:
    """The same error to raise once more: one object raised in many places would collect all their tracebacks."""
    return type(error)(error.message, remedy=error.remedy, **error.details)


class Link(Protocol):
    """What an operation needs of its channel."""

    session: Session

    def send(self, frame: bytes) -> None: ...
    async def drained(self) -> None: ...
    def forget(self, operation: GuestOperation) -> None: ...


class _Stream:
    """Bytes `base` to `end` of a stream; those below are in the spool, or gone."""

    __slots__ = ("base", "buffer", "end")

    def __init__(self, at: int) -> None:
        self.base = self.end = at
        self.buffer = bytearray()

    def append(self, data: bytes) -> None:
        self.buffer += data
        self.end += len(data)

    def drop_below(self, offset: int) -> None:
        if offset > self.base:
            del self.buffer[: offset - self.base]
            self.base = offset

    def slice(self, offset: int, size: int) -> bytes:
        at = offset - self.base
        return bytes(memoryview(self.buffer)[at : at + size])


class _Reader:
    """Where a reader stands."""

    __slots__ = ("at", "turn")

    def __init__(self, stdout: int, stderr: int) -> None:
        self.at = [stdout, stderr]
        self.turn = 0


class GuestOperation:
    """`ports.Operation` over a `SocketChannel`. Made by the channel only."""

    __slots__ = (
        "_end",
        "_error",
        "_key",
        "_link",
        "_news",
        "_op",
        "_owed",
        "_pid",
        "_readers",
        "_released",
        "_spool",
        "_stdin_sent",
        "_stdin_turn",
        "_streams",
        "_tap",
        "ended_at",
        "kind",
        "orphan",
        "pty",
        "started_at",
        "was_read",
    )

    def __init__(
        self,
        link: Link,
        op: int,
        *,
        key: bytes | None,
        kind: Kind,
        spool: OpSpool | None,
        starts: tuple[int, int] = (0, 0),
        owed: OpState | None = None,
        pid: int | None = None,
        orphan: bool = False,
        pty: bool = False,
        started_at: float = 0.0,
    ) -> None:
        self._link = link
        self._op = op
        self._key = key
        self.kind = kind
        self.pty = pty
        self.started_at = started_at
        self._spool = spool
        self._streams = (_Stream(starts[0]), _Stream(starts[1]))
        self._owed = owed
        """At a resync: what the guest said that it has, until that came."""
        self._pid = pid
        self._end: OpEnd | None = None
        self._error: DsecError | None = None
        self._readers: set[_Reader] = set()
        self._released = False
        self.was_read = orphan
        """Somebody reads it, did so, or nobody ever will."""
        self.orphan = orphan
        """From an earlier edge, without a key: dropped at its end, unless somebody reads it."""
        self._news = News()
        self._stdin_turn: asyncio.Lock | None = None
        self._stdin_sent = 0
        self.ended_at = 0.0
        self._tap: Tap | None = None

    @property
    def op(self) -> int:
        return self._op

    @property
    def key(self) -> bytes | None:
        return self._key

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def end(self) -> OpEnd | None:
        return self._end

    @property
    def busy(self) -> bool:
        """Somebody reads it."""
        return bool(self._readers)

    @property
    def stdin_offset(self) -> int:
        return max(self._stdin_sent, self._link.session.stdin_offset(self._op))

    def watch(self, tap: Tap) -> None:
        reader = _Reader(self._kept_from(0), self._kept_from(1))
        while (chunk := self._take(reader)) is not None:
            tap.output(chunk.stderr, chunk.offset, chunk.data)
        self._tap = tap
        if self._end is not None:
            tap.ended()

    async def started(self) -> int | None:
        while self._pid is None and self._end is None:
            await self._change()
        return self._pid

    async def resynced(self) -> int:
        while self._owed is not None and not self._paid(self._owed):
            await self._change()
        self._owed = None
        return self._streams[0].end

    def _paid(self, owed: OpState) -> bool:
        stdout, stderr = self._streams
        came = stdout.end >= owed.stdout_end and stderr.end >= owed.stderr_end
        return self._end is not None or (came and owed.state != _ENDED)

    # --- reading -----------------------------------------------------------------------------------------------------

    async def read(self, stdout_from: int = 0, stderr_from: int = 0) -> AsyncGenerator[Chunk | OpEnd, None]:
        reader = _Reader(
            stdout_from if stdout_from >= 0 else self._kept_from(0),
            stderr_from if stderr_from >= 0 else self._kept_from(1),
        )
        self._readers.add(reader)
        self.was_read = True
        try:
            while True:
                chunk = self._take(reader)
                if chunk is not None:
                    yield chunk
                    if self._spool is None:
                        self._acknowledge_taken(_ACK_BYTES)
                elif self._end is not None:
                    self._leave(reader)  # before the end is seen: many callers never come back after it
                    yield self._end
                    return
                else:
                    await self._change()
        finally:
            self._leave(reader)

    def _kept_from(self, stream: int) -> int:
        """The first byte of a stream that can still be read."""
        return 0 if self._spool is not None else self._streams[stream].base

    def _leave(self, reader: _Reader) -> None:
        self._readers.discard(reader)
        if not self._readers:
            if self._end is not None or self._error is not None:
                self.rest()
            else:
                self.settle()

    def _take(self, reader: _Reader) -> Chunk | None:
        """The next piece for a reader; the streams take turns where both have something."""
        if self._released and self._error is not None:
            raise again(self._error)
        for stream in (reader.turn, 1 - reader.turn):
            at, have = reader.at[stream], self._streams[stream]
            if at >= have.end:
                continue
            kept = at >= have.base
            data = have.slice(at, MAX_DATA) if kept else self._take_spooled(stream, at, have.base - at)
            reader.at[stream] = at + len(data)
            reader.turn = 1 - stream
            return Chunk(bool(stream), at, data)
        return None

    def _take_spooled(self, stream: int, at: int, missing: int) -> bytes:
        if self._spool is None:
            if self._key is None:
                raise InvalidRequest(
                    f"output before byte {self._streams[stream].base} is gone",
                    remedy="Start the command with a key; its output is then kept until it is released.",
                )
            raise OutcomeUnknown("output of an earlier edge is gone together with its spool")
        try:
            data = self._spool.read(stream, at, min(MAX_DATA, missing))
        except OSError as error:
            raise Internal(f"the spool cannot be read: {error.strerror}") from error
        if not data:
            raise Internal("the spool is shorter than what was written to it")
        return data

    async def _change(self) -> None:
        """Wait until something happens to the operation. Raises what went wrong with it."""
        if self._error is not None:
            raise again(self._error)
        await self._news.wait()

    def wake(self) -> None:
        """Something happened."""
        self._news.tell()

    # --- what the channel reports ------------------------------------------------------------------------------------

    def note_started(self, pid: int) -> None:
        self._pid = pid

    def note_output(self, stderr: bool, data: bytes) -> None:
        stream = self._streams[stderr]
        at = stream.end
        stream.append(data)
        if self._tap is not None:
            self._tap.output(stderr, at, data)

    def note_end(self, end: OpEnd, at: float) -> None:
        self._end = end
        self.ended_at = at
        tap, self._tap = self._tap, None  # it refers to who started the command, and so to this
        if tap is not None:
            tap.ended()

    def fail(self, error: DsecError) -> None:
        """It cannot go on here. One that ended keeps its result."""
        if self._end is None and self._error is None:
            self._error = error
            tap, self._tap = self._tap, None
            if tap is not None:
                tap.failed()
        self.wake()

    def settle(self) -> None:
        """Spool, drop and acknowledge what the rules in the module's docstring say. Raises OSError where the spool
        is full.
        """
        stdout, stderr = self._streams
        if stdout.end + stderr.end <= KEEP_BYTES:
            return
        if self._spool is None:
            if self.was_read:
                self._acknowledge_taken(1 if not self._readers else _ACK_BYTES)
            return
        sizes = self._spool.sizes
        for index, stream in enumerate(self._streams):
            if sizes[index] < stream.end:
                self._spool.append(index, memoryview(stream.buffer)[sizes[index] - stream.base :])
            tail = WINDOW // 2 if self._readers else 0
            stream.drop_below(stream.end - tail)
        self._link.send(self._link.session.ack(self._op, sizes[0], sizes[1]))

    def _acknowledge_taken(self, at_least: int) -> None:
        stdout, stderr = self._streams
        if stdout.end + stderr.end <= KEEP_BYTES or self._error is not None:
            return
        taken = [
            min((max(reader.at[index], stream.base) for reader in self._readers), default=stream.end)
            for index, stream in enumerate(self._streams)
        ]
        taken = [min(at, stream.end) for at, stream in zip(taken, self._streams, strict=True)]
        if taken[0] - stdout.base + taken[1] - stderr.base >= at_least:
            stdout.drop_below(taken[0])
            stderr.drop_below(taken[1])
            if self._end is None:
                self._link.send(self._link.session.ack(self._op, taken[0], taken[1]))

    def rest(self) -> None:
        """The operation ended: hold no descriptors."""
        if self._spool is not None:
            self._spool.close()

    # --- towards the guest -------------------------------------------------------------------------------------------

    async def write(self, data: bytes, offset: int | None = None) -> int:
        async with self._turn():
            sent = self.stdin_offset
            if offset is not None:
                if self._end is not None or self._link.session.stdin_room(self._op) is None:
                    return sent  # closed: what comes now is dropped, whatever was dropped before it
                if offset > sent:
                    raise InvalidRequest(f"stdin has {sent} bytes so far; data from byte {offset} on leaves a gap")
                data = data[sent - offset :]
            view = memoryview(data)
            session = self._link.session
            while view and self._end is None:
                if self._error is not None:
                    raise again(self._error)
                room = session.stdin_room(self._op)
                if room is None:
                    break
                if not room:
                    await self._change()
                    continue
                self._link.send(session.stdin(self._op, view[:room]))
                if self._tap is not None:
                    self._tap.stdin(view[:room])
                self._stdin_sent = session.stdin_offset(self._op)
                view = view[room:]
                await self._link.drained()
            return self.stdin_offset

    async def close_stdin(self) -> None:
        async with self._turn():
            await self._link.drained()
            if self._error is None and self._link.session.stdin_room(self._op) is not None:
                self._link.send(self._link.session.stdin(self._op, b"", eof=True))

    def _turn(self) -> asyncio.Lock:
        if self._stdin_turn is None:
            self._stdin_turn = asyncio.Lock()
        return self._stdin_turn

    async def signal(self, signal: int, scope: int = 0) -> None:
        if not 1 <= signal <= _SIGNAL_MAX or scope not in (0, 1, 2) or (scope == 2 and signal != _SIGKILL):
            raise InvalidRequest(f"no signal {signal} with scope {scope}", remedy="Scope 2 (everything) takes 9 only.")
        if self._error is not None:
            raise again(self._error)
        await self._link.drained()
        self._link.send(self._link.session.signal(self._op, signal, scope))

    async def resize(self, cols: int, rows: int) -> None:
        if not self.pty:
            raise InvalidRequest("the command has no terminal", remedy="Start it with `pty`.")
        if not (0 <= cols <= _SIZE_MAX and 0 <= rows <= _SIZE_MAX):
            raise InvalidRequest(f"a terminal has 0 to {_SIZE_MAX} columns and rows")
        if self._error is not None:
            raise again(self._error)
        await self._link.drained()
        self._link.send(self._link.session.resize(self._op, cols, rows))

    async def release(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Release it: here and in the guest. Idempotent."""
        self._link.forget(self)

    def drop(self) -> None:
        """It was released: nothing of it is left here."""
        self._released = True
        self._error = NotFound("the command was released: its output is gone")
        for stream in self._streams:
            stream.base = stream.end
            stream.buffer = bytearray()
        if self._spool is not None:
            self._spool.remove()
        if self._end is None and self._tap is not None:
            self._tap.failed()
        self.wake()
