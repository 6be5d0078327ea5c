"""Rights and quotas in a real cluster: NATS, two apiservers, simulated edges that answer as real ones do."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from dsec import AsyncClient, SandboxSpec
from dsec.bench.cluster_place import ClusterPlace, running
from dsec.errors import (
    Conflict,
    DsecError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
)
from dsec.spec.iam import ROLES, Verb

pytestmark = pytest.mark.asyncio(loop_scope="module")
EDGES = 4
SPEC = SandboxSpec(environment="debian", memory_bytes=64 << 20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place() -> AsyncIterator[ClusterPlace]:
    async with running(EDGES, servers=1, apiservers=2) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def root(place: ClusterPlace) -> AsyncIterator[AsyncClient]:
    """The operator, at the first apiserver."""
    async with AsyncClient(place.apis[0], place.key) as client:
        yield client


async def eventually(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait, bounded."""
    began = time.monotonic()
    while not await holds():
        assert time.monotonic() - began < 60, what
        await asyncio.sleep(0.05)


async def made(client: AsyncClient, count: int) -> tuple[list[str], list[str]]:
    """Ids, and the codes of those that failed."""
    results = [each async for each in client.create_many([SPEC] * count)]
    return (
        [each.sandbox.id for each in results if each.sandbox is not None],
        [each.error.code for each in results if each.error is not None],
    )


async def filled(client: AsyncClient, count: int) -> int:
    """Make so many, as nodes tell of room; returns how many were made when no more may be."""
    ids: list[str] = []

    async def are_made() -> bool:
        ids.extend((await made(client, 20))[0])
        return len(ids) >= count

    await eventually(are_made, f"room for {count}")
    more, failed = await made(client, 20)
    assert set(failed) == {"quota_exceeded"}
    return len(ids) + len(more)


async def refused(client: AsyncClient, kind: type[DsecError] = Unauthenticated) -> bool:
    try:
        await client.list(limit=1)
    except kind:
        return True
    return False


async def test_projects_roles_and_what_is_handed_on(place: ClusterPlace, root: AsyncClient) -> None:
    rights = root.rights
    await rights.create_project("lab", quota={"sandboxes": 50})
    await rights.create_project("lab/solve")
    with pytest.raises(Conflict):
        await rights.create_project("lab/solve")
    with pytest.raises(InvalidRequest, match="sandboxes"):
        await rights.create_project("lab/large", quota={"sandboxes": 51})
    role = await rights.give_role("agent:ada", "agent", project="lab")
    key = (await rights.create_key(project="lab", principal="agent:ada"))["key"]
    async with AsyncClient(place.apis[1], key) as ada:
        await eventually(lambda: can(ada.rights.roles()), "the other apiserver has heard of it")
        child = await ada.rights.create_project("lab/ada-1", quota={"sandboxes": 5})
        assert child["created_by"] == "agent:ada"
        await ada.rights.give_role("agent:child", "solver", project="lab/ada-1")
        for verbs in ([Verb.LAYERS_WRITE], [Verb.AUDIT], sorted(ROLES["admin"])):
            with pytest.raises(PermissionDenied):  # nobody gives what they don't hold
                await ada.rights.give_role("agent:child", verbs=verbs, project="lab/ada-1")
        with pytest.raises((PermissionDenied, NotFound)):
            await ada.rights.give_role("agent:child", "solver", project="default")
        with pytest.raises(PermissionDenied):
            await ada.rights.change_project("lab", quota={"sandboxes": 5000})
        made_key = await ada.rights.create_key(project="lab/ada-1", principal="agent:child")
        async with AsyncClient(place.apis[1], made_key["key"]) as child_client:
            box = await child_client.create(SPEC.environment, memory_bytes=SPEC.memory_bytes)
            for call in (
                child_client.rights.create_project("lab/ada-1/x"),
                child_client.rights.create_key(),
                child_client.rights.audit(),
                child_client.catalog.remove_environment("debian"),
                child_client.list_keys(),
            ):
                with pytest.raises(PermissionDenied):
                    await call
            with pytest.raises(PermissionDenied):  # logs have readers of their own
                [event async for event in (await child_client.connect(box.id)).events()]
            await root.rights.take_role(role["id"])
            await eventually(lambda: refused(child_client, PermissionDenied), "what was given by it is gone")
        await eventually(lambda: refused(ada, PermissionDenied), "a role that is taken is gone everywhere")


async def can(work: Awaitable[object]) -> bool:
    try:
        await work
    except DsecError:
        return False
    return True


