"""Requests over aiohttp: connections, retries, errors, time limits. One `Transport` a client.

Invariants: only requests that can be repeated are repeated (`replay`), always with the same idempotency key; every
failure leaves as a `DsecError`; no time limit that the caller didn't name. A connection to a machine that vanished is
noticed by TCP keep-alive within about a minute, however long the answer may take.

aiohttp is imported when the first request is made, because `import dsec` must be light.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

import msgspec

from dsec.errors import (
    DsecError,
    ErrorBody,
    OutcomeUnknown,
    RequestTimeout,
    Unauthenticated,
    Unavailable,
    from_body,
)
from dsec.sdk._config import Endpoint, find_endpoint, renewed_key

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

T = TypeVar("T")
Body = bytes | Callable[[], AsyncIterable[bytes | memoryview]] | None
"""Bytes, or a function that gives the chunks afresh for each attempt."""

CONNECT_TIMEOUT_S = 10.0
RETRY_S = 30.0
_IDLE_S = 60.0
"""Idle connections are closed before the server would do it."""
_NEW_KEY_S = 3.0
"""How long a server that has just started may take to write its new key."""
_FIRST_DELAY_S = 0.01
_MAX_DELAY_S = 2.0
_RETRIED = frozenset({429, 502, 503, 504})
_ERROR = msgspec.json.Decoder(ErrorBody)
_kept: list[Any] = []
"""Sessions of another event loop or of the parent process: never used again, and not to be closed from here."""


class Transport:
    """Talks to one server. Works in any event loop and after a fork: each gets a session of its own."""

    def __init__(self, endpoint: Endpoint, *, retry_s: float = RETRY_S) -> None:
        """`retry_s`: for how long connection failures and overload are retried. The very first request to a server
        that isn't there fails at once."""
        self.endpoint = endpoint
        self.speaks_for = ""
        """A run and its epoch, as the header X-Dsec-Run says it."""
        self.retry_s = retry_s
        self._reached = False
        self._known = False
        """The server has accepted our key before."""
        self._renewing = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._closed = False
        self._closer: AsyncGenerator[None] | None = None
        self._key_prefix = ""
        self._key_pid = 0
        self._keys = 0
        self._requests = 0

    # --- addresses and keys -----------------------------------------------------------------------------------------

    def url(self, path: str, /, **query: object) -> URL:
        """The address of a call. `path` is encoded already; query values that are None are left out."""
        from yarl import URL  # noqa: PLC0415

        parts = [
            f"{name}={_quoted(value)}"
            for name, values in query.items()
            if values is not None
            for value in (values if isinstance(values, list | tuple) else [values])
        ]
        return URL(self.endpoint.url + path + ("?" + "&".join(parts) if parts else ""), encoded=True)

    def new_key(self) -> str:
        """An idempotency key that nobody else uses."""
        if self._key_pid != os.getpid():
            self._key_prefix = os.urandom(10).hex()
            self._key_pid = os.getpid()
        self._keys += 1
        return f"{self._key_prefix}-{self._keys:x}"

    def new_request_id(self) -> str:
        """Names one request, also in the server's log, in the sandbox's events and in errors."""
        if self._key_pid != os.getpid():
            self.new_key()
        self._requests += 1
        return f"{self._key_prefix[:12]}-r{self._requests:x}"

    # --- requests ---------------------------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        url: URL,
        kind: type[T],
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        replay: bool = True,
        request_timeout_s: float | None = None,
    ) -> T:
        """A request with a whole JSON answer. `kind` None type: none is expected. Raises what the server answers;
        `Unavailable`, `OutcomeUnknown` (the connection broke and the request may not be repeated), `RequestTimeout`."""
        if request_timeout_s is None:
            return await self._call(method, url, kind, body, headers, replay)
        try:
            async with asyncio.timeout(request_timeout_s):
                return await self._call(method, url, kind, body, headers, replay)
        except TimeoutError:
            raise timed_out(request_timeout_s) from None

    async def _call(  # noqa: PLR0917
        self, method: str, url: URL, kind: type[T], body: Body, headers: Mapping[str, str] | None, replay: bool
    ) -> T:
        retry = Retry(self)
        while True:
            response = await self.open(method, url, body=body, headers=headers, replay=replay, retry=retry)
            try:
                data = await response.read()
            except cut_errors() as error:
                if not replay:
                    raise _unknown(error, response.headers.get("X-Request-Id")) from error
                await retry.wait(error)
                continue
            if kind is type(None):
                return None
            return decoded(data, kind)

    async def open(
        self,
        method: str,
        url: URL,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        replay: bool = True,
        retry: Retry | None = None,
    ) -> aiohttp.ClientResponse:
        """A request whose answer (2xx) the caller reads. Retries until there is one."""
        errors = cut_errors()
        request_id = self.new_request_id()
        headers = {**headers, "X-Request-Id": request_id} if headers else {"X-Request-Id": request_id}
        if self.speaks_for:
            headers["X-Dsec-Run"] = self.speaks_for
        while True:
            session = self._session if self._usable() else await self._new_session()
            assert session is not None
            source = _Source(body()) if callable(body) else None
            used = self.endpoint.api_key
            try:
                response = await session.request(method, url, data=source or body, headers=headers)
            except errors as error:
                if source is not None and source.error is not None:
                    raise source.error from None
                connecting = isinstance(error, _connect_errors())
                if connecting and not self._reached:
                    raise self._unreachable(error) from error
                if not (replay or connecting):
                    raise _unknown(error, request_id) from error
                retry = retry or Retry(self)
                await retry.wait(error, request_id=request_id)
                continue
            self._reached = True
            if response.status < 400:
                self._known = True
                return response
            failure, again_s = await _failure(response)
            failure.details.setdefault("request_id", request_id)
            if isinstance(failure, Unauthenticated) and self._known and await self._new_key(used):
                continue
            if again_s is None or not (replay or response.status == 429):
                raise failure
            retry = retry or Retry(self)
            await retry.wait(failure, at_least_s=again_s)

    async def websocket(self, url: URL) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket. Connection failures are retried as those of requests are. Raises what the server answers."""
        import aiohttp  # noqa: PLC0415

        retry: Retry | None = None
        while True:
            session = self._session if self._usable() else await self._new_session()
            assert session is not None
            used = self.endpoint.api_key
            try:
                found = await session.ws_connect(
                    url, max_msg_size=0, headers={"X-Dsec-Run": self.speaks_for} if self.speaks_for else None
                )
            except aiohttp.WSServerHandshakeError as error:
                failure = _refusal(error)
                if isinstance(failure, Unauthenticated) and self._known and await self._new_key(used):
                    continue
                raise failure from None
            except cut_errors() as error:
                if isinstance(error, _connect_errors()) and not self._reached:
                    raise self._unreachable(error) from error
                retry = retry or Retry(self)
                await retry.wait(error)
                continue
            self._reached = self._known = True
            return found

    def _unreachable(self, error: BaseException) -> Unavailable:
        return Unavailable(
            f"no server answers at {self.endpoint.url}: {_reason(error)}",
            remedy="start one with `dsec serve`, or set DSEC_URL and DSEC_API_KEY",
        )

    async def _new_key(self, used: str) -> bool:
        """A key that was good isn't any more: take the one that the server wrote when it started again, if it did."""
        async with self._renewing:
            until = time.monotonic() + _NEW_KEY_S
            while self._known and self.endpoint.api_key == used:
                key = renewed_key(self.endpoint)
                if key is not None:
                    self.endpoint = Endpoint(self.endpoint.url, key)
                    if self._session is not None:
                        self._session.headers["Authorization"] = f"Bearer {key}"
                elif time.monotonic() > until:
                    self._known = False
                else:
                    await asyncio.sleep(0.05)
            return self.endpoint.api_key != used

    # --- the session ------------------------------------------------------------------------------------------------

    def _usable(self) -> bool:
        session = self._session
        return (
            session is not None
            and not session.closed
            and self._loop is asyncio.get_running_loop()
            and self._pid == os.getpid()
        )

    async def _new_session(self) -> aiohttp.ClientSession:
        import aiohttp  # noqa: PLC0415

        if self._closed:
            raise Unavailable("this client was closed", remedy="make a new one")
        if self._session is not None and not self._session.closed:
            _kept.append(self._session)
        headers = {"Authorization": f"Bearer {self.endpoint.api_key}"} if self.endpoint.api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, socket_factory=_socket),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            read_bufsize=256 << 10,
        )
        self._session._retry_connection = False  # it would repeat any PUT or DELETE, appending ones too
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._renewing = asyncio.Lock()
        # An event loop closes the asynchronous generators that are still open when it ends, and so the session of a
        # client that nobody closed.
        self._closer = _close_at_end(self._session)
        await anext(self._closer)
        return self._session

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        self._closed = True
        await self._close_session()

    async def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None and self._loop is asyncio.get_running_loop() and self._pid == os.getpid():
            await session.close()


