"""Forks of real sandboxes: the parent's files, and nothing else of the parent's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec import AsyncClient
from dsec.errors import InvalidRequest
from dsec.spec.sandbox import SandboxSpec, State
from server_kit import Server, serving

pytestmark = pytest.mark.root

SMALL = SandboxSpec(environment="debian", memory_bytes=128 << 20, disk_bytes=64 << 20, pids=64)


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client
        await client.kill_many(await client.list())


def captures(server: Server) -> list[str]:
    return [path.name for path in (server.config.run / "volume" / "captures").iterdir()]


async def test_children_begin_with_the_parents_files_and_are_somebody_of_their_own(
    server: Server, client: AsyncClient
) -> None:
    parent = await client.create(SMALL, name="parent", hostname="parent", labels={"a": "b"})
    script = "mkdir /w; seq 1000 > /w/f; chown nobody /w/f; rm /etc/motd; echo 1234 > /etc/machine-id"
    (await parent.commands.run(script)).check()
    sleeper = await parent.commands.start(["sleep", "600"])
    children = await parent.fork(3)
    assert len({parent.id, *(child.id for child in children)}) == 4
    machines, hosts = set(), set()
    for child in children:
        assert child.info.spec.name is None
        assert child.info.spec.labels == {"a": "b"}
        seen = await child.commands.run("wc -l < /w/f; stat -c %U /w/f; ls /etc/motd; pgrep sleep; echo x > /w/mine")
        assert seen.stdout == "1000\nnobody\n"
        machines.add(await child.files.read("/etc/machine-id"))
        hosts.add((await child.commands.run(["hostname"])).stdout)
    assert len(machines | {await parent.files.read("/etc/machine-id")}) == 4
    assert len(hosts | {"parent\n"}) == 4
    assert len({child.info.token for child in children}) == 3
    assert not await parent.files.exists("/w/mine")
    assert [event.data for event in [e async for e in parent.events()] if event.type == "forked"] == [
        {"children": [child.id for child in children]}
    ]
    assert captures(server) == []
    await sleeper.kill()
    await parent.kill()
    assert (await children[0].commands.run("wc -l < /w/f")).stdout == "1000\n", "they outlive it"
    grandchild = (await children[0].fork())[0]
    assert await grandchild.files.read("/w/mine") == "x\n"


async def test_a_paused_one_is_forked_without_resuming_it(client: AsyncClient) -> None:
    parent = await client.create(SMALL)
    await parent.files.write("/state", "1")
    writer = await parent.commands.start("while :; do date +%N > /busy; done")
    await asyncio.sleep(0.2)
    await parent.pause()
    child = (await parent.fork())[0]
    assert (await parent.refresh()).state is State.PAUSED
    assert await child.files.read("/state") == "1"
    assert (await child.refresh()).state is State.RUNNING
    await writer.kill()


async def test_a_fork_keeps_its_disk_limit(client: AsyncClient) -> None:
    parent = await client.create(SMALL)
    (await parent.commands.run("head -c 40000000 /dev/urandom > /big")).check()
    child = (await parent.fork())[0]
    assert (await child.commands.run("head -c 100000000 /dev/urandom > /more")).exit_code != 0
    with pytest.raises(InvalidRequest):
        await parent.fork(0)


async def test_a_server_that_dies_over_a_fork_leaves_nothing(server: Server, client: AsyncClient) -> None:
    parent = await client.create(SMALL)
    forking = asyncio.create_task(parent.fork(8))
    while not (captures(server) or forking.done()):  # noqa: ASYNC110 (nobody would set an event)
        await asyncio.sleep(0)
    server.kill()
    await asyncio.gather(forking, return_exceptions=True)  # whichever moment it was
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(60):
        while any(info.state is not State.RUNNING for info in await client.list()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert captures(server) == []
    assert server.subvolumes() == {info.id for info in await client.list()}
    assert (await parent.commands.run("echo fine")).stdout == "fine\n"
