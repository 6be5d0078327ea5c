"""The exec body: round trips cut anywhere; order and sizes are checked."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.wire.exec_stream import MAX_PAYLOAD, ClientDecoder, ClientKind, ServerDecoder, ServerKind, encode
from dsec.wire.frames import ProtocolError

OUTPUT = st.tuples(st.sampled_from([ServerKind.STDOUT, ServerKind.STDERR]), st.binary(max_size=100))


@given(st.lists(OUTPUT, max_size=8), st.lists(st.integers(0, 1000), max_size=10))
def test_an_answer_survives_cut_anywhere(output: list[tuple[ServerKind, bytes]], cuts: list[int]) -> None:
    sent = [(ServerKind.STARTED, b"{}"), *output, (ServerKind.END, b'{"exit_code":0}')]
    data = b"".join(encode(kind, payload) for kind, payload in sent)
    decoder, got, at = ServerDecoder(), [], 0
    for cut in [*sorted(min(cut, len(data) - 1) for cut in cuts), len(data)]:
        assert not decoder.finished
        got += decoder.feed(data[at:cut])
        at = cut
    decoder.end()
    assert got == sent
    assert decoder.finished


def test_an_answer_without_an_end_was_cut() -> None:
    decoder = ServerDecoder()
    decoder.feed(encode(ServerKind.STDOUT, b"abc"))
    decoder.end()
    assert not decoder.finished


def test_a_request_is_a_spec_then_stdin() -> None:
    decoder = ClientDecoder()
    body = encode(ClientKind.SPEC, b"{}") + encode(ClientKind.STDIN, b"abc") + encode(ClientKind.STDIN_END)
    assert [kind for kind, _ in decoder.feed(body)] == [ClientKind.SPEC, ClientKind.STDIN, ClientKind.STDIN_END]
    assert decoder.finished


@pytest.mark.parametrize(
    "body",
    [
        encode(ClientKind.STDIN, b"x"),
        encode(ClientKind.SPEC) + encode(ClientKind.SPEC),
        encode(ClientKind.SPEC) + encode(ClientKind.STDIN_END) + encode(ClientKind.STDIN, b"x"),
        encode(ClientKind.SPEC) + encode(ClientKind.STDIN_END) + b"\0",
        encode(ClientKind.SPEC) + encode(ClientKind.STDIN_END, b"x"),
        b"\3" + bytes(4),
        struct.pack("<BI", 0, MAX_PAYLOAD + 1),
    ],
)
def test_a_malformed_request_is_refused_for_good(body: bytes) -> None:
    decoder = ClientDecoder()
    with pytest.raises(ProtocolError):
        decoder.feed(body)
    with pytest.raises(ProtocolError):
        decoder.feed(encode(ClientKind.SPEC))


@pytest.mark.parametrize("body", [b"\5" + bytes(4), encode(ServerKind.END) + encode(ServerKind.STDOUT, b"x")])
def test_a_malformed_answer_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        ServerDecoder().feed(body)


def test_a_body_that_ends_inside_a_frame_was_cut() -> None:
    decoder = ServerDecoder()
    decoder.feed(encode(ServerKind.STDOUT, b"abc")[:-1])
    with pytest.raises(ProtocolError):
        decoder.end()


@given(st.binary(max_size=300))
def test_noise_decodes_or_is_refused(noise: bytes) -> None:
    decoder = ClientDecoder()
    try:
        got = decoder.feed(noise)
    except ProtocolError:
        return
    data = b"".join(encode(kind, payload) for kind, payload in got)
    assert noise.startswith(data)


def test_a_payload_has_a_limit() -> None:
    with pytest.raises(ValueError, match="at most"):
        encode(ServerKind.STDOUT, bytes(MAX_PAYLOAD + 1))
