"""HTTP/1.1 for short calls: a request whose body is at hand, an answer of any length.

Owns a pool of connections to one server, for one event loop. It is there because it takes a quarter of the CPU time of
a general client's: no cookies, redirects, proxies, compression or streamed request bodies; whoever needs those takes
aiohttp. Pure Python over asyncio's transports, TLS included, so that it runs wherever Python does.

Invariants: a connection carries one exchange at a time, and is used again only after an answer that was whole, and
behind which nothing came; what breaks raises `ConnectionError`; an answer that nobody reads stops the sender, at
`_HIGH` bytes; the pool knows a connection from its begin to its end, and a closed one lets none begin.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from dsec.errors import InvalidRequest
from dsec.sockets import SILENCE_S, keep_alive

if TYPE_CHECKING:
    from yarl import URL

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 60.0
"""Connections that were idle for so long aren't used any more: the server closes them after a while."""
_HIGH = 512 << 10
_MAX_HEAD = 64 << 10
_NO_BODY = frozenset({204, 304})


class ConnectFailed(ConnectionError):
    """There is no connection: nothing was sent."""


class Answer:
    """An answer that has begun: read it to its end, or close it."""

    __slots__ = ("_connection", "_error", "_headers", "_parts", "_size", "_waiter", "at_end", "status")

    def __init__(self, connection: _Connection, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status
        self._headers = headers
        self._connection: _Connection | None = connection
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: ConnectionError | None = None
        self.at_end = False
        """All of it has come, though it may not have been read."""

    def header(self, name: str) -> str | None:
        """A header's value; of several of one name, the last one's."""
        value = self._headers.get(name.lower().encode("ascii"))
        return None if value is None else value.decode("latin-1")

    async def read_some(self) -> bytes:
        """What has come since; b"" at the end. Raises `ConnectionError` where it was cut."""
        while not self._parts:
            if self.at_end:
                return b""
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        data = self._parts.popleft()
        self._size -= len(data)
        if self._size < _HIGH // 2 and self._connection is not None:
            self._connection.resume()
        return data

    async def read(self) -> bytes:
        """All that is left of it. Raises as `read_some`."""
        data = await self.read_some()
        if self.at_end and not self._parts:
            return data
        parts = [data]
        while data := await self.read_some():
            parts.append(data)
        return b"".join(parts)

    def close(self) -> None:
        """Nobody wants the rest; the connection goes unless there is none. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None and not self.at_end:
            connection.abort()

    # --- what the connection says ---

    def feed(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > _HIGH and self._connection is not None:
            self._connection.pause()
        self._wake()

    def end(self) -> None:
        self.at_end = True
        self._connection = None
        self._wake()

    def fail(self, error: ConnectionError) -> None:
        self._error = error
        self._connection = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection: a parser of answers."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: Any = None
        self._buffer = b""
        self._head: asyncio.Future[Answer] | None = None
        """Of who waits for an answer's begin."""
        self._answer: Answer | None = None
        self._left = 0
        """Bytes of the body, or of its chunk, that are still to come; -1: all up to the connection's end."""
        self._chunked = False
        self._close = False
        self._paused = False
        self.used_at = 0.0

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        """Send a request; the future is the answer's begin."""
        self._head = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._head

    def abort(self) -> None:
        self._transport.abort()

    def certificate(self) -> str:
        """SHA-256 of what the server has shown; '' without TLS."""
        tls = self._transport.get_extra_info("ssl_object")
        return hashlib.sha256(tls.getpeercert(binary_form=True)).hexdigest() if tls is not None else ""

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    # --- asyncio's calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            keep_alive(sock, self._pool.silence_s)
        self._pool.meet(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        if self._answer is not None and self._left < 0 and exc is None:
            self._finish(again=False)
        else:
            self._fail(ConnectionResetError(f"the connection was cut: {exc}" if exc else "the connection was closed"))

    def data_received(self, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        try:
            while data:
                if self._answer is None:
                    data = self._begin(data)
                elif self._chunked:
                    data = self._chunks(self._answer, data)
                else:
                    data = self._body(self._answer, data)
        except ValueError as error:
            self._fail(ConnectionError(f"the server's answer is not valid HTTP/1.1: {error}"))
            self._transport.abort()

    # --- the answer ---

    def _begin(self, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MAX_HEAD:
                raise ValueError("its head is too long")
            self._buffer = data
            return b""
        if self._head is None:
            raise ValueError("it comes unasked")
        first, *lines = data[:end].split(b"\r\n")
        data = data[end + 4 :]
        if not first.startswith(b"HTTP/1."):
            raise ValueError("its first line is another protocol's")
        status = int(first[9:12])
        if status < 200:
            return data  # an interim answer
        headers = {}
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or not name or name[-1:].isspace():
                raise ValueError("a header without a name")
            headers[name.lower()] = value.strip()
        self._close = first[7:8] != b"1" or b"close" in headers.get(b"connection", b"").lower()
        self._chunked = False
        if status in _NO_BODY:
            self._left = 0
        elif b"transfer-encoding" in headers:
            if headers[b"transfer-encoding"].lower() != b"chunked":
                raise ValueError("an unknown transfer encoding")
            self._chunked, self._left = True, 0
        elif b"content-length" in headers:
            self._left = _number(headers[b"content-length"], 10)
        else:
            self._left = -1
        head, self._head = self._head, None
        self._answer = Answer(self, status, headers)
        if not head.done():
            head.set_result(self._answer)
        if not self._left and not self._chunked:
            return self._finish(again=not data)
        return data

    def _body(self, answer: Answer, data: bytes) -> bytes:
        if self._left < 0:
            answer.feed(data)
            return b""
        if len(data) < self._left:
            self._left -= len(data)
            answer.feed(data)
            return b""
        rest = data[self._left :]
        answer.feed(data[: self._left] if rest else data)
        return self._finish(again=not rest)

    def _chunks(self, answer: Answer, data: bytes) -> bytes:
        """A part of a chunked body: `_left` counts a chunk's data and the two bytes behind it."""
        at, total = 0, len(data)
        while at < total:
            if not self._left:
                end = data.find(b"\r\n", at)
                if end < 0:
                    if total - at > _MAX_HEAD:
                        raise ValueError("a chunk's head is too long")
                    self._buffer = data[at:]
                    return b""
                size = _number(data[at:end].partition(b";")[0].strip(), 16)
                if not size:
                    return self._trailer(data[at:], end - at)
                self._left, at = size + 2, end + 2
            elif self._left > 2:
                part = data[at : at + self._left - 2]
                answer.feed(part)
                self._left -= len(part)
                at += len(part)
            else:
                if data[at] != b"\n\r"[self._left - 1]:
                    raise ValueError("a chunk is longer than it says")
                self._left -= 1
                at += 1
        return b""

    def _trailer(self, data: bytes, at: int) -> bytes:
        """Behind the last chunk's head, which ends at `at`: lines that nobody wants, then an empty one."""
        end = data.find(b"\r\n\r\n", at)
        if end < 0:
            if len(data) - at > _MAX_HEAD:
                raise ValueError("its trailer is too long")
            self._buffer = data
            return b""
        return self._finish(again=len(data) == end + 4)

    def _finish(self, *, again: bool) -> bytes:
        """The answer is whole. `again`: nothing came behind it."""
        answer, self._answer = self._answer, None
        assert answer is not None
        self.resume()
        if again and not self._close:
            self._pool.take_back(self)
        else:
            self._transport.close()
        answer.end()
        return b""

    def _fail(self, error: ConnectionError) -> None:
        head, self._head = self._head, None
        answer, self._answer = self._answer, None
        if head is not None and not head.done():
            head.set_exception(error)
        if answer is not None:
            answer.fail(error)


class Pool:
    """Connections to the server of one URL. For one event loop."""

    def __init__(
        self,
        url: URL,
        *,
        certificate: str = "",
        silence_s: float = SILENCE_S,
        connect_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """`url`: any of its addresses. `certificate`: SHA-256 of the only one that the server may show, whoever signed
        it. `silence_s`: after which the server counts as gone (`sockets.py`)."""
        self.silence_s = silence_s
        self._connect_s = connect_s
        self._host, self._port = url.raw_host or "", url.port or 80
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._certificate = certificate
        if self._tls is not None and certificate:
            self._tls.check_hostname = False
            self._tls.verify_mode = ssl.CERT_NONE
        name = f"[{self._host}]" if ":" in self._host else self._host
        self._name = name if url.is_default_port() else f"{name}:{url.port}"
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._gone: asyncio.Future[None] | None = None
        """Of who closes the pool: there is none any more."""
        self.closed = False

    def head(self, api_key: str) -> str:
        """The headers that all requests begin with. Raises `InvalidRequest` for a key that no header can hold."""
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        both = f"{self._name}{api_key}"
        if not (both.isascii() and both.isprintable()):
            raise InvalidRequest("the API key or the server's name holds characters that can't be sent")
        return f"Host: {self._name}\r\n{authorization}"

    async def ask(self, request: bytes) -> Answer:
        """Send a whole request and wait for the answer's begin. Raises `ConnectFailed`, `ConnectionError`."""
        connection = self._take() or await self._connect()
        if self.closed:
            raise ConnectFailed("the connections to the server were closed here")
        if not connection.usable:
            raise ConnectFailed("the server closed the connection at once")
        try:
            return await connection.ask(request)
        except asyncio.CancelledError:
            connection.abort()
            raise

    def meet(self, connection: _Connection) -> None:
        """It has begun."""
        self._all.add(connection)
        if self.closed:
            connection.abort()

    def take_back(self, connection: _Connection) -> None:
        """It may be used again."""
        connection.used_at = time.monotonic()
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        """It is gone."""
        self._all.discard(connection)
        if self._gone is not None and not self._all and not self._gone.done():
            self._gone.set_result(None)
        if connection in self._idle:
            self._idle.remove(connection)

    async def close(self) -> None:
        """Close all connections; answers that are read still are cut, and whoever connects still is refused.
        Idempotent."""
        self.closed = True
        for connection in list(self._all):
            connection.abort()
        if self._all:
            if self._gone is None or self._gone.done():
                self._gone = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._gone)

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                if time.monotonic() - connection.used_at < IDLE_S:
                    return connection
                connection.abort()
        return None

    async def _connect(self) -> _Connection:
        connection = _Connection(self)
        try:
            async with asyncio.timeout(self._connect_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or str(error) or f"nothing within {self._connect_s:g} s"
            raise ConnectFailed(why) from error
        if self._certificate and connection.certificate() != self._certificate:
            connection.abort()
            raise ConnectFailed("the server shows another certificate")
        return connection


def _number(digits: bytes, base: int) -> int:
    """Raises ValueError for what isn't digits alone: Python takes signs, spaces and underscores too."""
    if not digits or not all(digit in b"0123456789abcdefABCDEF" for digit in digits) or len(digits) > 18:
        raise ValueError("a length that is no number")
    return int(digits, base)
