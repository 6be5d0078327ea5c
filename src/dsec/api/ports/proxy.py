"""One request to a port inside, and its answer: who may, the connection through the channel, the exchange over it.

The request was parsed by our server and is written anew; the answer of the program inside, which is hostile, is parsed
by h11 within bounds and written anew as well, so that neither side sees the other's framing. Invariants: nobody is
connected whom the sandbox's spec or a token doesn't admit; memory for one exchange is bounded, whatever either side
sends and however slowly the other reads; an answer that breaks after it began is cut, never ended as if it were whole;
the connection inside ends with the exchange.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import h11
import msgspec

from dsec.api.exchange import ClientGone, Exchange
from dsec.api.ports import heads
from dsec.api.ports.hosts import LOCAL, Target, find
from dsec.api.ports.raw import RAW, RawConnection
from dsec.edge.client import EdgeClient, PortStream
from dsec.edge.context import SANDBOX_ID
from dsec.errors import (
    BadAnswer,
    DsecError,
    InvalidRequest,
    PermissionDenied,
    PortClosed,
    SandboxEnded,
    SandboxLost,
    SandboxNotFound,
    Unauthenticated,
)
from dsec.spec.sandbox import SandboxInfo

MAX_HEAD_BYTES = 64 << 10
"""Of an answer: its head, and each line of its framing."""
MAX_INTERIM = 64
"""Interim (1xx) answers before the answer."""
CONTINUE_S = 1.0
"""How long a client that asks before it sends a body waits for the program's word."""
_GONE = (SandboxNotFound, SandboxEnded, SandboxLost)
_RETRIED = (429, 502, 503, 504)


class PortProxy:
    """Answers the requests whose host name is a port's."""

    def __init__(self, edge: EdgeClient, domain: str | None, note: Callable[[Exchange, DsecError], None]) -> None:
        """`domain`: None for this machine's. `note`: told of each error that is answered."""
        self._edge = edge
        self._domain = domain or LOCAL
        self._note = note

    def target(self, host: bytes) -> Target | None:
        """As `hosts.find`, which see."""
        return find(host, self._domain)

    def claims(self, host: bytes) -> bool:
        """Whether this host name is a port's, or a wrong form of one."""
        try:
            return self.target(host) is not None
        except DsecError:
            return True

    async def __call__(self, x: Exchange, target: Target) -> None:
        """Answer a request for `target`."""
        SANDBOX_ID.set(target.sandbox_id)
        try:
            await self._serve(x, target)
        except DsecError as error:
            self._note(x, error)
            await _fail(x, target, error)

    async def _serve(self, x: Exchange, target: Target) -> None:
        scope = x.scope
        if scope["http_version"] == "1.0" or scope["method"] == "CONNECT":
            raise InvalidRequest("ports are served by HTTP/1.1, and not as a proxy's CONNECT")
        info = self._edge.get(target.sandbox_id)
        query, token = heads.split_query(scope["query_string"])
        if not self._admits(info, x, target, token):
            raise Unauthenticated(
                f"port {target.port} of this sandbox is private and the request shows no valid token",
                remedy="Send the sandbox's traffic token as X-Dsec-Token (or E2b-Traffic-Access-Token), or, in a "
                "browser, open the URL with ?dsec_token=TOKEN; or make the sandbox with public_ports.",
            )
        if token is not None and self._is_traffic_token(target, token) and scope["method"] in ("GET", "HEAD"):
            await self._set_cookie(x, target, query)
            return
        head = _request(x, query)
        stream = await self._edge.connect(target.sandbox_id, target.port)
        try:
            await _Conversation(x, stream).run(head)
        finally:
            await stream.close()

    # --- who --------------------------------------------------------------------------------------------------------

    def _admits(self, info: SandboxInfo, x: Exchange, target: Target, argument: bytes | None) -> bool:
        """Raises `SandboxNotFound` for the key of another project, to whom the sandbox doesn't exist."""
        public = info.spec.public_ports
        if public is True or (public is not False and target.port in public):
            return True
        headers = x.scope["headers"]
        for shown in (argument, heads.cookie(headers)):
            if shown is not None and self._is_traffic_token(target, shown):
                return True
        return any(self._is_credential(target, shown) for shown in heads.credentials(headers))

    def _is_traffic_token(self, target: Target, shown: bytes) -> bool:
        return hmac.compare_digest(self._edge.traffic_token(target.sandbox_id).encode(), shown)

    def _is_credential(self, target: Target, shown: bytes) -> bool:
        if self._is_traffic_token(target, shown):
            return True
        try:
            self._edge.authorize(self._edge.authenticate(shown.decode("latin-1")), target.sandbox_id)
        except (Unauthenticated, PermissionDenied):
            return False
        return True

    async def _set_cookie(self, x: Exchange, target: Target, query: bytes) -> None:
        """The token of a URL becomes a cookie, and leaves the URL."""
        scope = x.scope
        proto = dict(scope["headers"]).get(b"x-forwarded-proto", b"").lower()
        cookie = heads.token_cookie(
            self._edge.traffic_token(target.sandbox_id), secure=proto == b"https" or scope["scheme"] == "https"
        )
        await x.begin(
            303,
            b"text/plain",
            (b"location", heads.clean_location(scope["raw_path"], query)),
            (b"set-cookie", cookie),
            (b"cache-control", b"no-store"),
            (b"referrer-policy", b"no-referrer"),
            (b"content-length", b"0"),
        )
        await x.finish()


