"""What a real cluster does with parts that are cut off, have a wrong clock, lie, come twice, or are full.

Two edges with real sandboxes, two apiservers, three NATS servers, in network namespaces of their own. Each test leaves
the cluster whole, the last one without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from cluster_kit import LOST_S, PATIENCE_S, Cluster, Process, apart, eventually, own_store, running, until
from faults_kit import (
    Liar,
    answer,
    apart_from,
    healed,
    incarnation,
    renewed,
    serve_lies,
    server_of,
    servers_of,
    until_said,
)

import server_kit
from dsec import AsyncClient, AsyncPortStream, AsyncSandbox
from dsec.cluster.wire import Heartbeat
from dsec.errors import DsecError, NotFound, PortClosed, SandboxLost, SandboxNotFound, Unavailable
from dsec.plan.watch import WatchPolicy
from dsec.sockets import CLUSTER_SILENCE_S
from dsec.spec.cluster import Charged, NodeReport
from dsec.spec.ids import edge_of
from dsec.spec.sandbox import State
from free_port import free_port

pytestmark = pytest.mark.root
SMALL: dict[str, Any] = {"memory_bytes": 64 << 20, "disk_bytes": 64 << 20}
CUT_OFF_S = 5.0
BUSY_S = 10.0
"""What the machine may take besides."""
LOG_MIB = 1
WRONG_ID = {"sandbox_not_found", "not_found", "invalid_request", "sandbox_lost"}


def at(edge: int) -> dict[str, Any]:
    """On this node."""
    return {**SMALL, "labels": {"node/n": str(edge)}}


@pytest.fixture(scope="module")
def cluster(state_over: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("faults")
    states = [own_store(state_over(directory / f"state-{number}")) for number in (1, 2)]

    def prepare(made: Cluster) -> None:
        made.use(made.apis, cut_off_after=str(CUT_OFF_S), log_mib=str(LOG_MIB))

    shared = directory / "shared"
    with apart() as spaces, running(directory, states, store=shared, spaces=spaces, prepare=prepare) as made:
        yield made


@pytest.mark.parametrize("alone", [True, False])
async def test_an_apiserver_that_is_cut_off_takes_no_keys_for_long(
    cluster: Cluster, one: AsyncClient, other: AsyncClient, alone: bool
) -> None:
    """From all NATS servers, or together with one of them: which goes on answering, but speaks for nobody."""
    spaces, api = cluster.spaces, cluster.apis[1]
    assert spaces is not None
    assert api.space is not None
    servers = [server.space for server in cluster.nats if server.space is not None]
    made = await one.rights.create_key("to be revoked")
    box = await one.create("debian", **at(1))
    token = box.info.token
    assert token is not None
    await until_said(api.url, made["key"], "ok", PATIENCE_S)
    far = servers if alone else servers[:2]
    cuts = [api.space] if alone else [api.space, servers[2]]
    for space in cuts:
        spaces.isolate(space, far)
    cut_at = time.monotonic()
    try:
        async with AsyncClient(cluster.apis[0].url, cluster.key) as majority:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        await majority.revoke_key(made["id"])
                        break
                    except Unavailable:  # those who are left choose who leads
                        await asyncio.sleep(0.2)
        await until_said(cluster.apis[0].url, made["key"], "unauthenticated", PATIENCE_S)
        said = await until_said(api.url, made["key"], "unavailable", PATIENCE_S)
        assert {each for _, each in said} <= {"ok", "unavailable"}
        taken_at = [asked_at for asked_at, each in said if each == "ok"]
        assert max(taken_at, default=cut_at) - cut_at < CUT_OFF_S + BUSY_S
        assert await answer(api.url, cluster.key) == "unavailable", "it can't know about any"
        with pytest.raises(Unavailable, match="cut off"):
            async with AsyncClient(api.url, cluster.key, retry_s=0.5) as client:
                await client.create("debian", **SMALL)
        async with AsyncClient(api.url, token) as inside:  # the node looks at a sandbox's own token
            assert (await (await inside.connect(box.id)).commands.run(["echo", "hi"])).stdout == "hi\n"
    finally:
        for space in cuts:
            spaces.isolate(space, far, whole=True)
    await until_said(api.url, cluster.key, "ok", PATIENCE_S)
    said = await until_said(api.url, made["key"], "unauthenticated", PATIENCE_S)
    assert "ok" not in {each for _, each in said}
    healed(cluster)
    await (await other.connect(box.id)).kill()


async def test_a_node_that_is_cut_off_is_told_of(cluster: Cluster, one: AsyncClient) -> None:
    """Neither wrong answers nor a wait without end; when it is back, it goes on."""
    spaces, space = cluster.spaces, cluster.edges[1].space
    assert spaces is not None
    assert space is not None
    box = await one.create("debian", **at(2))
    work = asyncio.create_task(box.commands.run(["sh", "-c", "touch /began; sleep 6; echo through"], key="work"))
    await eventually(lambda: box.files.exists("/began"))
    spaces.cut(space)
    until(lambda: cluster.healths() == ["well", "silent"], "it is missed")
    async with AsyncClient(cluster.apis[1].url, cluster.key, retry_s=0.5) as hasty:
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await (await hasty.connect(box.id)).commands.run(["true"])
        assert time.monotonic() - began < PATIENCE_S
        assert edge_of((await hasty.create("debian", **SMALL)).id) == 1
    spaces.cut(space, whole=True)
    healed(cluster)
    assert (await work).stdout == "through\n"
    await one.kill_many([info.id for info in await one.list()])


async def test_a_node_that_vanishes_without_a_word(cluster: Cluster, one: AsyncClient) -> None:
    """What is under way ends, as the platform's fault: nobody says that the connections are gone."""
    spaces, space = cluster.spaces, cluster.edges[1].space
    assert spaces is not None
    assert space is not None
    async with AsyncClient(cluster.apis[0].url, cluster.key, retry_s=0.5) as hasty:
        box = await hasty.create("debian", **at(2))
        serves = "$s=IO::Socket::INET->new(Listen=>1,LocalAddr=>'127.0.0.1',LocalPort=>8000);$c=$s->accept;sleep"
        await box.commands.start(["perl", "-MIO::Socket::INET", "-e", serves])

        async def connected() -> AsyncPortStream:
            while True:
                with contextlib.suppress(PortClosed):
                    return await box.ports.connect(8000)
                await asyncio.sleep(0.1)

        async with asyncio.timeout(PATIENCE_S):
            port = await connected()
        watch = await box.files.watch("/")
        work = {
            "a command": asyncio.create_task(box.commands.run(["sh", "-c", "touch /tmp/began; exec sleep 600"])),
            "a watch": asyncio.create_task(anext(aiter(watch))),
            "a port": asyncio.create_task(port.read()),
        }
        await eventually(lambda: box.files.exists("/tmp/began"))
        began = time.monotonic()
        spaces.cut(space)
        try:
            await asyncio.wait(work.values(), timeout=CLUSTER_SILENCE_S + PATIENCE_S)
            assert {name for name, task in work.items() if not task.done()} == set()
            assert time.monotonic() - began > CLUSTER_SILENCE_S / 2, "a short silence is none"
            for name, task in work.items():
                error = task.exception()
                assert isinstance(error, DsecError), (name, task)
                assert error.infra, (name, error)
        finally:
            spaces.cut(space, whole=True)
            for task in work.values():
                task.cancel()
        await watch.close()
        await port.close()
    healed(cluster)
    await one.kill(box.id)


