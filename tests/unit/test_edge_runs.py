"""Runs: leases that lapse once, and clients that are fenced off."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from edge_kit import Kit, spec, until

from dsec.edge.node import Edge
from dsec.errors import NotFound, RunFenced
from dsec.spec.causes import Cause
from dsec.spec.runs import OnLapse, RunRequest
from dsec.spec.sandbox import PausedBy, State
from dsec.testing.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def kit(tmp_path: Path, clock: FakeClock) -> Kit:
    return Kit(tmp_path, clock)


def asked(on_lapse: OnLapse = "pause", lease_s: float = 10) -> RunRequest:
    return RunRequest(name="r", lease_s=lease_s, on_lapse=on_lapse)


async def make(edge: Edge, **fields: object) -> str:
    return (await edge.create(spec(ttl_s=None, **fields), project="p")).sandbox.id


async def test_a_lapse_pauses_the_runs_sandboxes_and_no_others(kit: Kit, clock: FakeClock) -> None:
    async with kit.edge() as edge:
        edge.open_run("p", asked())
        mine, other = await make(edge, run="r"), await make(edge)
        await clock.advance(11)
        await until(lambda: edge.get(mine).state is State.PAUSED)
        paused = edge.get(mine).paused
        assert paused is not None
        assert paused.by is PausedBy.LEASE
        assert edge.get(other).state is State.RUNNING
        assert edge.run("p", "r").lapsed
        assert not edge.renew_run("p", "r", 1).lapsed
        await edge.resume(mine)
        await clock.advance(9)
        assert edge.get(mine).state is State.RUNNING, "the renewal counts"


async def test_a_lapse_may_stop_or_keep(kit: Kit, clock: FakeClock) -> None:
    async with kit.edge() as edge:
        edge.open_run("p", asked("keep"))
        sandbox_id = await make(edge, run="r")
        await clock.advance(100)
        assert edge.get(sandbox_id).state is State.RUNNING
        edge.open_run("p", asked("stop"))
        await clock.advance(11)
        await until(lambda: edge.get(sandbox_id).state is State.ENDED)
        assert edge.get(sandbox_id).cause is Cause.LEASE_LAPSED


async def test_renewals_keep_it_and_the_last_word_counts(kit: Kit, clock: FakeClock) -> None:
    async with kit.edge() as edge:
        edge.open_run("p", asked())
        sandbox_id = await make(edge, run="r")
        for _ in range(20):
            await clock.advance(9.9)
            edge.renew_run("p", "r", 1)
        assert edge.get(sandbox_id).state is State.RUNNING
        await clock.advance(10.1)
        assert edge.get(sandbox_id).state is State.PAUSED


async def test_a_clock_that_jumps_lapses_nothing(kit: Kit, clock: FakeClock) -> None:
    async with kit.edge() as edge:
        edge.open_run("p", asked())
        mine = await make(edge, run="r")
        for jump in (1e6, -2e6):
            clock.jump(jump)
            await clock.advance(4)
            await asyncio.sleep(0.01)
            assert edge.get(mine).state is State.RUNNING
            assert not edge.renew_run("p", "r", 1).lapsed
        await clock.advance(11)
        await until(lambda: edge.get(mine).state is State.PAUSED)


async def test_a_renewal_that_waits_while_the_server_stands_still_counts(kit: Kit, clock: FakeClock) -> None:
    """Both stood still, or it alone: what came meanwhile is read after the timers have run."""
    async with kit.edge() as edge:
        edge.open_run("p", asked())
        mine = await make(edge, run="r")
        await clock.advance(6)
        await clock.stall(7)
        assert edge.get(mine).state is State.RUNNING
        assert not edge.renew_run("p", "r", 1).lapsed
        await clock.advance(9)
        assert edge.get(mine).state is State.RUNNING, "it is whole"
        await clock.stall(4)
        await clock.advance(3.1)
        await until(lambda: edge.get(mine).state is State.PAUSED)


async def test_an_older_epoch_is_fenced_off(kit: Kit) -> None:
    async with kit.edge() as edge:
        assert edge.open_run("p", asked()).epoch == 1
        edge.check_run("p", "r", 1)
        assert edge.open_run("p", asked()).epoch == 2
        for call in (edge.check_run, edge.renew_run):
            with pytest.raises(RunFenced) as refused:
                call("p", "r", 1)
            assert refused.value.details["epoch"] == 2
            call("p", "r", 2)
        with pytest.raises(NotFound):
            edge.run("q", "r")
        assert edge.open_run("q", asked()).epoch == 1, "another project's run of the name is another"


async def test_a_restart_gives_a_whole_lease(kit: Kit, clock: FakeClock) -> None:
    async with kit.edge(keep=True) as edge:
        edge.open_run("p", asked())
        edge.open_run("p", asked())
        sandbox_id = await make(edge, run="r")
        await clock.advance(8)
    await clock.advance(3600)
    async with kit.edge() as edge:
        assert edge.run("p", "r").epoch == 2
        await clock.advance(9)
        assert edge.get(sandbox_id).state is State.RUNNING
        await clock.advance(2)
        await until(lambda: edge.get(sandbox_id).state is State.PAUSED)


async def test_one_that_is_being_made_meets_the_policy_too(kit: Kit, clock: FakeClock) -> None:
    async with kit.edge() as edge:
        edge.open_run("p", asked())
        kit.host.create_delay_s = 0.2
        making = asyncio.create_task(make(edge, run="r"))
        await until(lambda: edge.node().starting)
        await clock.advance(11)
        sandbox_id = await making
        await until(lambda: edge.get(sandbox_id).state is State.PAUSED)