def _request(x: Exchange, query: bytes) -> h11.Request:
    """The request as it goes in. Raises `InvalidRequest`."""
    scope = x.scope
    headers: heads.Headers = scope["headers"]
    client = scope.get("client")
    passed = heads.request_headers(headers, client=client[0] if client else None, scheme=scope["scheme"])
    framing = heads.framing(headers)
    if RAW in scope:
        if framing not in ([], [(b"content-length", b"0")]):
            raise InvalidRequest("a request for a WebSocket has no body")
        passed += [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
    else:
        passed += [*framing, (b"connection", b"close")]
        if framing and any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers):
            passed.append((b"expect", b"100-continue"))
    path = scope["raw_path"] or b"/"
    try:
        return h11.Request(
            method=scope["method"].encode(), target=path + (b"?" + query if query else b""), headers=passed
        )
    except h11.LocalProtocolError as error:
        raise InvalidRequest(f"the request can't be passed on: {error}") from None


class _Conversation:
    """The exchange over one connection inside."""

    def __init__(self, x: Exchange, stream: PortStream) -> None:
        self._x = x
        self._stream = stream
        self._raw: RawConnection | None = x.scope.get(RAW)
        self._inside = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._go_on = asyncio.Event()
        """The program wants the body."""
        self._body_asked = True
        """Of the client; it holds the body back until then."""

    async def run(self, head: h11.Request) -> None:
        """Raises `BadAnswer`, `PortClosed` (cut), `ClientGone`, what else the sandbox's end gives."""
        expects = any(name == b"expect" for name, _ in head.headers)
        await self._stream.write(self._inside.send(head) or b"")
        upload = asyncio.create_task(self._upload(expects))
        answer = asyncio.create_task(self._answer(head))
        try:
            await asyncio.wait((upload, answer), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                upload.result()  # the client is gone, or the sandbox: it doesn't end otherwise
            await answer
        finally:
            for task in (upload, answer):
                task.cancel()
            await asyncio.gather(upload, answer, return_exceptions=True)

    async def _upload(self, expects: bool) -> None:
        """The request's body; then waits until the client is gone."""
        x = self._x
        if expects:
            self._body_asked = False
            with suppress(TimeoutError):
                async with asyncio.timeout(CONTINUE_S):
                    await self._go_on.wait()
            self._body_asked = True
        more = True
        while True:
            message = await x.next_message()
            if message["type"] == "http.disconnect":
                raise ClientGone
            if not more:
                continue
            more = message.get("more_body", False)
            data = message.get("body", b"")
            if data:
                await self._send(h11.Data(data))
            if not more:
                await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Data | h11.EndOfMessage) -> None:
        data = self._inside.send(event)
        if data:
            await self._stream.write(data)

    def _next(self) -> Any:
        """The next event of the answer, or NEED_DATA. Raises `BadAnswer`."""
        try:
            return self._inside.next_event()
        except h11.RemoteProtocolError as error:
            raise _bad(error) from None

    async def _read(self) -> None:
        try:
            self._inside.receive_data(await self._stream.read())
        except h11.RemoteProtocolError as error:
            raise _bad(error) from None

    async def _answer(self, request: h11.Request) -> None:
        x, interim = self._x, 0
        while True:
            event = self._next()
            if event is h11.NEED_DATA:
                await self._read()
            elif isinstance(event, h11.InformationalResponse):
                interim += 1
                if event.status_code == 101:
                    await self._switch(request, event)
                    return
                if interim > MAX_INTERIM:
                    raise BadAnswer("the program inside sends interim answers without an end")
                self._go_on.set()
            elif isinstance(event, h11.Response):
                break
            else:
                raise BadAnswer("the program inside gave no answer")
        if not 200 <= event.status_code < 600:
            raise BadAnswer(f"the program inside answered with the status {event.status_code}")
        headers = heads.answer_headers(list(event.headers), event.status_code)
        if all(name != b"x-request-id" for name, _ in headers):
            headers.append((b"x-request-id", x.request_id))
        if not self._body_asked or any(name == b"upgrade" for name, _ in x.scope["headers"]):
            headers.append((b"connection", b"close"))  # what follows on this connection may be no request
        await self._body({"type": "http.response.start", "status": event.status_code, "headers": headers})

    async def _body(self, head: dict[str, Any] | None) -> None:
        x = self._x
        while True:
            event = self._next()
            if head is not None:
                if isinstance(event, h11.Data):
                    x.cork()  # both are there: one packet
                x.began = True
                await x.send(head)
                head = None
            if event is h11.NEED_DATA:
                await self._read()
            elif isinstance(event, h11.Data):
                await x.more(bytes(event.data))
            else:
                await x.finish()
                return

    async def _switch(self, request: h11.Request, answer: h11.InformationalResponse) -> None:
        """From here on it is bytes, both ways, until either side ends."""
        raw = self._raw
        asked, answered = list(request.headers), list(answer.headers)
        if raw is None:
            raise BadAnswer("the program inside switched protocols without being asked")
        heads.check_handshake(asked, answered)
        passed = heads.answer_headers([(n, v) for n, v in answered if n != b"content-length"], 101)
        lines = [b"HTTP/1.1 101 Switching Protocols", b"connection: Upgrade", b"upgrade: websocket"]
        lines += [name + b": " + value for name, value in passed]
        lines += [b"x-request-id: " + self._x.request_id, b"", b""]
        raw.take()
        await raw.write(b"\r\n".join(lines) + self._inside.trailing_data[0])
        await _first(self._out(raw), self._in(raw))
        raw.close()

    async def _in(self, raw: RawConnection) -> None:
        while data := await raw.read():
            await self._stream.write(data)

    async def _out(self, raw: RawConnection) -> None:
        with suppress(PortClosed):
            while data := await self._stream.read():
                await raw.write(data)


