"""One HTTP request and its answer over raw ASGI: what the hot handlers share.

Invariants: a request is authenticated before its body is read; a body is bounded in size and in the time that it may
stand still; an answer that went wrong after it began is cut (the connection is aborted), never ended as if it were
whole; every answer carries `x-request-id`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, MutableMapping, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote, unquote_to_bytes

import msgspec

from dsec.edge.client import Principal
from dsec.errors import DsecError, InvalidRequest, MethodNotAllowed, PermissionDenied, TooLarge, Unavailable

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")

MAX_JSON_BYTES = 4 << 20
MAX_INT = (1 << 63) - 1
MAX_BATCH_BYTES = 64 << 20
BODY_IDLE_S = 60.0
"""How long a body may stand still before the request is given up."""
RETRY_AFTER_S = 1
DRAIN_BYTES = 16 << 20
DRAIN_S = 2.0
"""A refused request's body is read so far before the answer, because closing on unread bytes would take the answer
along."""
ABORT_EXTENSION = "dsec.abort"
"""ASGI extension: a function that aborts the connection."""
READY_EXTENSION = "dsec.ready"
"""ASGI extension: a function that says whether more of the request's body, or its end, has come, so that nobody has to
wait for it."""
CORK_EXTENSION = "dsec.cork"
"""ASGI extension: a function that lets the head of an answer wait for the first of its body."""

_JSON = b"application/json"
_ENCODER = msgspec.json.Encoder()
_REQUEST_ID_BASE = os.urandom(6).hex()
_request_numbers = itertools.count(1)


def passes(error: DsecError) -> bool:
    """Whether the same request may do well a moment later, so that clients are told to repeat it."""
    return type(error) is Unavailable


def headers_of(error: DsecError) -> Headers:
    """What an error's answer says in its head."""
    headers: Headers = [(b"retry-after", b"%d" % RETRY_AFTER_S)] if passes(error) else []
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed) and "allowed" in error.details:
        headers.append((b"allow", ", ".join(error.details["allowed"]).encode()))
    return headers


def run_of(header: bytes) -> tuple[str, int]:
    """A run's name and epoch, as the header X-Dsec-Run says them. Raises `InvalidRequest`."""
    epoch, _, name = header.partition(b" ")
    if not epoch.isdigit() or not name or len(epoch) > 18:
        raise InvalidRequest("X-Dsec-Run is an epoch and a run's name")
    return unquote(name.decode("latin-1")), int(epoch)


class ClientGone(Exception):
    """The client closed the connection; nobody waits for an answer."""


