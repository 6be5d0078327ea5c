"""Trajectories of real sandboxes: trainers, servers and machines that die, and a sandbox made again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from dsec import AsyncClient
from dsec.errors import OutcomeUnknown, SandboxLost
from dsec.spec.events import EventType
from dsec.spec.sandbox import SandboxSpec
from dsec.spec.trajectory import EntryType, verify
from server_kit import Server, serving

pytestmark = pytest.mark.root

SMALL = SandboxSpec(environment="debian", memory_bytes=256 << 20, disk_bytes=256 << 20, pids=64)
EXAMPLE = Path(__file__).parents[2] / "examples" / "toy_trainer.py"
_line = msgspec.json.Encoder().encode


@pytest.fixture
def server(debian_state: Path) -> Iterator[Server]:
    with serving(debian_state) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client


def dsec(server: Server, *arguments: str) -> str:
    command = [sys.executable, "-m", "dsec.cli.main", *arguments]
    return subprocess.run(command, env=server.environment(), capture_output=True, text=True, check=True).stdout


def test_a_trainer_that_is_killed_at_random_does_what_an_undisturbed_one_does(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--drill", "--kills", "4", "--seed", str(random.randrange(10**6))],
        env=server.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "36 operations: the same" in done.stdout


async def test_a_server_that_is_killed_at_random_runs_every_key_once(server: Server, client: AsyncClient) -> None:
    """The client goes on by itself; what it asked for is in the log once, and ran once."""
    rng = random.Random(11)
    box = await client.create(SMALL)

    async def ask(number: int) -> str:
        result = await box.commands.run(f"echo {number} >>/tmp/runs; sleep 0.02; echo {number}", key=f"k{number}")
        return result.check().stdout

    async def work(numbers: range) -> list[str]:
        return [await ask(number) for number in numbers]

    workers = [asyncio.create_task(work(range(at, at + 20))) for at in (0, 100, 200)]
    for _ in range(2):
        await asyncio.sleep(rng.uniform(0.1, 0.6))
        server.kill()
        await asyncio.to_thread(server.start)
    answers = await asyncio.gather(*workers)
    expected = [f"{number}\n" for at in (0, 100, 200) for number in range(at, at + 20)]
    assert [answer for each in answers for answer in each] == expected
    assert sorted((await box.files.read("/tmp/runs")).splitlines()) == sorted(each.strip() for each in expected)
    entries = verify([_line(entry) async for entry in box.trajectory()], box.id)
    results = [entry for entry in entries if entry.type == EntryType.RESULT]
    asked = {entry.seq: entry.data for entry in entries if entry.type == EntryType.EXEC}
    keys = [asked[entry.data["exec"]]["key"] for entry in results]
    assert sorted(keys) == sorted(f"k{each.strip()}" for each in expected)


async def test_after_the_machines_death_a_sandbox_is_made_again(server: Server, client: AsyncClient) -> None:
    """The zygote's death takes its sandboxes along, as the machine's would."""
    box = await client.create(SMALL)
    await box.commands.run("mkdir /work; cd /work; for i in 1 2 3; do echo $i $RANDOM > f$i; done; ls", key="make")
    await box.files.write("/work/notes", "hello")
    first = await box.commands.run("cat /work/notes; date; wc -l /work/f1", key="look")
    flight = await box.commands.start("sleep 600", key="flight")
    await flight.detach()
    os.kill(server.zygote(), signal.SIGKILL)
    async for event in box.events(follow=True):
        last = event.type
    assert last == EventType.ENDED
    assert (await box.commands.run("cat /work/notes; date; wc -l /work/f1", key="look")) == first
    with pytest.raises(OutcomeUnknown):
        await box.commands.run("sleep 600", key="flight")
    with pytest.raises(SandboxLost):
        await box.commands.run("true", key="never")
    found = await client.rebuild(box.id)
    assert (found.diverged, found.replayed) == (None, 3)
    again = await client.connect(found.sandbox.id)
    assert await again.files.read("/work/notes") == "hello"
    assert (await again.commands.run("ls /work")).stdout.split() == ["f1", "f2", "f3", "notes"]
    checked = await asyncio.to_thread(dsec, server, "trajectory", "verify", box.id, "--json")
    assert msgspec.json.decode(checked)["ended"] is True
    shown = await asyncio.to_thread(dsec, server, "replay", box.id)
    for part in ("$ cat /work/notes", "hello", "= 0 of", "node_lost"):
        assert part in shown
