"""A real cluster on loopback: three NATS servers, two apiservers, two edges with real sandboxes; and what happens when
each of them is killed. The tests are in an order: each leaves the cluster whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import nats
import pytest
from cluster_kit import LOST_S, PATIENCE_S, Cluster, eventually, running, until
from faults_kit import beaten, caught_up, renewed

from dsec import AsyncClient, AsyncSandbox, Cause, ExecSpec, SandboxSpec
from dsec.cluster.credentials import read_credentials
from dsec.cluster.wire import HEARD, Heard
from dsec.errors import (
    Conflict,
    EnvironmentNotFound,
    QuotaExceeded,
    RunFenced,
    SandboxLost,
    SandboxNotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from dsec.spec.ids import edge_of
from dsec.spec.sandbox import State

pytestmark = pytest.mark.root
SMALL: dict[str, Any] = {"memory_bytes": 64 << 20, "disk_bytes": 64 << 20}


def at(edge: int) -> dict[str, Any]:
    """On this node."""
    return {**SMALL, "labels": {"node/n": str(edge)}}


@pytest.fixture(scope="module")
def cluster(state_over: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    states = [state_over(directory / f"state-{number}") for number in (1, 2)]
    with running(directory, states) as made:
        yield made


async def test_sandboxes_through_any_apiserver(one: AsyncClient, other: AsyncClient) -> None:
    boxes = [await one.create("debian", **at(edge)) for edge in (1, 2)]
    assert [edge_of(box.id) for box in boxes] == [1, 2]
    for box in boxes:
        same = await other.connect(box.id)
        result = await same.commands.run(["sh", "-c", "cat; echo $((6*7)); echo no >&2; exit 3"], stdin=b"in\n")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "in\n42\n", "no\n")
        await box.files.write("/data", b"x" * 3_000_000)
        assert await same.files.read_bytes("/data") == b"x" * 3_000_000
    with pytest.raises(Unsupported, match="no node"):
        await one.create("debian", **at(3))
    good = boxes[0].id
    for wrong in ("0" * 24, good[:-1] + ("1" if good.endswith("0") else "0"), "x", good[:12]):
        with pytest.raises(SandboxNotFound):
            await other.connect(wrong)
    await one.kill_many([box.id for box in boxes])
    for box in boxes:
        assert (await other.connect(box.id)).info.state is State.ENDED


async def test_batches_lists_and_commands_of_many(one: AsyncClient, other: AsyncClient) -> None:
    specs = [SandboxSpec(environment="debian", **at(n % 2 + 1), run="lists") for n in range(12)]
    made = [result async for result in one.create_many(specs, key="batch-1")]
    boxes = [result.sandbox for result in sorted(made, key=lambda each: each.index) if result.sandbox is not None]
    assert [edge_of(box.id) for box in boxes] == [1, 2] * 6
    again = {result.sandbox.id async for result in other.create_many(specs, key="batch-1") if result.sandbox}
    assert again == {box.id for box in boxes}, "the same key, another apiserver"
    listed = await other.list(run="lists")
    assert [info.id for info in listed] == sorted(box.id for box in boxes)
    assert len(await one.list(run="lists", limit=7)) == 7
    assert await one.list(run="nothing") == []
    commands = [(box, ExecSpec(argv=["echo", str(n)])) for n, box in enumerate(boxes)]
    async for result in one.run_many(commands):
        assert result.result is not None
        assert result.result.stdout == f"{result.index}\n"
    await one.kill_many([box.id for box in boxes])
    assert await other.list(run="lists") == []


async def test_connections_to_nodes_are_kept(cluster: Cluster, one: AsyncClient) -> None:
    """Each call took one of its own, with a handshake, and left it open for a minute."""

    def opened() -> int:
        return len(os.listdir(f"/proc/{cluster.apis[0].pid}/fd"))  # noqa: PTH208

    await one.list()
    before = opened()
    for _ in range(30):
        await one.list()  # asks both nodes
    assert opened() <= before + 4


async def test_a_key_or_a_name_is_one_sandbox_whoever_is_asked(one: AsyncClient, other: AsyncClient) -> None:
    asked = [client.create("debian", key="job-7", **SMALL) for client in (one, other) * 4]
    boxes = await asyncio.gather(*asked)
    assert len({box.id for box in boxes}) == 1
    with pytest.raises(Conflict):
        await other.create("debian", key="job-7", **{**SMALL, "memory_bytes": 65 << 20})
    named = await asyncio.gather(*(client.create("debian", name="solver", **SMALL) for client in (one, other) * 3))
    assert len({box.id for box in named}) == 1
    assert (await other.find("solver")).id == named[0].id
    for box in (boxes[0], named[0]):
        await box.kill()
    with pytest.raises(SandboxNotFound):
        await one.find("solver")


async def test_a_lease_holds_on_all_nodes_and_lapses_on_all(cluster: Cluster, one: AsyncClient) -> None:
    async with cluster.client(1) as trainer:
        run = trainer.run("grpo", lease_s=6, on_lapse="pause")
        await run.open()
        boxes = [await run.sandbox(f"s{edge}", "debian", **at(edge)) for edge in (1, 2)]
        await renewed(run)
        for box in boxes:
            assert (await one.connect(box.id)).info.state is State.RUNNING, "it is renewed"
        second = one.run("grpo", lease_s=6, on_lapse="pause")
        await second.open()
        with pytest.raises(RunFenced):
            await (await run.sandbox("s1", "debian", **at(1))).commands.run(["true"])
        await second.close()
        await run.close()
    for box in boxes:
        await eventually(lambda box=box: is_paused(one, box.id))
        await one.kill(box.id)


async def test_who_may_do_what(cluster: Cluster, one: AsyncClient, other: AsyncClient) -> None:
    box = await one.create("debian", **at(1))
    token = box.info.token
    assert token is not None
    key = await one.create_key(label="short")
    async with AsyncClient(other.url, key) as holder:
        assert (await holder.connect(box.id)).id == box.id
        (found,) = [each for each in await one.list_keys() if each.get("label") == "short"]
        await one.revoke_key(found["id"])
        await eventually(lambda: is_refused(holder, box.id))
    async with AsyncClient(other.url, token) as inside:
        assert (await inside.connect(box.id)).id == box.id
    edge = f"http://127.0.0.1:{cluster.edges[0].port}"
    for bearer in (cluster.key, "dsx_e30.00", "dsx_", ""):
        async with AsyncClient(edge, bearer or "none") as stranger:
            with pytest.raises(Unauthenticated):  # an edge believes apiservers alone
                await stranger.list()
    await box.kill()


async def test_a_solver_cant_start_a_graders_environment(one: AsyncClient, other: AsyncClient) -> None:
    await one.rights.create_project("school")
    for path in ("school/solve", "school/grade"):
        await one.rights.create_project(path)
    keys = {path: (await one.rights.create_key(project=f"school/{path}"))["key"] for path in ("solve", "grade")}
    name = "hidden-tests"
    async with AsyncClient(one.url, keys["grade"]) as grader, AsyncClient(other.url, keys["solve"]) as solver:
        layers = (await one.environments())["debian"]
        for _ in range(4):  # without a shared store a name is on one node: each call goes to the next
            await grader.catalog.create_environment(name, layers)
        box = await grader.create(name, **SMALL)
        for node in (1, 2):
            with pytest.raises(EnvironmentNotFound):
                await solver.create(name, **at(node))
        assert name not in await solver.environments()
        with pytest.raises(SandboxNotFound):
            await solver.connect(box.id)
        with pytest.raises(SandboxNotFound):
            await solver.kill(box.id)
        await one.rights.delete_project("school")
        with pytest.raises(Unauthenticated):
            await grader.connect(box.id)


async def test_a_quota_holds_while_its_node_restarts(cluster: Cluster, one: AsyncClient, other: AsyncClient) -> None:
    await one.rights.create_project("small", quota={"sandboxes": 3})
    key = (await one.rights.create_key(project="small"))["key"]
    async with AsyncClient(one.url, key) as first, AsyncClient(other.url, key) as second:
        boxes = [await first.create("debian", **at(1)), await first.create("debian", **at(1))]
        cluster.edges[0].kill()
        cluster.edges[0].start()
        boxes.append(await second.create("debian", **at(1)))
        for client in (first, second):
            with pytest.raises(QuotaExceeded):
                await client.create("debian", **at(2))
        await boxes[0].kill()

        async def has_room() -> bool:
            try:
                await second.create("debian", **at(2))
            except QuotaExceeded:
                return False
            return True

        await eventually(has_room)
        await one.rights.delete_project("small")


async def test_forks_calls_and_judge_runs_are_within_the_quota_while_their_node_dies(
    cluster: Cluster, one: AsyncClient, other: AsyncClient
) -> None:
    await one.rights.create_project("spender", quota={"sandboxes": 4})
    key = (await one.rights.create_key(project="spender"))["key"]
    async with AsyncClient(one.url, key) as first, AsyncClient(other.url, key) as second:
        parent = await first.create("debian", **at(1))
        same = await second.connect(parent.id)
        assert (
            await second.judge("print(input())", [("1", "1")] * 6, language="python", environment="debian")
        ).passed == 6
        results = [each async for each in first.function("print(1)", environment="debian").run_many([{}] * 6)]
        assert [each.ok for each in results] == [True] * 6, "three at a time"
        await same.fork(2)
        with pytest.raises(QuotaExceeded):
            await parent.fork(2)
        verdict = await parent.verify(["true"], paths=["/tmp"], memory_bytes=64 << 20, disk_bytes=64 << 20)
        assert not verdict.infra, "the last share is a grader's"
        asleep = asyncio.create_task(second.function("import time; time.sleep(600)", environment="debian").run())
        forking = asyncio.create_task(parent.fork(1))
        await asyncio.sleep(0.2)
        for edge in cluster.edges:  # nobody is asked which one calls went to
            edge.kill()
        for edge in cluster.edges:
            edge.start()
        asleep.cancel()
        await asyncio.gather(asleep, forking, return_exceptions=True)
        cluster.all_hear()

        async def all_there() -> bool:
            """Nothing is held by what died; nothing that lives isn't counted."""
            with suppress(QuotaExceeded, Unavailable):
                await second.create("debian", **at(2))
            return len(await first.list()) == 4

        await eventually(all_there)
        for client in (first, second):
            with pytest.raises(QuotaExceeded):
                await (await client.connect(parent.id)).fork()
        with pytest.raises(QuotaExceeded):
            await second.judge("print(1)", [("", "1")], language="python", environment="debian")
    await one.rights.delete_project("spender")


