"""What time ends: a trainer that dies, so that its run's lease lapses, its sandboxes are paused, the next trainer finds
them, the old one is fenced off; and sandboxes with a time to live."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec import AsyncClient, AsyncSandbox
from dsec.errors import NotFound, RunFenced, SandboxEnded
from dsec.spec.causes import Cause
from dsec.spec.runs import RunInfo
from dsec.spec.sandbox import SandboxSpec, State
from server_kit import PATIENCE_S, Server, serving

pytestmark = pytest.mark.root

SMALL = SandboxSpec(environment="debian", memory_bytes=256 << 20, disk_bytes=256 << 20, pids=64)

TRAINER = """
import asyncio, sys
from dsec import AsyncClient

async def work():
    async with AsyncClient() as client, client.run("grpo-42", lease_s=6, on_lapse="pause") as run:
        box = await run.sandbox("a", "debian", memory_bytes=64 << 20, disk_bytes=64 << 20)
        await box.files.write("/state", "step 1")
        print(box.id, flush=True)
        await asyncio.sleep(600)

asyncio.run(work())
"""


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client
        await client.kill_many(await client.list())


async def lease_end(client: AsyncClient) -> float:
    """When the trainer's lapses, as it was renewed last; to be told renews nothing."""
    url = client._transport.url("/v1/runs", name="grpo-42")
    found = await client._transport.call("GET", url, dict[str, list[RunInfo]])
    return found["runs"][0].expires_at


async def test_a_trainer_is_killed_and_another_goes_on(server: Server) -> None:
    trainer = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", TRAINER], env=server.environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert trainer.stdout is not None
        sandbox_id = (await asyncio.to_thread(trainer.stdout.readline)).strip()
        async with server.client() as client:
            began = time.time()
            async with asyncio.timeout(PATIENCE_S):
                while (await lease_end(client)) < began + 6.5:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert (await client.connect(sandbox_id)).info.state is State.RUNNING, "it is renewed"
            trainer.kill()
            trainer.wait()
            async with asyncio.timeout(PATIENCE_S):
                while (await client.connect(sandbox_id)).info.state is not State.PAUSED:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            with pytest.raises(NotFound):
                await client.attach_run("nosuch")
            second = await client.attach_run("grpo-42")
            assert second.epoch == 1
            box = await second.sandbox("a", "debian", memory_bytes=64 << 20, disk_bytes=64 << 20)
            assert box.id == sandbox_id
            assert await box.files.read("/state") == "step 1"
            async with client.run("grpo-42", lease_s=30) as third:
                assert third.epoch == 2
                assert [info.id for info in await third.list()] == [sandbox_id]
                for call in (box.files.read("/state"), second.renew(), second.kill()):
                    with pytest.raises(RunFenced):
                        await call
                mine = await third.sandbox("a", "debian", memory_bytes=64 << 20, disk_bytes=64 << 20)
                assert await mine.files.read("/state") == "step 1"
                await third.kill()
            await second.close()
    finally:
        trainer.kill()
        trainer.wait()
        if trainer.stdout is not None:
            trainer.stdout.close()


# --- times to live ---


async def test_a_ttl_ends_it_with_all_that_runs(client: AsyncClient) -> None:
    box = await client.create(SMALL, ttl_s=1.0)
    with pytest.raises(SandboxEnded, match="ttl"):
        await box.commands.run(["sleep", "1000"])
    async with asyncio.timeout(PATIENCE_S):
        while (await box.refresh()).state is not State.ENDED:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert (box.info.cause, box.info.infra) == (Cause.TTL, False)
    with pytest.raises(SandboxEnded):
        await box.renew(60)


async def test_renewals_race_expiries(client: AsyncClient) -> None:
    """Whoever renewed in time lives on, whoever didn't is gone, and nothing is in between."""
    boxes = [item.unwrap() async for item in client.create_many(SMALL, count=20, ttl_s=2.0)]

    async def renew(number: int, box: AsyncSandbox) -> bool:
        await asyncio.sleep(max(0.0, (box.info.expires_at or 0) - time.time() - 0.1 + 0.01 * number))
        try:
            await box.renew(1000)
        except SandboxEnded:
            return False
        return True

    renewed = await asyncio.gather(*(renew(number, box) for number, box in enumerate(boxes)))
    await asyncio.sleep(0.5)
    for box, lives in zip(boxes, renewed, strict=True):
        info = await box.refresh()
        if lives:
            assert (await box.commands.run("echo here")).stdout == "here\n"
        else:
            assert info.cause is Cause.TTL


async def test_an_idle_ttl_counts_from_the_last_use(client: AsyncClient) -> None:
    until_told = "until test -e {}; do sleep 0.05; done; echo end"
    while True:
        busy = await client.create(SMALL, idle_ttl_s=1.0)
        try:
            held = await busy.commands.start(until_told.format("/first"))
            break
        except SandboxEnded:  # the host stood still for so long
            continue
    idle = await client.create(SMALL, idle_ttl_s=1.0)
    await asyncio.sleep(1.5)
    assert (await busy.refresh()).state is State.RUNNING
    async with asyncio.timeout(PATIENCE_S):
        while (await idle.refresh()).state is not State.ENDED:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert idle.info.cause is Cause.IDLE_TTL
    with pytest.raises(SandboxEnded):
        await idle.commands.run("true")
    await (await busy.commands.start(until_told.format("/second"))).detach()
    await busy.files.write("/first", "")
    assert (await held.wait()).check().stdout == "end\n"
    await asyncio.sleep(1.5)  # nobody listens, it is in use all the same
    assert (await busy.refresh()).state is State.RUNNING
    await busy.files.write("/second", "")
    async with asyncio.timeout(PATIENCE_S):
        while (await busy.refresh()).state is not State.ENDED:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert busy.info.cause is Cause.IDLE_TTL
