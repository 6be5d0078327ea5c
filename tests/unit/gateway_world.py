"""A server whose gateways lead to servers of this machine, which speak the real protocols: what tests in sandboxes
need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from aiohttp import web
from gateway_kit import serve
from upstream_kit import MIDDLE, NEW, OLD, Files, GitServer, Index, Registry, bare, commit, push, repository

from dsec import AsyncClient, AsyncSandbox
from server_kit import serving

SECRET = "sk-very-secret-0123456789"


class World:
    """A server and what is outside of it."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.index, self.registry = Index(), Registry()
        self.files, self.git = Files(top / "files"), GitServer(top / "git")
        self.asked: list[dict[str, str]] = []
        self.client: AsyncClient

    async def model(self, request: web.BaseRequest) -> web.StreamResponse:
        """A model endpoint that repeats what it got."""
        await request.content.read()
        self.asked.append(dict(request.headers))
        return web.json_response({"got": dict(request.headers), "usage": {"prompt_tokens": 3, "completion_tokens": 4}})

    async def begin(self, stack: AsyncExitStack, state: Path) -> None:
        self.index.url = await stack.enter_async_context(serve(self.index.handle))
        self.registry.url = await stack.enter_async_context(serve(self.registry.handle))
        files = await stack.enter_async_context(serve(self.files.handle))
        git = await stack.enter_async_context(serve(self.git.handle))
        model = await stack.enter_async_context(serve(self.model))
        for version, at in (("1.0", OLD), ("2.0", MIDDLE), ("3.0", NEW)):
            self.index.add("tool", version, at, requires="base")
            self.registry.add("left", f"{version}.0", at)
        self.index.add("base", "0.1", OLD)
        self.registry.add("@scope/thing", "0.1.0", OLD, requires={"left": "*"})
        repository(self.files.top, "stable", {"hello-dsec": "1.0"})
        _, clone = bare(self.git.top, "org/repo.git")
        self.first = commit(clone, "a", "1", "2021-01-01T00:00:00Z")
        push(clone)
        _, other = bare(self.git.top, "org/other.git")
        commit(other, "b", "2", "2021-01-01T00:00:00Z")
        push(other)
        (state / "gateways.toml").write_text(
            f'[pypi]\nurl = "{self.index.url}/simple/"\n[npm]\nurl = "{self.registry.url}"\n'
            f'[[apt]]\nurl = "{files}/debian"\ninside = "http://mirror.example/debian"\n'
            f'[git."git.example"]\nurl = "{git}"\n'
            f'[http."api.example"]\nurl = "{model}"\n'
            f'[inference.main]\nurl = "{model}/v1"\nheaders = {{ Authorization = "Bearer secret:key" }}\n'
        )
        (state / "secrets.toml").touch(0o600)
        (state / "secrets.toml").write_text(f'[key]\nvalue = "{SECRET}"\nhosts = ["{model.removeprefix("http://")}"]\n')


@asynccontextmanager
async def open_world(state: Path, top: Path) -> AsyncIterator[World]:
    """All of it. `state`: of a server that isn't running yet."""
    world = World(top)
    async with AsyncExitStack() as stack:
        await world.begin(stack, state)
        server = stack.enter_context(serving(state))
        world.client = await stack.enter_async_context(server.client())
        yield world


async def run(box: AsyncSandbox, command: str) -> tuple[int, str]:
    """A shell command's exit code and all that it printed."""
    async with asyncio.timeout(120):
        result = await box.commands.run(["sh", "-c", f"exec 2>&1; {command}"])
    return result.exit_code or 0, result.stdout


async def works(box: AsyncSandbox, command: str) -> str:
    code, output = await run(box, command)
    assert code == 0, output
    return output
