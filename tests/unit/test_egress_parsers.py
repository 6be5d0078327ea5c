"""The bytes that come from inside: DNS queries, ClientHellos, HTTP requests. Hostile ones too."""

from __future__ import annotations

import contextlib
import ssl
import struct
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.egress import dns, tls
from dsec.egress.gates import Hello, Whatever, gate_of
from dsec.egress.http1 import Refused, Requests
from dsec.egress.splice import Gate
from dsec.egress.standins import MOST, StandIns, is_stand_in
from dsec.spec.network import Reason

STAND_IN = IPv4Address("198.18.1.2")


def query(name: bytes, kind: int = 1, *, flags: int = 0x0100, more: bytes = b"") -> bytes:
    labels = b"".join(bytes((len(label),)) + label for label in name.split(b".")) if name else b""
    return struct.pack("!HHHHHH", 7, flags, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1) + more


def asked(message: bytes) -> tuple[int, int, bytes] | None:
    """Code, number of answers, and the last bytes of the answer; None: silence."""
    names = {"a.example": STAND_IN}
    answer = dns.answer(message, names.get, {STAND_IN: "a.example"}.get)
    if answer is None:
        return None
    number, flags, _, answers, _, _ = struct.unpack_from("!HHHHHH", answer)
    assert number == struct.unpack_from("!H", message)[0]
    assert flags & 0x8000
    assert len(answer) < 600
    return flags & 0xF, answers, answer[-4:]


def test_granted_names_have_one_address() -> None:
    assert asked(query(b"a.example")) == (0, 1, STAND_IN.packed)
    assert asked(query(b"A.eXample")) == (0, 1, STAND_IN.packed)
    assert asked(query(b"a.example", 255)) == (0, 1, STAND_IN.packed)
    for kind in (28, 65, 16, 15, 33, 6, 2):  # AAAA, HTTPS, TXT, MX, SRV, SOA, NS
        found = asked(query(b"a.example", kind))
        assert found is not None
        assert found[:2] == (0, 0)


def test_other_names_do_not_exist() -> None:
    for name in (b"b.example", b"a.example.evil", b"", b"x" * 63 + b".example", b"\xff\x00.example", b"a b.example"):
        found = asked(query(name))
        assert found is not None
        assert found[:2] == (3, 0)


def test_reverse() -> None:
    found = asked(query(b"2.1.18.198.in-addr.arpa", 12))
    assert found is not None
    assert found[:2] == (0, 1)
    for name in (b"3.1.18.198.in-addr.arpa", b"x.in-addr.arpa", b"1.1.1.1.1.in-addr.arpa"):
        found = asked(query(name, 12))
        assert found is not None
        assert found[0] == 3


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"", None),
        (b"\0" * 11, None),
        (query(b"a.example", flags=0x8100), None),  # an answer
        (b"\0" * 5000, None),
        (query(b"a.example", flags=0x2800), 4),  # an update
        (struct.pack("!HHHHHH", 7, 0, 1, 0, 0, 0) + b"\xc0\x0c\0\1\0\1", 1),  # a name that points to itself
        (struct.pack("!HHHHHH", 7, 0, 2, 0, 0, 0) + b"\1a\0\0\1\0\1" * 2, 1),
        (struct.pack("!HHHHHH", 7, 0, 0, 0, 0, 0), 1),
        (query(b"a.example")[:-3], 1),
        (struct.pack("!HHHHHH", 7, 0, 1, 0, 0, 0) + (b"\x3f" + b"a" * 63) * 5 + b"\0\0\1\0\1", 1),
    ],
)
def test_hostile_queries(message: bytes, code: int | None) -> None:
    found = asked(message)
    assert (None if found is None else found[0]) == code


@given(st.binary(max_size=600))
def test_any_bytes_are_answered_or_not(message: bytes) -> None:
    dns.answer(message, lambda _: None, lambda _: None)


def hello(name: str | None) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def in_records(data: bytes, size: int) -> bytes:
    """The same hello in records of `size` bytes."""
    body = data[5:]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(data[:3] + len(piece).to_bytes(2, "big") + piece for piece in pieces)


@pytest.mark.parametrize("size", [1, 3, 100, 16384])
def test_the_name_is_found_in_any_pieces(size: int) -> None:
    whole = in_records(hello("Secret.example"), size)
    assert tls.server_name(whole) == "secret.example"
    for end in range(0, len(whole), 7):
        assert tls.server_name(whole[:end]) is None
    gate = Hello("secret.example")
    passed = b"".join(gate.feed(whole[at : at + 5]) for at in range(0, len(whole), 5))
    assert passed == whole
    assert gate.raw


