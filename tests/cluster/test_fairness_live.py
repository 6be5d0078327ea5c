"""Scarcity in a real cluster (NATS, an apiserver, simulated edges): whose turn it is, and until when one waits."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
import pytest_asyncio

from dsec import AsyncClient, AsyncSandbox, CreateResult, SandboxSpec
from dsec.bench.cluster_edges import MAX_LIVE, MEMORY_BYTES
from dsec.bench.cluster_place import ClusterPlace, running
from dsec.errors import Unavailable
from dsec.plan.watch import WatchPolicy

pytestmark = pytest.mark.asyncio(loop_scope="module")
EDGES = 2
ROOM = 8
"""Sandboxes of `SPEC` that the cluster has room for."""
SPEC = SandboxSpec(environment="debian", memory_bytes=(MAX_LIVE + 200) * MEMORY_BYTES * EDGES // ROOM)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place() -> AsyncIterator[ClusterPlace]:
    async with running(EDGES, servers=1, apiservers=1) as made:
        yield made


class Asker:
    """A project that asks for many at once."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.made: list[str] = []
        self.refused: list[str] = []

    async def ask(self, count: int, deadline_s: float) -> None:
        async for each in self.client.create_many([SPEC] * count, deadline_s=deadline_s):
            if each.sandbox is not None:
                self.made.append(each.sandbox.id)
            elif each.error is not None:
                self.refused.append(each.error.code)

    async def end_one(self) -> None:
        assert not await AsyncSandbox.kill_many([self.made.pop()], client=self.client)

    async def end_all(self) -> None:
        """What is left takes no room from the tests to come."""
        await AsyncSandbox.kill_many(self.made, client=self.client)
        await self.client.close()


async def until(holds: Callable[[], bool], what: str) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < 60, what
        await asyncio.sleep(0.05)


async def all_wait(place: ClusterPlace, requests: int) -> None:
    """Returns when so many wait for room."""
    headers = {"authorization": f"Bearer {place.key}"}
    began = time.monotonic()
    async with aiohttp.ClientSession(headers=headers) as session:
        while True:
            async with session.get(f"{place.apis[0]}/metrics") as answer:
                said = await answer.text()
            if f"\ndsec_cluster_waiting {requests}\n" in said:
                return
            assert time.monotonic() - began < 60, said
            await asyncio.sleep(0.05)


async def test_a_burst_starves_nobody_and_weights_count(place: ClusterPlace) -> None:
    async with AsyncClient(place.apis[0], place.key) as root, asyncio.TaskGroup() as tasks:
        askers = []
        for name, weight in (("burst", 1.0), ("light", 1.0), ("heavy", 3.0)):
            await root.rights.create_project(name, weight=weight)
            key = (await root.rights.create_key(project=name))["key"]
            askers.append(Asker(AsyncClient(place.apis[0], key)))
        burst, light, heavy = askers
        try:
            bursting = tasks.create_task(burst.ask(40 * ROOM, 45.0))
            await until(lambda: len(burst.made) == ROOM, "the burst takes all there is")
            waiting = [tasks.create_task(each.ask(4 * ROOM, 40.0)) for each in (light, heavy)]
            await all_wait(place, 3)
            for n in range(ROOM):
                await burst.end_one()
                await until(lambda n=n: len(light.made) + len(heavy.made) + len(burst.made) == ROOM, f"turn {n}")  # type: ignore[misc]
            # From then on room is shared by weight, one to one to three, however many each asks for; a turn more or
            # less is between any two.
            shares = [len(each.made) for each in askers]
            assert all(most - 1 <= share <= most + 1 for share, most in zip(shares, (2, 2, 5), strict=True)), shares
            await asyncio.gather(bursting, *waiting)
            for each in askers:  # whoever got nothing until then is told so, by its own deadline
                assert set(each.refused) == {"admission_timeout"}
            assert len(burst.refused) == 40 * ROOM - ROOM - len(burst.made)
        finally:
            for each in askers:
                await each.end_all()


async def all_room_is_free(place: ClusterPlace) -> None:
    """As the apiserver itself has heard it: where nodes are full as far as it knows, it sends them nothing."""
    headers = {"authorization": f"Bearer {place.key}"}
    began = time.monotonic()
    async with aiohttp.ClientSession(headers=headers) as session:
        while True:
            async with session.get(f"{place.apis[0]}/v1/nodes") as answer:
                nodes = (await answer.json())["nodes"]
            said = [(node["health"], node["live"], node["memory_committed_bytes"]) for node in nodes]
            if said == [("well", 0, 0)] * EDGES:
                return
            assert time.monotonic() - began < 60, said
            await asyncio.sleep(0.1)


async def test_nobody_waits_for_a_node_that_doesnt_answer(place: ClusterPlace) -> None:
    """15 s after the deadline a creation is told as unknown, of a batch each that isn't told; its key leads to what was
    made in the end."""
    small = {"memory_bytes": 64 << 20}
    # A batch is on record before it is placed, which takes a while on a busy machine.
    deadline_s = WatchPolicy().silent_s
    specs = [SandboxSpec(environment="debian", name=name, **small) for name in (None, None, None, "named")]
    async with AsyncClient(place.apis[0], place.key, retry_s=0.1) as client:

        async def many() -> list[CreateResult[AsyncSandbox]]:
            return [each async for each in client.create_many(specs, key="late", deadline_s=deadline_s)]

        await all_room_is_free(place)
        # What it is asked while it stands still it sends on when it goes on: to nodes whose silence begins anew then,
        # so that they don't count as silent yet, however long this took on a busy machine.
        api = place.api_pids[0]
        os.kill(api, signal.SIGSTOP)
        try:
            place.edges.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(120):
                single = asyncio.create_task(client.create("debian", deadline_s=deadline_s, **small))
                others = asyncio.create_task(many())
                await asyncio.sleep(WatchPolicy().silent_s + 2.0)
                os.kill(api, signal.SIGCONT)
                told = await others
                with pytest.raises(Unavailable, match="has not answered"):
                    await single
        finally:
            os.kill(api, signal.SIGCONT)
            place.edges.send_signal(signal.SIGCONT)
        assert [each.error.code for each in told if each.error is not None] == ["unavailable"] * 4

        async def there() -> list[str]:
            return sorted([each.sandbox.id for each in await many() if each.sandbox is not None])

        began = time.monotonic()
        while len(ids := await there()) < 4 or (await place.ask("look"))["projects"]["default"] < 5:
            assert time.monotonic() - began < 60
        assert await there() == ids
        assert (await place.ask("look"))["projects"]["default"] == 5, "the single one too, and none twice"
        await client.kill_many([each.id for each in await client.list(limit=1000)])
