"""Forks, function calls and judge runs within a project's quota, and nodes as the SDK and the CLI have them: two real
apiservers, simulated edges."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yarl

from dsec import AsyncClient, SandboxSpec
from dsec.bench.cluster_place import ClusterPlace, running
from dsec.cluster.audit import Audit
from dsec.cluster.bus import open_bus
from dsec.cluster.credentials import read_credentials
from dsec.errors import DsecError, InvalidRequest, NotFound, PermissionDenied, QuotaExceeded, Unsupported
from dsec.spec.ids import edge_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
SMALL: dict[str, Any] = {"memory_bytes": 64 << 20}
CALLS = {"function": {"environment": "debian", "source": "def f(): return 1", "name": "f"}, "calls": [{}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place() -> AsyncIterator[ClusterPlace]:
    async with running(4, servers=1, apiservers=2) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def root(place: ClusterPlace) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(place.apis[0], place.key) as client:
        yield client


async def key_of(root: AsyncClient, project: str, quota: dict[str, Any]) -> str:
    """Of a new project."""
    await root.rights.create_project(project, quota=quota)
    return str((await root.rights.create_key(project=project))["key"])


async def post(url: str | yarl.URL, key: str, path: str, body: object) -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url + path if isinstance(url, str) else url, data=json.dumps(body)) as answer,
    ):
        return answer.status, await answer.read()


async def test_100_clients_fork_at_once_within_the_quota(place: ClusterPlace, root: AsyncClient) -> None:
    limit, clients = 40, 100
    key = await key_of(root, "forks", {"sandboxes": limit})
    async with AsyncClient(place.apis[0], key) as first:
        parent = await first.create("debian", **SMALL)
    codes: Counter[str] = Counter()
    ids: list[str] = []

    async def one(number: int) -> None:
        async with AsyncClient(place.apis[number % 2], key) as client:
            try:
                ids.extend(child.id for child in await (await client.connect(parent.id)).fork(3))
            except DsecError as error:
                codes[error.code] += 1

    await asyncio.gather(*(one(number) for number in range(clients)))
    assert codes == {QuotaExceeded.code: clients - len(ids) // 3}
    assert limit - 7 < len(set(ids)) < limit, "each of the two may have kept two that were too few for three"
    assert (await place.ask("look"))["projects"]["forks"] == len(ids) + 1
    async with AsyncClient(place.apis[1], key) as client:
        box = await client.connect(parent.id)

        async def fill() -> None:
            with contextlib.suppress(QuotaExceeded):
                while True:
                    ids.append((await box.fork())[0].id)

        await until(fill, lambda: len(ids) == limit - 1)
        with pytest.raises(QuotaExceeded, match="sandboxes"):
            await box.fork()
        await client.kill_many(ids[:5])
        del ids[:5]
        await until(fill, lambda: len(ids) == limit - 1)
    assert (await place.ask("look"))["projects"]["forks"] == limit


async def until(work: Callable[[], Awaitable[None]], holds: Callable[[], bool]) -> None:
    """Again and again, bounded: what has ended makes room when its node has told of it."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < 60
        await work()


async def is_refused(*clients: AsyncClient) -> bool:
    """Whether none of them may make one more."""
    for client in clients:
        try:
            await client.create("debian", **SMALL)
        except QuotaExceeded:
            continue
        return False
    return True


async def hold(*clients: AsyncClient) -> None:
    """Returns when all apiservers have heard of a quota that allows nothing more."""
    began = time.monotonic()
    while not await is_refused(*clients):
        assert time.monotonic() - began < 60
        await asyncio.sleep(0.05)


async def filled(place: ClusterPlace, project: str, *clients: AsyncClient, up_to: int) -> None:
    """Make as many as may be made: so many live in the end, and never more."""
    began = time.monotonic()
    while True:
        await is_refused(*clients)
        live = (await place.ask("look"))["projects"].get(project, 0)
        assert live <= up_to
        if live == up_to and await is_refused(*clients):
            return
        assert time.monotonic() - began < 60, live


async def test_what_was_there_before_a_quota_counts(place: ClusterPlace, root: AsyncClient) -> None:
    """Creations and forks at both apiservers while nothing bounds them; then a quota that is lifted and set again."""
    key = await key_of(root, "before", {})
    async with AsyncClient(place.apis[0], key) as one, AsyncClient(place.apis[1], key) as two:
        parent = await one.create("debian", **SMALL)
        for limit in (8, 9):
            forks = [each.id for each in await parent.fork(5)]
            forks += [each.id for each in await (await two.connect(parent.id)).fork(6)]
            await root.rights.change_project("before", quota={"sandboxes": limit})
            await hold(one, two)
            with pytest.raises(QuotaExceeded):
                await parent.fork()
            kept = {parent.id, *forks}
            await one.kill_many([each.id for each in await one.list(limit=1000) if each.id not in kept])
            await one.kill_many(forks[:2])
            await asyncio.sleep(3.0)  # their nodes have told of it
            assert await is_refused(two, one), "there is more than the quota allows still"
            await one.kill_many(forks)
            await filled(place, "before", one, two, up_to=limit)
            await root.rights.change_project("before", quota={})
            began = time.monotonic()
            while await is_refused(two) or await is_refused(one):  # both have heard that there is none
                assert time.monotonic() - began < 60