async def test_builds_are_within_the_quota(one: AsyncClient, other: AsyncClient, tmp_path: Path) -> None:
    """Ours, which end with their request, and E2B's, which don't: each two cores, between its steps too."""
    await one.rights.create_project("maker", quota={"cpus": 2})
    key = (await one.rights.create_key(project="maker"))["key"]
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN sleep 900\n")
    async with AsyncClient(one.url, key) as first, AsyncClient(other.url, key) as second:

        async def has_room(client: AsyncClient = second) -> bool:
            try:
                await (await client.create("debian", cpus=0.5, **SMALL)).kill()
            except QuotaExceeded:
                return False
            return True

        logs: list[str] = []
        building = asyncio.create_task(first.catalog.build_dockerfile(tmp_path, "slow", on_log=logs.append))
        await eventually(lambda: _is(any("sleep" in line for line in logs)))
        assert not await has_room()
        for client in (first, second):
            with pytest.raises(QuotaExceeded):
                await client.catalog.build_dockerfile(tmp_path, "other")
        building.cancel()
        await asyncio.gather(building, return_exceptions=True)
        await eventually(has_room)
        async with aiohttp.ClientSession(one.url, headers={"x-api-key": key}) as session:
            plan = {"fromTemplate": "debian", "steps": [{"type": "RUN", "args": ["sleep 2"]}] * 2, "force": True}

            async def starts(build: str) -> bool:
                async with session.post(f"/v2/templates/{build}", json=plan) as answer:
                    assert answer.status in (202, 429), await answer.text()
                    return answer.status == 202

            async def template(name: str) -> str:
                async with session.post("/v3/templates", json={"name": name}) as answer:
                    made = await answer.json()
                    return f"{made['templateID']}/builds/{made['buildID']}"

            second_build, seen = await template("second"), set[bool]()
            while not seen:  # until it was looked at while it was building
                build = await template("first")
                await eventually(lambda build=build: starts(build))
                while True:
                    room = await has_room() or await starts(second_build)
                    async with session.get(f"/templates/{build}/status") as answer:
                        status = (await answer.json())["status"]
                    if status != "building":
                        break
                    seen.add(room)
            assert (status, seen) == ("ready", {False})
            await eventually(has_room)
    await one.rights.delete_project("maker")


