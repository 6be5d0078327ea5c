"""The life of sandboxes on an edge: creation, admission, expiry, deletion, their ends and causes."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from edge_kit import GIB, Kit, finish, spec, until

from dsec.channel.operation import GuestOperation
from dsec.channel.socket import SocketChannel
from dsec.edge.command import Command
from dsec.edge.config import EdgeConfig
from dsec.edge.node import Edge
from dsec.edge.recorder import Recorder
from dsec.edge.sandbox import Sandbox
from dsec.errors import (
    AdmissionTimeout,
    CreateFailed,
    EnvironmentNotFound,
    InvalidRequest,
    QuotaExceeded,
    SandboxEnded,
    SandboxLost,
    SandboxNotFound,
    Unavailable,
    Unsupported,
)
from dsec.spec.causes import Cause
from dsec.spec.sandbox import ExecSpec, State
from dsec.testing.clock import FakeClock


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


async def make(edge: Edge, **fields: object) -> str:
    return (await edge.create(spec(**fields), project="p")).sandbox.id


async def test_create_use_delete(kit: Kit) -> None:
    async with kit.edge() as edge:
        created = await edge.create(spec(labels={"a": "b"}), project="p")
        assert not created.existed
        assert created.sandbox.state is State.RUNNING
        assert created.sandbox.token
        assert created.sandbox.create_ms is not None
        info = edge.get(created.sandbox.id)
        assert info.token is None
        assert info.expires_at is not None
        _, _, status = await finish(await edge.exec(info.id, ExecSpec(argv=["true"])))
        assert status.exit_code == 0
        first = await edge.delete(info.id)
        assert (first.state, first.cause, first.infra) == (State.ENDED, Cause.DELETED, False)
        assert first.ended_at is not None
        assert await edge.delete(info.id) == first
        assert edge.get(info.id) == first
        assert not kit.left()
        assert edge.node().live == 0


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("argv", [[], ["echo", "hi"], ["sleep", "600"]])
async def test_an_ended_sandbox_is_freed_at_once(kit: Kit, argv: list[str], key: str | None) -> None:
    """Nothing of it waits for a collection of garbage, which comes after thousands of sandboxes."""
    kinds = (Sandbox, SocketChannel, GuestOperation, Command, Recorder)
    async with kit.edge() as edge:
        gc.collect()
        before = {id(each) for each in gc.get_objects() if isinstance(each, kinds)}  # other tests' in this process
        gc.disable()
        try:
            box = await make(edge)
            if argv:
                execution = await edge.exec(box, ExecSpec(argv=argv, key=key))
                if argv[0] == "echo":
                    assert (await finish(execution))[0] == b"hi\n"
                del execution
            await edge.delete(box)
            await asyncio.sleep(0.01)  # each look is at all objects of this process
            await until(
                lambda: not any(isinstance(each, kinds) and id(each) not in before for each in gc.get_objects())
            )
        finally:
            gc.enable()


async def test_calls_on_an_ended_sandbox_say_why(kit: Kit) -> None:
    async with kit.edge() as edge:
        deleted, killed = await make(edge), await make(edge)
        await edge.delete(deleted)
        await edge.delete(killed, Cause.PLATFORM_KILLED, "drained")
        with pytest.raises(SandboxEnded, match="it was deleted") as caught:
            await edge.exec(deleted, ExecSpec(argv=["true"]))
        assert caught.value.details["cause"] == "deleted"
        assert not caught.value.infra
        with pytest.raises(SandboxLost, match="the platform ended it: drained") as lost:
            await edge.stat_file(killed, b"/")
        assert lost.value.infra
        assert edge.get(killed).infra


async def test_unknown_ids(kit: Kit) -> None:
    async with kit.edge() as edge:
        for sandbox_id in ("", "x" * 24, "../../etc", "0" * 24, "a\0b", "ü"):
            with pytest.raises(SandboxNotFound):
                edge.get(sandbox_id)
            with pytest.raises(SandboxNotFound):
                await edge.delete(sandbox_id)
            with pytest.raises(SandboxNotFound):
                await edge.exec(sandbox_id, ExecSpec(argv=["true"]))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"cpu_class": "idle"}, InvalidRequest),
        ({"network": {"pipy": True}}, InvalidRequest),
        ({"network": {"pypi": True}}, Unsupported),
        ({"gpus": 0}, Unsupported),
        ({"gpus": 1}, Unsupported),
        ({"backend": "microvm"}, Unsupported),
        ({"environment": "nobody"}, EnvironmentNotFound),
        ({"environment": "-bad"}, InvalidRequest),
        ({"cpus": 0.0}, InvalidRequest),
        ({"memory_bytes": 1}, InvalidRequest),
        ({"workdir": "relative"}, InvalidRequest),
        ({"workdir": "/a\0b"}, InvalidRequest),
        ({"user": "a\nb"}, InvalidRequest),
        ({"name": "a\0b"}, InvalidRequest),
        ({"env": {"": "x"}}, InvalidRequest),
        ({"env": {"A=B": "x"}}, InvalidRequest),
        ({"env": {"A": "x\0"}}, InvalidRequest),
        ({"env": {"A": "\udc80"}}, InvalidRequest),
        ({"env": {"A": "x" * (1 << 20)}}, InvalidRequest),
        ({"labels": {str(n): "" for n in range(65)}}, InvalidRequest),
        ({"memory_bytes": 1 << 46}, Unsupported),
    ],
)
async def test_specs_that_are_refused(kit: Kit, fields: dict[str, object], error: type[Exception]) -> None:
    async with kit.edge() as edge:
        with pytest.raises(error):
            await edge.create(spec(**fields), project="p")
        assert edge.node().live == 0
        assert not kit.left()


async def test_what_is_unsupported_is_named(kit: Kit) -> None:
    async with kit.edge() as edge:
        with pytest.raises(Unsupported, match="not available in this version") as caught:
            await edge.create(spec(gpus=1), project="p")
        assert caught.value.details["field"] == "gpus"


async def test_a_failed_creation_leaves_nothing_and_says_where(kit: Kit) -> None:
    async with kit.edge() as edge:
        kit.host.fail_next_create("mount")
        with pytest.raises(CreateFailed, match="mount"):
            await make(edge)
        await until(lambda: edge.node().live == 0)
        assert not kit.left()
        page = await edge.list_sandboxes("p", states=[State.ENDED])
        assert [(info.cause, info.infra) for info in page.sandboxes] == [(Cause.CREATE_FAILED, True)]


async def test_a_creation_that_hangs_is_given_up(kit: Kit) -> None:
    kit.config = EdgeConfig(create_timeout_s=0.05)
    async with kit.edge() as edge:
        kit.host.create_delay_s = 3600.0
        with pytest.raises(CreateFailed, match="did not answer"):
            await make(edge)
        await until(lambda: edge.node().live == 0)
        assert not kit.left()


async def test_a_caller_that_goes_away_stops_no_creation(kit: Kit) -> None:
    async with kit.edge() as edge:
        kit.host.go_on = asyncio.Event()
        caller = asyncio.ensure_future(make(edge))
        await until(lambda: edge.node().starting == 1)
        caller.cancel()
        kit.host.go_on.set()
        await until(lambda: edge.node().starting == 0)
        page = await edge.list_sandboxes("p")
        assert [info.state for info in page.sandboxes] == [State.RUNNING]


async def test_deleted_while_it_starts(kit: Kit) -> None:
    async with kit.edge() as edge:
        kit.host.go_on = asyncio.Event()
        caller = asyncio.ensure_future(make(edge))
        await until(lambda: edge.node().starting == 1)
        (info,) = (await edge.list_sandboxes("p")).sandboxes
        assert info.state is State.STARTING
        with pytest.raises(Unavailable):
            await edge.exec(info.id, ExecSpec(argv=["true"]))
        async with asyncio.timeout(10):  # it is given up: a machine that boots may take minutes, or never come up
            assert (await edge.delete(info.id)).cause is Cause.DELETED
        with pytest.raises(SandboxEnded):
            await caller
        assert not kit.left()
        assert edge.node().live == 0


async def test_concurrent_deletions_share_one(kit: Kit) -> None:
    async with kit.edge() as edge:
        sandbox_id = await make(edge)
        answers = await asyncio.gather(*(edge.delete(sandbox_id) for _ in range(20)))
        assert all(answer == answers[0] for answer in answers)
        cancelled = asyncio.ensure_future(edge.delete(await make(edge)))
        await asyncio.sleep(0)
        cancelled.cancel()
        await until(lambda: edge.node().live == 0)
        assert not kit.left()


async def test_only_an_operator_may_say_why(kit: Kit) -> None:
    async with kit.edge() as edge:
        sandbox_id = await make(edge)
        with pytest.raises(InvalidRequest):
            await edge.delete(sandbox_id, Cause.OUTCOME_UNKNOWN)
        assert edge.get(sandbox_id).state is State.RUNNING


async def test_delete_many(kit: Kit) -> None:
    async with kit.edge() as edge:
        ids = [await make(edge) for _ in range(30)]
        foreign = (await edge.create(spec(), project="other")).sandbox.id
        results = await edge.delete_many([*ids, foreign, "nobody", ids[0]], project="p")
        assert [result.id for result in results] == [*ids, foreign, "nobody", ids[0]]
        assert [result.error.code if result.error else None for result in results] == [None] * 30 + [
            "sandbox_not_found",
            "sandbox_not_found",
            None,
        ]
        assert kit.left() == {foreign}


async def test_a_guest_that_dies_ends_its_sandbox(kit: Kit) -> None:
    async with kit.edge() as edge:
        sandbox_id = await make(edge)
        command = await edge.exec(sandbox_id, ExecSpec(argv=["sleep", "100"]))
        await command.started()
        kit.host.kill_guest(sandbox_id)
        with pytest.raises(SandboxEnded, match="its first process ended") as caught:
            await finish(command)
        assert caught.value.details["cause"] == "guest_exited"
        await until(lambda: edge.get(sandbox_id).state is State.ENDED)
        assert edge.get(sandbox_id).cause is Cause.GUEST_EXITED
        assert not kit.left()


# --- time ---


async def test_ttl_renewal_and_idle_ttl(tmp_path: Path) -> None:
    clock = FakeClock()
    kit = Kit(tmp_path, clock)
    async with kit.edge() as edge:
        short = await make(edge, ttl_s=10.0)
        forever = await make(edge, ttl_s=None)
        renewed = await make(edge, ttl_s=10.0)
        idle = await make(edge, ttl_s=None, idle_ttl_s=10.0)
        busy = await make(edge, ttl_s=None, idle_ttl_s=10.0)
        command = await edge.exec(busy, ExecSpec(argv=["sleep", "1000"]))
        await command.started()
        await clock.advance(9.0)
        assert edge.get(short).state is State.RUNNING
        before = edge.get(renewed).expires_at
        after = (await edge.renew(renewed, 10.0)).expires_at
        assert before is not None
        assert after == before + 9.0
        await clock.advance(1.5)
        await until(lambda: edge.get(short).state is State.ENDED and edge.get(idle).state is State.ENDED)
        assert edge.get(short).cause is Cause.TTL
        assert edge.get(idle).cause is Cause.IDLE_TTL
        assert edge.get(renewed).state is State.RUNNING
        await clock.advance(100.0)
        await until(lambda: edge.get(renewed).state is State.ENDED)
        assert edge.get(forever).state is State.RUNNING
        assert edge.get(busy).state is State.RUNNING  # a command runs
        await edge.signal(busy, command.key, 9)
        await finish(command)
        await clock.advance(10.5)
        await until(lambda: edge.get(busy).state is State.ENDED)
        with pytest.raises(SandboxEnded):
            await edge.renew(short, 10.0)
        assert kit.left() == {forever}


async def test_an_open_request_counts_as_use(tmp_path: Path) -> None:
    clock = FakeClock()
    kit = Kit(tmp_path, clock)
    async with kit.edge() as edge:
        sandbox_id = await make(edge, idle_ttl_s=10.0)
        go_on = asyncio.Event()

        async def slow():  # type: ignore[no-untyped-def]
            yield b"a"
            await go_on.wait()
            yield b"b"

        upload = asyncio.ensure_future(edge.write_file(sandbox_id, b"/f", slow()))
        await clock.settle()
        await clock.advance(50.0)
        assert edge.get(sandbox_id).state is State.RUNNING
        go_on.set()
        assert await upload == 2
        await clock.advance(9.0)
        assert edge.get(sandbox_id).state is State.RUNNING
        await clock.advance(2.0)
        await until(lambda: edge.get(sandbox_id).state is State.ENDED)


async def test_renewals_and_expiry_never_disagree(tmp_path: Path) -> None:
    """Whoever renews in time keeps it; who is told that it was renewed finds it running."""
    clock = FakeClock()
    kit = Kit(tmp_path, clock)
    async with kit.edge() as edge:
        sandbox_id = await make(edge, ttl_s=1.0)
        for _ in range(20):
            await clock.advance(0.99)
            await edge.renew(sandbox_id, 1.0)
        assert edge.get(sandbox_id).state is State.RUNNING
        assert (await edge.renew(sandbox_id, None)).expires_at is None
        await clock.advance(1e5)
        assert edge.get(sandbox_id).state is State.RUNNING
        for bad in (0.0, -1.0, 1e12):
            with pytest.raises(InvalidRequest):
                await edge.renew(sandbox_id, bad)


# --- admission ---


async def test_what_starts_at_once_is_bounded_and_in_order(kit: Kit) -> None:
    kit.config = EdgeConfig(max_starting=2)
    kit.host.create_delay_s = 0.005
    async with kit.edge() as edge:
        most = 0
        order = []

        async def one(n: int) -> None:
            await edge.create(spec(name=str(n)), project="p")
            order.append(n)

        tasks = [asyncio.ensure_future(one(n)) for n in range(12)]
        while not all(task.done() for task in tasks):
            most = max(most, edge.node().starting)
            await asyncio.sleep(0.001)
        assert most == 2
        assert order == sorted(order)


async def test_a_full_node_queues_to_the_deadline_then_says_for_what(kit: Kit) -> None:
    kit.config = EdgeConfig(max_live=1)
    async with kit.edge() as edge:
        first = await make(edge)
        with pytest.raises(AdmissionTimeout, match="as many sandboxes as it takes") as caught:
            await edge.create(spec(), project="p", deadline_s=0.02)
        assert caught.value.infra
        assert caught.value.retryable
        waiting = asyncio.ensure_future(edge.create(spec(), project="p", deadline_s=20.0))
        await until(lambda: edge.node().queued == 1)
        assert [info.state for info in (await edge.list_sandboxes("p", states=[State.QUEUED])).sandboxes] == [
            State.QUEUED
        ]
        await edge.delete(first)
        created = await waiting
        assert created.sandbox.queue_ms > 0
        assert edge.node().queued == 0


async def test_promised_memory_is_counted_and_given_back(kit: Kit) -> None:
    kit.room.memory = 4 * GIB
    kit.config = EdgeConfig(memory_overcommit=1.0)
    async with kit.edge() as edge:
        big = await make(edge, memory_bytes=3 * GIB)
        assert edge.node().memory_committed_bytes == 3 * GIB
        with pytest.raises(AdmissionTimeout, match="promised"):
            await edge.create(spec(memory_bytes=2 * GIB), project="p", deadline_s=0.02)
        with pytest.raises(Unsupported):
            await edge.create(spec(memory_bytes=5 * GIB), project="p")
        await edge.delete(big)
        await make(edge, memory_bytes=2 * GIB)
        assert edge.node().memory_committed_bytes == 2 * GIB


async def test_real_shortages_hold_creations_back_until_they_pass(kit: Kit) -> None:
    kit.config = EdgeConfig(recheck_s=0.01)
    async with kit.edge() as edge:
        for shortage in ("memory_free", "disk_free"):
            setattr(kit.room, shortage, 0)
            waiting = asyncio.ensure_future(edge.create(spec(), project="p"))
            await until(lambda: edge.node().queued == 1)
            setattr(kit.room, shortage, 64 * GIB)
            await waiting  # nothing else happens on the node: it looks again by itself


async def test_a_full_queue_refuses(kit: Kit) -> None:
    kit.config = EdgeConfig(max_live=1, max_queued=1)
    async with kit.edge() as edge:
        await make(edge)
        waiting = asyncio.ensure_future(edge.create(spec(), project="p"))
        await until(lambda: edge.node().queued == 1)
        with pytest.raises(QuotaExceeded):
            await edge.create(spec(), project="p")
        waiting.cancel()


async def test_deleted_in_the_queue(kit: Kit) -> None:
    kit.config = EdgeConfig(max_live=1)
    async with kit.edge() as edge:
        await make(edge)
        waiting = asyncio.ensure_future(edge.create(spec(name="q"), project="p"))
        await until(lambda: edge.node().queued == 1)
        queued = edge.find_named("p", None, "q")
        ended = await edge.delete(queued.id)
        assert (ended.state, ended.cause) == (State.ENDED, Cause.DELETED)
        with pytest.raises(SandboxEnded):
            await waiting
        assert await edge.delete(queued.id) == ended
        assert edge.node().live == 1


# --- the end of the server ---


async def test_close_ends_what_runs_unless_it_is_kept(kit: Kit) -> None:
    edge = await kit.open()
    sandbox_id = await make(edge)
    await edge.close(keep=True)
    assert kit.left() >= {sandbox_id}
    edge = await kit.open()
    assert edge.get(sandbox_id).state is State.RUNNING
    await edge.close(keep=False)
    await edge.close(keep=False)
    assert not kit.left()
    edge = await kit.open()
    assert edge.get(sandbox_id).cause is Cause.SHUTDOWN
    await edge.close(keep=True)


async def test_a_stopping_server_takes_nothing_on(kit: Kit) -> None:
    kit.config = EdgeConfig(max_live=1)
    edge = await kit.open()
    sandbox_id = await make(edge)
    waiting = asyncio.ensure_future(edge.create(spec(), project="p"))
    await until(lambda: edge.node().queued == 1)
    await edge.close(keep=True)
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await make(edge)
    with pytest.raises(Unavailable):
        await edge.exec(sandbox_id, ExecSpec(argv=["true"]))


async def test_a_second_edge_on_the_same_state_is_refused(kit: Kit) -> None:
    async with kit.edge():
        with pytest.raises(Unavailable, match="in use"):
            await kit.open()


# --- listing ---


async def test_listing_filters_and_pages(kit: Kit) -> None:
    async with kit.edge() as edge:
        ids = [await make(edge, run="a" if n % 2 else "b", labels={"n": str(n % 3), "k": "v"}) for n in range(12)]
        await edge.create(spec(), project="other")
        gone = ids[::4]
        await edge.delete_many(gone, project="p")

        async def collect(**filters: object) -> list[str]:
            found: list[str] = []
            after = None
            while True:
                page = await edge.list_sandboxes("p", limit=2, after=after, **filters)  # type: ignore[arg-type]
                assert len(page.sandboxes) <= 2
                found += [info.id for info in page.sandboxes]
                after = page.next
                if after is None:
                    return found

        assert await collect() == [i for i in ids if i not in gone]
        assert await collect(states=[State.ENDED]) == gone
        assert await collect(states=list(State)) == ids
        assert await collect(states=list(State), run="a") == ids[1::2]
        assert await collect(states=list(State), labels={"n": "1", "k": "v"}) == ids[1::3]
        assert await collect(labels={"n": "none"}) == []
        for limit in (0, 1001):
            with pytest.raises(InvalidRequest):
                await edge.list_sandboxes("p", limit=limit)
