"""What goes on in a sandbox: watches and connections to ports.

Neither is made again when its connection breaks, because what happened meanwhile can't be known: `Unavailable` says
so, and the caller begins again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING

from msgspec import Struct

from dsec.errors import BY_CODE, DsecError, ErrorBody, InvalidRequest, PortClosed, Unavailable, from_body
from dsec.sdk._answers import cut_errors, decoded
from dsec.sdk._transport import Transport, timed_out
from dsec.spec.sandbox import FileEvent, PortAccess
from dsec.wire.events import from_json

if TYPE_CHECKING:
    import aiohttp

_CUT = 4000
_PIECE = 256 << 10


class _Item(Struct, frozen=True):
    event: FileEvent | None = None
    error: ErrorBody | None = None


class AsyncWatch:
    """Events of a directory; made by `files.watch`. Iterate over it: it ends when the directory is removed or moved
    away, with a `remove` event of the path "". Close it when done early, or use `async with`.

    The iteration raises `QuotaExceeded` where the tree got more directories than a watch can follow, `Unavailable`
    where the connection broke: look at the directory, and watch again.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        """Not for callers."""
        self._response = response
        self._events: deque[FileEvent] = deque()
        self._rest = b""
        self._ended = False

    async def __aenter__(self) -> AsyncWatch:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[FileEvent]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[FileEvent]:
        while True:
            while self._events:
                yield self._events.popleft()
            if self._ended:
                return
            await self._more()

    async def _more(self) -> None:
        try:
            data = await self._response.content.readany()
        except cut_errors() as error:
            await self.close()
            raise Unavailable(
                "the connection of a watch broke", remedy="look at the directory, then watch again"
            ) from error
        if not data:
            await self.close()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in filter(None, lines):
            item = decoded(line, _Item)
            if item.error is not None:
                await self.close()
                raise from_body(item.error)
            if item.event is not None:
                self._events.append(from_json(item.event))

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        self._ended = True
        self._response.close()


class AsyncPorts:
    """Connections to what listens in one sandbox; `sandbox.ports`."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        """Not for callers."""
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._path = f"/v1/sandboxes/{sandbox_id}/ports"
        self._access: PortAccess | None = None

    async def access(self, *, request_timeout_s: float | None = None) -> PortAccess:
        """How they are reached by host name: the domain, and the token that admits to those that aren't public."""
        if self._access is None:
            url = self._transport.url(self._path)
            self._access = await self._transport.call("GET", url, PortAccess, request_timeout_s=request_timeout_s)
        return self._access

    async def get_host(self, port: int) -> str:
        """The host name at which the server serves a port inside, for HTTP and WebSockets."""
        return f"{port}-{self._sandbox_id}.{(await self.access()).domain}"

    async def url(self, port: int, *, token: bool = False) -> str:
        """The URL of a port inside, by the scheme at which the server itself is reached. `token`: with the sandbox's
        traffic token, for a browser, which gets a cookie for it; whoever has it reaches all ports of the sandbox."""
        scheme = self._transport.endpoint.url.partition("://")[0]
        end = f"?dsec_token={(await self.access()).token}" if token else ""
        return f"{scheme}://{await self.get_host(port)}/{end}"

    async def connect(self, port: int, *, request_timeout_s: float | None = None) -> AsyncPortStream:
        """Connect to a TCP port on the loopback inside. Raises `PortClosed` where nothing listens there,
        `InvalidRequest`, `SandboxNotFound`, `SandboxEnded`, `QuotaExceeded`, `Unavailable`, `RequestTimeout`."""
        if request_timeout_s is None:
            return await self._connect(port)
        try:
            async with asyncio.timeout(request_timeout_s):
                return await self._connect(port)
        except TimeoutError:
            raise timed_out(request_timeout_s) from None

    async def _connect(self, port: int) -> AsyncPortStream:
        return AsyncPortStream(await self._transport.websocket(self._transport.url(f"{self._path}/{port}")), port)


class AsyncPortStream:
    """A connection to a port inside; made by `ports.connect`. Close it in the end, or use `async with`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, port: int) -> None:
        """Not for callers."""
        self._socket = socket
        self._port = port
        self._ended = self._closed_write = False

    async def __aenter__(self) -> AsyncPortStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def read(self) -> bytes:
        """Some bytes; b"" when the other side has ended its direction. Raises `PortClosed` where the connection inside
        was cut, `Unavailable` where ours was."""
        while not self._ended:
            message = await self._socket.receive()
            kind = message.type.name
            if kind == "BINARY":
                if message.data:
                    return bytes(message.data)
            elif kind == "TEXT":
                self._ended = message.data == "end"
            elif kind in ("CLOSE", "CLOSING", "CLOSED", "ERROR"):
                self._ended = True
                raise self._cut(kind, message.extra if kind == "CLOSE" else None)
        return b""

    def _cut(self, kind: str, reason: str | None) -> DsecError:
        if kind == "CLOSE" and self._socket.close_code == _CUT:
            found = BY_CODE.get(reason or "", PortClosed)
            return found(f"the connection to port {self._port} inside the sandbox was cut")
        return Unavailable(f"the connection to the server for port {self._port} broke", remedy="connect again")

    async def write(self, data: bytes) -> None:
        """Send, waiting while the other side doesn't read. Dropped where it doesn't take any more. Raises `Unavailable`
        where the connection to the server is gone."""
        if self._closed_write:
            raise InvalidRequest("this direction of the connection was closed")
        for at in range(0, len(data), _PIECE):
            try:
                await self._socket.send_bytes(data[at : at + _PIECE])
            except cut_errors() as error:
                raise self._cut("CLOSED", None) from error

    async def close_write(self) -> None:
        """End our direction; reading goes on. Idempotent."""
        if not self._closed_write and not self._socket.closed:
            self._closed_write = True
            try:
                await self._socket.send_str("end")
            except cut_errors() as error:
                raise self._cut("CLOSED", None) from error

    async def close(self) -> None:
        """End both directions. Idempotent."""
        self._ended = self._closed_write = True
        await self._socket.close()
