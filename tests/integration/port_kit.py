"""What the tests of the port proxy share: an edge whose sandboxes' ports are servers in the test's own event loop, so
that each may answer as badly as it likes, and requests by host name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from api_kit import Served, served

from dsec.edge.node import Edge
from dsec.errors import PortClosed
from dsec.spec.sandbox import SandboxSpec

PORT = 8000
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Stream:
    """A `PortStream` over a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        try:
            return await self._reader.read(65536)
        except ConnectionResetError:
            raise PortClosed("the connection was cut") from None

    async def write(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def close_write(self) -> None:
        self._writer.write_eof()

    async def close(self) -> None:
        self._writer.transport.abort()


class Inside:
    """The edge as the API sees it, with `handler` behind each sandbox's `PORT`."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self.handler: Handler | None = None
        self.connected: list[tuple[str, int]] = []
        self.open = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._edge, name)

    async def connect(self, sandbox_id: str, port: int) -> Stream:
        self._edge.usage(sandbox_id)  # raises where it doesn't run
        self.connected.append((sandbox_id, port))
        if self.handler is None or port != PORT:
            raise PortClosed(f"nothing answers at port {port} inside the sandbox")
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        host, real = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, real)
        server.close()
        return Stream(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.handler is not None
        self.open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self.handler(reader, writer)
                await writer.drain()
        finally:
            self.open -= 1
            writer.close()


class Ports:
    """A server, one sandbox with a private port, and what is inside."""

    def __init__(self, server: Served, inside: Inside) -> None:
        self.server = server
        self.inside = inside
        self.box = ""
        self.token = ""

    async def make(self, **fields: object) -> tuple[str, str]:
        """A sandbox, and the token of its ports."""
        spec = SandboxSpec(environment="base", **fields)  # type: ignore[arg-type]
        made = await self.server.edge.create(spec, project="project")
        return made.sandbox.id, self.server.edge.traffic_token(made.sandbox.id)

    def answers(self, answer: bytes, *, close: bool = True) -> list[bytes]:
        """Let the port answer so, whatever is asked; gives the heads that it got."""
        heads: list[bytes] = []

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
            await writer.drain()
            if not close:
                await reader.read()

        self.inside.handler = handler
        return heads

    def host(self, port: int = PORT, domain: str = "localhost") -> str:
        return f"{port}-{self.box}.{domain}"

    def head(self, *headers: str) -> bytes:
        """The head of a request with the token."""
        lines = ["GET / HTTP/1.1", f"host: {self.host()}", f"x-dsec-token: {self.token}", *headers]
        return "\r\n".join([*lines, "", ""]).encode()

    async def ask(
        self, target: str = "/", *headers: str, method: str = "GET", body: bytes = b"", host: str | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """A request with the token."""
        return await self.plain(target, f"x-dsec-token: {self.token}", *headers, method=method, body=body, host=host)

    async def plain(
        self, target: str = "/", *headers: str, method: str = "GET", body: bytes = b"", host: str | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """A request without one: status, headers in lower case, body."""
        lines = [f"{method} {target} HTTP/1.1", f"host: {host or self.host()}", "connection: close", *headers]
        if body:
            lines.append(f"content-length: {len(body)}")
        return await self.server.raw_bytes("\r\n".join([*lines, "", ""]).encode("latin-1") + body)


@asynccontextmanager
async def ports(root: Path) -> AsyncIterator[Ports]:
    found: list[Inside] = []

    def make(edge: Edge) -> Inside:
        found.append(Inside(edge))
        return found[0]

    async with served(root, make) as server:
        kit = Ports(server, found[0])
        kit.box, kit.token = await kit.make()
        yield kit
