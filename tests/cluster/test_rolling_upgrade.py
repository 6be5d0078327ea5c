"""A cluster of the release before becomes one of this release, process by process, under load: real processes of both,
side by side. Sandboxes, what runs in them, and the zygote that made them stay."""

from __future__ import annotations

import asyncio
import io
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import SOURCES, Cluster, Process, running

from dsec import AsyncClient, AsyncSandbox
from dsec.spec.ids import edge_of
from dsec.spec.sandbox import State
from server_kit import Server

BEFORE = "8310e0f"
"""The code that counts as the release before: move it on with each release."""
SMALL: dict[str, Any] = {"memory_bytes": 64 << 20, "disk_bytes": 64 << 20}
ROOT = SOURCES.parent
_KNOWN = subprocess.run(
    ["git", "-C", str(ROOT), "cat-file", "-e", f"{BEFORE}^{{commit}}"], capture_output=True, check=False
)
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(_KNOWN.returncode != 0, reason="this checkout doesn't have the release before in its history"),
]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the release before."""
    place = tmp_path_factory.mktemp("before")
    archived = ["git", "-C", str(ROOT), "archive", BEFORE, "src", "native"]
    packed = subprocess.run(archived, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(place, filter="data")
    return place / "src"


@pytest.fixture(scope="module")
def cluster(
    before: Path, state_over: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("upgrade")
    states = [state_over(directory / f"state-{number}") for number in (1, 2)]

    def prepare(made: Cluster) -> None:
        for process in (*made.apis, *made.edges):
            process.environment["PYTHONPATH"] = str(before)

    with running(directory, states, prepare=prepare) as made:
        yield made


class Load:
    """Sandboxes that are there all along, and what runs in them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.ids: list[str] = []
        self._number = 0

    async def begin(self, client: AsyncClient) -> None:
        """One more on each node, with a background process, a file, and a command that runs through an upgrade."""
        for edge in (1, 2):
            box = await client.create("debian", labels={"node/n": str(edge)}, **SMALL)
            assert edge_of(box.id) == edge
            await box.commands.run(["sh", "-c", "echo $$ >/tmp/pid; exec sleep 100000 >/dev/null 2>&1 &"])
            await box.files.write("/data", box.id.encode())
            self.ids.append(box.id)

    async def check(self) -> None:
        """All that there is, through every apiserver; and something new, everywhere."""
        for api in range(len(self._cluster.apis)):
            async with self._cluster.client(api) as client:
                assert {info.id for info in await client.list()} >= set(self.ids)
                for sandbox_id in self.ids:
                    box = await client.connect(sandbox_id)
                    assert box.info.state is State.RUNNING
                    await still(box)
                await self.begin(client)

    async def through(self, client: AsyncClient, restart: Callable[[], None]) -> None:
        """A command on each node that runs while something is restarted, its result under its key."""
        self._number += 1
        key = f"through-{self._number}"
        boxes = [await client.connect(sandbox_id) for sandbox_id in self.ids[:2]]
        command = ["sh", "-c", "sleep 3; date +%N"]
        started = [asyncio.create_task(box.commands.run(command, key=key)) for box in boxes]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(restart)
        for box, result in zip(boxes, [await each for each in started], strict=True):
            assert (await box.commands.run(command, key=key)).stdout == result.stdout


async def still(box: AsyncSandbox) -> None:
    assert await box.files.read_bytes("/data") == box.id.encode()
    assert (await box.commands.run(["sh", "-c", "ls /proc/*/exe -l 2>/dev/null | grep -c sleep"])).stdout == "1\n"


async def test_process_by_process(cluster: Cluster) -> None:
    load = Load(cluster)
    servers = [Server(state) for state in cluster.states]
    async with cluster.client(0) as client:
        await load.begin(client)
    zygotes = [server.zygote() for server in servers]

    def upgrade(process: Process) -> Callable[[], None]:
        def work() -> None:
            process.kill()
            process.environment["PYTHONPATH"] = str(SOURCES)
            process.start()
            cluster.all_hear()

        return work

    apis, edges = cluster.apis, cluster.edges
    for process in (
        apis[0],  # an apiserver of this release, edges of the one before
        edges[0],  # an edge of this release, an apiserver of the one before
        apis[1],
        edges[1],
    ):
        async with cluster.client(1 if process is apis[0] else 0) as client:
            await load.through(client, upgrade(process))
        await load.check()
        assert [server.zygote() for server in servers] == zygotes
    async with cluster.client(1) as client:
        assert not [each for each in (await client.kill_many(load.ids)).values() if each is not None]
        assert await client.list() == []