async def test_a_quota_that_is_lowered_holds(place: ClusterPlace, root: AsyncClient) -> None:
    key = await key_of(root, "lowered", {"sandboxes": 64})
    async with AsyncClient(place.apis[0], key) as one, AsyncClient(place.apis[1], key) as two:
        ids = [(await client.create("debian", **SMALL)).id for _ in range(6) for client in (one, two)]
        await root.rights.change_project("lowered", quota={"sandboxes": 10})
        await hold(one, two)
        await one.kill_many(ids[:1])
        await asyncio.sleep(3.0)
        assert await is_refused(one, two)
        await one.kill_many(ids[1:])
        await filled(place, "lowered", one, two, up_to=10)


async def test_e2b_forks_count_too(place: ClusterPlace, root: AsyncClient) -> None:
    key = await key_of(root, "e2b-forks", {"cpus": 3})
    async with AsyncClient(place.apis[0], key) as client:
        parent = await client.create("debian", **SMALL)
    headers = {"x-api-key": key}
    async with aiohttp.ClientSession(headers=headers) as session:
        url = f"{place.apis[1]}/sandboxes/{parent.id}/fork"
        for count, status in ((0, 400), (3, 429)):
            async with session.post(url, json={"count": count}) as answer:
                assert answer.status == status
        # The simulated edges don't speak E2B's: what they refuse uses nothing up.
        async with session.post(url, json={"count": 2}) as answer:
            assert answer.status == 404
    async with AsyncClient(place.apis[1], key) as client:
        assert len(await (await client.connect(parent.id)).fork(2)) == 2


async def test_the_pace_holds_for_forks_and_calls(place: ClusterPlace, root: AsyncClient) -> None:
    key = await key_of(root, "paced", {"creates_per_s": 20})
    async with AsyncClient(place.apis[0], key) as client:
        parent = await client.create("debian", **SMALL)
        began = time.monotonic()
        for _ in range(3):
            assert len(await parent.fork(20)) == 20
        assert time.monotonic() - began > 1.0
    began = time.monotonic()
    for _ in range(3):
        status, body = await post(place.apis[1], key, "/v1/functions", CALLS | {"calls": [{}] * 20})
        assert (status, body.count(b"\n")) == (200, 20)
    assert time.monotonic() - began > 1.0


async def test_100_clients_call_at_once_within_the_quota(place: ClusterPlace, root: AsyncClient) -> None:
    limit = 6
    key = await key_of(root, "calls", {"cpus": limit})
    asked = [post(place.apis[number % 2], key, "/v1/functions", CALLS) for number in range(100)]
    statuses = Counter(status for status, _ in await asyncio.gather(*asked))
    assert set(statuses) <= {200, 429}
    assert statuses[200] >= limit, "they wait for each other"
    most = (await place.ask("look"))["most_calling"]["calls"]
    assert 0 < most <= limit
    # A batch that is larger than what is left runs with what is left.
    status, body = await post(place.apis[0], key, "/v1/functions", CALLS | {"calls": [{}] * 50})
    assert (status, body.count(b"\n")) == (200, 50)
    assert (await place.ask("look"))["most_calling"]["calls"] <= limit


async def test_what_has_no_share_is_refused_clearly_and_holds_none(place: ClusterPlace, root: AsyncClient) -> None:
    key = await key_of(root, "none", {"sandboxes": 1, "backends": {"fncall": 0}})
    async with AsyncClient(place.apis[0], key) as client:
        parent = await client.create("debian", **SMALL)
        with pytest.raises(QuotaExceeded) as refused:
            await parent.fork(3)
        assert (refused.value.details["project"], refused.value.details["limit"]) == ("none", "sandboxes")
    judged = {"environment": "debian", "language": "python", "source": "1", "cases": [{}]}
    for path, body in (
        ("/v1/judge", judged),
        ("/v1/functions", CALLS),
        ("/run_code", {"code": "1", "language": "python"}),
    ):
        status, answer = await post(place.apis[1], key, path, body)
        assert status == 429, path
        assert b"fncall" in answer
    for fork in ("fork", "fork/", "/fork", "%66ork", "f%6frk//"):  # an edge takes them all for the same
        url = yarl.URL(f"{place.apis[0]}/v1/sandboxes/{parent.id}/{fork}", encoded=True)
        status, answer = await post(url, key, "", {"count": 1})
        assert (status, b"quota_exceeded" in answer) == (429, True), fork
    for path in ("/v1/judge", "/v1/functions"):
        assert (await post(place.apis[1], key, path, {"nothing": 1}))[0] == 400