async def _is(fact: bool) -> bool:
    return fact


async def test_nodes_are_told_that_they_are_heard(cluster: Cluster) -> None:
    """All at once, by one apiserver; with the rights that an edge has."""
    mine = read_credentials(cluster.directory / "keys" / "edge-1.json")
    client = await nats.connect(cluster.urls, nkeys_seed_str=mine.seed, inbox_prefix=f"_INBOX.{mine.user}")
    try:
        told = await client.subscribe(HEARD)
        async with asyncio.timeout(60):
            while msgspec.json.decode((await told.next_msg(60)).data, type=Heard) != Heard.of([1, 2]):
                pass
    finally:
        await client.close()


async def test_nodes_say_what_their_kernel_has(cluster: Cluster, one: AsyncClient) -> None:
    for node in cluster.get("/v1/nodes")["nodes"]:
        assert {"user-namespaces"} <= set(node["features"])
    assert set(cluster.get("/v1/node")["features"]) == {*node["features"]}
    said = cluster.cli("run", "--require", node["features"][0], "--memory", "64M", "debian", "--", "echo", "here")
    assert said == "here\n"
    with pytest.raises(Unsupported, match="'warp-drive'"):
        await one.create("debian", **SMALL, require_features=["user-namespaces", "warp-drive"])


