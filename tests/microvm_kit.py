"""Servers whose machines are microVMs on an imitated CPU, with the templates that are kept between runs."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from dsec import AsyncClient, AsyncSandbox, Client, Sandbox
from dsec.errors import CreateFailed
from dsec.spec.sandbox import SandboxSpec
from server_kit import PATIENCE_S, Server, serving

SMALL = SandboxSpec(
    environment="debian", backend="microvm", memory_bytes=256 << 20, disk_bytes=512 << 20, pids=128, cpus=1
)
needs_qemu = pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed")


@contextmanager
def machines_over(state: Path, templates: Path, **settings: str) -> Iterator[None]:
    """For a server that is started meanwhile; `settings`: other values of `DSEC_VM_...`."""
    (state / "vm").mkdir()
    (state / "vm" / "templates").symlink_to(templates)
    templates.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ACCEL": "tcg", "SPARE": "0", **settings}.items():
            patch.setenv(f"DSEC_VM_{name}", value)
        yield


@contextmanager
def serving_machines(state: Path, templates: Path, **settings: str) -> Iterator[Server]:
    """A server whose template has booted."""
    with machines_over(state, templates, **settings), serving(state) as server:
        asyncio.run(_prime(server))
        yield server


async def _prime(server: Server) -> None:
    """On a busy machine the template's boot takes longer than a creation may, and goes on behind it."""
    async with server.client() as client, asyncio.timeout(4 * PATIENCE_S):
        while True:
            try:
                await (await client.create(SMALL)).kill()
                return
            except CreateFailed:
                continue


@contextmanager
def first_box(client: Client, spec: SandboxSpec) -> Iterator[Sandbox]:
    """The same for a test's own sandbox."""
    deadline = time.monotonic() + 4 * PATIENCE_S
    while True:
        try:
            box = client.create(spec)
        except CreateFailed:
            if time.monotonic() > deadline:
                raise
        else:
            break
    with box:
        yield box


@asynccontextmanager
async def emptied(server: Server) -> AsyncIterator[AsyncClient]:
    """A client for a test, after which there is no sandbox."""
    async with server.client() as client:
        yield client
        await client.kill_many(await client.list())


async def said(box: AsyncSandbox, script: str) -> str:
    """What a script printed."""
    return (await box.commands.run(["sh", "-c", script])).check().stdout.strip()


def monitors(server: Server) -> list[int]:
    """The VMMs of a server's machines, spare ones too."""
    return [pid for pid in server.guests() if b"qemu" in Path(f"/proc/{pid}/cmdline").read_bytes()]
