"""Pausing real sandboxes: memory that is given back, time that stands still, requests that resume, servers that die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec import AsyncClient, AsyncSandbox
from dsec.kernel import zram
from dsec.spec.causes import Cause
from dsec.spec.events import SandboxEvent
from dsec.spec.sandbox import SandboxSpec, State
from server_kit import PATIENCE_S, Server, serving

pytestmark = pytest.mark.root

SMALL = SandboxSpec(environment="debian", memory_bytes=256 << 20, disk_bytes=256 << 20, pids=64)
HOLDER = "x = bytearray(b'some words that compress ' * 2_000_000); print('held', flush=True); input(); print(len(x))"


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSEC_ZRAM_BYTES", str(24 << 20))
        with serving(debian_module_state) as server:
            yield server
    assert not [name for name in zram.swaps() if name.startswith("/dev/zram")] or _others()


def _others() -> bool:
    """Servers of other tests on this machine, whose swap it may be."""
    return len(list(Path("/run/dsec").glob("*/zygote.sock"))) > 0


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client
        await client.kill_many(await client.list())


async def event(box: AsyncSandbox, kind: str) -> SandboxEvent:
    """The last of a kind, waited for."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = [each async for each in box.events() if each.type == kind]
            if found:
                return found[-1]
            await asyncio.sleep(0.02)


async def test_memory_is_given_back_and_comes_again(client: AsyncClient) -> None:
    box = await client.create(SMALL)
    held = await box.commands.start(["python3", "-c", HOLDER], stdin=True)
    async for chunk in held:
        assert "held" in str(chunk)
        break
    assert (await box.pause()).state is State.PAUSED
    out = (await event(box, "paged_out")).data
    assert out["before_bytes"] > 40 << 20
    assert out["after_bytes"] < out["before_bytes"] * 0.3
    assert (await box.refresh()).state is State.PAUSED
    await held.write_stdin("\n")
    result = await held.wait()
    assert result.stdout.endswith("50000000\n")
    assert (await box.refresh()).state is State.RUNNING


async def test_a_command_stands_still_and_its_timeout_too(client: AsyncClient) -> None:
    box, limit_s = await client.create(SMALL), 3.5
    for _ in range(10):
        began = time.monotonic()
        command = await box.commands.start(
            ["sh", "-c", "for i in 1 2 3 4; do echo $i; sleep 0.2; done"], command_timeout_s=limit_s
        )
        await asyncio.sleep(0.3)
        await box.pause()
        paused = time.monotonic()
        await asyncio.sleep(limit_s + 0.1)
        assert (await box.refresh()).state is State.PAUSED
        resumed = time.monotonic()
        await box.resume()
        result = await command.wait()
        if paused - began + time.monotonic() - resumed < limit_s:
            break  # else the host was so busy that its time may have passed while it ran: once more
    assert result.cause is Cause.EXITED
    assert result.stdout == "1\n2\n3\n4\n"
    assert result.wall_s < limit_s


async def test_time_inside_is_right_after_a_resume(client: AsyncClient) -> None:
    box = await client.create(SMALL)
    await box.pause()
    await asyncio.sleep(1.0)
    before = time.time()
    result = await box.commands.run(["date", "+%s.%N"])
    assert before - 0.1 < float(result.stdout) < time.time() + 0.1


async def test_an_upload_waits_and_loses_nothing(client: AsyncClient) -> None:
    box = await client.create(SMALL)
    sent, paused = asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(128):
            if number == 64:  # more than sockets hold: the server is at it
                sent.set()
                await paused.wait()
            yield bytes([number]) * (256 << 10)

    upload = asyncio.create_task(box.files.write("/tmp/big", pieces()))
    await sent.wait()
    await box.pause()
    paused.set()
    await asyncio.sleep(0.5)
    assert not upload.done()
    assert (await box.refresh()).state is State.PAUSED
    await box.resume()
    await upload
    data = await box.files.read_bytes("/tmp/big")
    assert data == b"".join(bytes([number]) * (256 << 10) for number in range(128))


async def test_where_swap_is_full_memory_stays_and_nothing_is_lost(client: AsyncClient) -> None:
    """More of what doesn't compress than compressed swap may take."""
    box = await client.create(SMALL)
    program = (
        "import hashlib, os; x = os.urandom(40 << 20); print(hashlib.sha256(x).hexdigest(), flush=True); input();"
        "print(hashlib.sha256(x).hexdigest())"
    )
    held = await box.commands.start(["python3", "-c", program], stdin=True)
    async for chunk in held:
        digest = chunk.text.strip()
        break
    for _ in range(2):
        await box.pause()
        await event(box, "paged_out")
        await box.resume()
    await held.write_stdin("\n")
    assert (await held.wait()).stdout.split()[-1] == digest


async def test_pauses_resumes_and_requests_all_at_once(client: AsyncClient) -> None:
    """Whatever the order in which they come, every request is answered and the sandbox is what was said of it last."""
    box = await client.create(SMALL)

    async def ask(number: int) -> None:
        assert (await box.commands.run(["echo", str(number)])).stdout == f"{number}\n"

    for _ in range(4):
        calls = [call for number in range(6) for call in (box.pause(), ask(number), box.pause(), box.resume())]
        await asyncio.gather(*calls)
    await asyncio.gather(*(box.pause() for _ in range(5)))
    assert (await box.refresh()).state is State.PAUSED
    moves = [each.type async for each in box.events() if each.type in ("paused", "resumed")]
    assert moves == ["paused", "resumed"] * (len(moves) // 2) + ["paused"]
    await asyncio.gather(*(box.resume() for _ in range(5)))
    await ask(7)


async def test_all_of_a_run_at_once(client: AsyncClient) -> None:
    specs = [SandboxSpec(environment="debian", memory_bytes=64 << 20, disk_bytes=64 << 20, run="grpo-1")] * 8
    boxes = [made.sandbox async for made in client.create_many(specs) if made.sandbox is not None]
    assert set((await client.pause_many(run="grpo-1")).values()) == {None}
    assert {info.state for info in await client.list(run="grpo-1")} == {State.PAUSED}
    assert len(await client.resume_many(run="grpo-1")) == len(boxes) == 8
    assert {info.state for info in await client.list(run="grpo-1")} == {State.RUNNING}


async def test_a_server_that_is_killed_finds_it_paused(server: Server, client: AsyncClient) -> None:
    box, limit_s = await client.create(SMALL), 3.0
    for attempt in range(10):
        began = time.monotonic()
        command = await box.commands.start("sleep 1; echo done", key=f"k{attempt}", command_timeout_s=limit_s)
        await box.pause()
        paused = time.monotonic()
        server.kill()
        await asyncio.to_thread(server.start)
        await asyncio.sleep(limit_s + 0.5)
        assert (await box.refresh()).state is State.PAUSED
        resumed = time.monotonic()
        await box.resume()
        result = await command.wait()
        if paused - began + time.monotonic() - resumed < limit_s:
            break  # as above
    assert (result.cause, result.stdout) == (Cause.EXITED, "done\n")
    await box.pause()
    await client.kill(box.id)
    assert (await box.refresh()).cause is Cause.DELETED