async def test_an_edge_reads_no_other_subject(cluster: Cluster) -> None:
    """What is done with the credentials of an edge that was taken over."""
    mine = read_credentials(cluster.directory / "keys" / "edge-1.json")
    errors: list[str] = []

    async def on_error(error: Exception) -> None:
        errors.append(str(error).lower())

    client = await nats.connect(
        cluster.urls, nkeys_seed_str=mine.seed, error_cb=on_error, inbox_prefix=f"_INBOX.{mine.user}"
    )
    heard: list[str] = []

    async def hear(message: Any) -> None:
        heard.append(message.subject)

    try:
        for subject in ("dsec.beat.>", "dsec.beat.2", "dsec.edge.2.>", "_INBOX.>", "_INBOX.apiserver.>", "$KV.>", ">"):
            await client.subscribe(subject, cb=hear)
        others = ("dsec.beat.2", "dsec.join.2", "dsec.edge.2.fenced", "dsec.heard")
        for subject in (*others, "$KV.dsec_keys.x", "$JS.API.STREAM.LIST"):
            await client.publish(subject, b"{}")
        await client.flush()

        def refused(what: str) -> int:
            return sum(f"permissions violation for {what}" in each for each in errors)

        async with asyncio.timeout(PATIENCE_S):
            while refused("subscription") < 7 or refused("publish") < 6:  # noqa: ASYNC110 (nothing tells)
                await asyncio.sleep(0.05)
        await beaten(cluster)
        await client.flush()
        assert (refused("subscription"), refused("publish")) == (7, 6), errors
        assert not heard
    finally:
        await client.close()
    cluster.all_hear()


