"""Requests that are passed on as they are, within rules: which headers go out and come back, bodies streamed both ways,
secrets added outside and taken out of what returns.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping

from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from dsec.egress.gateways.answers import Refusal, UpstreamError
from dsec.egress.gateways.base import Call
from dsec.egress.gateways.outside import Outside
from dsec.egress.gateways.secrets import Headers, Scrubber

BODY_BYTES = 1 << 30
"""The largest request body that is passed on, where a gateway doesn't say otherwise."""

_HOPS = frozenset(
    [
        "connection",
        "proxy-connection",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "http2-settings",
        "proxy-authenticate",
        "proxy-authorization",
        "expect",
    ]
)
# What makes a server behind the upstream's front see another method, host or path than the gateway checked.
_MISLEADING = re.compile(
    r"host|content-length|forwarded|via|x-(forwarded|original|rewrite|real|http-method|method|host|accel|sendfile)\b.*"
    r"|x-http-.*|x-envoy-.*|cf-connecting-.*|true-client-ip|.*_.*"
)
_NOT_BACK = frozenset(["alt-svc", "strict-transport-security", "content-length", "nel", "report-to", "via", "server"])


def outgoing(headers: Mapping[str, str], private: Collection[str], strip: Collection[str] = ()) -> CIMultiDict[str]:
    """The headers of a request from inside that go out. Those of the names in `private` are the gateway's own."""
    named = {each.strip().lower() for each in headers.get("Connection", "").split(",")}
    dropped = _HOPS | named | {name.lower() for name in (*private, *strip)}
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in dropped and not _MISLEADING.fullmatch(name.lower()):
            kept.add(name, value)
    return kept


def incoming(headers: Mapping[str, str], scrubber: Scrubber) -> CIMultiDict[str]:
    """The headers of an answer that go inside."""
    named = {each.strip().lower() for each in headers.get("Connection", "").split(",")}
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in _HOPS | named | _NOT_BACK:
            kept.add(name, scrubber.text(value))
    return kept


async def body(call: Call, limit: int) -> AsyncIterator[bytes]:
    """A request's body as it comes. Raises `Refusal` 413."""
    seen = 0
    async for data in call.request.content.iter_any():
        seen += len(data)
        if seen > limit:
            raise Refusal(413, f"a request body may have {limit} bytes here")
        yield data


async def relay(
    call: Call,
    outside: Outside,
    url: URL,
    *,
    headers: Mapping[str, str],
    private: Headers,
    data: bytes | AsyncIterator[bytes] | None,
    moved: Callable[[URL], str | None] = lambda _url: None,
    seen: Callable[[bytes], None] = lambda _data: None,
) -> web.StreamResponse:
    """Pass a request on and its answer back, byte by byte as it comes. `moved`: the inside's address for one that a
    redirect names (None: as it is); `seen` gets what goes back."""
    sent = CIMultiDict(headers)
    if private.secrets:
        sent["Accept-Encoding"] = "identity"  # so that secrets can be found in the answer
    scrubber = Scrubber(private.secrets)
    async with outside.open(call.request.method, url, headers=sent, private=private.values, data=data) as answer:
        if answer.status == 401 and private.secrets:
            raise UpstreamError("the server outside refused the credentials that its operator gave")
        if private.secrets and answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UpstreamError("the server outside compressed what it was asked not to")
        back = incoming(answer.headers, scrubber)
        if location := answer.headers.get("Location"):
            target = moved(url.join(URL(location)))
            back["Location"] = scrubber.text(target if target is not None else location)
        length = answer.headers.get("Content-Length", "")
        if length.isdigit():
            back["Content-Length"] = length
        response = await call.begin(answer.status, back)
        if call.request.method == "HEAD" or answer.status in {204, 304}:
            return response
        async for chunk in answer.content.iter_any():
            clean = scrubber.feed(chunk)
            if clean:
                seen(clean)
                await call.write(clean)
        if rest := scrubber.end():
            seen(rest)
            await call.write(rest)
        return response
