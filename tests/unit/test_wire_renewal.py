"""A session that goes on over another connection: what the guest may say then, and what it may not."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from msgspec.structs import replace

from dsec.spec.operations import ExecFlag, Kind, OpRequest
from dsec.wire.frames import PROTOCOL_VERSION, WINDOW, Frame, FrameType, ProtocolError
from dsec.wire.messages import OpState, encode_opstate
from dsec.wire.renewal import RenewableSession
from dsec.wire.session import Output, Phase, Started, Synced

RUNS, STARTS = 1, 2
"""Operations: one said 100 bytes, of which 40 were acknowledged, and took 10 of 30; of the other nothing is known."""
AS_IT_WAS = OpState(kind=Kind.EXEC, state=1, pid=7, stdin_offset=30, stdout_base=40, stdout_end=150)


def say(session: RenewableSession, kind: FrameType, op: int = 0, payload: bytes = b"") -> Any:
    return session.receive(Frame(kind, op, payload))


def welcome(session: RenewableSession, incarnation: int, count: int, highest: int) -> None:
    payload = struct.pack("<HHIQQ", PROTOCOL_VERSION, 0, count, incarnation, highest)
    assert say(session, FrameType.WELCOME, 0, payload) is None


@pytest.fixture
def session() -> RenewableSession:
    """In the middle of a renewal."""
    found = RenewableSession(1, machine=True)
    found.hello()
    welcome(found, 1, 0, 0)
    say(found, FrameType.SYNCED)
    for _ in (RUNS, STARTS):
        found.start(OpRequest(argv=(b"x",), flags=ExecFlag.STDIN))
    say(found, FrameType.STARTED, RUNS, struct.pack("<II", 7, 0))
    say(found, FrameType.OUT, RUNS, struct.pack("<Q", 0) + b"a" * 100)
    found.ack(RUNS, 40, 0)
    found.stdin(RUNS, b"b" * 30)
    say(found, FrameType.STDIN_ACK, RUNS, struct.pack("<Q", 10))
    assert found.renew(2)
    return found


def listed(session: RenewableSession, runs: OpState, starts: OpState | None = None) -> list[Any]:
    welcome(session, 2, 1 if starts is None else 2, STARTS)
    said = [say(session, FrameType.OPSTATE, RUNS, encode_opstate(runs))]
    if starts is not None:
        said.append(say(session, FrameType.OPSTATE, STARTS, encode_opstate(starts)))
    return said


def test_it_goes_on_where_it_was(session: RenewableSession) -> None:
    with pytest.raises(RuntimeError, match="not live"):
        session.start(OpRequest(argv=(b"x",)))
    assert listed(session, AS_IT_WAS, OpState(kind=Kind.EXEC, state=1, pid=8)) == [None, Started(STARTS, 8)]
    assert say(session, FrameType.SYNCED) == Synced()
    again = say(session, FrameType.OUT, RUNS, struct.pack("<Q", 40) + b"a" * 110)
    assert again == Output(RUNS, False, 100, b"a" * 50)  # what was heard isn't told twice
    assert session.stdin_offset(RUNS) == 30
    assert say(session, FrameType.STARTED, STARTS, struct.pack("<II", 8, 0)) is None
    assert session.start(OpRequest(argv=(b"x",)))[0] == STARTS + 1


def test_what_ended_or_was_released_meanwhile_is_said_once(session: RenewableSession) -> None:
    session.release(STARTS)
    assert listed(session, AS_IT_WAS, OpState(kind=Kind.EXEC, state=1, pid=8)) == [None, None]
    assert say(session, FrameType.SYNCED) == Synced()
    assert say(session, FrameType.OUT, STARTS, struct.pack("<Q", 0) + b"late") is None


@pytest.mark.parametrize(
    "lie",
    [
        {"stdout_base": 41},  # more is forgotten than was acknowledged
        {"stdout_end": 99},  # less was said than was heard
        {"stdout_end": 40 + WINDOW + 1},
        {"stdin_offset": 9},  # less was taken than it said
        {"stdin_offset": 31},  # more than was sent
        {"pid": 9},
        {"stderr_base": 1, "stderr_end": 1},
    ],
)
def test_a_guest_that_says_something_else_than_before_is_cut_off(
    session: RenewableSession, lie: dict[str, int]
) -> None:
    with pytest.raises(ProtocolError, match="another than it was"):
        listed(session, replace(AS_IT_WAS, **lie))
    assert session.phase is Phase.BROKEN


def test_one_that_forgets_invents_or_repeats_an_operation_is_cut_off(session: RenewableSession) -> None:
    listed(session, AS_IT_WAS)
    with pytest.raises(ProtocolError, match="doesn't know operation 2"):
        say(session, FrameType.SYNCED)


@pytest.mark.parametrize("op", [0, RUNS, STARTS + 1])
def test_no_operation_is_there_twice_or_new(session: RenewableSession, op: int) -> None:
    welcome(session, 2, 2, STARTS)
    say(session, FrameType.OPSTATE, RUNS, encode_opstate(AS_IT_WAS))
    with pytest.raises(ProtocolError, match="above the highest, or there twice"):
        say(session, FrameType.OPSTATE, op, encode_opstate(AS_IT_WAS))


@pytest.mark.parametrize(("incarnation", "highest"), [(1, STARTS), (2, STARTS + 1)])
def test_an_answer_to_another_greeting_or_with_other_counts(
    session: RenewableSession, incarnation: int, highest: int
) -> None:
    with pytest.raises(ProtocolError, match="WELCOME"):
        welcome(session, incarnation, 0, highest)