async def test_a_killed_nats_server_is_not_missed(cluster: Cluster, one: AsyncClient, other: AsyncClient) -> None:
    for server in cluster.nats:
        server.kill()
        box = await one.create("debian", key=f"without-{server.name}", **SMALL)
        assert (await (await other.connect(box.id)).commands.run(["echo", "hi"])).stdout == "hi\n"
        await box.kill()
        server.start()
        await caught_up(cluster)


async def test_a_killed_apiserver_is_not_missed(cluster: Cluster, one: AsyncClient, other: AsyncClient) -> None:
    box = await one.create("debian", **at(2))
    cluster.apis[1].kill()
    assert (await box.commands.run(["echo", "hi"])).stdout == "hi\n"
    late = asyncio.create_task((await one.connect(box.id)).commands.run(["sh", "-c", "sleep 1; echo late"]))
    cluster.apis[1].start()
    assert (await (await other.connect(box.id)).commands.run(["echo", "back"])).stdout == "back\n"
    assert (await late).stdout == "late\n"
    await box.kill()


async def test_a_killed_edge_comes_back_with_what_it_had(cluster: Cluster, one: AsyncClient) -> None:
    box = await one.create("debian", **at(1))
    running_command = asyncio.create_task(box.commands.run(["sh", "-c", "touch /began; sleep 4; echo through"]))
    await eventually(lambda: box.files.exists("/began"))
    cluster.edges[0].kill()
    cluster.edges[0].start()
    assert (await running_command).stdout == "through\n"
    assert (await one.connect(box.id)).info.state is State.RUNNING
    await box.kill()


async def test_a_cordoned_node_gets_nothing_new(cluster: Cluster, one: AsyncClient) -> None:
    cluster.cordon(2)
    boxes = [await one.create("debian", **SMALL) for _ in range(6)]
    assert {edge_of(box.id) for box in boxes} == {1}
    cluster.cordon(2, False)
    boxes.append(await one.create("debian", **at(2)))
    await one.kill_many([box.id for box in boxes])


async def test_a_lost_node(cluster: Cluster, one: AsyncClient, other: AsyncClient) -> None:
    """Its sandboxes are lost, by the platform's fault; nothing waits for it; when it comes back it ends them."""
    box = await one.create("debian", key="to-be-lost", name="lost", **at(2))
    kept = await one.create("debian", **at(1))
    cluster.edges[1].kill()
    began = asyncio.get_running_loop().time()
    for api in cluster.apis:  # impatient for as long as that takes, since the other node is lost as soon
        cluster.restart_api(api, lost_after=8)
    until(lambda: all(cluster.healths(api)[1:] == ["lost"] for api in cluster.apis), "edge 2 is lost")
    assert asyncio.get_running_loop().time() - began > 4
    for api in cluster.apis:
        cluster.restart_api(api, lost_after=LOST_S)
    until(lambda: all(cluster.healths(api) == ["well", "lost"] for api in cluster.apis), "the other one is well")
    for client in (one, other):
        with pytest.raises(SandboxLost) as lost:
            await (await client.connect(box.id)).commands.run(["true"])
        assert lost.value.infra
    assert [info.id for info in await other.list()] == [kept.id]
    with pytest.raises(SandboxNotFound):
        await one.find("lost")
    cluster.edges[1].start()
    cluster.all_hear()
    info = (await other.connect(box.id)).info
    assert (info.state, info.cause, info.infra) == (State.ENDED, Cause.NODE_LOST, True)
    with pytest.raises(SandboxLost):
        await (await one.connect(box.id)).commands.run(["true"])
    new: AsyncSandbox = await other.create("debian", **at(2))
    assert edge_of(new.id) == 2
    for each in (new, kept):
        await each.kill()


async def is_paused(client: AsyncClient, sandbox_id: str) -> bool:
    return (await client.connect(sandbox_id)).info.state is State.PAUSED


async def is_refused(client: AsyncClient, sandbox_id: str) -> bool:
    try:
        await client.connect(sandbox_id)
    except Unauthenticated:
        return True
    return False
