"""The heads of requests and answers on their way through the proxy: what is passed on, what is not, what is added.

Pure. Invariants: nothing that is for one connection alone passes (hop-by-hop headers, framing: each side has its own);
no credential of ours goes in, wherever in the head it stands; what comes out of a sandbox speaks for its own host name
alone (no cookies for others) and never in our name (no `x-dsec-` headers).
"""

from __future__ import annotations

import base64
import hashlib
import re
from urllib.parse import quote, unquote_to_bytes

from dsec.errors import BadAnswer, InvalidRequest

Headers = list[tuple[bytes, bytes]]

COOKIE = b"dsec_token"
ARGUMENT = b"dsec_token"
TOKEN_HEADERS = (b"x-dsec-token", b"e2b-traffic-access-token")
_TOKEN = re.compile(rb"dsk_[\w-]{40,}|d[st]t_[0-9a-v]{24}_~?[\w-]{40,}")
"""API keys, and tokens of sandboxes."""
_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade content-length expect host".split()
)
_OURS = frozenset((*TOKEN_HEADERS, b"x-dsec-release", b"e2b-sandbox-id", b"e2b-sandbox-port"))
_FORWARDED = frozenset(b"x-forwarded-for x-forwarded-host x-forwarded-proto x-forwarded-port forwarded".split())
_ACCEPT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_BODILESS = (204, 304)


def credentials(headers: Headers) -> list[bytes]:
    """What the headers offer as a key or token of ours, the likeliest first. `Authorization` is the program's inside
    unless it holds one of ours."""
    found = [value.strip() for name in TOKEN_HEADERS for each, value in headers if each == name]
    for name, value in headers:
        kind, _, token = value.partition(b" ")
        if name == b"authorization" and kind.lower() == b"bearer" and _TOKEN.fullmatch(token.strip()):
            found.append(token.strip())
    return found


def cookie(headers: Headers) -> bytes | None:
    """The token in our cookie."""
    for name, value in headers:
        if name == b"cookie":
            for pair in value.split(b";"):
                key, _, token = pair.strip().partition(b"=")
                if key == COOKIE:
                    return token
    return None


def split_query(query: bytes) -> tuple[bytes, bytes | None]:
    """The query without our argument, and its value."""
    kept, token = [], None
    for pair in query.split(b"&"):
        name, _, value = pair.partition(b"=")
        if unquote_to_bytes(name) == ARGUMENT:
            token = unquote_to_bytes(value)
        else:
            kept.append(pair)
    return b"&".join(kept), token


def request_headers(headers: Headers, *, client: str | None, scheme: str) -> Headers:
    """What goes in, without the framing. Raises `InvalidRequest` for what has two meanings."""
    values = dict(headers)
    hosts = [value for name, value in headers if name == b"host"]
    dropped = _HOP | _OURS | _FORWARDED | _named_by_connection(headers)
    passed: Headers = [(b"host", hosts[0])]
    for name, value in headers:
        if name in dropped:
            continue
        if name == b"cookie":
            pairs = [each.strip() for each in value.split(b";")]
            passed_on = b"; ".join(pair for pair in pairs if pair.partition(b"=")[0].strip() != COOKIE)
        else:
            passed_on = value.strip()
        if not _TOKEN.search(passed_on) and (passed_on or name != b"cookie"):
            passed.append((name, passed_on))
    before = values.get(b"x-forwarded-for", b"").strip()
    if client is not None:
        passed.append((b"x-forwarded-for", b", ".join(filter(None, (before, client.encode("latin-1"))))))
    proto = values.get(b"x-forwarded-proto", b"").strip().lower()
    passed.append((b"x-forwarded-proto", proto if proto in (b"http", b"https") else scheme.encode()))
    passed.append((b"x-forwarded-host", hosts[0]))
    return passed


def framing(headers: Headers) -> Headers:
    """How long the body is, said anew. Raises `InvalidRequest` where that isn't beyond doubt."""
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    lengths = [value.strip() for name, value in headers if name == b"content-length"]
    if codings:
        if codings != [b"chunked"] or lengths:
            raise InvalidRequest("the only Transfer-Encoding is chunked, and no Content-Length goes with it")
        return [(b"transfer-encoding", b"chunked")]
    if not lengths:
        return []
    if len(lengths) > 1 or not lengths[0].isdigit():
        raise InvalidRequest("the Content-Length is not one number")
    return [(b"content-length", lengths[0])]


def answer_headers(headers: Headers, status: int) -> Headers:
    """What goes out of an answer's head; a length where it is certain. Header names are in lower case."""
    names = {name for name, _ in headers}
    dropped = (_HOP - {b"content-length"}) | _named_by_connection(headers)
    if b"transfer-encoding" in names or status in _BODILESS:
        dropped |= {b"content-length"}
    passed: Headers = []
    for name, value in headers:
        if name in dropped or name.startswith(b"x-dsec-"):
            continue
        if name == b"set-cookie":
            own = _own_cookie(value)
            if own is not None:
                passed.append((name, own))
        else:
            passed.append((name, value))
    return passed


def check_handshake(asked: Headers, answered: Headers) -> None:
    """That the program inside agreed to a WebSocket. Raises `BadAnswer`."""
    key = dict(asked).get(b"sec-websocket-key", b"").strip()
    expected = base64.b64encode(hashlib.sha1(key + _ACCEPT, usedforsecurity=False).digest())
    said = dict(answered)
    if said.get(b"upgrade", b"").lower() != b"websocket" or said.get(b"sec-websocket-accept") != expected:
        raise BadAnswer("the program inside switched to something that is not this WebSocket")


def clean_location(path: bytes, query: bytes) -> bytes:
    """Path and query as the `Location` of a redirect that can't lead to another host."""
    safe = "/%:@!$&'()*+,;=~-._?"
    clean = quote(path, safe=safe).encode()
    if clean.startswith(b"//") or not clean.startswith(b"/"):
        clean = b"/." + (clean if clean.startswith(b"/") else b"/" + clean)
    return clean + (b"?" + quote(query, safe=safe).encode() if query else b"")


def token_cookie(token: str, *, secure: bool) -> bytes:
    """The `Set-Cookie` of a traffic token: of this host name alone, out of reach of its scripts."""
    return f"{COOKIE.decode()}={token}; Path=/; HttpOnly; SameSite=Lax{'; Secure' if secure else ''}".encode()


def _own_cookie(value: bytes) -> bytes | None:
    """A cookie of the program's for its own host name, or None for one that it may not set."""
    parts = [part.strip() for part in value.split(b";")]
    if parts[0].partition(b"=")[0].strip() == COOKIE:
        return None
    return b"; ".join(p for p in parts if p.partition(b"=")[0].strip().lower() != b"domain")


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    return frozenset(
        token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")
    )