async def test_keys_end_everywhere_within_seconds(place: ClusterPlace, root: AsyncClient) -> None:
    await root.rights.create_project("keys")
    wide = await root.rights.create_key("wide", project="keys")
    async with AsyncClient(place.apis[1], wide["key"]) as other:
        assert not await refused(other)
        narrow = await other.rights.create_key("narrow", scopes=["sandboxes.read"], ttl_s=600)
        async with AsyncClient(place.apis[0], narrow["key"]) as reader:
            assert not await refused(reader)
            with pytest.raises(PermissionDenied):
                await reader.create("debian")
        short = await other.rights.create_key("short", scopes=["sandboxes.read"], ttl_s=2)
        async with AsyncClient(place.apis[0], short["key"]) as reader:
            await eventually(lambda: refused(reader), "it ends")
        fresh = await root.rights.rotate_key(wide["id"], overlap_s=0.5)
        async with AsyncClient(place.apis[1], fresh["key"]) as rotated:
            assert not await refused(rotated)
            await eventually(lambda: refused(other), "the old one ends")
            await root.revoke_key(fresh["id"])
            await eventually(lambda: refused(rotated), "revoked")
    with pytest.raises(NotFound):
        await root.revoke_key("0123456789abcdef")


async def test_who_rotates_a_key_gets_no_more_than_they_have(place: ClusterPlace, root: AsyncClient) -> None:
    """The secret of the new one is theirs: of another principal's, or of a wider one, it must not be."""
    await root.rights.create_project("rotating")
    await root.rights.give_role("person:boss", "admin", project="rotating")
    await root.rights.give_role("agent:sly", "agent", project="rotating")
    boss = await root.rights.create_key(project="rotating", principal="person:boss")
    wide = await root.rights.create_key(project="rotating", principal="agent:sly")
    scopes = [Verb.READ, Verb.KEYS, Verb.GRANT]
    narrow = await root.rights.create_key(project="rotating", principal="agent:sly", scopes=scopes)
    top = await root.rights.create_key(project="rotating")
    half = await root.rights.create_key(project="rotating", scopes=scopes)
    async with AsyncClient(place.apis[1], narrow["key"]) as sly:
        await eventually(lambda: can(sly.rights.roles()), "the other apiserver has heard of it")
        for other in (boss, wide, top):
            with pytest.raises(PermissionDenied):
                await sly.rights.rotate_key(other["id"])
        own = await sly.rights.rotate_key(narrow["id"])
        made = await sly.rights.create_key(project="rotating", principal="person:boss")
    async with AsyncClient(place.apis[1], half["key"]) as part:
        with pytest.raises(PermissionDenied):
            await part.rights.rotate_key(top["id"])
    async with AsyncClient(place.apis[1], made["key"]) as as_boss:
        assert not await refused(as_boss)
        with pytest.raises(PermissionDenied):
            await as_boss.create("debian")
    async with AsyncClient(place.apis[1], own["key"]) as sly, AsyncClient(place.apis[0], boss["key"]) as chief:
        assert not await refused(sly)
        assert not await refused(chief)


async def test_keys_of_a_deleted_project(place: ClusterPlace, root: AsyncClient) -> None:
    await root.rights.create_project("gone")
    await root.rights.create_project("gone/child")
    keys = [(await root.rights.create_key(project=path))["key"] for path in ("gone", "gone/child")]
    async with AsyncClient(place.apis[0], keys[0]) as one, AsyncClient(place.apis[1], keys[1]) as two:
        for client in (one, two):
            await eventually(lambda client=client: can(client.create("debian", memory_bytes=64 << 20)), "it works")
        assert {each["path"] for each in await root.rights.projects()} >= {"gone", "gone/child"}
        await root.rights.delete_project("gone")
        for client in (one, two):
            await eventually(lambda client=client: refused(client), "its keys are good for nothing")

    async def is_empty() -> bool:
        return sum(each["live"] for each in await live_projects(place, root, "gone")) == 0

    await eventually(is_empty, "its sandboxes are ended")
    with pytest.raises(Conflict):
        await root.rights.create_project("gone")
    assert not {each["path"] for each in await root.rights.projects()} & {"gone", "gone/child"}


async def live_projects(place: ClusterPlace, root: AsyncClient, name: str) -> list[dict[str, int]]:
    """What nodes tell of a project; there is no record to ask for any more."""
    del root
    return [{"live": count} for project, count in (await place.ask("look"))["projects"].items() if name in project]


