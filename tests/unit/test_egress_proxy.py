"""What the proxy reads out of requests, and what it lets go on."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.egress.http1 import Refused
from dsec.egress.proxy import Asked, Forwarded, environment, parse
from dsec.spec.network import Reason

V6 = ipaddress.ip_address("2001:db8::1")


@pytest.mark.parametrize(
    ("head", "target", "port"),
    [
        (b"CONNECT Good.Example.:443 HTTP/1.1\r\nHost: good.example:443\r\n\r\n", "good.example", 443),
        (b"CONNECT good.example:22 HTTP/1.0\r\n\r\n", "good.example", 22),
        (b"CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: [2001:db8::1]:443\r\n\r\n", V6, 443),
        (b"CONNECT 1.2.3.4:1 HTTP/1.1\r\nhost: 1.2.3.4\r\n\r\n", ipaddress.ip_address("1.2.3.4"), 1),
        (b"GET http://good.example HTTP/1.1\r\nHost: good.example\r\n\r\n", "good.example", 80),
        (b"GET HTTP://GOOD.example:8080/a?b HTTP/1.1\r\nHost: x\r\n\r\n", "good.example", 8080),
    ],
)
def test_a_target_is_read(head: bytes, target: object, port: int) -> None:
    assert parse(head[:-1]) is None
    assert parse(head) == Asked(target, port, head.startswith(b"CONNECT"), head)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "head",
    [
        b"CONNECT good.example HTTP/1.1\r\n\r\n",
        b"CONNECT good.example:0 HTTP/1.1\r\n\r\n",
        b"CONNECT good.example:443x HTTP/1.1\r\n\r\n",
        b"CONNECT http://good.example:443 HTTP/1.1\r\n\r\n",
        b"CONNECT user@good.example:443 HTTP/1.1\r\n\r\n",
        b"CONNECT good.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
        b"CONNECT good.example:443 HTTP/1.1\r\nHost : good.example:443\r\n\r\n",
        b"CONNECT good.example:443 HTTP/1.1\r\nHost: good.example:443\r\nHost: evil.example:443\r\n\r\n",
        b"CONNECT good.example:443 HTTP/1.1\r\nContent-Length: 3\r\n\r\n",
        b"CONNECT good.example:443 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"CONNECT good.example:443 HTTP/1.1\r\n\r\n\x16\x03\x01",
        b"CONNECT 0x7f000001:443 HTTP/1.1\r\n\r\n",
        b"CONNECT [good.example]:443 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"GET https://good.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"GET http://user@good.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"GET http://good.example\\@evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"GET http:///path HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"GET http://good.example/ HTTP/2.0\r\n\r\n",
        b"x" * 70000,
    ],
)
def test_what_is_no_target_is_refused(head: bytes) -> None:
    with pytest.raises(Refused):
        parse(head)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        parse(data + b"\r\n\r\n")
    except Refused as refused:
        assert refused.reason in {Reason.HTTP_MALFORMED, Reason.HTTP_HOST_MISMATCH}  # noqa: PT017


def test_a_request_goes_on_in_origin_form() -> None:
    gate = Forwarded("good.example", 8080)
    sent = (
        b"POST http://good.example:8080?q#f HTTP/1.1\r\nHost: good.example:8080\r\nProxy-Connection: keep-alive\r\n"
        b"Proxy-Authorization: Basic eDp5\r\nConnection: keep-alive\r\nX: y\r\nContent-Length: 4\r\n\r\nbody"
    )
    passed = b"".join(gate.feed(bytes([byte])) for byte in sent)
    assert passed == (
        b"POST /?q HTTP/1.1\r\nHost: good.example:8080\r\nX: y\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbody"
    )
    assert gate.feed(sent) == passed
    with pytest.raises(Refused):
        gate.feed(sent.replace(b"good.example", b"evil.example"))


def test_addresses_are_hosts_too() -> None:
    sent = b"GET http://[2001:db8::1]/ HTTP/1.1\r\nHost: [2001:db8:0::1]\r\n\r\n"
    assert Forwarded(V6, 80).feed(sent).startswith(b"GET / HTTP/1.1\r\nHost:")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET http://good.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"GET http://good.example/ HTTP/1.1\r\nHost: good.example:81\r\n\r\n",
        b"GET http://good.example/ HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"GET http://good.example/ HTTP/1.1\r\nHost: good.example\r\nUpgrade: websocket\r\n\r\n",
        b"GET http://good.example/ HTTP/1.1\r\nHost: good.example\r\nContent-Length: 1\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_other_requests_do_not(sent: bytes) -> None:
    with pytest.raises(Refused):
        Forwarded("good.example", 80).feed(sent)


def test_variables() -> None:
    found = environment(["db", "db"])
    assert found["http_proxy"] == found["HTTPS_PROXY"] == "http://proxy.dsec:3128"
    assert found["no_proxy"] == found["NO_PROXY"] == "localhost,127.0.0.1,127.0.0.0/8,::1,.dsec,db"