class Exchange:
    """A request that has come, and the answer on its way."""

    __slots__ = (
        "_expects",
        "_more",
        "_query",
        "_run",
        "authorization",
        "began",
        "content_length",
        "content_type",
        "failed",
        "host",
        "principal",
        "receive",
        "release",
        "request_id",
        "scope",
        "send",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.principal: Principal | None = None
        self.authorization = b""
        self.content_type = b""
        self.host = b""
        self.content_length: int | None = None
        self.release = b""
        self._run = b""
        self.began = False
        self.failed: DsecError | None = None
        """The error that a control route answered with."""
        self._more = True
        self._expects = False
        request_id = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                self.authorization = value
            elif name == b"content-type":
                self.content_type = value.partition(b";")[0].strip().lower()
            elif name == b"content-length":
                self.content_length = int(value)
            elif name == b"host":
                self.host = value
            elif name == b"x-request-id":
                request_id = value[:128]
            elif name == b"x-dsec-run":
                self._run = value
            elif name == b"x-dsec-release":
                self.release = value
            elif name == b"expect":
                self._expects = True
        self.request_id = request_id or f"{_REQUEST_ID_BASE}{next(_request_numbers):x}".encode()
        self._query: dict[str, list[bytes]] | None = None

    def only(self, *methods: str) -> None:
        """Raise `MethodNotAllowed` for any other."""
        method = self.scope["method"]
        if method not in methods:
            raise MethodNotAllowed(
                f"{method} is not for {self.scope['path']}",
                remedy=f"it takes {' and '.join(methods)}",
                allowed=list(methods),
            )

    # --- what was asked ---------------------------------------------------------------------------------------------

    def bearer(self) -> str:
        """The token of `Authorization: Bearer TOKEN`, or ''."""
        kind, _, token = self.authorization.partition(b" ")
        return token.strip().decode("latin-1") if kind.lower() == b"bearer" else ""

    def run(self) -> tuple[str, int] | None:
        """The run that the caller speaks for, and its epoch: the header `X-Dsec-Run: EPOCH NAME`, the name quoted as in
        a URL. Raises `InvalidRequest`."""
        return run_of(self._run) if self._run else None

    def project(self) -> str:
        """The caller's project. Raises `PermissionDenied` for a sandbox token, which reaches its sandbox alone."""
        return self.owner().project

    def owner(self) -> Principal:
        """The caller, who has an API key. Raises as `project`."""
        principal = self.principal
        assert principal is not None
        if principal.sandbox_id is not None:
            raise PermissionDenied(
                "a sandbox token reaches its own sandbox alone", remedy="use an API key of the project"
            )
        return principal

    @property
    def query(self) -> dict[str, list[bytes]]:
        """Arguments as bytes; `+` is a space, as in forms."""
        if self._query is None:
            self._query = {}
            for pair in self.scope["query_string"].split(b"&"):
                if pair:
                    name, _, value = pair.replace(b"+", b" ").partition(b"=")
                    self._query.setdefault(unquote_to_bytes(name).decode("latin-1"), []).append(unquote_to_bytes(value))
        return self._query

    def check_query(self, *known: str, often: Collection[str] = ()) -> None:
        """Raise `InvalidRequest` for an argument that isn't known: a mistyped one must not be ignored. `often`: those
        that may come more than once."""
        for name, values in self.query.items():
            if name not in known:
                raise InvalidRequest(f"unknown argument {name!r}", remedy=f"known: {', '.join(known) or 'none'}")
            if len(values) > 1 and name not in often:
                raise InvalidRequest(f"argument {name!r} was given more than once")

    def raw(self, name: str) -> bytes | None:
        """An argument as bytes."""
        values = self.query.get(name)
        return values[0] if values else None

    def text(self, name: str) -> str | None:
        """An argument as text. Raises `InvalidRequest` where it isn't UTF-8."""
        return next(iter(self.texts(name)), None)

    def texts(self, name: str) -> Sequence[str]:
        """An argument that may come more than once. Raises `InvalidRequest` where it isn't UTF-8."""
        try:
            return [value.decode() for value in self.query.get(name, ())]
        except UnicodeDecodeError:
            raise InvalidRequest(f"argument {name!r} is not UTF-8") from None

    def value(self, name: str, kind: type[T], default: T) -> T:
        """An argument as a number or bool. Raises `InvalidRequest` with its name."""
        text = self.text(name)
        if text is None:
            return default
        try:
            value = msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"argument {name!r}: {error}") from None
        if isinstance(value, int) and not -MAX_INT - 1 <= value <= MAX_INT:
            raise InvalidRequest(f"argument {name!r} is beyond 64 bits")
        return value

    def natural(self, name: str) -> int | None:
        """An argument as a number of 0 and more. Raises `InvalidRequest` with its name."""
        value = self.value(name, int, -1) if name in self.query else None
        if value is not None and value < 0:
            raise InvalidRequest(f"argument {name!r} cannot be negative")
        return value

    async def body(self, limit: int = MAX_JSON_BYTES) -> bytes:
        """The whole body. Raises `TooLarge`, `InvalidRequest` (it stood still), `ClientGone`."""
        if self.content_length is not None and self.content_length > limit:
            raise TooLarge(f"a body of {self.content_length} bytes; at most {limit} here")
        message = await self._next()
        data: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(data) > limit:
                raise TooLarge(f"a body of over {limit} bytes")
            return data
        parts, size = [data], len(data)
        while message.get("more_body", False):
            message = await self._next()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise TooLarge(f"a body of over {limit} bytes")
        return b"".join(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, with back-pressure. Raises `ClientGone` where it was cut, `InvalidRequest` where it
        stood still."""
        more = True
        while more:
            message = await self._next()
            more = message.get("more_body", False)
            data = message.get("body", b"")
            if data:
                yield data

    async def _next(self) -> Message:
        ready = self.scope.get("extensions", {}).get(READY_EXTENSION)
        try:
            if ready is not None and ready():
                return await self._checked_message()
            async with asyncio.timeout(BODY_IDLE_S):
                return await self._checked_message()
        except TimeoutError:
            raise InvalidRequest(f"the body stood still for {BODY_IDLE_S:g} s", remedy="send it again") from None

    async def _checked_message(self) -> Message:
        message = await self.next_message()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    async def next_message(self) -> Message:
        """`receive` that knows whether the body is at its end."""
        message = await self.receive()
        self._more = message.get("more_body", False)
        return message

    async def drain(self) -> None:
        """Read what is left of the body of a request that is refused, within bounds."""
        left = DRAIN_BYTES
        if self._expects or not self._more:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while self._more and left > 0:
                    left -= len((await self.next_message()).get("body", b""))

    def decode(self, decoder: msgspec.json.Decoder[T], data: bytes) -> T:
        """A JSON body. Raises `InvalidRequest` with msgspec's message, which names the field."""
        try:
            return decoder.decode(data)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not JSON: {error}") from None

    # --- the answer -------------------------------------------------------------------------------------------------

    async def begin(self, status: int, content_type: bytes, *headers: tuple[bytes, bytes]) -> None:
        """Status and headers of an answer that is streamed; they leave with the first part."""
        self.began = True
        self.cork()
        await self.send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", content_type), (b"x-request-id", self.request_id), *headers],
            }
        )

    def cork(self) -> None:
        """The head that comes next waits for what follows it."""
        cork = self.scope.get("extensions", {}).get(CORK_EXTENSION)
        if cork is not None:
            cork()

    async def more(self, data: bytes) -> None:
        """A part of the body; waits while the client doesn't read."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """The last part."""
        await self.send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, body: object, *headers: tuple[bytes, bytes]) -> None:
        """A whole JSON answer."""
        data = _ENCODER.encode(body)
        await self.begin(status, _JSON, (b"content-length", b"%d" % len(data)), *headers)
        await self.finish(data)

    async def empty(self) -> None:
        """204."""
        self.began = True
        self.cork()
        await self.send({"type": "http.response.start", "status": 204, "headers": [(b"x-request-id", self.request_id)]})
        await self.finish()

    async def fail(self, error: DsecError) -> None:
        """The error as the answer; where one has begun already it is cut instead."""
        if self.began:
            await self.cut()
            return
        await self.drain()
        await self.answer(error.http_status, error.body(), *headers_of(error))

    async def cut(self) -> None:
        """Abort the connection, so that the client sees that the answer is not whole."""
        abort = self.scope.get("extensions", {}).get(ABORT_EXTENSION)
        if abort is None:
            raise ConnectionAbortedError("the answer was cut")  # a server without the extension closes on an exception
        abort()
        while (await self.receive())["type"] != "http.disconnect":
            pass
