"""A server that is killed at each of its crossings, one run for each: whatever its moment, every key runs once, nothing
that was written is lost, the chain holds and nothing is left on the host.

A run without a death counts the crossings. A sample of them is tried, the same for the same DSEC_TEST_SEED; all of them
with DSEC_TEST_EVERY=1.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dsec import AsyncClient
from dsec.spec.sandbox import SandboxSpec, State
from dsec.spec.trajectory import EntryType, verify
from server_kit import PATIENCE_S, Server, end

pytestmark = pytest.mark.root

DYING = Path(__file__).with_name("dying_server.py")
SAMPLE = 6
SMALL = SandboxSpec(environment="debian", memory_bytes=128 << 20, disk_bytes=64 << 20, pids=32)
BIG = "".join(f"{number}\n" for number in range(1, 20_001))
_line = msgspec.json.Encoder().encode


class DyingServer(Server):
    """Dies at crossing `at` of those that it makes while `counts` is there."""

    at = 0

    @property
    def counts(self) -> Path:
        return self.state / "crossings"

    def spawn(self) -> subprocess.Popen[bytes]:
        with (self.state / "server.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(DYING), "serve", "--port", str(self.port), "--on-exit", self.on_exit],
                env={
                    **self.environment(),
                    "DSEC_TEST_COUNTS": str(self.counts),
                    "DSEC_TEST_DIES_AT": str(self.at),
                    "DSEC_ZRAM_BYTES": str(64 << 20),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


@pytest.fixture
def server(debian_state: Path) -> Iterator[DyingServer]:
    server = DyingServer(debian_state)
    server.start()
    try:
        yield server
    finally:
        server.at = 0
        end(server)


async def life(client: AsyncClient) -> None:
    """A sandbox from its creation to its end."""
    box = await client.create(SMALL)
    first = await box.commands.run("echo one | tee -a /tmp/runs", key="one")
    await box.files.write("/tmp/f", b"x" * 100_000)
    typed = await box.commands.run(["tee", "-a", "/tmp/runs"], stdin="two\n", key="two")
    await box.pause()
    third = await box.commands.run("echo three >> /tmp/runs; seq 20000; exit 3", key="three")
    assert (first.stdout, typed.stdout, third.stdout, third.exit_code) == ("one\n", "two\n", BIG, 3)
    assert await box.files.read("/tmp/runs") == "one\ntwo\nthree\n"
    assert await box.files.read("/tmp/f") == "x" * 100_000
    again = await box.commands.run("echo three >> /tmp/runs; seq 20000; exit 3", key="three")
    assert (again.stdout, again.exit_code) == (BIG, 3)
    await box.kill()
    entries = verify([_line(entry) async for entry in box.trajectory()], box.id)
    asked = {entry.seq: entry.data.get("key", "") for entry in entries if entry.type == EntryType.EXEC}
    results = [asked[entry.data["exec"]] for entry in entries if entry.type == EntryType.RESULT]
    assert sorted(key for key in results if not key.startswith("~")) == ["one", "three", "two"]
    assert entries[-1].type == EntryType.END
    assert (await box.refresh()).state is State.ENDED


async def disturbed(server: DyingServer, at: int) -> bool:
    """A life during which the server dies at a crossing, and is started again; False: it had fewer of them."""
    server.kill()
    server.at = at
    await asyncio.to_thread(server.start)
    endpoint = server.endpoint()
    async with AsyncClient(endpoint.url, endpoint.api_key, retry_s=PATIENCE_S) as client:
        await client.list()  # a client that has reached a server waits for the next one
        server.counts.write_bytes(b"")
        living = asyncio.create_task(life(client))
        while not living.done() and server.process is not None and server.process.poll() is None:
            await asyncio.wait([living], timeout=0.01)
        server.counts.unlink()
        died = server.process is not None and server.process.poll() is not None
        if died:
            server.at = 0
            await asyncio.to_thread(server.start)
        await living
        assert await client.list() == []
    return died


async def test_a_server_that_dies_at_every_crossing(server: DyingServer) -> None:
    server.counts.write_bytes(b"")
    async with server.client() as client:
        await life(client)
    crossings = int(server.counts.read_bytes())
    server.counts.unlink()
    assert crossings > 60, "the life is as long as it was meant to be"
    every = list(range(1, crossings + 1))
    seed = int(os.environ.get("DSEC_TEST_SEED") or random.randrange(10**6))
    tried = every if os.environ.get("DSEC_TEST_EVERY") else sorted(random.Random(seed).sample(every, SAMPLE))
    died = 0
    for at in tried:
        try:
            died += await disturbed(server, at)
        except BaseException as error:
            error.add_note(f"crossing {at}; DSEC_TEST_SEED={seed}, {crossings} crossings\n{server.log()[-3000:]}")
            raise
    assert died > len(tried) / 2, "the numbers of crossings differ a little from run to run"
    assert server.difference(set()) == ""