async def test_refusals_dont_wash_out_what_was_done(place: ClusterPlace) -> None:
    bus = await open_bus(place.urls, read_credentials(place.keys / "apiserver.json"))
    try:
        kept: dict[str, Any] = {"replicas": 1, "kept_s": 3600.0, "kept_bytes": 1 << 20}
        audit = Audit(await bus.log("some", "some", **kept, kept_each=1000))
        await audit.note("role.grant", by="operator", project="lab", about="first")
        audit = Audit(await bus.log("some", "some", **kept, kept_each=10))  # as of a stream of the release before
        for number in range(40):
            await audit.note("refused", by="agent:sly", project="lab", about=str(number))
        await audit.note("key.create", by="operator", project="lab", about="last")
        entries, _ = await audit.read("lab", 0, 1000)
        assert [each.about for each in entries] == ["first", *map(str, range(30, 40)), "last"]
    finally:
        await bus.close()


async def test_nodes_by_sdk_and_cli(place: ClusterPlace, root: AsyncClient) -> None:
    assert [each["edge"] for each in await root.nodes.list()] == [1, 2, 3, 4]
    assert (await root.nodes.cordon(2))["cordoned"]
    said = json.loads(await dsec(place, "node", "ls", "--json"))
    assert [(each["health"], each["cordoned"]) for each in said] == [("well", number == 2) for number in range(1, 5)]
    async with AsyncClient(place.apis[1], place.key) as other:
        began = time.monotonic()
        while not (await other.nodes.list())[1]["cordoned"]:
            assert time.monotonic() - began < 60
        results = [each async for each in other.create_many([SandboxSpec(environment="debian", **SMALL)] * 40)]
    ids = [each.sandbox.id for each in results if each.sandbox is not None]
    assert len(ids) == 40
    assert 2 not in {edge_of(each) for each in ids}
    await dsec(place, "node", "uncordon", "2")
    assert not any(each["cordoned"] for each in await root.nodes.list())
    await root.kill_many(ids)
    with pytest.raises(NotFound):
        await root.nodes.cordon(77)
    with pytest.raises(NotFound):
        [each async for each in root.nodes.drain(77)]
    key = await key_of(root, "nodeless", {})
    async with AsyncClient(place.apis[0], key) as client:
        with pytest.raises(PermissionDenied):
            await client.nodes.list()
        with pytest.raises(PermissionDenied):
            await client.nodes.cordon(1)
        with pytest.raises(PermissionDenied):
            [each async for each in client.nodes.drain(1)]


async def test_a_creation_goes_where_the_kernel_has_what_it_requires(place: ClusterPlace) -> None:
    odd = SandboxSpec(environment="debian", require_features=["odd", "simulated"], **SMALL)
    async with AsyncClient(place.apis[0], place.key) as client:
        results = [each async for each in client.create_many([odd] * 30)]
        ids = [each.sandbox.id for each in results if each.sandbox is not None]
        ids += [(await client.create("debian", require_features=["odd"], **SMALL)).id for _ in range(4)]
        assert Counter(edge_of(each) % 2 == 1 for each in ids) == {True: 34}
        await client.kill_many(ids)
        assert (await client.nodes.list())[0]["features"] == ["simulated", "odd"]
        for fields, missing in (
            ({"require_features": ["odd", "warp-drive"]}, ["warp-drive"]),
            ({"require_features": ["odd", "even"]}, ["even", "odd"]),
            ({"require_kvm": True}, ["kvm"]),
        ):
            with pytest.raises(Unsupported) as refused:
                await client.create("debian", **SMALL, **fields)
            assert refused.value.details["missing"] == missing
            spec = SandboxSpec(environment="debian", **SMALL, **fields)
            with pytest.raises(Unsupported, match=f"{missing[0]!r}"):
                [each async for each in client.create_many([spec] * 2)]
        with pytest.raises(InvalidRequest):
            await client.create("debian", require_features=["Not A Name"], **SMALL)


async def dsec(place: ClusterPlace, *arguments: str) -> str:
    """What the command prints, as the operator."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dsec.cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "DSEC_URL": place.apis[0], "DSEC_API_KEY": place.key},
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


async def test_a_deleted_project_ends_whoever_was_away_or_dies_over_it(place: ClusterPlace, root: AsyncClient) -> None:
    """Nodes that don't answer then, and the apiserver that was asked is killed: tokens of its sandboxes would be good
    for as long as those live. The last of these tests: of two apiservers one is left."""
    for path in ("left", "left/below"):
        async with AsyncClient(place.apis[0], await key_of(root, path, {})) as client:
            await client.create("debian", **SMALL)
    place.edges.send_signal(signal.SIGSTOP)
    try:
        async with AsyncClient(place.apis[1], place.key, retry_s=0.1) as asked:
            deleting = asyncio.create_task(asked.rights.delete_project("left"))

            async def is_deleted() -> bool:
                return not any(each["path"] == "left" for each in await root.rights.projects())

            began = time.monotonic()
            while not await is_deleted():
                assert time.monotonic() - began < 60
            os.kill(place.api_pids[1], signal.SIGKILL)
            with pytest.raises(DsecError):
                await deleting
    finally:
        place.edges.send_signal(signal.SIGCONT)
    began = time.monotonic()
    while {"left", "left/below"} & (await place.ask("look"))["projects"].keys():
        assert time.monotonic() - began < 90
        await asyncio.sleep(0.5)
