"""The envelopes of Connect streams."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.wire.connect import COMPRESSED, END_STREAM, MAX_PAYLOAD, Code, Decoder, encode, encode_end
from dsec.wire.frames import ProtocolError


@given(st.lists(st.binary(max_size=200), max_size=8), st.data())
def test_what_was_put_in_comes_out_however_it_is_cut(payloads: list[bytes], data: st.DataObject) -> None:
    wire = b"".join(encode(payload) for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    decoder, found = Decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        found += decoder.feed(wire[start:end])
    decoder.end()
    assert found == payloads


@given(st.binary(max_size=400))
def test_any_bytes_give_payloads_or_a_protocol_error(data: bytes) -> None:
    decoder = Decoder()
    try:
        payloads = decoder.feed(data)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            decoder.feed(encode(b"{}"))
    else:
        assert b"".join(encode(payload) for payload in payloads) == data[: sum(len(p) + 5 for p in payloads)]


@pytest.mark.parametrize("flags", [COMPRESSED, END_STREAM, 4, 255])
def test_flags_are_refused(flags: int) -> None:
    with pytest.raises(ProtocolError, match="not taken"):
        Decoder().feed(encode(b"{}", flags))


def test_a_large_envelope_is_refused_by_its_head() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        Decoder().feed(b"\0" + (MAX_PAYLOAD + 1).to_bytes(4, "big"))


def test_a_cut_is_seen() -> None:
    decoder = Decoder()
    assert decoder.feed(encode(b"{}")[:-1]) == []
    with pytest.raises(ProtocolError, match="inside"):
        decoder.end()


def test_the_last_envelope() -> None:
    assert encode_end() == b"\x02\0\0\0\x02{}"
    wire = encode_end(Code.NOT_FOUND, 'no "such" thing\n')
    assert wire[0] == END_STREAM
    assert json.loads(wire[5:]) == {"error": {"code": "not_found", "message": 'no "such" thing\n'}}


def test_every_code_has_a_status() -> None:
    assert all(400 <= code.http_status < 600 for code in Code)