def test_a_hello_without_a_name_or_with_another() -> None:
    for name, reason in ((None, Reason.TLS_NAME_MISSING), ("other.example", Reason.TLS_NAME_MISMATCH)):
        with pytest.raises(Refused) as caught:
            Hello("a.example").feed(hello(name))
        assert caught.value.reason is reason


def test_what_is_no_hello() -> None:
    real = hello("a.example")
    twice = real.replace(b"\x00\x00\x00\x0e\x00\x0c\x00\x00\x09a.example", b"")
    assert twice != real
    for data in (b"GET / HTTP/1.1", b"\x16\x03\x01\x00\x00", b"\x17\x03\x03\x00\x01\x00", b"\x16\x03\x01\xff\xff"):
        with pytest.raises(Refused) as caught:
            Hello("a.example").feed(data)
        assert caught.value.reason is Reason.NOT_TLS
    with pytest.raises(Refused):
        Hello("a.example").feed(b"\x16\x03\x01\x40\x00\x01\x00\xff\xff" + b"\0" * 70000)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_hello_or_not(data: bytes) -> None:
    for start in (b"", b"\x16\x03\x01", b"\x16\x03\x01\x00\x30\x01\x00\x00\x2c"):
        with contextlib.suppress(tls.Malformed):
            tls.server_name(start + data)


GET = b"GET /x HTTP/1.1\r\nHost: a.example\r\n\r\n"


def fed(gate: Gate, data: bytes, step: int, passed: bytearray) -> None:
    for at in range(0, len(data), step):
        passed += gate.feed(data[at : at + step])


@pytest.mark.parametrize("step", [1, 2, 17, 10_000])
def test_requests_pass_as_they_are(step: int) -> None:
    sent = (
        GET
        + b"POST / HTTP/1.1\r\nhost: A.example:80\r\nContent-Length: 5\r\n\r\nhello"
        + b"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nTrailer: x\r\n\r\n"
        + b"GET http://a.example/y HTTP/1.1\r\nHost: a.example.\r\n\r\n"
        + b"OPTIONS * HTTP/1.0\r\nHost: a.example\r\n\r\n"
    )
    gate = Requests("a.example", 80)
    assert b"".join(gate.feed(sent[at : at + step]) for at in range(0, len(sent), step)) == sent
    assert gate.count == 5


SMUGGLED = b"\r\n\r\nGET /secret HTTP/1.1\r\nHost: evil.example\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "reason"),
    [
        (GET.replace(b"a.example", b"evil.example"), Reason.HTTP_HOST_MISMATCH),
        (GET.replace(b"Host: a.example\r\n", b""), Reason.HTTP_HOST_MISMATCH),
        (GET.replace(b"a.example", b"a.example:81"), Reason.HTTP_HOST_MISMATCH),
        (GET.replace(b"a.example", b"a.example@evil.example"), Reason.HTTP_HOST_MISMATCH),
        (GET.replace(b"/x", b"http://evil.example/"), Reason.HTTP_HOST_MISMATCH),
        (GET.replace(b"/x", b"http://a.example@evil.example/"), Reason.HTTP_HOST_MISMATCH),
        (GET.replace(b"/x", b"https://a.example/"), Reason.HTTP_MALFORMED),
        (GET.replace(b"Host: a.example", b"Host: a.example\r\nHost: evil.example"), Reason.HTTP_MALFORMED),
        (GET.replace(b"Host: a.example", b"Host: a.example\r\n evil.example"), Reason.HTTP_MALFORMED),
        (GET.replace(b"Host: a", b"Host : a"), Reason.HTTP_MALFORMED),
        (GET.replace(b"Host: a.example", b"X: y\nHost: evil.example\r\nHost: a.example"), Reason.HTTP_MALFORMED),
        (GET.replace(b"Host: a.example", b"X: y\rHost: evil.example\r\nHost: a.example"), Reason.HTTP_MALFORMED),
        (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n", Reason.HTTP_MALFORMED),
        (b"GET /x HTTP/2.0\r\nHost: a.example\r\n\r\n", Reason.HTTP_MALFORMED),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Reason.HTTP_MALFORMED),
        (b"GET /x\r\n\r\n", Reason.HTTP_MALFORMED),
        (b"GET /x HTTP/1.1\r\nHost: a.example\r\nContent-Length: 4\r\nTransfer-Encoding: chunked" + SMUGGLED, None),
        (b"GET /x HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: xchunked" + SMUGGLED, None),
        (b"GET /x HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked, identity" + SMUGGLED, None),
        (b"GET /x HTTP/1.1\r\nHost: a.example\r\nContent-Length: 1\r\nContent-Length: 0" + SMUGGLED, None),
        (b"GET /x HTTP/1.1\r\nHost: a.example\r\nContent-Length: +0" + SMUGGLED, None),
        (b"GET /x HTTP/1.1\r\nHost: a.example\r\nContent-Length: 0, 0" + SMUGGLED, None),
        (b"GET /x HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\n", Reason.HTTP_MALFORMED),
        (b"GET /x HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n1;a=b\r\n", Reason.HTTP_MALFORMED),
        (b"GET /x HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab", Reason.HTTP_MALFORMED),
        (b"GET /x HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n1\nb", Reason.HTTP_MALFORMED),
        (b"GET /x HTTP/1.1\r\nHost: a.example\r\nUpgrade: h2c\r\n\r\n", Reason.HTTP_MALFORMED),
        (b"GET /" + b"x" * 70000, Reason.HTTP_MALFORMED),
        (b"\x16\x03\x01\x02\x00", Reason.HTTP_MALFORMED),
    ],
)
def test_what_could_be_read_in_two_ways_does_not_pass(request_bytes: bytes, reason: Reason | None) -> None:
    passed = bytearray()
    with pytest.raises(Refused) as caught:
        fed(Requests("a.example", 80), request_bytes + b"\r\n\r\n\r\n\r\n", 8, passed)
    assert b"evil" not in passed
    assert reason is None or caught.value.reason is reason


