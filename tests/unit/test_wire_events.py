"""Events of watches and records of connections: round trips, however they are cut, and nonsense of any kind."""

from __future__ import annotations

import itertools
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.spec.sandbox import FileEvent
from dsec.wire.entries import to_text
from dsec.wire.events import (
    EVENT_SIZE,
    MAX_PATH,
    ConnectDecoder,
    EventDecoder,
    encode_begin,
    encode_connected,
    encode_ended,
    encode_event,
    from_json,
    json_safe,
)
from dsec.wire.frames import ProtocolError

PATHS = st.binary(max_size=40).map(to_text)
KINDS = st.sampled_from(["create", "write", "remove", "chmod", "overflow"])


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


@given(
    st.lists(st.tuples(KINDS, PATHS, st.none() | PATHS, st.booleans())), st.lists(st.integers(0, 10_000), max_size=8)
)
def test_events_come_back(made: list[tuple[str, str, str | None, bool]], cuts: list[int]) -> None:
    events = [
        FileEvent(kind="rename" if before is not None else kind, path=path, from_path=before, directory=directory)  # type: ignore[arg-type]
        for kind, path, before, directory in made
    ]
    decoder = EventDecoder()
    found: list[FileEvent] = []
    for piece in pieces(encode_begin() + b"".join(map(encode_event, events)), cuts):
        found += decoder.feed(piece)
    decoder.end()
    assert decoder.began
    assert [msgspec.structs.replace(each, path_b64=None, from_path_b64=None) for each in found] == events
    for each in found:
        travelled = msgspec.json.decode(msgspec.json.encode(json_safe(each)), type=FileEvent)
        assert from_json(travelled) == each


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_nonsense_is_refused_or_bounded(data: list[bytes]) -> None:
    decoder, connection = EventDecoder(), ConnectDecoder()
    try:
        for piece in data:
            decoder.feed(piece)
    except ProtocolError:
        pass
    assert len(decoder._buffer) <= EVENT_SIZE + 2 * MAX_PATH + 50
    try:
        for piece in data:
            connection.feed(piece)
            assert len(connection._buffer) < 9
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        encode_event(FileEvent(kind="create", path="x")),  # before the beginning
        encode_begin() * 2,
        struct.pack("<BBHHH", ord("b"), 1, 0, 0, 0),
        struct.pack("<BBHHH", ord("b"), 0, 1, 0, 0) + b"x",
        encode_begin() + struct.pack("<BBHHH", ord("c"), 2, 0, 0, 0),
        encode_begin() + struct.pack("<BBHHH", ord("c"), 0, 1, 1, 0) + b"xy",
        encode_begin() + struct.pack("<BBHHH", ord("c"), 0, 1, 0, 1) + b"x",
        encode_begin() + struct.pack("<BBHHH", ord("?"), 0, 1, 0, 0) + b"x",
    ],
)
def test_malformed_events(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        EventDecoder().feed(data)


def test_a_cut_event() -> None:
    decoder = EventDecoder()
    decoder.feed(encode_begin() + encode_event(FileEvent(kind="create", path="x"))[:-1])
    with pytest.raises(ProtocolError):
        decoder.end()
    with pytest.raises(ValueError, match="65,535"):
        encode_event(FileEvent(kind="create", path="x" * 65_536))


@given(st.integers(0, (1 << 64) - 1), st.lists(st.integers(0, 10), max_size=8))
def test_records_of_a_connection(size: int, cuts: list[int]) -> None:
    decoder = ConnectDecoder()
    for piece in pieces(encode_connected() + encode_ended(size), cuts):
        decoder.feed(piece)
    assert decoder.state.connected
    assert decoder.state.stdout_bytes == size


@pytest.mark.parametrize("data", [b"e", b"cc", b"cx", encode_connected() + encode_ended(1) * 2, b"c" + bytes(9)])
def test_malformed_records_of_a_connection(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        ConnectDecoder().feed(data)