async def test_a_node_whose_nats_server_lost_the_others(cluster: Cluster, one: AsyncClient) -> None:
    """It answers everything and passes nothing on. A node that reaches another one goes there."""
    box = await one.create("debian", **at(2))
    server = server_of(cluster, cluster.edges[1])
    others = [each for each in cluster.nats if each is not server]
    apart_from(cluster, [server], others)
    try:
        until(lambda: server not in servers_of(cluster, cluster.edges[1]), "it goes to another one")
        cluster.all_hear()
        assert (await box.commands.run(["echo", "hi"])).stdout == "hi\n"
        assert (await one.create("debian", **at(2))).id != box.id
    finally:
        apart_from(cluster, [server], others, whole=True)
    healed(cluster)
    await one.kill_many([info.id for info in await one.list()])


async def test_a_node_that_is_left_with_a_minority(cluster: Cluster, one: AsyncClient, other: AsyncClient) -> None:
    """It and its NATS server reach nobody else: it is lost, once, and its sandboxes go on on the others alone."""
    edge = cluster.edges[1]
    kept = await one.create("debian", **at(1))
    cluster.cordon(1)
    box = await one.create("debian", **SMALL, sync="always")
    cluster.cordon(1, False)
    server = server_of(cluster, edge)
    here, there = [edge, server], [*(each for each in cluster.nats if each is not server), *cluster.apis]
    before = incarnation(cluster, 2)
    apart_from(cluster, here, there)
    try:
        for api in cluster.apis:  # impatient for as long as that takes, since the other node is lost as soon
            cluster.restart_api(api, lost_after=6)
        until(lambda: all(cluster.healths(api)[1:] == ["lost"] for api in cluster.apis), "it is lost")
        for api in cluster.apis:
            cluster.restart_api(api, lost_after=LOST_S)
        until(lambda: all(live_of(cluster, api) == [1, 0] for api in cluster.apis), "the other one has reported")
        with pytest.raises(SandboxLost):
            await (await one.connect(box.id)).commands.run(["true"])
        runs = server_kit.Server(cluster.states[1])
        assert runs.difference(set()) != "", "it goes on, and can't know"
        assert (await other.rebuild(box.id)).sandbox.id == box.id
        await (await other.connect(box.id)).files.write("/file", "on the other node\n")
    finally:
        apart_from(cluster, here, there, whole=True)
    healed(cluster)
    assert incarnation(cluster, 2) == before + 1, "it was lost once, and came back once"
    until(lambda: runs.difference(set()) == "", "it has ended what was declared lost")
    for client in (one, other):
        assert sorted(info.id for info in await client.list()) == sorted([box.id, kept.id])
        assert await (await client.connect(box.id)).files.read("/file") == "on the other node\n"
        assert (await (await client.connect(kept.id)).commands.run(["echo", "hi"])).stdout == "hi\n"
    await one.kill_many([box.id, kept.id])


