"""Machines that are paused into a file, their VMMs ended, and resumed by any request; nothing of a stream is lost."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec import AsyncClient, AsyncSandbox
from dsec.spec.sandbox import State
from microvm_kit import SMALL, emptied, monitors, needs_qemu, said, serving_machines
from server_kit import PATIENCE_S, Server

pytestmark = [pytest.mark.root, needs_qemu]


@pytest.fixture(scope="module")
def server(debian_module_state: Path, vm_templates: Path) -> Iterator[Server]:
    with serving_machines(debian_module_state, vm_templates, PAUSE="suspend") as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with emptied(server) as client:
        yield client


def files(server: Server) -> list[str]:
    """Of suspended machines."""
    return [path.name for path in (server.config.run / "volume" / "vm").glob("*.suspend*")]


async def suspend(server: Server, *boxes: AsyncSandbox) -> None:
    """Pause them, and wait until they have no VMM."""
    for box in boxes:
        await box.pause()
    async with asyncio.timeout(PATIENCE_S):
        while len(files(server)) < len(boxes) or monitors(server):  # noqa: ASYNC110 (nobody would set an event)
            await asyncio.sleep(0.05)


async def test_any_request_resumes_it_as_it_was(server: Server, client: AsyncClient) -> None:
    box = await client.create(SMALL)
    await said(box, "echo in-memory > /dev/shm/kept; echo on-disk > /kept")
    copying = await box.commands.start(["cat"], stdin=True, key="cat")
    await copying.write_stdin(b"before\n")
    pid = copying.pid
    for turn in ("one", "two"):
        await suspend(server, box)
        assert (await box.refresh()).state is State.PAUSED
        told = await asyncio.gather(*(said(box, f"cat /dev/shm/kept /kept; echo {turn}") for _ in range(3)))
        assert told == [f"in-memory\non-disk\n{turn}"] * 3
        assert (len(monitors(server)), files(server)) == (1, [])
        assert str(pid) in (await said(box, "pgrep -x cat")).split()
    await suspend(server, box)
    await copying.write_stdin(b"after\n")
    await copying.close_stdin()
    assert (await copying.wait()).stdout == "before\nafter\n"


async def test_nothing_of_a_stream_is_lost(server: Server, client: AsyncClient) -> None:
    """Paused in the middle of output and of an upload, as often as fits."""
    box = await client.create(SMALL)
    content = os.urandom(1 << 20) * 3
    upload = asyncio.ensure_future(box.files.write("/upload", content))
    printing = await box.commands.start(["sh", "-c", "seq 1 200000"], key="seq")
    output = asyncio.ensure_future(printing.wait())
    for _ in range(3):
        await asyncio.sleep(0.1)
        await suspend(server, box)
        await box.resume()
    await upload
    assert (await output).stdout == "".join(f"{i}\n" for i in range(1, 200001))
    assert (await said(box, "sha256sum < /upload")).split()[0] == hashlib.sha256(content).hexdigest()


async def test_forks_ends_and_another_server(server: Server, client: AsyncClient) -> None:
    box, doomed = await client.create(SMALL), await client.create(SMALL)
    await said(box, "echo here > /dev/shm/kept")
    await suspend(server, box, doomed)
    await doomed.kill()
    assert len(files(server)) == 1
    server.kill()
    server.start()
    async with server.client() as again:
        same = await again.connect(box.id)
        assert (await same.refresh()).state is State.PAUSED
        (child,) = await same.fork(1)
        assert await said(child, "cat /dev/shm/kept") == "here"
        assert (await same.refresh()).state is State.PAUSED
        assert await said(same, "cat /dev/shm/kept") == "here"
    assert files(server) == []
