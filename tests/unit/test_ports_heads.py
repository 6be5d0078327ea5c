"""The port proxy's decisions: which port a host name means, what passes of the heads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.api.ports import heads
from dsec.api.ports.hosts import Target, domain_here, find
from dsec.errors import BadAnswer, DsecError, InvalidRequest, Misdirected

ID = "0123456789abcdefghijklmv"[:24]
TRAFFIC = f"dtt_{ID}_{'a' * 64}".encode()
KEY = b"dsk_" + b"x" * 43
SANDBOX = f"dst_{ID}_~{'0' * 64}".encode()


@pytest.mark.parametrize(
    "host",
    [
        f"8000-{ID}.localhost",
        f"8000-{ID}.localhost:7190",
        f"8000-{ID}.localhost.",
        f"8000-{ID}.LOCALHOST.:1",
        f"8000-{ID.upper()}.LocalHost:",
    ],
)
def test_spellings_of_one_host(host: str) -> None:
    assert find(host.encode(), "localhost") == Target(ID, 8000)
    assert find(host.encode(), "localhost:7190") == Target(ID, 8000)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost",
        "127.0.0.1:8000",
        "[::1]:8000",
        "[8000-x::1]",
        ID,
        f"8000-{ID}",
        f"8000-{ID}.",
        f"8000-{ID}x.localhost",
        f"8000-{ID[:-1]}.localhost",
        f"x8000-{ID}.localhost",
        f"8000-{ID}@localhost",
        f"-{ID}.localhost",
        f" 8000-{ID}.localhost",
        f"49983-{ID}.anywhere",
        f"8000-{ID}.localhost".rjust(400, "0"),
    ],
)
def test_hosts_of_the_api(host: str) -> None:
    assert find(host.encode(), "localhost") is None


@pytest.mark.parametrize("port", ["0", "65536", "08000", "99999999999999999999", "049983"])
def test_what_is_no_port(port: str) -> None:
    with pytest.raises(InvalidRequest, match="no port"):
        find(f"{port}-{ID}.localhost".encode(), "localhost")


@pytest.mark.parametrize("domain", ["other", "localhost.other", "other.localhost", "localhost:80.other", "xlocalhost"])
def test_other_domains_are_refused(domain: str) -> None:
    with pytest.raises(Misdirected, match="localhost"):
        find(f"8000-{ID}.{domain}".encode(), "localhost")


@given(st.binary(max_size=80))
def test_any_host_is_answered(host: bytes) -> None:
    try:
        found = find(host, "localhost")
    except DsecError:
        return
    assert found is None or 1 <= found.port <= 65535


def test_domains() -> None:
    assert domain_here(None, 7190) == "localhost:7190"
    assert domain_here("sandboxes.example", 7190) == "sandboxes.example"


def passed(*headers: tuple[bytes, bytes]) -> dict[bytes, bytes]:
    return dict(heads.request_headers([(b"host", b"h"), *headers], client="1.2.3.4", scheme="http"))


def test_what_goes_in() -> None:
    found = passed(
        (b"connection", b"keep-alive, X-Once, Host, Authorization"),
        (b"x-once", b"1"),
        (b"keep-alive", b"1"),
        (b"te", b"trailers"),
        (b"upgrade", b"h2c"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"3"),
        (b"proxy-authorization", b"Basic x"),
        (b"accept", b"  text/html "),
    )
    assert found == {
        b"host": b"h",
        b"accept": b"text/html",
        b"x-forwarded-for": b"1.2.3.4",
        b"x-forwarded-proto": b"http",
        b"x-forwarded-host": b"h",
    }


def test_who_forwards() -> None:
    found = passed(
        (b"x-forwarded-for", b"9.9.9.9"),
        (b"x-forwarded-proto", b"HTTPS"),
        (b"x-forwarded-host", b"forged"),
        (b"forwarded", b"for=forged"),
    )
    assert found[b"x-forwarded-for"] == b"9.9.9.9, 1.2.3.4"
    assert found[b"x-forwarded-proto"] == b"https"
    assert found[b"x-forwarded-host"] == b"h"
    assert b"forwarded" not in found
    assert passed((b"x-forwarded-proto", b"gopher"))[b"x-forwarded-proto"] == b"http"


@pytest.mark.parametrize("token", [KEY, SANDBOX, TRAFFIC])
@pytest.mark.parametrize("form", [b"%b", b"Bearer %b", b"bearer  %b ", b"x=%b; y=1", b"https://h/?dsec_token=%b"])
def test_no_credential_of_ours_goes_in(token: bytes, form: bytes) -> None:
    for name in (b"authorization", b"x-api-key", b"x-access-token", b"referer", b"x-dsec-token", b"cookie"):
        assert not any(token in value for value in passed((name, form % token)).values()), name
    assert passed((b"e2b-traffic-access-token", b"anything")).keys().isdisjoint(heads.TOKEN_HEADERS)


def test_what_is_the_programs_own_goes_in() -> None:
    own = [(b"authorization", b"Bearer app-token"), (b"x-api-key", b"dsk_short"), (b"cookie", b"a=1; session=2")]
    assert {name: value for name, value in passed(*own).items() if name in dict(own)} == dict(own)
    assert passed((b"cookie", b"a=1;dsec_token=x; b=2"))[b"cookie"] == b"a=1; b=2"
    assert b"cookie" not in passed((b"cookie", b"dsec_token=x"))


def test_credentials() -> None:
    assert heads.credentials([(b"authorization", b"Bearer app"), (b"authorization", b"Basic " + KEY)]) == []
    assert heads.credentials([(b"authorization", b"bearer " + KEY), (b"x-dsec-token", TRAFFIC)]) == [TRAFFIC, KEY]
    assert heads.cookie([(b"cookie", b"a=1"), (b"cookie", b"b=2; dsec_token=t")]) == b"t"
    assert heads.cookie([(b"cookie", b"xdsec_token=t")]) is None


@pytest.mark.parametrize(
    ("query", "kept", "token"),
    [
        (b"", b"", None),
        (b"a=1&b", b"a=1&b", None),
        (b"dsec_token=t", b"", b"t"),
        (b"a=1&dsec%5Ftoken=%74&b=2", b"a=1&b=2", b"t"),
        (b"xdsec_token=t", b"xdsec_token=t", None),
    ],
)
def test_queries(query: bytes, kept: bytes, token: bytes | None) -> None:
    assert heads.split_query(query) == (kept, token)


def test_framing() -> None:
    assert heads.framing([]) == []
    assert heads.framing([(b"content-length", b"5")]) == [(b"content-length", b"5")]
    assert heads.framing([(b"transfer-encoding", b"Chunked")]) == [(b"transfer-encoding", b"chunked")]
    for doubtful in (
        [(b"transfer-encoding", b"chunked"), (b"content-length", b"5")],
        [(b"transfer-encoding", b"gzip, chunked")],
        [(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")],
        [(b"content-length", b"5"), (b"content-length", b"5")],
        [(b"content-length", b"5, 5")],
        [(b"content-length", b"+5")],
    ):
        with pytest.raises(InvalidRequest):
            heads.framing(doubtful)


def test_what_comes_out() -> None:
    answer = [
        (b"connection", b"close, x-once"),
        (b"x-once", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"5"),
        (b"x-dsec-error", b"forged"),
        (b"set-cookie", b"a=1; DOMAIN=.localhost; Path=/; HttpOnly"),
        (b"set-cookie", b" dsec_token = forged"),
        (b"content-type", b"text/plain"),
    ]
    assert heads.answer_headers(answer, 200) == [
        (b"set-cookie", b"a=1; Path=/; HttpOnly"),
        (b"content-type", b"text/plain"),
    ]
    assert heads.answer_headers([(b"content-length", b"5")], 200) == [(b"content-length", b"5")]
    assert heads.answer_headers([(b"content-length", b"5")], 304) == []


def test_handshakes() -> None:
    asked = [(b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ==")]
    said = [(b"upgrade", b"WebSocket"), (b"sec-websocket-accept", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")]
    heads.check_handshake(asked, said)
    for wrong in (said[:1], said[1:], [said[0], (said[1][0], b"other")]):
        with pytest.raises(BadAnswer):
            heads.check_handshake(asked, wrong)


@pytest.mark.parametrize(
    ("path", "query", "location"),
    [
        (b"/a%20b", b"x=1", b"/a%20b?x=1"),
        (b"//evil.example/", b"", b"/.//evil.example/"),
        (b"/\\evil.example", b"", b"/%5Cevil.example"),
        (b"/\r\nx: y", b"\n", b"/%0D%0Ax:%20y?%0A"),
        (b"*", b"", b"/./*"),
    ],
)
def test_a_redirect_stays_on_its_host(path: bytes, query: bytes, location: bytes) -> None:
    assert heads.clean_location(path, query) == location
