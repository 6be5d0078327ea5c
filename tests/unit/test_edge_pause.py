"""Pausing: time stands still, requests resume, and whoever comes at the same moment finds it decided."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from edge_kit import Kit, finish, spec, until

from dsec.backends.fake.backend import FakeInstance
from dsec.edge.client import Created
from dsec.edge.node import Edge
from dsec.errors import Conflict, SandboxEnded
from dsec.spec.causes import Cause
from dsec.spec.events import EventType
from dsec.spec.runs import RunRequest
from dsec.spec.sandbox import ExecSpec, PausedBy, SandboxSpec, State
from dsec.testing.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def kit(tmp_path: Path, clock: FakeClock) -> Kit:
    return Kit(tmp_path, clock)


async def make(edge: Edge, wanted: SandboxSpec | None = None) -> Created:
    return await edge.create(wanted or spec(), project="p")


async def test_any_request_resumes_and_looking_does_not(kit: Kit) -> None:
    async with kit.edge() as edge:
        sandbox_id = (await make(edge)).sandbox.id
        paused = await edge.pause(sandbox_id)
        assert paused.state is State.PAUSED
        assert paused.paused is not None
        assert paused.paused.by is PausedBy.CALLER
        again = await edge.pause(sandbox_id)
        assert again.paused == paused.paused
        edge.usage(sandbox_id)
        edge.processes(sandbox_id)
        edge.metrics()
        edge.events(sandbox_id)
        await edge.renew(sandbox_id, 60)
        page = await edge.list_sandboxes("p", states=[State.PAUSED])
        assert [info.state for info in page.sandboxes] == [State.PAUSED]
        _, _, status = await finish(await edge.exec(sandbox_id, ExecSpec(argv=["true"])))
        assert status.exit_code == 0
        assert edge.get(sandbox_id).state is State.RUNNING
        await edge.pause(sandbox_id)
        await edge.write_file(sandbox_id, b"/f", _once(b"x"))
        assert edge.get(sandbox_id).state is State.RUNNING


async def test_deleting_never_resumes(kit: Kit) -> None:
    async with kit.edge() as edge:
        sandbox_id = (await make(edge)).sandbox.id
        await edge.pause(sandbox_id)
        ended = await edge.delete(sandbox_id)
        assert ended.cause is Cause.DELETED
        assert ended.paused is None
        assert "resumed" not in [event.type for event in edge.events(sandbox_id)]
        with pytest.raises(SandboxEnded):
            await edge.resume(sandbox_id)


async def test_two_resumes_at_once_are_one(kit: Kit) -> None:
    async with kit.edge() as edge:
        sandbox_id = (await make(edge)).sandbox.id
        await edge.pause(sandbox_id)
        infos = await asyncio.gather(*(edge.resume(sandbox_id) for _ in range(5)))
        assert {info.state for info in infos} == {State.RUNNING}
        assert [event.type for event in edge.events(sandbox_id)].count("resumed") == 1


async def test_a_ttl_stands_still(kit: Kit, clock: FakeClock) -> None:
    async with kit.edge() as edge:
        sandbox_id = (await make(edge, spec(ttl_s=100, idle_ttl_s=50))).sandbox.id
        await clock.advance(40)
        await asyncio.sleep(0)
        await edge.pause(sandbox_id)
        await clock.advance(10_000)
        await asyncio.sleep(0.01)
        assert edge.get(sandbox_id).state is State.PAUSED
        info = await edge.resume(sandbox_id)
        assert info.expires_at is not None
        assert info.expires_at - clock.now() == pytest.approx(60, abs=0.1)
        await edge.renew(sandbox_id, 30)
        await clock.advance(31)
        await until(lambda: edge.get(sandbox_id).state is State.ENDED)
        assert edge.get(sandbox_id).cause is Cause.TTL


async def test_a_clock_that_jumps_while_it_is_paused_changes_nothing(kit: Kit, clock: FakeClock) -> None:
    async with kit.edge() as edge:
        sandbox_id = (await make(edge, spec(ttl_s=100))).sandbox.id
        await edge.pause(sandbox_id)
        clock.jump(1e6)
        info = await edge.resume(sandbox_id)
        assert info.expires_at is not None
        assert info.expires_at - clock.now() == pytest.approx(100, abs=0.1)


async def test_a_renewal_of_a_paused_one_counts_from_its_resume(kit: Kit, clock: FakeClock) -> None:
    async with kit.edge() as edge:
        sandbox_id = (await make(edge, spec(ttl_s=100))).sandbox.id
        await edge.pause(sandbox_id)
        await clock.advance(50)
        await edge.renew(sandbox_id, 20)
        await clock.advance(5000)
        await asyncio.sleep(0.01)
        info = await edge.resume(sandbox_id)
        assert info.expires_at is not None
        assert info.expires_at - clock.now() == pytest.approx(20, abs=0.1)


async def test_a_ttl_may_pause_and_the_next_request_gives_a_whole_one(kit: Kit, clock: FakeClock) -> None:
    async with kit.edge() as edge:
        sandbox_id = (await make(edge, spec(ttl_s=100, on_ttl="pause"))).sandbox.id
        await clock.advance(101)
        await until(lambda: edge.get(sandbox_id).state is State.PAUSED)
        info = edge.get(sandbox_id)
        assert info.paused is not None
        assert info.paused.by is PausedBy.TTL
        await clock.advance(1000)
        await finish(await edge.exec(sandbox_id, ExecSpec(argv=["true"])))
        expires_at = edge.get(sandbox_id).expires_at
        assert expires_at is not None
        assert expires_at - clock.now() == pytest.approx(100, abs=0.1)


async def test_the_pause_and_its_time_outlive_the_edge(kit: Kit, clock: FakeClock) -> None:
    async with kit.edge(keep=True) as edge:
        sandbox_id = (await make(edge, spec(ttl_s=100))).sandbox.id
        await clock.advance(40)
        await edge.pause(sandbox_id)
    await clock.advance(1000)
    async with kit.edge() as edge:
        assert edge.get(sandbox_id).state is State.PAUSED
        info = await edge.resume(sandbox_id)
        assert info.expires_at is not None
        assert info.expires_at - clock.now() == pytest.approx(60, abs=0.1)


async def test_what_an_edge_finds_after_a_death_in_the_middle(kit: Kit) -> None:
    async with kit.edge(keep=True) as edge:
        logged, captured, thawed = [(await make(edge)).sandbox.id for _ in range(3)]
        edge._notes.events.add(logged, EventType.PAUSED, {"by": "caller"})
        await edge.pause(thawed)
    kit.host.guests[logged].frozen = True  # the server died before that was on record
    kit.host.guests[captured].frozen = True  # it stood still for a fork
    kit.host.guests[thawed].frozen = False  # it died before the resume was on record
    async with kit.edge() as edge:
        assert [edge.get(each).state for each in (logged, captured, thawed)] == [
            State.PAUSED,
            State.RUNNING,
            State.RUNNING,
        ]
        assert not kit.host.guests[captured].frozen
        await finish(await edge.exec(logged, ExecSpec(argv=["true"])))
        assert edge.get(logged).state is State.RUNNING


async def test_what_a_tripwire_paused_only_its_own_call_resumes(kit: Kit) -> None:
    async with kit.edge() as edge:
        sandbox_id = (await make(edge)).sandbox.id
        await edge.pause(sandbox_id)
        edge._pauses.pause(edge._live(sandbox_id), PausedBy.TRIPWIRE, "r")
        for call in (edge.resume(sandbox_id), edge.exec(sandbox_id, ExecSpec(argv=["true"]))):
            with pytest.raises(Conflict, match="tripwire 'r'"):
                await call
        assert edge.get(sandbox_id).state is State.PAUSED
        assert edge.resume_tripwires(sandbox_id).paused is None
        assert edge.get(sandbox_id).state is State.RUNNING


async def test_one_that_dies_while_it_is_paused_has_ended(kit: Kit) -> None:
    async with kit.edge() as edge:
        sandbox_id = (await make(edge)).sandbox.id
        await edge.pause(sandbox_id)
        kit.host.kill_guest(sandbox_id)
        await until(lambda: edge.get(sandbox_id).state is State.ENDED)
        assert edge.get(sandbox_id).cause is Cause.GUEST_EXITED


async def test_many_in_one_call(kit: Kit) -> None:
    async with kit.edge() as edge:
        ids = [(await make(edge, spec(run="r", labels={"k": str(n % 2)}))).sandbox.id for n in range(4)]
        other = (await make(edge)).sandbox.id
        assert {item.id for item in await edge.pause_many("p", run="r", labels={"k": "1"})} == {ids[1], ids[3]}
        assert {item.id for item in await edge.pause_many("p", run="r")} == {ids[0], ids[2]}
        assert edge.get(other).state is State.RUNNING
        assert len(await edge.pause_many("p", run="r", resume=True)) == 4
        results = await edge.pause_many("q", ids=[other, "nosuch"])
        assert [item.error.code for item in results if item.error] == ["sandbox_not_found"] * 2
        assert edge.get(other).state is State.RUNNING


@pytest.mark.parametrize("by", ["a call", "a lapse"])
async def test_many_at_once_leave_others_their_turns(
    kit: Kit, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    turn, frozen = 0, dict[int, int]()
    freeze = FakeInstance.freeze

    def counted(self: FakeInstance, now: bool) -> None:
        frozen[turn] = frozen.get(turn, 0) + 1
        freeze(self, now)

    monkeypatch.setattr(FakeInstance, "freeze", counted)
    async with kit.edge() as edge:
        edge.open_run("p", RunRequest(name="r", lease_s=10, on_lapse="pause"))
        for _ in range(80):
            await make(edge, spec(run="r", ttl_s=None))
        if by == "a call":
            pausing = asyncio.ensure_future(edge.pause_many("p", run="r"))
        else:
            pausing = asyncio.ensure_future(clock.advance(11))
        async with asyncio.timeout(120):
            while sum(frozen.values()) < 80:
                await asyncio.sleep(0)
                turn += 1
        await pausing
        assert max(frozen.values()) <= 16, frozen
        assert len((await edge.list_sandboxes("p", states=[State.PAUSED])).sandboxes) == 80


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