class _Source:
    """A streamed body; keeps what its chunks' maker raised, which aiohttp turns into a connection error."""

    def __init__(self, chunks: AsyncIterable[bytes | memoryview]) -> None:
        self._chunks = chunks
        self.error: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        try:
            async for chunk in self._chunks:
                yield chunk
        except Exception as error:
            self.error = error
            raise


class Retry:
    """When to try again, and when to give up."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._until = time.monotonic() + transport.retry_s
        self._delay = _FIRST_DELAY_S

    async def wait(self, error: BaseException, *, at_least_s: float = 0.0, request_id: str | None = None) -> None:
        """Wait before the next attempt. Raises the error (as `Unavailable`, if it isn't one of ours) when the time is
        over."""
        delay = max(at_least_s, self._delay * random.uniform(0.5, 1.0))
        if time.monotonic() + delay > self._until:
            if isinstance(error, DsecError):
                raise error
            raise Unavailable(
                f"the connection to {self._transport.endpoint.url} broke and could not be made again: {_reason(error)}",
                remedy="see whether the server runs; then try again",
                **_named(request_id),
            ) from error
        self._delay = min(self._delay * 2, _MAX_DELAY_S)
        await asyncio.sleep(delay)


async def _close_at_end(session: aiohttp.ClientSession) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await session.close()


def decoded(data: bytes, kind: type[T]) -> T:
    """An answer of the server's. Raises `Unavailable` where something else answered."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unavailable(
            f"the answer is not that of a dsec server of this version: {error}",
            remedy="check the URL and `dsec version`",
        ) from error


