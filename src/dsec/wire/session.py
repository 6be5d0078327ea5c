"""The edge's side of one guest channel as a state machine without I/O.

Owns: what may come when (`TABLE`), operation numbers, offsets, windows, the resync. Bytes to send are returned,
what the guest says comes back as events; the caller does the I/O and keeps the data.

The guest is hostile. Whatever it sends either is an event that the table allows, with offsets inside the window and
numbers that agree with what went before, or `ProtocolError`, after which the session takes nothing more. Memory:
one small record for each of at most MAX_OPS operations, no payloads. Frames of operations that were released while
they were under way are ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum, auto

from msgspec import Struct

from dsec.spec.operations import EndKind, ExecFlag, Kind, OpEnd, OpRequest, Stage
from dsec.wire import messages
from dsec.wire.frames import (
    MAX_DATA,
    MAX_OPS,
    PROTOCOL_VERSION,
    WINDOW,
    Flag,
    Frame,
    FrameType,
    ProtocolError,
    encode,
    header,
    split_request,
)
from dsec.wire.messages import EXIT_LAYOUT, EXIT_TRUNCATED, MAX_MESSAGE, MAX_NUMBER, OpState

__all__ = ["EXIT_LAYOUT", "EXIT_TRUNCATED", "Session"]

HELLO = struct.Struct("<HHIQ")
WELCOME = struct.Struct("<HHIQQ")
_U64 = struct.Struct("<Q")
_TWO_U64 = struct.Struct("<QQ")
_TWO_U32 = struct.Struct("<II")
_STATUS = struct.Struct("<6Q")
_TWO_U16 = struct.Struct("<HH")


class Phase(IntEnum):
    """Of the channel (NEW to BROKEN) and of an operation (STARTING to ENDED)."""

    NEW = auto()
    GREETED = auto()
    SYNCING = auto()
    LIVE = auto()
    BROKEN = auto()

    STARTING = auto()
    RUNNING = auto()
    ENDED = auto()


TABLE: dict[tuple[Phase, FrameType], Phase] = {
    # the channel
    (Phase.GREETED, FrameType.WELCOME): Phase.SYNCING,
    (Phase.SYNCING, FrameType.OPSTATE): Phase.SYNCING,
    (Phase.SYNCING, FrameType.SYNCED): Phase.LIVE,
    (Phase.LIVE, FrameType.PONG): Phase.LIVE,
    (Phase.LIVE, FrameType.STATUS): Phase.LIVE,  # of a virtual machine only
    # an operation, while the channel is live
    (Phase.STARTING, FrameType.STARTED): Phase.RUNNING,
    (Phase.STARTING, FrameType.STDIN_ACK): Phase.STARTING,
    (Phase.STARTING, FrameType.EXIT): Phase.ENDED,
    (Phase.STARTING, FrameType.REFUSED): Phase.ENDED,
    (Phase.RUNNING, FrameType.STARTED): Phase.RUNNING,  # once, after a resync
    (Phase.RUNNING, FrameType.OUT): Phase.RUNNING,
    (Phase.RUNNING, FrameType.STDIN_ACK): Phase.RUNNING,
    (Phase.RUNNING, FrameType.EXIT): Phase.ENDED,
    (Phase.RUNNING, FrameType.REFUSED): Phase.RUNNING,
    (Phase.ENDED, FrameType.STDIN_ACK): Phase.ENDED,  # both crossed with what we sent
    (Phase.ENDED, FrameType.REFUSED): Phase.ENDED,
}
"""What may come when. Everything else is a `ProtocolError`."""

_STDERR, _STDIN = (
    int(Flag.STDERR),
    int(ExecFlag.STDIN | ExecFlag.PTY),
)  # arithmetic on IntFlag is slow, and this is done for every command
_TAKE_STDIN = frozenset({Kind.WRITE, Kind.CONNECT, Kind.WAY_OUT})
_OP_FRAMES = frozenset(kind for phase, kind in TABLE if phase in (Phase.STARTING, Phase.RUNNING, Phase.ENDED))


# --- events -----------------------------------------------------------------------------------------------------------


class Known(Struct, frozen=True):
    """During a resync: the guest has this operation. Output goes on at the two offsets; `state` says what is below."""

    op: int
    state: OpState
    stdout_from: int
    stderr_from: int


class Synced(Struct, frozen=True):
    """The resync is complete; operations may start."""


class Started(Struct, frozen=True):
    """An operation runs."""

    op: int
    pid: int


class Output(Struct, frozen=True, gc=False):
    """New bytes: what was there before is already cut off, so the offsets of a stream follow each other."""

    op: int
    stderr: bool
    offset: int
    data: bytes


class StdinRoom(Struct, frozen=True):
    """There is room for more stdin."""

    op: int


class Ended(Struct, frozen=True):
    """An operation ended; all of its output came before."""

    op: int
    end: OpEnd


class Refused(Struct, frozen=True):
    """A frame for a started operation (a signal, say) was not accepted."""

    op: int
    errno: int
    message: str


class Pong(Struct, frozen=True):
    """The answer to a ping."""

    token: int
    guest_ns: int


class Status(Struct, frozen=True):
    """A virtual machine's counters, as its own kernel says."""

    oom_kills: int = 0
    pids_refused: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    pids: int = 0
    """Of commands, without the guest."""


