"""Requests: connections, retries, errors, time limits. One `Transport` a client. Short ones, commands among them, go
over `_http`'s connections; what streams a body, or is streamed for long, over aiohttp.

Invariants: only requests that can be repeated are repeated (`replay`), always with the same idempotency key; every
failure leaves as a `DsecError`; no time limit that the caller didn't name. A connection to a machine that vanished is
noticed by TCP keep-alive within about a minute, however long the answer may take.

aiohttp is imported when the first request is made, because `import dsec` must be light.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

import msgspec

from dsec.errors import (
    DsecError,
    ErrorBody,
    InvalidRequest,
    OutcomeUnknown,
    RequestTimeout,
    Unauthenticated,
    Unavailable,
    from_body,
)
from dsec.sdk._answers import (
    Answer,
    Source,
    SourceFailed,
    Streamed,
    connect_errors,
    cut_errors,
    decoded,
    failure_of,
    reason,
)
from dsec.sdk._config import Endpoint, find_endpoint, named_by, renewed_key
from dsec.sdk._http import CONNECT_TIMEOUT_S, IDLE_S, Pool
from dsec.sockets import watched

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

T = TypeVar("T")
Body = bytes | Callable[[], AsyncIterable[bytes | memoryview]] | None
"""Bytes, or a function that gives the chunks afresh for each attempt."""

RETRY_S = 30.0
TELL_S = 3.0
"""Who waits for a server for longer is told why (logger `dsec.sdk`), and again from time to time."""
TELL_EVERY_S = 10.0
_NEW_KEY_S = 3.0
"""How long a server that has just started may take to write its new key."""
_FIRST_DELAY_S = 0.01
_MAX_DELAY_S = 2.0
_ERROR = msgspec.json.Decoder(ErrorBody)
log = logging.getLogger("dsec.sdk")
_VISIBLE = re.compile(r"[!-~]+")
_kept: list[Any] = []
"""Sessions of another event loop or of the parent process: never used again, and not to be closed from here."""


A = TypeVar("A", bound=Answer)


class Transport:
    """Talks to one server. Works in any event loop and after a fork: each gets a session of its own."""

    def __init__(self, endpoint: Endpoint, *, retry_s: float = RETRY_S) -> None:
        """`retry_s`: for how long connection failures and overload are retried. The very first request to a server
        that isn't there fails at once."""
        self.endpoint = endpoint
        self.speaks_for = ""
        """A run and its epoch, as the header X-Dsec-Run says it."""
        self.retry_s = retry_s
        self.told_at = -TELL_EVERY_S
        self._reached = False
        self._known = False
        """The server has accepted our key before."""
        self._renewing = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self._pool: Pool | None = None
        self._head: tuple[str, str] = ("", "")
        """An API key, and the headers that requests with it begin with."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._closed = False
        self._closers: list[AsyncGenerator[None]] = []
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
            answer = await self.send(method, url, body=body, headers=headers, replay=replay, retry=retry)
            try:
                data = await answer.read()
            except cut_errors() as error:
                if not replay:
                    raise _unknown(error, answer.header("X-Request-Id")) from error
                await retry.wait(error)
                continue
            if kind is type(None):
                return None
            return decoded(data, kind)

    async def send(
        self,
        method: str,
        url: URL,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        replay: bool = True,
        retry: Retry | None = None,
    ) -> Answer:
        """A request whose answer (2xx) the caller reads. Retries until there is one. Raises as `call`."""
        if callable(body):
            response = await self.open(method, url, body=body, headers=headers, replay=replay, retry=retry)
            return Streamed(response)
        lines = [f"{name}: {value}" for name, value in headers.items()] if headers else []
        if self.speaks_for:
            lines.append(f"X-Dsec-Run: {self.speaks_for}")
        target = url.raw_path_qs
        request_id = self.new_request_id()
        if not (_VISIBLE.fullmatch(target) and all(line.isascii() and line.isprintable() for line in lines)):
            raise InvalidRequest("the address or a header of the request holds characters that can't be sent")
        lines += (f"X-Request-Id: {request_id}", f"Content-Length: {len(body or b'')}", "\r\n")
        named = "\r\n".join(lines)

        async def attempt() -> Answer:
            pool = self._pool
            if pool is None or self._loop is not asyncio.get_running_loop() or self._pid != os.getpid():
                pool = await self._new_pool(url)
            if self._head[0] != self.endpoint.api_key or not self._head[1]:
                self._head = (self.endpoint.api_key, pool.head(self.endpoint.api_key))
            head = f"{method} {target} HTTP/1.1\r\n{self._head[1]}{named}".encode("latin-1")
            return await pool.ask(head + body if body else head)

        return await self._until_answered(attempt, request_id, replay, retry)

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
        """As `send`, by aiohttp."""
        request_id = self.new_request_id()
        headers = {**headers, "X-Request-Id": request_id} if headers else {"X-Request-Id": request_id}
        if self.speaks_for:
            headers["X-Dsec-Run"] = self.speaks_for

        async def attempt() -> Streamed:
            session = self._session if self._usable() else await self._new_session()
            assert session is not None
            source = Source(body()) if callable(body) else None
            try:
                return Streamed(
                    await session.request(method, url, data=source or body, headers=headers, allow_redirects=False)
                )
            except cut_errors():
                if source is not None and source.error is not None:
                    raise SourceFailed(source.error) from None
                raise

        try:
            return (await self._until_answered(attempt, request_id, replay, retry)).response
        except SourceFailed as failed:
            raise failed.error from None

    async def _until_answered(
        self, attempt: Callable[[], Awaitable[A]], request_id: str, replay: bool, retry: Retry | None
    ) -> A:
        while True:
            used, began = self.endpoint.api_key, time.monotonic()
            try:
                answer = await attempt()
            except cut_errors() as error:
                connecting = isinstance(error, connect_errors())
                if connecting and not self._reached:
                    raise self._unreachable(error) from error
                if not (replay or connecting):
                    raise _unknown(error, request_id) from error
                retry = retry or Retry(self)
                stood_s = 0.0 if connecting else time.monotonic() - began
                await retry.wait(error, stood_s=stood_s, request_id=request_id)
                continue
            self._reached = True
            if answer.status < 300:
                self._known = True
                return answer
            failure, again_s = await failure_of(answer)
            failure.details.setdefault("request_id", request_id)
            if isinstance(failure, Unauthenticated) and self._known and await self._new_key(used):
                continue
            if again_s is None or not (replay or answer.status == 429):
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
                if isinstance(error, connect_errors()) and not self._reached:
                    raise self._unreachable(error) from error
                retry = retry or Retry(self)
                await retry.wait(error)
                continue
            self._reached = self._known = True
            return found

    def _unreachable(self, error: BaseException) -> Unavailable:
        return Unavailable(
            f"no server answers at {self.endpoint.url}{named_by(self.endpoint)}: {reason(error)}",
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

    def _enter(self) -> None:
        """This event loop, and this process, are where it works from now on."""
        if self._closed:
            raise Unavailable("this client was closed", remedy="make a new one")
        if self._loop is not asyncio.get_running_loop() or self._pid != os.getpid():
            _kept.extend(each for each in (self._session, self._pool) if each is not None and not each.closed)
            self._session = self._pool = None
            self._loop = asyncio.get_running_loop()
            self._pid = os.getpid()
            self._renewing = asyncio.Lock()

    async def _new_session(self) -> aiohttp.ClientSession:
        import aiohttp  # noqa: PLC0415

        self._enter()
        headers = {"Authorization": f"Bearer {self.endpoint.api_key}"} if self.endpoint.api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, socket_factory=watched),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            read_bufsize=256 << 10,
        )
        self._session._retry_connection = False  # it would repeat any PUT or DELETE, appending ones too
        await self._close_at_end(self._session)
        return self._session

    async def _new_pool(self, url: URL) -> Pool:
        self._enter()
        self._pool = Pool(url)
        await self._close_at_end(self._pool)
        return self._pool

    async def _close_at_end(self, connections: _Closable) -> None:
        """An event loop closes the asynchronous generators that are still open when it ends, and so the connections of
        a client that nobody closed."""
        closer = _closing(connections)
        await anext(closer)
        self._closers.append(closer)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        self._closed = True
        await self._disconnect()

    async def _disconnect(self) -> None:
        session, pool = self._session, self._pool
        self._session = self._pool = None
        if self._loop is asyncio.get_running_loop() and self._pid == os.getpid():
            for each in (session, pool):
                if each is not None:
                    await each.close()


class Retry:
    """When to try again, and when to give up: `retry_s` after the first failure. Whoever gets ahead takes a new one."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._until: float | None = None
        self._delay = _FIRST_DELAY_S

    async def wait(
        self,
        error: BaseException,
        *,
        at_least_s: float = 0.0,
        stood_s: float = 0.0,
        request_id: str | None = None,
    ) -> None:
        """Wait before the next attempt. `stood_s`: how long the connection stood before it was cut; one that stood for
        longer than is retried was good. Raises the error (as `Unavailable`, if it isn't one of ours) when the time is
        over."""
        if self._until is None or stood_s > self._transport.retry_s:
            self._until, self._delay = time.monotonic() + self._transport.retry_s, _FIRST_DELAY_S
        delay = max(at_least_s, self._delay * random.uniform(0.5, 1.0))
        left_s = self._until - time.monotonic()
        if delay > left_s:
            if isinstance(error, DsecError):
                raise error
            raise Unavailable(
                f"the connection to {self._transport.endpoint.url} broke and could not be made again: {reason(error)}",
                remedy="see whether the server runs; then try again",
                **_named(request_id),
            ) from error
        self._delay = min(self._delay * 2, _MAX_DELAY_S)
        if self._transport.retry_s - left_s + delay >= TELL_S:
            self._tell(error, left_s)
        await asyncio.sleep(delay)

    def _tell(self, error: BaseException, left_s: float) -> None:
        transport, now = self._transport, time.monotonic()
        if now - transport.told_at >= TELL_EVERY_S:  # one word for all that wait
            transport.told_at = now
            said = f"no connection to {transport.endpoint.url}: {reason(error)}"
            log.warning("%s; trying again for %.0f s", error.message if isinstance(error, DsecError) else said, left_s)


class _Closable(Protocol):
    async def close(self) -> None: ...


async def _closing(connections: _Closable) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await connections.close()


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


def _unknown(error: BaseException, request_id: str | None) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"the connection broke before the answer came: {reason(error)}",
        remedy="it may have happened: look before you repeat it",
        **_named(request_id),
    )


def _named(request_id: str | None) -> dict[str, str]:
    return {"request_id": request_id} if request_id else {}


def _quoted(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return quote(value if isinstance(value, bytes) else str(value), safe="/")


_defaults: WeakKeyDictionary[asyncio.AbstractEventLoop, Transport] = WeakKeyDictionary()


def default_transport() -> Transport:
    """The transport of callers that named no client: one an event loop, closed when the loop ends."""
    loop = asyncio.get_running_loop()
    transport = _defaults.get(loop)
    if transport is None or transport._closed:
        transport = _defaults[loop] = Transport(find_endpoint())
    return transport
