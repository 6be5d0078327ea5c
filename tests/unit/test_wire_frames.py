"""Frames and fields: round trips, splitting anywhere, and every mutation either decodes or is a ProtocolError."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.wire.frames import (
    _RULES,
    HEADER_SIZE,
    MAX_DATA,
    MAX_PAYLOAD,
    MAX_REQUEST,
    PROTOCOL_VERSION,
    Flag,
    Frame,
    FrameType,
    ProtocolError,
    RequestJoiner,
    StreamDecoder,
    Tag,
    decode,
    decode_all,
    decode_fields,
    encode,
    encode_fields,
    encode_many,
    field_int,
    split_request,
)

U64 = st.integers(0, (1 << 64) - 1)
VECTORS = Path(__file__).parents[1] / "vectors" / "frames.json"


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(list(FrameType)))
    least, most, flags = _RULES[kind]
    payload = draw(st.binary(min_size=least, max_size=min(most, least + 200)))
    return Frame(kind, draw(U64), payload, draw(st.sampled_from([0, int(flags)])))


@given(frames())
def test_a_frame_survives_a_packet(frame: Frame) -> None:
    assert decode(frame.encode()) == frame


@given(st.lists(frames(), max_size=8), st.lists(st.integers(0, 2000), max_size=20))
def test_frames_survive_a_stream_cut_anywhere(sent: list[Frame], cuts: list[int]) -> None:
    data = encode_many(sent)
    decoder, got, at = StreamDecoder(), [], 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        got += decoder.feed(data[at:cut])
        at = cut
    decoder.end()
    assert got == sent


@given(st.lists(frames(), min_size=1, max_size=8), st.integers(1, HEADER_SIZE - 1))
def test_frames_survive_one_packet_and_a_cut_one_is_refused(sent: list[Frame], cut: int) -> None:
    packet = encode_many(sent)
    assert decode_all(packet) == sent
    with pytest.raises(ProtocolError):
        decode_all(packet[:-cut])
    with pytest.raises(ProtocolError):
        decode_all(b"")


@given(frames(), st.data())
def test_a_mutated_packet_decodes_or_is_refused(frame: Frame, data: st.DataObject) -> None:
    packet = bytearray(frame.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    packet = packet[: data.draw(st.integers(0, len(packet)))]
    try:
        found = decode(bytes(packet))
    except ProtocolError:
        return
    assert found.encode() == packet


@given(st.binary(max_size=400))
def test_noise_on_a_stream_decodes_or_is_refused_for_good(noise: bytes) -> None:
    decoder = StreamDecoder()
    try:
        decoder.feed(noise)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            decoder.feed(b"")


def header(size: int, kind: int, flags: int = 0, zero: int = 0) -> bytes:
    return struct.pack("<IBBHQ", size, kind, flags, zero, 1)


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"x" * (HEADER_SIZE - 1),
        header(0, 0),
        header(0, 99),
        header(0, FrameType.SYNCED, flags=1),
        header(0, FrameType.SYNCED, flags=128),
        header(0, FrameType.SYNCED, zero=1),
        header(0, FrameType.SYNCED) + b"x",
        header(1, FrameType.SYNCED) + b"x",
        header(15, FrameType.ACK) + bytes(15),
        header(16, FrameType.ACK) + bytes(15),
        header(7, FrameType.OUT) + bytes(7),
        header(8 + MAX_DATA + 1, FrameType.OUT) + bytes(8 + MAX_DATA + 1),
        header(MAX_PAYLOAD + 1, FrameType.START) + bytes(MAX_PAYLOAD + 1),
        header(0xFFFFFFFF, FrameType.START),
    ],
)
def test_malformed_packets_are_refused(packet: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(packet)


@given(st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=20), st.booleans())
def test_a_stream_that_an_earlier_edge_left_begins_with_our_welcome(before: bytes, cuts: list[int], half: bool) -> None:
    incarnation = 0x1122334455667788
    welcome = Frame(FrameType.WELCOME, 0, struct.pack("<HHIQQ", PROTOCOL_VERSION, 0, 0, incarnation, 7))
    other = Frame(FrameType.WELCOME, 0, struct.pack("<HHIQQ", PROTOCOL_VERSION, 0, 0, 5, 7)).encode()
    stray = struct.pack("<Q", incarnation)  # our number, but in no WELCOME
    stream = (
        before + other + stray + (other[:30] if half else b"") + welcome.encode() + Frame(FrameType.SYNCED).encode()
    )
    decoder, found, at = StreamDecoder(incarnation), list[Frame](), 0
    for size in [*cuts, len(stream)]:
        found += decoder.feed(stream[at : at + size])
        at += size
    assert found == [welcome, Frame(FrameType.SYNCED)]


def test_a_refusal_of_what_came_before_the_welcome_is_heard() -> None:
    number, why = 0x1122334455667788, struct.pack("<II", 1, 0) + b"set the clock: no"
    other = Frame(FrameType.REFUSED, 5, why).encode() + Frame(FrameType.CONFIGURED, number, bytes(8)).encode()
    decoder = StreamDecoder(number)
    assert decoder.feed(other) == []
    with pytest.raises(ProtocolError, match="set the clock: no"):
        decoder.feed(Frame(FrameType.REFUSED, number, why).encode())


def test_a_stream_refuses_a_huge_size_before_it_waits_for_it() -> None:
    with pytest.raises(ProtocolError):
        StreamDecoder().feed(header(0xFFFFFFFF, FrameType.START))


def test_a_stream_that_ends_inside_a_frame_was_cut() -> None:
    decoder = StreamDecoder()
    assert decoder.feed(header(0, FrameType.SYNCED)[:-1]) == []
    with pytest.raises(ProtocolError):
        decoder.end()


def test_what_cannot_travel_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="no such frame"):
        encode(FrameType.SYNCED, 0, b"x")
    with pytest.raises(ValueError, match="no such frame"):
        encode(FrameType.OUT, 0, bytes(8), Flag.MORE)


# --- fields and requests ---------------------------------------------------------------------------------------------

FIELDS = st.lists(st.tuples(st.sampled_from(list(Tag)), st.one_of(U64, st.binary(max_size=50))), max_size=10)


@given(FIELDS)
def test_fields_survive(fields: list[tuple[Tag, int | bytes]]) -> None:
    found = decode_fields(encode_fields(fields))
    expected = [(tag, value.to_bytes(8, "little") if isinstance(value, int) else value) for tag, value in fields]
    assert found == expected


@given(FIELDS, st.data())
def test_mutated_fields_decode_or_are_refused(fields: list[tuple[Tag, int | bytes]], data: st.DataObject) -> None:
    payload = bytearray(encode_fields(fields) or b"\0")
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(0, len(payload)))]
    try:
        found = decode_fields(bytes(payload))
    except ProtocolError:
        return
    assert encode_fields(found) == payload


@pytest.mark.parametrize(
    "payload",
    [
        b"\1",
        struct.pack("<HHI", 1, 0, 1),
        struct.pack("<HHI", 999, 0, 0),
        struct.pack("<HHI", 1, 1, 0),
        struct.pack("<HHI", 1, 0, 0xFFFFFFFF),
        bytes(MAX_REQUEST + 1),
    ],
)
def test_malformed_fields_are_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_fields(payload)


def test_an_integer_field_has_eight_bytes() -> None:
    assert field_int(Tag.MODE, bytes([1, 0, 0, 0, 0, 0, 0, 0])) == 1
    with pytest.raises(ProtocolError):
        field_int(Tag.MODE, b"\1")


@given(st.integers(0, 3 * MAX_PAYLOAD + 2))
def test_a_request_is_split_and_joined(size: int) -> None:
    payload = bytes(range(256)) * (size // 256 + 1)
    payload = payload[:size]
    sent = [decode(packet) for packet in split_request(FrameType.START, 7, payload)]
    joiner = RequestJoiner()
    *parts, last = sent
    assert [joiner.add(frame) for frame in parts] == [None] * len(parts)
    assert joiner.add(last) == payload


def test_a_request_has_a_limit_on_both_sides() -> None:
    with pytest.raises(ValueError, match="at most"):
        list(split_request(FrameType.START, 1, bytes(MAX_REQUEST + 1)))
    joiner = RequestJoiner()
    part = Frame(FrameType.START, 1, bytes(MAX_PAYLOAD), Flag.MORE)
    for _ in range(MAX_REQUEST // MAX_PAYLOAD):
        joiner.add(part)
    with pytest.raises(ProtocolError):
        joiner.add(part)


def test_half_requests_are_bounded() -> None:
    joiner = RequestJoiner(pending=2)
    for op in (1, 2):
        joiner.add(Frame(FrameType.START, op, b"", Flag.MORE))
    with pytest.raises(ProtocolError):
        joiner.add(Frame(FrameType.START, 3, b"", Flag.MORE))


# --- vectors shared with C -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", json.loads(VECTORS.read_text()), ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, object]) -> None:
    packet = bytes.fromhex(str(vector["hex"]))
    decoded = vector["decoded"]
    if decoded is None:
        with pytest.raises(ProtocolError):
            decode(packet)
        return
    assert isinstance(decoded, dict)
    frame = decode(packet)
    assert (frame.type.name, frame.op, frame.flags) == (decoded["type"], decoded["op"], decoded["flags"])
    assert frame.payload.hex() == decoded["payload"]
    assert frame.encode() == packet
    if "fields" in decoded:
        found = [[tag.name, value.hex()] for tag, value in decode_fields(frame.payload)]
        assert found == decoded["fields"]