def live_of(cluster: Cluster, api: Process) -> list[int]:
    """Sandboxes on each node, by its last report to this apiserver."""
    return [node["live"] for node in cluster.get("/v1/nodes", api)["nodes"]]


def faked(process: Process, offset_s: int, clock: Path) -> None:
    """Its clock is wrong from its next start on; the monotonic one isn't."""
    process.environment |= {"LD_PRELOAD": str(clock), "WRONG_CLOCK_S": str(offset_s)}


def unfaked(process: Process) -> None:
    for name in ("LD_PRELOAD", "WRONG_CLOCK_S"):
        process.environment.pop(name, None)


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes a process's wall clock wrong, and nothing else."""
    made = tmp_path_factory.mktemp("clock") / "wrong_clock.so"
    source = Path(__file__).with_name("wrong_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, source], check=True)
    return made


async def test_clocks_that_are_wrong(cluster: Cluster, one: AsyncClient, other: AsyncClient, clock: Path) -> None:
    """An edge that is an hour ahead, an apiserver that is two hours behind."""
    skewed = {cluster.edges[0]: 3600, cluster.apis[1]: -7200}
    before = await one.create("debian", **at(1))
    for process, offset_s in skewed.items():
        process.kill()
        faked(process, offset_s, clock)
        process.start()
    try:
        healed(cluster)
        assert (await before.commands.run(["echo", "hi"])).stdout == "hi\n", "nothing expired"
        inside = float((await before.commands.run(["date", "+%s"])).stdout)
        assert abs(inside - time.time()) < 1800, "a sandbox has the kernel's clock"
        began = time.monotonic()
        box = await other.create("debian", ttl_s=3, **at(1))
        await eventually(lambda: is_in(one, box.id, State.ENDED))
        assert time.monotonic() - began > 1, "a TTL is a span"
        for maker, taker in ((one, other), (other, one)):
            made = await maker.rights.create_key("short")
            await until_said(taker.url, made["key"], "ok", PATIENCE_S)
            await maker.revoke_key(made["id"])
            await until_said(taker.url, made["key"], "unauthenticated", PATIENCE_S)
        run = other.run("skewed", lease_s=6, on_lapse="pause")
        await run.open()
        leased = await run.sandbox("s", "debian", **at(1))
        await renewed(run)
        assert (await one.connect(leased.id)).info.state is State.RUNNING, "it is renewed"
        await run.close()
        await eventually(lambda: is_in(one, leased.id, State.PAUSED))
        await one.kill(leased.id)
    finally:
        for process in skewed:
            process.kill()
            unfaked(process)
            process.start()
    healed(cluster)
    assert (await before.commands.run(["echo", "hi"])).stdout == "hi\n"
    await before.kill()


async def is_in(client: AsyncClient, sandbox_id: str, state: State) -> bool:
    return (await client.connect(sandbox_id)).info.state is state


async def test_a_number_that_is_joined_twice(
    cluster: Cluster, one: AsyncClient, state_over: Callable[[Path], Path], tmp_path: Path
) -> None:
    """By another machine with the same credentials: it is refused, and says so, while the first one serves on."""
    box = await one.create("debian", **at(1))
    first = cluster.edges[0]
    twin = cluster.twin(first, state_over(tmp_path / "twin"))
    twin.spawn()
    until(lambda: not twin.runs, "it ends")
    assert "Give this node a number" in twin.log.read_text()
    again = cluster.twin(first, cluster.states[0])
    again.spawn()
    until(lambda: not again.runs, "a state directory has one server")
    for _ in range(5):
        assert (await box.commands.run(["echo", "mine"])).stdout == "mine\n"
        cluster.all_hear()
    assert cluster.get("/v1/nodes")["nodes"][0]["url"].endswith(f":{first.port}")
    await box.kill()


async def test_streams_that_are_full(cluster: Cluster, one: AsyncClient) -> None:
    """Nothing wrong: what is done stays done, what has to be in the streams is refused, it is said, and it recovers."""
    box = await one.create("debian", **at(1))
    safe = await one.create("debian", sync="always", **at(1))
    assert (await safe.commands.run(["echo", "first"], key="first")).stdout == "first\n"
    log = cluster.edges[0].log
    before = len(log.read_text())
    noise = ["sh", "-c", "head -c 6000 /dev/urandom | base64 -w0"]

    async def is_full() -> bool:
        results = await asyncio.gather(*(each.commands.run(noise) for each in (*boxes, box)))
        assert all(len(result.stdout) == 8000 for result in results)
        told = "isn't in the cluster yet" in log.read_text()[before:]
        return told and cluster.get("/v1/nodes")["nodes"][0]["unshipped"] > 0

    boxes = [await one.create("debian", **at(1)) for _ in range(12)]
    await eventually(is_full)

    async def is_refused() -> bool:
        try:
            async with AsyncClient(one.url, cluster.key, retry_s=0.1) as hasty:
                await (await hasty.connect(safe.id)).commands.run(noise)
        except Unavailable:
            return True
        return False

    await eventually(is_refused)
    assert (await box.commands.run(["echo", "still"])).stdout == "still\n"
    await box.files.write("/data", b"x" * 100_000)
    made = await one.create("debian", **at(2))
    cluster.use(cluster.apis, log_mib="64")
    for api in cluster.apis:
        api.kill()
        api.start()
    healed(cluster)

    async def all_is_there() -> bool:
        return not any(node["unshipped"] for node in cluster.get("/v1/nodes")["nodes"])

    await eventually(all_is_there)
    assert (await safe.commands.run(["echo", "first"], key="first")).stdout == "first\n"
    assert (await safe.commands.run(["echo", "second"])).stdout == "second\n"
    assert await box.files.read_bytes("/data") == b"x" * 100_000
    await one.kill_many([each.id for each in (*boxes, box, safe, made)])


async def test_ids_that_are_stale_forged_or_cut_short(cluster: Cluster, one: AsyncClient, other: AsyncClient) -> None:
    box = await one.create("debian", **at(1))
    good = box.id
    wrong = [good[:number] for number in (1, 8, 12, 23)]
    wrong += [good[:-1] + ("0" if good[-1] != "0" else "1"), good[:-1] + "z", good.upper(), good + "0"]
    wrong += [f"{good[:number]}{'1' if good[number] != '1' else '2'}{good[number + 1 :]}" for number in range(24)]
    wrong += ["0" * 24, "v" * 24, "..", "%2e%2e", "a%00b", "%ff" * 24, good[:12] + "%2F" + good[12:]]
    headers = {"authorization": f"Bearer {cluster.key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for api in cluster.apis:
            for sandbox_id in wrong:
                for method, rest in (
                    ("GET", ""),
                    ("DELETE", ""),
                    ("GET", "/files?path=/etc/passwd"),
                    ("GET", "/events"),
                ):
                    url = f"{api.url}/v1/sandboxes/{sandbox_id}{rest}"
                    async with session.request(method, aiohttp.client.URL(url, encoded=True)) as got:
                        body = msgspec.json.decode(await got.read())
                        assert got.status in (400, 404, 502), (method, url, got.status, body)
                        assert body["code"] in ("sandbox_not_found", "not_found", "invalid_request", "sandbox_lost"), (
                            body
                        )
    with pytest.raises((SandboxNotFound, NotFound)):
        await other.connect(good[:-1] + ("0" if good[-1] != "0" else "1"))
    assert (await box.commands.run(["echo", "here"])).stdout == "here\n"
    await box.kill()


async def test_a_node_that_lies(cluster: Cluster, one: AsyncClient, other: AsyncClient) -> None:
    """It says that it is empty and endless, or full, and has others' sandboxes. It may get some creations, which
    fail as the platform's fault or are placed elsewhere; nothing else suffers."""
    await one.rights.create_project("victim")
    key = (await one.rights.create_key(project="victim"))["key"]
    kept = await one.create("debian", **at(1))
    here, port = "10.77.0.1", free_port()
    server = await asyncio.start_server(serve_lies, here, port)
    url = f"http://{here}:{port}"
    async with Liar(cluster, 3) as liar:
        joined = await liar.join(url)
        assert joined.claim is not None
        others = Charged(taken=1 << 40, live=1 << 40)
        lies = [
            NodeReport(edge=3, instance="liar", incarnation=joined.claim.incarnation, create_ms=0.001),
            NodeReport(
                edge=3,
                instance="liar",
                incarnation=joined.claim.incarnation,
                live=1 << 62,
                starting=1 << 62,
                queued=1 << 62,
                memory_committed_bytes=1 << 62,
                projects={f"p{n}": 1 << 60 for n in range(2000)} | {"victim": 1 << 50},
                runs={f"victim\0r{n}": 1 << 50 for n in range(5000)},
                layers=tuple(f"l{n}" for n in range(5000)),
                taken={"apiserver-x": 1 << 60},
                charged={"apiserver-x": {"victim": others, "/": others}, "": {"": others}},
            ),
            NodeReport(edge=3, instance="liar", incarnation=1 << 50),
            NodeReport(edge=1, instance="e1-aaaaaaaaaaaa", incarnation=1 << 50, live=0),
        ]
        stop = asyncio.Event()

        async def lie() -> None:
            number = 0
            while not stop.is_set():
                beat = Heartbeat(lies[number % len(lies)], time.time() * 1e3 if number % 3 else -1e18, number)
                await liar.beat(msgspec.json.encode(beat))
                for garbage in (b"", b"{", b"[1]", b'{"report":{"edge":3,"busy":1e999},"now":1e999}', bytes(100_000)):
                    await liar.beat(garbage)
                number += 1
                await asyncio.sleep(0.1)

        lying = asyncio.create_task(lie())
        try:
            await asyncio.sleep(1)
            codes: Counter[str] = Counter()
            began, policy = time.monotonic(), WatchPolicy()
            for number in range(20):
                client = (one, other)[number % 2]
                codes[await made_and_used(client)] += 1
            assert set(codes) <= {"ok", "infra"}
            probes = 1 + (time.monotonic() - began) // policy.probe_s
            assert codes["infra"] <= 2 * (policy.follies + probes), "at each apiserver"
            async with AsyncClient(cluster.apis[1].url, key) as victim:
                boxes = [await victim.create("debian", **at(1 + n % 2)) for n in range(8)]
                assert len({box.id for box in boxes}) == 8
                await victim.kill_many([box.id for box in boxes])
            assert (await kept.commands.run(["echo", "here"])).stdout == "here\n"
            until(lambda: cluster.healths()[:2] == ["well", "well"], "the others are well")
            cluster.cordon(3)
            for client in (one, other) * 4:
                assert await made_and_used(client) == "ok"
        finally:
            stop.set()
            await lying
    server.close()
    await kept.kill()


async def made_and_used(client: AsyncClient) -> str:
    """`ok`, or `infra` where the platform says that it is its fault."""
    try:
        box: AsyncSandbox = await client.create("debian", **SMALL)
        assert (await box.commands.run(["echo", "hi"])).stdout == "hi\n"
        await box.kill()
    except DsecError as error:
        return "infra" if error.infra else str(error)
    return "ok"
