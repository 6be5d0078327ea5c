"""Gateways on loopback, as the egress serves them: one plain HTTP server that dispatches by the name asked for. Tools
reach it as their proxy, so that they use the very names that they have in a sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from dsec.egress.gateway import Grant, Visit
from dsec.egress.gateways.base import BaseGateway
from dsec.egress.gateways.build import open_gateways
from dsec.egress.gateways.config import GatewaysConfig


class Front:
    """What stands for the egress in these tests: `grants` is the policy, `notes` the event log."""

    def __init__(self, gateways: Sequence[BaseGateway]) -> None:
        self.gateways = gateways
        self.grants: list[Grant] = []
        self.notes: list[dict[str, Any]] = []
        self.sandbox_id = "one"
        self.project = "default"
        self.url = ""

    def grant(self, permission: str, **options: Any) -> Grant:
        """The policy from now on: this permission alone."""
        self.grants = []
        return self.also(permission, **options)

    def also(self, permission: str, **options: Any) -> Grant:
        """And this one."""
        kind, _, argument = permission.partition(":")
        grant = Grant(permission, kind, argument, options)
        self.of(kind).check(grant)
        self.grants.append(grant)
        return grant

    def of(self, kind: str) -> BaseGateway:
        return next(each for each in self.gateways if kind in each.kinds)

    def environment(self) -> dict[str, str]:
        """For a tool: what the gateways set, and the way to them; nothing of this machine's own settings."""
        found = {"PATH": os.environ["PATH"], "http_proxy": self.url, "LC_ALL": "C.UTF-8"}
        for gateway in self.gateways:
            grants = [grant for grant in self.grants if grant.kind in gateway.kinds]
            if grants:
                found |= gateway.environment(grants)
        return found

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        host = (request.rel_url.host or request.host).partition(":")[0].lower()
        for gateway in self.gateways:
            grants = [grant for grant in self.grants if grant.kind in gateway.kinds]
            named = {str(grant.argument).partition("/")[0] for grant in grants if grant.kind == "http"}
            if grants and host in {*gateway.hosts, *named}:
                visit = Visit(self.sandbox_id, self.project, grants, lambda _kind, data: self.notes.append(dict(data)))
                return await gateway.handle(request, visit)
        return web.Response(status=403, text=f"nothing granted serves {host}")

    @asynccontextmanager
    async def ask(
        self, method: str, url: str, *, headers: Mapping[str, str] = {}, data: Any = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request at one of the names inside, redirects not followed, nothing decoded."""
        from yarl import URL

        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                method, URL(url, encoded=True), headers=headers, data=data, proxy=self.url, allow_redirects=False
            ) as response,
        ):
            yield response

    async def get(self, url: str, **headers: str) -> tuple[int, bytes]:
        """The status and body of a GET."""
        async with self.ask("GET", url, headers=headers) as response:
            return response.status, await response.read()

    async def raw(self, data: bytes) -> bytes:
        """What comes back for bytes, until the connection is closed."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), 120)
        finally:
            writer.close()


@asynccontextmanager
async def serve(handler: Any) -> AsyncIterator[str]:
    """An aiohttp handler on a loopback port; gives its URL."""
    server = web.Server(handler)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def open_front(state: Path, config: GatewaysConfig) -> AsyncIterator[Front]:
    """Gateways that serve."""
    async with AsyncExitStack() as stack:
        front = Front(await stack.enter_async_context(open_gateways(state, config=config)))
        front.url = await stack.enter_async_context(serve(front.handle))
        yield front


async def run(*command: str, environment: Mapping[str, str], cwd: Path, timeout_s: float = 120.0) -> tuple[int, str]:
    """A tool's exit code and all that it printed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={"HOME": str(cwd), **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return process.returncode or 0, output.decode(errors="replace")