@pytest.mark.parametrize("second", [GET.replace(b"a.example", b"evil.example"), b"evil\r\n\r\n"])
def test_later_requests_are_checked_too(second: bytes) -> None:
    gate = Requests("a.example", 80)
    assert gate.feed(GET) == GET
    with pytest.raises(Refused):
        gate.feed(second)


def test_a_websocket_is_raw_once_the_server_agrees() -> None:
    upgrade = GET.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    gate = Requests("a.example", 80)
    assert gate.feed(upgrade + b"frames") == upgrade
    assert gate.waits_for_answer
    gate.upgraded(b"HTTP/1.1 101 Switching Protocols\r\n")
    assert gate.feed(b"") == b"frames"
    assert gate.raw
    gate = Requests("a.example", 80)
    gate.feed(upgrade)
    gate.upgraded(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises(Refused):
        gate.feed(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")


@given(
    st.lists(st.sampled_from([GET, b"evil.example", b"Host:", b"\r\n", b"\n", b"0", b"Content-Length: 3", b" ", b"\0"]))
)
def test_nothing_passes_before_its_head_was_checked(pieces: list[bytes]) -> None:
    gate, passed = Requests("a.example", 80), b""
    try:
        for piece in pieces:
            passed += gate.feed(piece)
    except Refused:
        pass
    assert passed == b"" or passed.startswith(b"GET /x HTTP/1.1\r\nHost: a.example")


def test_elsewhere_tls_and_http_are_recognised() -> None:
    for data in (hello("evil.example"), b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"):
        gate, passed = gate_of("a.example", 8000), bytearray()
        assert isinstance(gate, Whatever)
        with pytest.raises(Refused):
            fed(gate, data, 1, passed)
        assert not passed
    for data in (b"\0\0\0\x08\x04\xd2\x16\x2f", b"SSH-2.0-x\r\n", b"*1\r\n$4\r\nPING\r\n", b"G", b"\x16"):
        gate = gate_of("a.example", 8000)
        assert gate.feed(data) in (data, b"")
        assert gate.feed(b"........") in (b"........", data + b"........")


def test_stand_ins_mean_the_same_for_ever() -> None:
    saved: dict[int, str] = {}

    def save(name: str, address: int) -> None:
        saved[address] = name

    table = StandIns("box", save)
    first = {f"h{n}.example": table.address(f"h{n}.example") for n in range(3000)}
    assert len(set(first.values())) == 3000
    assert all(is_stand_in(address) and table.name(address) == name for name, address in first.items())
    again = StandIns("box", save, [(name, address) for address, name in saved.items()])
    assert {name: again.address(name) for name in first} == first
    assert StandIns("other", save).address("h1.example") != first["h1.example"]


def test_the_table_is_bounded() -> None:
    table = StandIns("box", lambda name, address: None)
    kept = table.address("kept.example")
    for n in range(MOST + 100):
        table.address(f"h{n}.example")
        if n % 1000 == 0:
            assert table.address("kept.example") == kept
    assert table.name(table.address("h0.example")) == "h0.example"
    assert len(table._by_name) == len(table._by_address) == MOST