def timed_out(request_timeout_s: float, **details: object) -> RequestTimeout:
    """The error for a `request_timeout_s` that passed."""
    return RequestTimeout(
        f"no answer within request_timeout_s={request_timeout_s:g}",
        remedy="what was asked for may go on on the server",
        **details,
    )


def _refusal(error: aiohttp.WSServerHandshakeError) -> DsecError:
    """The error of a WebSocket that the server refused: its body isn't shown, so that it comes in a header too."""
    told = unquote(error.headers.get("x-dsec-error", "")) if error.headers else ""
    try:
        return from_body(_ERROR.decode(told))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Unavailable(f"HTTP status {error.status}: {error.message}", remedy="check the URL of the server")


async def _failure(response: aiohttp.ClientResponse) -> tuple[DsecError, float | None]:
    """The error of an answer, and after how long to try again (None: not)."""
    after = response.headers.get("Retry-After")
    request_id = response.headers.get("X-Request-Id")
    try:
        data = await response.read()
    except cut_errors():
        data = b""
    error: DsecError
    try:
        error = from_body(_ERROR.decode(data))
        foreign = False
    except (msgspec.MsgspecError, UnicodeDecodeError):  # a proxy in between, say
        text = data[:200].decode("utf-8", "replace")
        error = Unavailable(f"HTTP status {response.status}: {text}", remedy="check the URL of the server")
        foreign = True
    if request_id:
        error.details.setdefault("request_id", request_id)
    if response.status not in _RETRIED or not (after or foreign):
        return error, None
    try:
        return error, float(after or 0)
    except ValueError:
        return error, 1.0


def _reason(error: BaseException) -> object:
    """Of a broken connection, in words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _unknown(error: BaseException, request_id: str | None) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"the connection broke before the answer came: {_reason(error)}",
        remedy="it may have happened: look before you repeat it",
        **_named(request_id),
    )


def _named(request_id: str | None) -> dict[str, str]:
    return {"request_id": request_id} if request_id else {}


_errors: dict[str, tuple[type[BaseException], ...]] = {}


def cut_errors() -> tuple[type[BaseException], ...]:
    """What a broken connection raises."""
    found = _errors.get("cut")
    if found is None:
        import aiohttp  # noqa: PLC0415

        found = _errors["cut"] = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)
    return found


def _connect_errors() -> tuple[type[BaseException], ...]:
    import aiohttp  # noqa: PLC0415

    return (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


def _quoted(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return quote(value if isinstance(value, bytes) else str(value), safe="/")


def _socket(address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(address[0], address[1], address[2])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 60_000)):
        option = getattr(socket, name, None)  # not on every platform
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


_defaults: WeakKeyDictionary[asyncio.AbstractEventLoop, Transport] = WeakKeyDictionary()


def default_transport() -> Transport:
    """The transport of callers that named no client: one an event loop, closed when the loop ends."""
    loop = asyncio.get_running_loop()
    transport = _defaults.get(loop)
    if transport is None or transport._closed:
        transport = _defaults[loop] = Transport(find_endpoint())
    return transport