async def test_a_quota_holds_against_100_clients_at_once(place: ClusterPlace, root: AsyncClient) -> None:
    limit, clients = 40, 100
    await root.rights.create_project("race", quota={"sandboxes": limit})
    key = (await root.rights.create_key(project="race"))["key"]
    codes: Counter[str] = Counter()
    ids: list[str] = []

    async def one(number: int) -> None:
        async with AsyncClient(place.apis[number % 2], key) as client:
            try:
                box = await client.create("debian", memory_bytes=64 << 20)
            except DsecError as error:
                codes[error.code] += 1
            else:
                ids.append(box.id)

    await asyncio.gather(*(one(n) for n in range(clients)))
    assert codes == {QuotaExceeded.code: clients - limit}
    assert len(set(ids)) == limit
    assert (await place.ask("look"))["projects"]["race"] == limit
    async with AsyncClient(place.apis[1], key) as client:
        with pytest.raises(QuotaExceeded):
            await client.create("debian", memory_bytes=64 << 20)
        await client.kill_many(ids[:7])

        async def has_room() -> bool:
            return await can(client.create("debian", memory_bytes=64 << 20))

        await eventually(has_room, "what has ended makes room, at whichever apiserver it was made")
        assert await filled(client, 6) == 6
    assert (await place.ask("look"))["projects"]["race"] == limit


async def test_quotas_of_cores_memory_and_backends_and_of_those_above(place: ClusterPlace, root: AsyncClient) -> None:
    await root.rights.create_project("top", quota={"sandboxes": 9, "memory_bytes": 12 * (64 << 20)})
    await root.rights.create_project("top/a", quota={"cpus": 4})
    await root.rights.create_project("top/b", quota={"backends": {"microvm": 1, "container": 7}})
    keys = {path: (await root.rights.create_key(project=path))["key"] for path in ("top/a", "top/b")}
    async with AsyncClient(place.apis[0], keys["top/a"]) as a, AsyncClient(place.apis[1], keys["top/b"]) as b:
        await eventually(lambda: can(b.list()), "the other apiserver has heard of it")
        ids, failed = await made(a, 6)
        assert (len(ids), set(failed)) == (4, {"quota_exceeded"}), "a core each"
        ids_b, failed = await made(b, 9)
        assert (len(ids_b), set(failed)) == (5, {"quota_exceeded"}), "what its parent has left"
        await a.kill_many(ids)

        async def is_memory() -> bool:
            try:
                await b.create("debian", memory_bytes=8 * (64 << 20))
            except QuotaExceeded as error:
                return "memory" in error.message
            raise AssertionError("there is no such room")

        await eventually(is_memory, "what it lacks then is memory")
        assert await filled(b, 2) == 2, "of this backend"
        await root.rights.change_project("top/b", quota={})
        await eventually(lambda: can(b.create("debian", memory_bytes=64 << 20)), "a quota that is lifted")


async def test_the_pace_of_creations(place: ClusterPlace, root: AsyncClient) -> None:
    await root.rights.create_project("slow", quota={"creates_per_s": 20})
    key = (await root.rights.create_key(project="slow"))["key"]
    async with AsyncClient(place.apis[0], key) as client:
        began = time.monotonic()
        for _ in range(3):
            assert len((await made(client, 20))[0]) == 20
        assert time.monotonic() - began > 1.0
        many = asyncio.create_task(made(client, 200))  # as many as the next ten seconds may have, however late it is

        async def is_late() -> bool:
            try:
                await client.create("debian", memory_bytes=64 << 20, deadline_s=0.05)
            except QuotaExceeded:
                return True
            return False

        await eventually(is_late, "there is no turn before its deadline")
        assert len((await many)[0]) == 200


async def test_the_audit_stream_says_who_did_what(place: ClusterPlace, root: AsyncClient) -> None:
    entries, following = await root.rights.audit(limit=1000)
    seen = {each["what"] for each in entries}
    assert {"project.create", "project.change", "project.delete", "role.grant", "role.revoke"} <= seen
    assert {"key.create", "key.rotate", "key.revoke", "refused"} <= seen
    assert [each["number"] for each in entries] == sorted(each["number"] for each in entries)
    assert any(each["by"] == "agent:ada" and each["about"] == "lab/ada-1" for each in entries)
    assert not any("dsk_" in str(each) for each in entries), "no secret"
    assert (await root.rights.audit(after=following))[0] == []
    key = (await root.rights.create_key(project="keys"))["key"]
    async with AsyncClient(place.apis[1], key) as client:
        await eventually(lambda: can(client.list()), "known")
        own, _ = await client.rights.audit(limit=1000)
        assert own
        assert {each["project"] for each in own} == {"keys"}
