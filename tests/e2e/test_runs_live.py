"""A trainer that dies: its run's lease lapses, its sandboxes are paused, the next trainer finds them, the old one is
fenced off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import AsyncClient
from dsec.errors import NotFound, RunFenced
from dsec.spec.runs import RunInfo
from dsec.spec.sandbox import State
from server_kit import PATIENCE_S, Server, serving

pytestmark = pytest.mark.root

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