def _bad(error: h11.RemoteProtocolError) -> BadAnswer:
    return BadAnswer(
        f"the program inside gave no valid HTTP answer: {str(error)[:200]}",
        remedy="Look at what listens at that port, and at its log.",
    )


async def _first(*work: Coroutine[Any, Any, None]) -> None:
    """Do all until one has ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fail(x: Exchange, target: Target, error: DsecError) -> None:
    """The error as the answer, in the form that E2B's client reads; `x-dsec-error` tells it from the program's own."""
    if x.began:
        await x.cut()
        return
    status, message = error.http_status, f"{error.message}. {error.remedy}" if error.remedy else error.message
    if isinstance(error, _GONE):
        status, message = 502, f"The sandbox was not found: {error.message}"
    elif isinstance(error, BadAnswer):
        status = 502
    elif isinstance(error, PortClosed):
        status, message = 502, f"The sandbox is running but port is not open: {error.message}. {error.remedy}".strip()
    headers = [(b"x-dsec-error", quote(msgspec.json.encode(error.body())).encode())]
    if status in _RETRIED:
        headers.append((b"should-retry", b"true" if error.retryable else b"false"))
    if any(name == b"upgrade" for name, _ in x.scope["headers"]):
        headers.append((b"connection", b"close"))
    await x.drain()
    body = {
        "code": status,
        "message": message,
        "error_code": error.code,
        "sandboxId": target.sandbox_id,
        "port": target.port,
    }
    await x.answer(status, body, *headers)
