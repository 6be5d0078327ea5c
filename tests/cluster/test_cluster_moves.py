"""Sandboxes that outlive their node: logs in the cluster's streams, rebuilding elsewhere under the same id, draining.

One small cluster, over TLS between apiservers and edges. The tests are in an order: nodes are lost on the way.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import PATIENCE_S, Cluster, eventually, own_store, running, until
from faults_kit import as_apiserver
from nats.js import JetStreamContext

from dsec import AsyncClient, AsyncSandbox, Cause
from dsec.cluster.logs import SHARDS, all_of, shard_of, stream_of
from dsec.errors import QuotaExceeded, SandboxLost, SandboxNotFound
from dsec.spec.ids import edge_of
from dsec.spec.sandbox import State

pytestmark = pytest.mark.root
SMALL: dict[str, Any] = {"memory_bytes": 64 << 20, "disk_bytes": 64 << 20}
LOST_S = 12.0
"""Nodes that serve on aren't lost while the machine is busy: a wait of some seconds for each that is."""
SWEEP_S = 1.0


@pytest.fixture(scope="module")
def cluster(state_over: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("moves")
    states = [own_store(state_over(directory / f"state-{number}")) for number in (1, 2, 3)]

    def prepare(made: Cluster) -> None:
        made.use(made.edges, tls="")
        made.use(made.apis, lost_after=str(LOST_S), sweep_every=str(SWEEP_S))

    with running(directory, states, store=directory / "shared", prepare=prepare) as made:
        yield made


async def on(client: AsyncClient, cluster: Cluster, edge: int, **options: Any) -> AsyncSandbox:
    """A sandbox on this node, which may be moved to any other."""
    others = [number for number in (1, 2, 3) if number != edge]
    for number in others:
        cluster.cordon(number)
    try:
        return await client.create("debian", **SMALL, **options)
    finally:
        for number in others:
            cluster.cordon(number, False)


async def shipped(cluster: Cluster) -> None:
    """All logs are in the streams: each node says so in a heartbeat from now on."""
    began, said = time.time(), set[int]()
    bus = await as_apiserver(cluster)
    try:
        beats = await bus.subscribe("dsec.beat.*")
        while {node["edge"] for node in cluster.get("/v1/nodes")["nodes"] if node["health"] != "lost"} - said:
            message = await beats.next_msg(PATIENCE_S)
            beat = json.loads(message.data)
            if beat["now"] > began and not beat["unshipped"]:
                said.add(beat["report"]["edge"])
            assert time.time() < began + PATIENCE_S, said
    finally:
        await bus.close()


async def test_a_sandbox_outlives_its_node(cluster: Cluster, one: AsyncClient, other: AsyncClient) -> None:
    box = await on(one, cluster, 1, name="solver", env={"SECRET": "s3"}, labels={"who": "me"})
    assert edge_of(box.id) == 1
    await box.commands.run(["sh", "-c", "echo $SECRET > /a; date +%N > /when; seq 1 40000"], key="first")
    await box.files.write("/b", b"x" * 100_000)
    done = await box.commands.run(["sh", "-c", "cat /a; wc -c < /b; cat /when"], key="second")
    await shipped(cluster)
    before = [line async for line in box.trajectory()]
    cluster.edges[0].kill()
    until(lambda: cluster.healths(cluster.apis[1])[0] == "lost", "edge 1 is lost")
    with pytest.raises(SandboxLost) as lost:
        await (await other.connect(box.id)).commands.run(["true"])
    assert lost.value.infra
    assert [line async for line in box.trajectory()] == before, "the log is the cluster's"
    rebuilt = await other.rebuild(box.id)
    assert rebuilt.sandbox.id == box.id
    assert rebuilt.sandbox.state is State.RUNNING
    assert (rebuilt.sandbox.spec.name, rebuilt.sandbox.spec.labels) == ("solver", {"who": "me"})
    assert rebuilt.diverged is not None, "the time is another"
    for client in (one, other):
        again = await client.connect(box.id)
        assert await again.files.read("/a") == "s3\n"
        assert await again.files.read_bytes("/b") == b"x" * 100_000
        assert (await client.find("solver")).id == box.id
        assert [info.id for info in await client.list()] == [box.id]
        # a key of the one that is gone names the command that was done again
        assert (await again.commands.run(["sh", "-c", "cat /a; wc -c < /b; cat /when"], key="second")).exit_code == 0
    assert (await one.create("debian", name="solver", env={"SECRET": "s3"}, labels={"who": "me"}, **SMALL)).id == box.id
    assert done.exit_code == 0


async def test_a_moved_one_outlives_the_next_node_too(cluster: Cluster, one: AsyncClient, other: AsyncClient) -> None:
    """Edge 1 is back, edge 2 or 3 has the sandbox of the test before."""
    cluster.edges[0].start()
    cluster.all_hear()
    box = await one.find("solver")
    await box.commands.run(["sh", "-c", "echo more >> /a"], key="third")
    where = holder(cluster, box.id)
    assert where in (2, 3)
    await shipped(cluster)
    cluster.edges[where - 1].kill()
    until(lambda: cluster.healths()[where - 1] == "lost", "its node is lost")
    with pytest.raises(SandboxLost):
        await other.connect(box.id)
    answers = await asyncio.gather(one.rebuild(box.id), other.rebuild(box.id))
    assert {answer.sandbox.id for answer in answers} == {box.id}, "two who ask get one"
    again = await other.connect(box.id)
    assert await again.files.read("/a") == "s3\nmore\n"
    cluster.edges[where - 1].start()
    cluster.all_hear()
    assert [info.id for info in await one.list()] == [box.id], "it is on one node"
    await asyncio.gather(*(client.kill_many([box.id]) for client in (one, other)))
    assert (await one.connect(box.id)).info.state is State.ENDED
    assert await other.list() == []


async def test_a_drained_node_loses_nothing(cluster: Cluster, one: AsyncClient, other: AsyncClient) -> None:
    boxes = [await on(one, cluster, 2, labels={"n": str(number)}) for number in range(3)]
    for box in boxes:
        await box.commands.run(["sh", "-c", "head -c 200000 /dev/urandom > /data; sha256sum /data > /sum"])
    sums = [await box.files.read("/sum") for box in boxes]
    busy = asyncio.create_task(boxes[0].commands.run(["sh", "-c", "touch /began; sleep 3; echo done"]))
    await eventually(lambda: boxes[0].files.exists("/began"))
    said = await asyncio.to_thread(cluster.cli, "node", "drain", "2", "--deadline-s", "60", "--json")
    assert (await busy).stdout == "done\n", "it was waited for"
    moved = {item["id"]: item for item in map(json.loads, said.splitlines())}
    assert [each async for each in other.nodes.drain(2)] == [], "there is nothing left to move"
    assert {each.id for each in boxes} == set(moved)
    assert {item.get("edge") for item in moved.values()} <= {1, 3}, moved
    for box, told in zip(boxes, sums, strict=True):
        for client in (one, other):
            same = await client.connect(box.id)
            result = await same.commands.run(["sha256sum", "/data"])
            assert result.stdout == told, "bytes that nothing could make again came from a snapshot"
    until(lambda: cluster.get("/v1/nodes")["nodes"][1]["live"] == 0, "edge 2 is empty")
    assert (await one.list(limit=2))[0].id in moved
    assert {info.id for info in await other.list()} == set(moved)
    await one.kill_many(list(moved))
    cluster.cordon(2, False)


async def test_what_no_snapshot_holds_stays_and_is_said(cluster: Cluster, one: AsyncClient) -> None:
    box = await on(one, cluster, 2)
    await box.commands.run(
        ["sh", "-c", "head -c 9000 /dev/urandom > /data; sleep 600 > /dev/null 2>&1 & echo $! > /pid"]
    )
    data = await box.files.read_bytes("/data")
    try:
        (stays,) = [each async for each in one.nodes.drain(2, deadline_s=2.0)]
        assert stays["id"] == box.id
        assert stays["error"]["code"] == "conflict"
        assert "left-over program" in stays["error"]["message"]
        assert holder(cluster, box.id) == 2
        assert await box.files.read_bytes("/data") == data
        await box.commands.run(["sh", "-c", "kill $(cat /pid)"])
        (moved,) = [each async for each in one.nodes.drain(2, deadline_s=60.0)]
        assert moved["edge"] in {1, 3}, moved
        assert await box.files.read_bytes("/data") == data
    finally:
        await one.kill(box.id)
        cluster.cordon(2, False)


async def test_what_nobody_may_read_or_rebuild(cluster: Cluster, one: AsyncClient) -> None:
    box = await on(one, cluster, 3)
    await one.rights.create_project("tight", quota={"sandboxes": 1})
    tight = AsyncClient(one.url, (await one.rights.create_key(project="tight"))["key"])
    last = await on(tight, cluster, 3)
    with pytest.raises(QuotaExceeded):
        await tight.rebuild(last.id)  # it lives: this would be a second one
    await shipped(cluster)
    stranger = cluster.make_key("--project", "stranger")
    cluster.edges[2].kill()
    until(lambda: cluster.healths()[2] == "lost", "edge 3 is lost")
    async with AsyncClient(one.url, stranger) as client:
        for asked in (box.id, "0" * 24, box.id[:-1] + ("0" if box.id[-1] != "0" else "1")):
            with pytest.raises((SandboxNotFound, SandboxLost)):
                await client.rebuild(asked)
        with pytest.raises(SandboxNotFound):
            [entry async for entry in AsyncSandbox(client._transport, box.info).trajectory()]
    async with tight:
        taken = await tight.create("debian", **SMALL)
        with pytest.raises(QuotaExceeded):
            await tight.rebuild(last.id)
        await taken.kill()

        async def rebuilt() -> bool:
            try:
                return (await tight.rebuild(last.id)).sandbox.id == last.id
            except QuotaExceeded:
                return False

        await eventually(rebuilt)
        with pytest.raises(QuotaExceeded):
            await tight.create("debian", **SMALL)
    cluster.edges[2].start()
    cluster.all_hear()
    assert (await one.connect(box.id)).info.cause is Cause.NODE_LOST
    assert (await one.rebuild(box.id)).sandbox.id == box.id, "also when it is back, and has ended it"
    await one.kill(box.id)


async def test_records_go_when_they_lead_nowhere(cluster: Cluster, one: AsyncClient, other: AsyncClient) -> None:
    """Not while the sandbox lives, nor while its node knows how it ended, nor while there is a log to make it anew."""
    boxes = [await on(one, cluster, 3) for _ in range(3)]
    await asyncio.to_thread(cluster.post, "/v1/nodes/3/drain?deadline_s=60")
    cluster.cordon(3, False)
    over, logged, lives = (box.id for box in boxes)
    await one.kill_many([over, logged])
    await shipped(cluster)
    bus = await as_apiserver(cluster)
    try:
        streams = bus.jetstream()
        records = await streams.key_value("dsec_moved")

        async def recorded() -> set[str]:
            return {key for key in await records.keys() if key in {over, logged, lives}}

        for each in (over, lives):  # as 7 days would
            await streams.purge_stream(stream_of(shard_of(each, SHARDS)), subject=all_of(each, SHARDS))
        await asyncio.sleep(4 * SWEEP_S)
        assert await recorded() == {over, logged, lives}
        assert (await other.connect(over)).info.state is State.ENDED
        for each in (over, logged):
            forget(cluster, each)

        async def one_went() -> bool:
            return await recorded() == {logged, lives}

        await eventually(one_went)
        await asyncio.sleep(4 * SWEEP_S)
        assert await recorded() == {logged, lives}
        assert await kept_of(streams, over) == 0, "not even that it is gone"
        for each_client in (one, other):
            with pytest.raises(SandboxNotFound):
                await each_client.connect(over)
            with pytest.raises(SandboxNotFound):
                await each_client.rebuild(over)
            assert (await each_client.connect(lives)).info.state is State.RUNNING
        assert (await other.rebuild(logged)).sandbox.id == logged
        await one.kill_many([logged, lives])
    finally:
        await bus.close()


async def kept_of(streams: JetStreamContext, sandbox_id: str) -> int:
    """Messages that the bucket keeps of a record."""
    info = await streams.stream_info("KV_dsec_moved", subjects_filter=f"$KV.dsec_moved.{sandbox_id}")
    return sum((info.state.subjects or {}).values())


def holder(cluster: Cluster, sandbox_id: str) -> int:
    """The edge whose record says that the sandbox runs."""
    found = []
    for number, state in enumerate(cluster.states, 1):
        with sqlite3.connect(f"file:{state}/edge.db?mode=ro", uri=True) as records:
            rows = records.execute("select id from sandboxes where id = ? and state = 'running'", (sandbox_id,))
            found += [number] * len(rows.fetchall())
    assert len(found) == 1, found
    return found[0]


def forget(cluster: Cluster, sandbox_id: str) -> None:
    """As its nodes would a day after its end."""
    for directory in cluster.states:
        with sqlite3.connect(directory / "edge.db", timeout=10) as records:
            records.execute("delete from sandboxes where id = ? and state = 'ended'", (sandbox_id,))
