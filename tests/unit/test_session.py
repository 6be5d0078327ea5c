"""The session: a well-behaved guest is understood, a hostile one is cut off, whatever it sends."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsec.spec.operations import EndKind, ExecFlag, Kind, OpEnd, OpRequest, Stage
from dsec.wire.frames import (
    _RULES,
    MAX_OPS,
    PROTOCOL_VERSION,
    WINDOW,
    Flag,
    Frame,
    FrameType,
    ProtocolError,
    RequestJoiner,
    decode,
)
from dsec.wire.messages import (
    OpState,
    decode_exit,
    decode_opstate,
    decode_request,
    encode_exit,
    encode_opstate,
    encode_request,
)
from dsec.wire.session import Ended, Known, Output, Phase, Pong, Refused, Session, Started, StdinRoom, Synced

INCARNATION = 77


def welcome(
    count: int = 0, highest: int = 0, *, version: int = PROTOCOL_VERSION, incarnation: int = INCARNATION
) -> Frame:
    return Frame(FrameType.WELCOME, 0, struct.pack("<HHIQQ", version, 0, count, incarnation, highest))


def opstate(op: int, **state: object) -> Frame:
    values = {"kind": Kind.EXEC, "state": 1, **state}
    return Frame(FrameType.OPSTATE, op, encode_opstate(OpState(**values)))  # type: ignore[arg-type]


def started(op: int, pid: int = 9) -> Frame:
    return Frame(FrameType.STARTED, op, struct.pack("<II", pid, 0))


def out(op: int, offset: int, data: bytes, *, stderr: bool = False) -> Frame:
    return Frame(FrameType.OUT, op, struct.pack("<Q", offset) + data, Flag.STDERR if stderr else 0)


def stdin_ack(op: int, offset: int) -> Frame:
    return Frame(FrameType.STDIN_ACK, op, struct.pack("<Q", offset))


def ended(op: int, stdout: int = 0, stderr: int = 0, **end: object) -> Frame:
    values = {"kind": EndKind.EXITED, "stdout_bytes": stdout, "stderr_bytes": stderr, **end}
    return Frame(FrameType.EXIT, op, encode_exit(OpEnd(**values)))  # type: ignore[arg-type]


def refused(op: int, errno: int = 11, message: bytes = b"") -> Frame:
    return Frame(FrameType.REFUSED, op, struct.pack("<II", errno, 0) + message)


SYNCED = Frame(FrameType.SYNCED)


def live(*states: Frame, spooled: dict[int, tuple[int, int]] | None = None, highest: int | None = None) -> Session:
    session = Session(INCARNATION, spooled)
    assert decode(session.hello()).type is FrameType.HELLO
    top = max((state.op for state in states), default=0) if highest is None else highest
    session.receive(welcome(len(states), top))
    for state in states:
        assert isinstance(session.receive(state), Known)
    assert session.receive(SYNCED) == Synced()
    return session


def running(**request: object) -> tuple[Session, int]:
    session = live()
    op, _ = session.start(OpRequest(argv=(b"x",), **request))  # type: ignore[arg-type]
    assert session.receive(started(op)) == Started(op, 9)
    return session, op


# --- a life -----------------------------------------------------------------------------------------------------------


def test_a_command_from_start_to_release() -> None:
    session = live()
    request = OpRequest(argv=(b"cat", b"\xff"), env=(b"A=1",), key=b"k", flags=ExecFlag.STDIN, timeout_ms=0)
    op, frames = session.start(request)
    assert decode_request(decode(frames[0]).payload) == request
    assert session.receive(started(op)) == Started(op, 9)
    sent = decode(session.stdin(op, b"abc", eof=True))
    assert (sent.type, sent.payload[8:], sent.flags) == (FrameType.STDIN, b"abc", Flag.EOF)
    assert session.stdin_room(op) is None
    assert session.receive(stdin_ack(op, 3)) == StdinRoom(op)
    assert session.receive(out(op, 0, b"abc")) == Output(op, False, 0, b"abc")
    assert session.receive(out(op, 0, b"e", stderr=True)) == Output(op, True, 0, b"e")
    assert decode(session.ack(op, 3, 1)).payload == struct.pack("<QQ", 3, 1)
    assert session.ack(op, 3, 1) == b""
    assert decode(session.signal(op, 15, 1)).payload == struct.pack("<II", 15, 1)
    event = session.receive(ended(op, 3, 1, code=7, cpu_us=5))
    assert isinstance(event, Ended)
    assert (event.end.code, event.end.cpu_us) == (7, 5)
    assert session.signal(op, 15, 0) == b""
    assert decode(session.release(op)).type is FrameType.RELEASE
    assert session.release(op) == b""


def test_a_long_request_is_split() -> None:
    session = live()
    request = OpRequest(argv=tuple(b"x" * 60_000 for _ in range(5)))
    joiner, whole = RequestJoiner(), None
    for packet in session.start(request)[1]:
        whole = joiner.add(decode(packet))
    assert whole is not None
    assert decode_request(whole) == request


def test_numbers_rise_above_what_the_guest_ever_saw() -> None:
    session = live(highest=41)
    assert [session.start(OpRequest(argv=(b"x",)))[0] for _ in range(2)] == [42, 43]


def test_a_failed_start_says_where() -> None:
    session = live()
    op, _ = session.start(OpRequest(argv=(b"x",)))
    event = session.receive(ended(op, kind=EndKind.START_FAILED, code=2, stage=Stage.EXEC))
    assert isinstance(event, Ended)
    assert event.end.message == "cannot execute: No such file or directory"


def test_a_refused_start_is_a_failed_start_and_needs_no_release() -> None:
    session = live()
    op, _ = session.start(OpRequest(argv=(b"x",)))
    event = session.receive(refused(op, 11, b"no \xff" + b"x" * 5000))
    assert isinstance(event, Ended)
    assert (event.end.kind, event.end.code, event.end.stage) == (EndKind.START_FAILED, 11, Stage.REQUEST)
    assert event.end.message.startswith("no \ufffdx")
    assert len(event.end.message) <= 500
    assert session.release(op) == b""


def test_a_refused_signal_is_told() -> None:
    session, op = running()
    assert session.receive(refused(op, 3, b"gone")) == Refused(op, 3, "gone")


def test_a_ping_comes_back_once() -> None:
    session = live()
    token, _ = session.ping()
    pong = Frame(FrameType.PONG, 0, struct.pack("<QQ", token, 5))
    assert session.receive(pong) == Pong(token, 5)
    with pytest.raises(ProtocolError):
        session.receive(pong)


def test_what_crosses_a_release_is_ignored() -> None:
    session, op = running()
    session.release(op)
    for frame in (out(op, 0, b"late"), stdin_ack(op, 0), ended(op), refused(op)):
        assert session.receive(frame) is None


def test_too_many_operations_are_not_started() -> None:
    session = live()
    for _ in range(MAX_OPS):
        session.start(OpRequest(argv=(b"x",)))
    with pytest.raises(OverflowError):
        session.start(OpRequest(argv=(b"x",)))


# --- flow control -----------------------------------------------------------------------------------------------------


def test_stdin_keeps_to_the_window() -> None:
    session, op = running(flags=ExecFlag.STDIN)
    sent = 0
    while room := session.stdin_room(op):
        session.stdin(op, bytes(room))
        sent += room
    assert sent == WINDOW
    with pytest.raises(RuntimeError):
        session.stdin(op, b"x")
    session.receive(stdin_ack(op, 10))
    assert session.stdin_room(op) == 10


def test_output_keeps_to_the_window_and_goes_on_after_an_ack() -> None:
    session, op = running()
    piece = bytes(1 << 16)
    for index in range(4):
        session.receive(out(op, index << 16, piece))
    session.ack(op, 1, 0)
    session.receive(out(op, WINDOW, b"x"))
    with pytest.raises(ProtocolError):
        session.receive(out(op, WINDOW + 1, b"x"))


def test_an_ack_never_goes_back_or_beyond() -> None:
    session, op = running()
    session.receive(out(op, 0, b"abc"))
    session.ack(op, 2, 0)
    for bad in ((1, 0), (4, 0), (2, 1)):
        with pytest.raises(RuntimeError):
            session.ack(op, *bad)


# --- resync -----------------------------------------------------------------------------------------------------------


def test_a_resync_continues_where_the_spool_ends_and_drops_what_is_there() -> None:
    state = opstate(5, key=b"k", pid=9, stdout_base=100, stdout_end=160, stderr_base=0, stderr_end=10)
    session = Session(INCARNATION, {5: (120, 0)})
    session.hello()
    session.receive(welcome(1, 5))
    known = session.receive(state)
    assert isinstance(known, Known)
    assert (known.stdout_from, known.stderr_from, known.state.key) == (120, 0, b"k")
    session.receive(SYNCED)
    assert session.receive(out(5, 100, b"x" * 20)) is None
    assert session.receive(out(5, 110, b"a" * 10 + b"b" * 40)) == Output(5, False, 120, b"b" * 40)
    assert session.receive(out(5, 0, b"e" * 10, stderr=True)) == Output(5, True, 0, b"e" * 10)
    assert session.receive(started(5)) is None
    assert isinstance(session.receive(ended(5, 160, 10)), Ended)


def test_an_operation_that_was_starting_still_starts() -> None:
    session = live(opstate(5, state=0))
    assert session.receive(started(5)) == Started(5, 9)


def test_stdin_goes_on_where_the_guest_had_it() -> None:
    session = live(opstate(5, stdin_offset=1000))
    assert session.stdin_offset(5) == 1000
    assert session.receive(stdin_ack(5, 500)) is None  # what an earlier edge had sent is written by and by
    frame = decode(session.stdin(5, b"abc"))
    assert frame.payload == struct.pack("<Q", 1000) + b"abc"
    assert session.stdin_room(5) == 65536
    assert session.receive(stdin_ack(5, 1003)) == StdinRoom(5)
    with pytest.raises(ProtocolError):
        session.receive(stdin_ack(5, 1004))


# --- a hostile guest --------------------------------------------------------------------------------------------------

HANDSHAKES: dict[str, list[Frame]] = {
    "another version": [welcome(version=PROTOCOL_VERSION + 1)],
    "another incarnation": [welcome(incarnation=1)],
    "SYNCED first": [SYNCED],
    "WELCOME twice": [welcome(), welcome()],
    "an operation frame before SYNCED": [welcome(), started(1)],
    "more operations than announced": [welcome(1, 9), opstate(1), opstate(2)],
    "endless operations": [welcome(0, 9), opstate(1)],
    "fewer operations than announced": [welcome(2, 9), opstate(1), SYNCED],
    "an operation twice": [welcome(2, 9), opstate(1), opstate(1)],
    "operation 0": [welcome(1, 9), opstate(0)],
    "an operation above the highest": [welcome(1, 9), opstate(10)],
    "one key twice": [welcome(2, 9), opstate(1, key=b"k"), opstate(2, key=b"k")],
    "too many operations": [welcome(MAX_OPS + 1, 1 << 40)],
    "more operations than numbers": [welcome(2, 1)],
    "an absurd highest number": [welcome(0, (1 << 64) - 1)],
    "more output than a window": [welcome(1, 9), opstate(1, stdout_end=WINDOW + 1)],
    "less output than was spooled": [welcome(1, 9), opstate(7, stdout_end=5)],
    "output that ends before it begins": [welcome(1, 9), opstate(1, stdout_base=2, stdout_end=1)],
    "an unknown state": [welcome(1, 9), opstate(1, state=3)],
    "PONG before SYNCED": [welcome(), Frame(FrameType.PONG, 0, bytes(16))],
    "HELLO from a guest": [Frame(FrameType.HELLO, 0, bytes(16))],
    "a zygote's frame": [Frame(FrameType.Z_OK)],
}


@pytest.mark.parametrize("frames", HANDSHAKES.values(), ids=HANDSHAKES.keys())
def test_a_false_handshake_breaks_the_session(frames: list[Frame]) -> None:
    session = Session(INCARNATION, {7: (10, 0)})
    session.hello()
    *before, last = frames
    for frame in before:
        session.receive(frame)
    with pytest.raises(ProtocolError):
        session.receive(last)
    assert session.phase is Phase.BROKEN
    with pytest.raises(ProtocolError):
        session.receive(welcome())


LIES: dict[str, Callable[[int], list[Frame]]] = {
    "an operation that never was": lambda op: [started(op + 1)],
    "operation 0": lambda op: [out(0, 0, b"x")],
    "STARTED twice": lambda op: [started(op)],
    "a pid of 0": lambda op: [ended(op), started(op)],
    "output with a gap": lambda op: [out(op, 1, b"x")],
    "output far away": lambda op: [out(op, (1 << 64) - 1, b"x")],
    "output without bytes": lambda op: [out(op, 0, b"")],
    "output after the end": lambda op: [ended(op), out(op, 0, b"x")],
    "an end before the output": lambda op: [out(op, 0, b"x"), ended(op, 2)],
    "an end that forgets output": lambda op: [out(op, 0, b"x"), ended(op, 0)],
    "two ends": lambda op: [ended(op), ended(op)],
    "an exit code of 256": lambda op: [ended(op, code=256)],
    "signal 0": lambda op: [ended(op, kind=EndKind.SIGNALED, code=0)],
    "a negative exit code": lambda op: [ended(op, code=-1)],
    "absurd counters": lambda op: [ended(op, cpu_us=1 << 63)],
    "an unknown end": lambda op: [Frame(FrameType.EXIT, op, bytes([9]) + bytes(63))],
    "an unknown stage": lambda op: [Frame(FrameType.EXIT, op, bytes([0, 99]) + bytes(62))],
    "unknown exit flags": lambda op: [Frame(FrameType.EXIT, op, bytes([0, 0, 2]) + bytes(61))],
    "stdin that was never sent": lambda op: [stdin_ack(op, 1)],
    "errno 0": lambda op: [refused(op, 0)],
    "a PONG that nobody asked for": lambda op: [Frame(FrameType.PONG, 0, bytes(16))],
    "OPSTATE when live": lambda op: [opstate(op)],
    "SYNCED again": lambda op: [SYNCED],
    "WELCOME again": lambda op: [welcome()],
    "an edge's frame": lambda op: [Frame(FrameType.RELEASE, op)],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_breaks_the_session(lie: Callable[[int], list[Frame]]) -> None:
    session, op = running(flags=ExecFlag.STDIN)
    *before, last = lie(op)
    for frame in before:
        session.receive(frame)
    with pytest.raises(ProtocolError):
        session.receive(last)
    assert session.phase is Phase.BROKEN


def test_an_operation_of_a_former_edge_that_was_not_announced_never_was() -> None:
    session = live(highest=9)
    with pytest.raises(ProtocolError):
        session.receive(out(3, 0, b"x"))


@st.composite
def any_frame(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from([kind for kind in FrameType if kind < 128]))
    least, most, flags = _RULES[kind]
    payload = draw(st.binary(min_size=least, max_size=min(most, least + 60)))
    if draw(st.booleans()):
        payload = bytes(len(payload))
    return Frame(kind, draw(st.integers(0, 4)), payload, draw(st.sampled_from([0, flags])))


@given(st.lists(any_frame(), max_size=20))
def test_no_frame_does_anything_but_an_event_or_an_error(frames: list[Frame]) -> None:
    session, _ = running(flags=ExecFlag.STDIN)
    for _ in range(2):
        session.start(OpRequest(argv=(b"x",)))
    for frame in frames:
        try:
            session.receive(frame)
        except ProtocolError:
            assert session.phase is Phase.BROKEN


@given(st.binary(max_size=200))
def test_noise_as_payload_decodes_or_is_refused(noise: bytes) -> None:
    for decoder in (decode_request, decode_opstate):
        try:
            decoder(noise)
        except ProtocolError:
            continue
    if len(noise) >= 64:
        try:
            decode_exit(noise[:64])
        except ProtocolError:
            return


NUMBERS = st.one_of(st.none(), st.integers(0, (1 << 64) - 1))
TEXTS = st.one_of(st.none(), st.binary(max_size=20))


@given(
    st.builds(
        OpRequest,
        kind=st.sampled_from(Kind),
        argv=st.lists(st.binary(max_size=20), max_size=4).map(tuple),
        env=st.lists(st.binary(max_size=20), max_size=4).map(tuple),
        cwd=TEXTS,
        user=TEXTS,
        key=st.one_of(st.none(), st.binary(min_size=1, max_size=128)),
        path=TEXTS,
        path2=TEXTS,
        timeout_ms=NUMBERS,
        output_cap=NUMBERS,
        mode=NUMBERS,
        offset=NUMBERS,
        length=NUMBERS,
        depth=NUMBERS,
        open_files=NUMBERS,
        flags=st.integers(0, 7).map(ExecFlag),
    )
)
def test_a_request_survives(request: OpRequest) -> None:
    assert decode_request(encode_request(request)) == request


class OffsetsMachine(RuleBasedStateMachine):
    """A guest that sends any valid overlap of one stream, and an edge that acknowledges at will: the stream comes
    out whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.session, self.op = running()
        self.data = bytes(range(256)) * 64
        self.sent = self.acked = 0
        self.got = b""

    @rule(back=st.integers(0, 300), size=st.integers(1, 700))
    def send(self, back: int, size: int) -> None:
        start = max(0, self.sent - back)
        piece = self.data[start : start + size]
        if piece:
            event = self.session.receive(out(self.op, start, piece))
            self.sent = max(self.sent, start + len(piece))
            if event is not None:
                assert isinstance(event, Output)
                assert event.offset == len(self.got)
                self.got += event.data

    @precondition(lambda self: self.acked < self.sent)
    @rule(part=st.floats(0, 1))
    def acknowledge(self, part: float) -> None:
        self.acked += int((self.sent - self.acked) * part)
        self.session.ack(self.op, self.acked, 0)

    @invariant()
    def whole(self) -> None:
        assert self.got == self.data[: self.sent]


OffsetsMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestOffsets = OffsetsMachine.TestCase