Event = Known | Synced | Started | Output | StdinRoom | Ended | Refused | Pong | Status


class Op:
    """An operation as the session sees it: numbers only."""

    __slots__ = (
        "acked",
        "ends",
        "phase",
        "pid",
        "refused",
        "resumed",
        "stdin_acked",
        "stdin_before",
        "stdin_done",
        "stdin_sent",
    )

    def __init__(self, phase: Phase, stdin: bool) -> None:
        self.phase = phase
        self.pid = 0
        self.ends = [0, 0]  # received, of stdout and stderr
        self.acked = (0, 0)
        self.stdin_sent = 0
        self.stdin_acked = 0
        self.stdin_before = 0  # taken from an earlier edge
        self.stdin_done = not stdin
        self.resumed = False
        self.refused = False


class Session:
    """One channel, from HELLO on. `spooled`: for each operation, how much of stdout and stderr is already kept safe
    on our side, so that
    it needn't come again."""

    def __init__(
        self, incarnation: int, spooled: Mapping[int, tuple[int, int]] | None = None, *, machine: bool = False
    ) -> None:
        """`machine`: the guest is a virtual machine's, and says its STATUS."""
        self._machine = machine
        self.incarnation = incarnation
        self._spooled = spooled or {}
        self._phase = Phase.NEW
        self._ops: dict[int, Op] = {}
        self._keys: set[bytes] = set()
        self._expected = 0
        self._synced_ops: frozenset[int] = frozenset()
        self._first = self._next = 0
        self._pings: set[int] = set()
        self._ping = 0

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def live(self) -> int:
        """Operations that were not released."""
        return len(self._ops)

    # --- out ---------------------------------------------------------------------------------------------------------

    def hello(self) -> bytes:
        """The first frame."""
        if self._phase is not Phase.NEW:
            raise RuntimeError("HELLO is said once")
        self._phase = Phase.GREETED
        return encode(FrameType.HELLO, 0, HELLO.pack(PROTOCOL_VERSION, 0, 0, self.incarnation))

    def start(self, request: OpRequest) -> tuple[int, list[bytes]]:
        """A new operation's number and the frames that start it. Raises ValueError for a request that cannot
        travel, OverflowError where
        MAX_OPS operations are there."""
        if self._phase is not Phase.LIVE:
            raise RuntimeError("the channel is not live")
        if len(self._ops) >= MAX_OPS:
            raise OverflowError(f"{MAX_OPS} operations are live or unreleased")
        op = self._next
        frames = list(split_request(FrameType.START, op, messages.encode_request(request)))
        self._next += 1
        takes_stdin = request.kind in _TAKE_STDIN or bool(int(request.flags) & _STDIN)
        self._ops[op] = Op(Phase.STARTING, takes_stdin)
        return op, frames

    def stdin_room(self, op: int) -> int | None:
        """How many bytes of stdin may be sent now; None where it is closed or the operation ended."""
        state = self._ops.get(op)
        if state is None or state.stdin_done or state.phase is Phase.ENDED:
            return None
        return min(MAX_DATA, WINDOW - (state.stdin_sent - state.stdin_acked))

    def stdin_offset(self, op: int) -> int:
        """Where the next byte of stdin goes: after what we sent, or after what the guest had taken at the resync."""
        state = self._ops.get(op)
        return state.stdin_sent if state else 0

    def stdin(self, op: int, data: bytes | memoryview, *, eof: bool = False) -> bytes:
        """A frame with at most `stdin_room` bytes of stdin."""
        room = self.stdin_room(op)
        if room is None or len(data) > room:
            raise RuntimeError("no room for stdin")
        state = self._ops[op]
        head = header(FrameType.STDIN, op, _U64.size + len(data), Flag.EOF if eof else 0)
        frame = b"".join((head, _U64.pack(state.stdin_sent), data))
        state.stdin_sent += len(data)
        state.stdin_done = eof
        return frame

    def ack(self, op: int, stdout: int, stderr: int) -> bytes:
        """Let the guest forget output below the offsets; b"" where there is nothing new to say."""
        state = self._ops.get(op)
        if state is None or state.acked == (stdout, stderr):
            return b""
        if not (state.acked[0] <= stdout <= state.ends[0] and state.acked[1] <= stderr <= state.ends[1]):
            raise RuntimeError("acknowledges what never came, or goes back")
        state.acked = (stdout, stderr)
        return encode(FrameType.ACK, op, _TWO_U64.pack(stdout, stderr))

    def signal(self, op: int, signal: int, scope: int) -> bytes:
        """A frame that signals; b"" where the operation ended."""
        state = self._ops.get(op)
        if state is None or state.phase is Phase.ENDED:
            return b""
        return encode(FrameType.SIGNAL, op, _TWO_U32.pack(signal, scope))

    def resize(self, op: int, cols: int, rows: int) -> bytes:
        """A frame that resizes a terminal; b"" where the operation ended."""
        state = self._ops.get(op)
        if state is None or state.phase is Phase.ENDED:
            return b""
        return encode(FrameType.RESIZE, op, _TWO_U16.pack(cols, rows))

    @staticmethod
    def hold(since_ns: int) -> bytes:
        """A frame that says since when the sandbox stands still (CLOCK_MONOTONIC); 0: it goes on."""
        return encode(FrameType.HOLD, 0, _U64.pack(since_ns))

    def release(self, op: int) -> bytes:
        """Forget an operation; b"" where the guest doesn't have it."""
        state = self._ops.pop(op, None)
        return b"" if state is None or state.refused else encode(FrameType.RELEASE, op)

    def ping(self) -> tuple[int, bytes]:
        """A token and the frame that asks for it back."""
        self._ping += 1
        self._pings.add(self._ping)
        return self._ping, encode(FrameType.PING, 0, _U64.pack(self._ping))

    # --- in ----------------------------------------------------------------------------------------------------------

    def receive(self, frame: Frame) -> Event | None:
        """What a frame means; None where it is a duplicate, or late. Raises `ProtocolError`, then and ever after."""
        try:
            if frame.type in _OP_FRAMES:
                return self._receive_op(frame)
            after = TABLE.get((self._phase, frame.type))
            if after is None:
                raise ProtocolError(f"{frame.type.name} while the channel is {self._phase.name}")
            event = self._receive_channel(frame)
            self._phase = after
            return event
        except ProtocolError:
            self._phase = Phase.BROKEN
            raise

    def _receive_channel(self, frame: Frame) -> Event | None:
        match frame.type:
            case FrameType.WELCOME:
                self._welcome(frame.payload)
                return None
            case FrameType.OPSTATE:
                return self._opstate(frame)
            case FrameType.SYNCED:
                if self._expected:
                    raise ProtocolError(f"SYNCED with {self._expected} operations still to come")
                self._synced_ops = frozenset(self._ops)
                return Synced()
            case FrameType.STATUS:
                if not self._machine:
                    raise ProtocolError("STATUS of a guest that is no virtual machine's")
                return Status(*_STATUS.unpack(frame.payload))
            case _:
                token, guest_ns = _TWO_U64.unpack(frame.payload)
                if token not in self._pings:
                    raise ProtocolError("PONG without a PING")
                self._pings.discard(token)
                return Pong(token, guest_ns)

    def _welcome(self, payload: bytes) -> None:
        version, zero, count, incarnation, highest = WELCOME.unpack(payload)
        if version != PROTOCOL_VERSION:
            raise ProtocolError(f"the guest speaks version {version}, we speak {PROTOCOL_VERSION}")
        if zero or incarnation != self.incarnation:
            raise ProtocolError("WELCOME answers another HELLO")
        if count > MAX_OPS or highest > MAX_NUMBER or count > highest:
            raise ProtocolError("WELCOME with absurd counts")
        self._expected = count
        self._first = self._next = highest + 1

    def _opstate(self, frame: Frame) -> Event | None:
        if not self._expected:
            raise ProtocolError("more operations than WELCOME said")
        self._expected -= 1
        found = messages.decode_opstate(frame.payload)
        if not 0 < frame.op < self._first or frame.op in self._ops:
            raise ProtocolError(f"operation {frame.op} is above the highest, or there twice")
        if found.key is not None:
            if found.key in self._keys:
                raise ProtocolError("two operations with one key")
            self._keys.add(found.key)
        held = found.stdout_end - found.stdout_base + found.stderr_end - found.stderr_base
        spooled = self._spooled.get(frame.op, (0, 0))
        if held > WINDOW or spooled[0] > found.stdout_end or spooled[1] > found.stderr_end:
            raise ProtocolError(f"operation {frame.op} has more output than its window, or less than it had")
        op = Op(Phase.STARTING if found.state == 0 else Phase.RUNNING, stdin=True)
        op.pid = found.pid
        op.ends = [max(found.stdout_base, spooled[0]), max(found.stderr_base, spooled[1])]
        op.acked = (found.stdout_base, found.stderr_base)
        op.stdin_sent = op.stdin_acked = found.stdin_offset
        op.stdin_before = found.stdin_offset
        op.resumed = True
        self._ops[frame.op] = op
        return Known(frame.op, found, op.ends[0], op.ends[1])

    def _receive_op(self, frame: Frame) -> Event | None:
        if self._phase is not Phase.LIVE:
            raise ProtocolError(f"{frame.type.name} while the channel is {self._phase.name}")
        op = self._ops.get(frame.op)
        if op is None:
            if self._first <= frame.op < self._next or frame.op in self._synced_ops:
                return None  # released while this was under way
            if frame.type is FrameType.REFUSED and frame.op == 0:  # the last word of a guest that hangs up on us
                why = frame.payload[8 : 8 + MAX_MESSAGE].decode("utf-8", "replace")
                raise ProtocolError(f"the guest hung up: {why}")
            raise ProtocolError(f"{frame.type.name} for operation {frame.op}, which never was")
        after = TABLE.get((op.phase, frame.type))
        if after is None:
            raise ProtocolError(f"{frame.type.name} for an operation that is {op.phase.name}")
        event: Event | None
        match frame.type:
            case FrameType.OUT:
                event = self._out(frame, op)
            case FrameType.EXIT:
                event = self._exit(frame, op)
            case FrameType.STDIN_ACK:
                event = self._stdin_ack(frame, op)
            case FrameType.STARTED:
                event = self._started(frame, op)
            case _:
                event = self._refused(frame, op)
        op.phase = after
        return event

    def _started(self, frame: Frame, op: Op) -> Event | None:
        pid, zero = _TWO_U32.unpack(frame.payload)
        if zero or not 0 < pid <= 1 << 22:
            raise ProtocolError("a malformed STARTED")
        if op.phase is Phase.RUNNING:
            if not op.resumed or op.pid not in (0, pid):
                raise ProtocolError("STARTED twice")
            op.resumed = False
            return None
        op.pid = pid
        op.resumed = False
        return Started(frame.op, pid)

    def _out(self, frame: Frame, op: Op) -> Event | None:
        offset = _U64.unpack_from(frame.payload)[0]
        stderr = bool(frame.flags & _STDERR)
        have = op.ends[stderr]
        end = offset + len(frame.payload) - 8
        if offset > have:
            raise ProtocolError(f"output at {offset}, but only {have} bytes came before")
        if end == offset:
            raise ProtocolError("output without bytes")
        if end <= have:
            return None
        op.ends[stderr] = end
        if sum(op.ends) - sum(op.acked) > WINDOW:
            raise ProtocolError("output beyond the window")
        return Output(frame.op, stderr, have, frame.payload[8 + have - offset :])

    def _stdin_ack(self, frame: Frame, op: Op) -> Event | None:
        offset = _U64.unpack(frame.payload)[0]
        if offset <= op.stdin_before:
            return None  # an earlier edge's stdin is being written; it takes nothing from our window
        if not op.stdin_acked <= offset <= op.stdin_sent:
            raise ProtocolError(f"stdin acknowledged to {offset} of {op.stdin_sent}")
        if offset == op.stdin_acked:
            return None
        op.stdin_acked = offset
        return StdinRoom(frame.op)

    def _exit(self, frame: Frame, op: Op) -> Event:
        end = messages.decode_exit(frame.payload)
        if [end.stdout_bytes, end.stderr_bytes] != op.ends:
            raise ProtocolError(f"EXIT after {op.ends} bytes says {end.stdout_bytes} and {end.stderr_bytes}")
        return Ended(frame.op, end)

    def _refused(self, frame: Frame, op: Op) -> Event:
        errno, zero = _TWO_U32.unpack_from(frame.payload)
        message = frame.payload[8 : 8 + 4 * MAX_MESSAGE].decode("utf-8", "replace")[:MAX_MESSAGE]
        if zero or not 0 < errno < 4096:
            raise ProtocolError("a malformed REFUSED")
        if op.phase is not Phase.STARTING:
            return Refused(frame.op, errno, message)
        op.refused = True
        if op.ends != [0, 0]:
            raise ProtocolError("REFUSED after output")
        message = message or messages.start_failure(Stage.REQUEST, errno)
        return Ended(frame.op, OpEnd(kind=EndKind.START_FAILED, code=errno, stage=Stage.REQUEST, message=message))
