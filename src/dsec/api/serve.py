"""Runs the API on a socket: uvicorn with uvloop and httptools, tuned for many short requests.

Owns the socket, the answer to bytes that are not HTTP, and the end: on shutdown new connections are refused, short
requests finish, and streams that are still open are cut after `grace_s` so that their clients attach to the next
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from dsec.api.exchange import ABORT_EXTENSION, CORK_EXTENSION, READY_EXTENSION, Receive, Scope, Send
from dsec.api.metrics import ServerMetrics
from dsec.api.ports.raw import RAW, RawConnection
from dsec.api.quick import Held, ShortWay
from dsec.errors import ErrorBody, Unavailable
from dsec.kernel import heap
from dsec.sockets import keep_alive

WS_MESSAGE_BYTES = 4 << 20
BACKLOG = 4096
KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections, so that they and not we close them."""
MAX_HEADERS_BYTES = 64 << 10
_TOO_LONG = "the request's headers are longer than 64 KiB"


class CorkedTransport:
    """A transport that can hold one write back until the next: an answer's head leaves with the first of its body.

    As two writes they would be two system calls, and two wake-ups of the client.
    """

    __slots__ = ("_head", "_holding", "_transport", "_write")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._write = transport.write
        self._holding = False
        self._head = b""

    def cork(self) -> None:
        """Hold the next write."""
        self._holding = True

    def write(self, data: bytes) -> None:
        if self._holding:
            self._holding = False
            self._head = data
            return
        if self._head:
            data = self._head + data
            self._head = b""
        self._write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with errors in our form, bounded headers, a way to cut an answer, and answers that leave
    whole. Before uvicorn sees a request that comes in one piece, a short way may take it (`_quick`)."""

    _header_bytes = 0
    _raw: RawConnection | None = None
    _between = True
    """The bytes that come next are a request's first: none is half read."""
    _waiting: Held | None = None
    """A request on the short way; what comes behind it waits in `_behind`."""
    _behind = b""
    _shutting_down = False
    _used_at = 0.0
    _extensions: dict[str, Any]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        corked = CorkedTransport(transport)
        self.transport = corked  # type: ignore[assignment]
        self._extensions = {
            ABORT_EXTENSION: transport.abort,
            CORK_EXTENSION: corked.cork,
            READY_EXTENSION: self._body_is_ready,
        }

    def _body_is_ready(self) -> bool:
        """A request that waits in the pipeline makes this False for the one before it at worst."""
        return self.cycle is not None and (bool(self.cycle.body) or not self.cycle.more_body)

    def on_message_begin(self) -> None:
        self._between = False
        super().on_message_begin()
        self._header_bytes = 0
        self.scope["extensions"] = self._extensions

    def on_headers_complete(self) -> None:
        """One meaning for each request: a second host is refused, be it a header or in the request line. A WebSocket to
        a port inside is passed through as bytes, so it isn't made one of ours."""
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (self.url[:1] not in b"/*" and [self.url.split(b"/")[2]] != hosts):
            raise ValueError("more than one host")  # httptools turns it into a parser error
        api: Any = self.app
        if self.parser.should_upgrade() and super()._should_upgrade() and hosts and api.ports.claims(hosts[0]):
            self._raw = RawConnection(_Wire(self), self._taken)
            cast("dict[str, Any]", self.scope)[RAW] = self._raw
        super().on_headers_complete()

    def _should_upgrade(self) -> bool:
        return self._raw is None and super()._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        pass

    def on_message_complete(self) -> None:
        self._between = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._raw is not None:
            self._raw.feed(data)
        elif self._waiting is not None:
            self._behind += data
            self.flow.pause_reading()
        elif not (self._between and self._quick(data)):
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._raw is not None:
            self._raw.lose()
        if self._waiting is not None:
            self._waiting.let_go()
            self._waiting = None

    # --- the short way ---

    def _quick(self, data: bytes) -> bool:
        """Whether a request that begins here goes the short way. The answer before it has left whole."""
        api: Any = self.app
        lane = next((lane for begins, lane in api.lanes.items() if data.startswith(begins)), None)
        if lane is None or self._shutting_down or (self.cycle is not None and not self.cycle.response_complete):
            return False
        if self.transport.is_closing():
            return False
        self._waiting = lane.begin(data, self._answered)
        return self._waiting is not None

    def _answered(self, data: bytes, whole: bool) -> None:
        self._waiting = None
        if self.transport.is_closing():
            return
        if whole:
            self.transport.write(data)
            self.server_state.total_requests += 1
            self._used_at = self.loop.time()
            if self._shutting_down:
                self.transport.close()
                return
            if self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_handler()
        else:
            super().data_received(data)
            if self._shutting_down:
                super().shutdown()
        if self._behind:
            data, self._behind = self._behind, b""
            self.flow.resume_reading()
            self.data_received(data)

    def timeout_keep_alive_handler(self) -> None:
        """The short way doesn't set the timer anew for each request: it is looked at when it is due."""
        left_s = self._used_at + self.timeout_keep_alive - self.loop.time()
        if self._waiting is not None or left_s > 0:
            again_s = max(left_s, 1.0)
            self.timeout_keep_alive_task = self.loop.call_later(again_s, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        self._shutting_down = True
        if self._waiting is None:
            super().shutdown()

    def _taken(self) -> None:
        """The request's end, for uvicorn: no answer of its own comes."""
        self.cycle.response_started = self.cycle.response_complete = True

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADERS_BYTES:
            raise ValueError(_TOO_LONG)  # httptools turns it into a parser error

    def send_400_response(self, msg: str) -> None:
        too_long = self._header_bytes > MAX_HEADERS_BYTES
        status = "413 Content Too Large" if too_long else "400 Bad Request"
        body = msgspec.json.encode(
            ErrorBody(
                code="too_large" if too_long else "invalid_request",
                message=_TOO_LONG if too_long else "the request is not valid HTTP/1.1",
            )
        )
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode("ascii") + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class _Wire:
    """What a `RawConnection` borrows of its connection."""

    def __init__(self, protocol: HttpProtocol) -> None:
        self._protocol = protocol

    def pause(self) -> None:
        self._protocol.flow.pause_reading()

    def resume(self) -> None:
        self._protocol.flow.resume_reading()

    async def send(self, data: bytes) -> None:
        self._protocol.transport.write(data)
        await self._protocol.flow.drain()

    def end(self) -> None:
        self._protocol.transport.close()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSockets; a refusal that was answered as HTTP isn't taken for a handshake that was forgotten."""

    async def send(self, message: Any) -> None:
        await super().send(message)
        self.handshake_complete |= self.close_sent


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.exit_wanted = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the composition's business

    async def main_loop(self) -> None:
        """uvicorn's looks ten times a second whether it has to end; an idle server had nothing dearer to do."""
        await self.exit_wanted.wait()


class Hosts(Protocol):
    """Which host names are ports' of sandboxes."""

    def claims(self, host: bytes) -> bool: ...


class App(Protocol):
    """What is served: `dsec.api.app.Api`, or what stands before it or in its place."""

    @property
    def metrics(self) -> ServerMetrics: ...
    @property
    def ports(self) -> Hosts: ...
    @property
    def lanes(self) -> Mapping[bytes, ShortWay]:
        """Short ways for short requests, by what these begin with. They go around `__call__`."""
        ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class ApiServer:
    """The running server: `start`, then `stop`."""

    def __init__(
        self, api: App, host: str, port: int, *, grace_s: float = 2.0, tls: tuple[Path, Path] | None = None
    ) -> None:
        """`port` 0: any free one. `tls`: certificate and key, as PEM."""
        self._tls = tls
        self._api = api
        self._host = host
        self._port = port
        self._grace_s = grace_s
        self._task: asyncio.Task[None] | None = None
        self._server: _Server | None = None
        self._socket: socket.socket | None = None

    @property
    def url(self) -> str:
        """Where it listens. Only after `start`."""
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def start(self) -> None:
        """Listen. Raises `Unavailable` where the address is taken."""
        sock = self._socket = _bound(self._host, self._port)
        keep_alive(sock)  # what it accepts has it too
        config = uvicorn.Config(
            self._api,
            http=HttpProtocol,
            ws=WebSocketProtocol,
            ws_per_message_deflate=False,
            ws_ping_interval=None,  # a peer that doesn't read for a while is no dead peer
            ws_max_size=WS_MESSAGE_BYTES,
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=None if self._tls is None else self._tls[0],
            ssl_keyfile=None if self._tls is None else self._tls[1],
        )
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]), name="dsec api")
        while not self._server.started:
            await asyncio.sleep(0)
            if self._task.done():
                await self._task
        self._server.config.timeout_graceful_shutdown = None
        self._api.metrics.watch()

    async def stop(self) -> None:
        """Refuse new connections, give open requests `grace_s`, cut the rest. Idempotent."""
        server, task = self._server, self._task
        if server is None or task is None:
            return
        self._api.metrics.close()
        server.should_exit = True
        server.exit_wanted.set()
        await asyncio.wait([task], timeout=self._grace_s)
        if not task.done():
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            server.force_exit = True
        await task
        self._server = self._task = None


def check_address(host: str, port: int) -> None:
    """Raises `Unavailable` where a server could not listen there now."""
    _bound(host, port).close()


def _bound(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise Unavailable(
            f"cannot listen on {host}:{port}: {error.strerror}",
            remedy="Stop what listens there, or choose another address by --host and --port.",
        ) from error
    return sock


class Stop:
    """SIGTERM and SIGINT: before `wait` the first cancels the task that makes this, in it they end it. Others change
    nothing: what tidies up isn't broken off."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._opening = asyncio.current_task()
        self._ready = False
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._opening is not None and not self._ready and not self._event.is_set():
            self._opening.cancel()
        self._event.set()

    def end(self) -> None:
        """As a signal does."""
        self._event.set()

    async def wait(self) -> None:
        """All is open; returns when it is to end."""
        self._ready = True
        heap.settle()
        await heap.tidy_until(self._event)
