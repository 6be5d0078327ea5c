"""The edge dies, a backend fails, a caller goes away: at every step of making and ending sandboxes, one after the
other.

A step is each await of the backend's and each write to the journal, before and after. The backend here is a double
that keeps a set of resources; whatever happens, each of them must belong to a sandbox that runs, and no id may be made
twice.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from edge_double import KINDS, NOT_NOW, Machine, abandon, count_journal_steps, open_edge
from edge_kit import spec, until

from dsec.edge.kept import BatchItem
from dsec.edge.node import Edge
from dsec.errors import DsecError
from dsec.ports import InstanceEnd
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxInfo, SandboxSpec, State


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture(autouse=True)
def _journal_steps(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    count_journal_steps(monkeypatch, machine)


class Told:
    """What callers were told."""

    def __init__(self) -> None:
        self.running: dict[str, SandboxInfo] = {}
        self.ended: dict[str, SandboxInfo] = {}
        self.batch: dict[int, str] = {}
        self.doomed: set[str] = set()
        """Those whose end was asked for, or happened, whether or not it was confirmed."""


SPECS = [spec(labels={"n": str(n)}) for n in range(3)]


async def scenario(edge: Edge, machine: Machine, told: Told) -> None:
    """A bit of everything; each call may fail or never return."""

    async def create(wanted: SandboxSpec) -> str | None:
        try:
            info = (await edge.create(wanted, project="p")).sandbox
        except DsecError:
            return None
        told.running[info.id] = info
        return info.id

    async def delete(sandbox_id: str) -> None:
        told.doomed.add(sandbox_id)
        try:
            told.ended[sandbox_id] = await edge.delete(sandbox_id)
        except DsecError:
            return

    named = await create(spec(name="n"))
    try:
        async for item in edge.create_many(SPECS, project="p", key="b"):
            note(item, told)
    except DsecError:
        return
    if named is not None:
        await delete(named)
    if 1 in told.batch:
        told.doomed.add(told.batch[1])
        machine.instances[told.batch[1]].end.set_result(InstanceEnd(Cause.GUEST_EXITED, "died"))
    if 2 in told.batch:
        await edge.renew(told.batch[2], 50.0)
    await create(spec(name="n"))
    await calm(edge)


def note(item: BatchItem, told: Told) -> None:
    if item.sandbox is not None:
        told.batch[item.index] = item.sandbox.id
        if item.sandbox.state is State.RUNNING:
            told.running[item.sandbox.id] = item.sandbox


async def calm(edge: Edge) -> None:
    def is_calm() -> bool:
        node = edge.node()
        return not (node.starting or node.queued or node.ending)

    await until(is_calm)


async def check(edge: Edge, machine: Machine, told: Told) -> None:
    """Nothing leaked, nothing lost, nothing twice."""
    await calm(edge)
    everything = (await edge.list_sandboxes("p", states=list(State), limit=1000)).sandboxes
    running = {info.id for info in everything if info.state is State.RUNNING}
    assert {info.state for info in everything} <= {State.RUNNING, State.ENDED}
    assert machine.owners() == running
    assert all(machine.of(sandbox_id) == set(KINDS) for sandbox_id in running)
    assert all(info.cause is not None for info in everything if info.state is State.ENDED)
    for sandbox_id in told.running.keys() - told.doomed:
        assert sandbox_id in running, "a caller was told that it runs, and nobody ended it"
    for sandbox_id, info in told.ended.items():
        assert edge.get(sandbox_id) == info
        assert info.cause is Cause.DELETED

    again = Told()
    async for item in edge.create_many(SPECS, project="p", key="b"):
        note(item, again)
    assert {index: again.batch[index] for index in told.batch if index in again.batch} == told.batch
    assert len(set(again.batch.values())) == len(again.batch)
    named = (await edge.create(spec(name="n"), project="p")).sandbox
    assert named.state is State.RUNNING
    live = (await edge.list_sandboxes("p", limit=1000)).sandboxes
    assert [info.id for info in live if info.spec.name == "n"] == [named.id]
    assert len(set(machine.made)) == len(machine.made), "an id was made twice"

    await edge.delete_many([info.id for info in live], project="p")
    assert machine.resources == set()
    assert edge.node().live == 0
    assert edge.node().memory_committed_bytes == 0


async def count_steps(tmp_path: Path, machine: Machine) -> int:
    edge = await open_edge(machine, tmp_path / "dry")
    await scenario(edge, machine, Told())
    steps = len(machine.steps)
    await edge.close(keep=True)
    return steps


async def kill_and_recover(root: Path, machine: Machine, at: int) -> bool:
    """Run the scenario, let the edge die at step `at`, recover from what was on disk then. False: it has fewer
    steps."""
    machine.__init__()  # type: ignore[misc]
    machine.kill_at = at
    told = Told()
    edge = await open_edge(machine, root / "state")
    script = asyncio.ensure_future(scenario(edge, machine, told))
    killed = asyncio.ensure_future(machine.killed.wait())
    await asyncio.wait([script, killed], return_when=asyncio.FIRST_COMPLETED)
    died = machine.killed.is_set()
    machine.kill_at = None
    if died:
        shutil.copytree(root / "state", root / "after", ignore=NOT_NOW)
    script.cancel()
    killed.cancel()
    await asyncio.gather(script, killed, return_exceptions=True)
    if died:
        await abandon(edge)
        step = machine.steps[at - 1].replace(":", "").split()
        heir = await open_edge(machine, root / "after")
        await calm(heir)
        if step[0] == "destroy":  # why it ends was on disk before anything of it went
            assert heir.get(step[1]).cause in (Cause.DELETED, Cause.GUEST_EXITED)
        await check(heir, machine, told)
        await heir.close(keep=False)
    else:
        await edge.close(keep=False)
    assert machine.resources == set()
    return died


async def test_the_edge_dies_at_every_step(tmp_path: Path, machine: Machine) -> None:
    at = 1
    while True:
        root = tmp_path / str(at)
        root.mkdir()
        try:
            if not await kill_and_recover(root, machine, at):
                break
        except BaseException as error:
            error.add_note(f"died at step {at}: {machine.steps[at - 1 : at]}; all steps: {machine.steps}")
            raise
        shutil.rmtree(root)
        at += 1
    assert at > 50  # the scenario is as long as it was meant to be


async def test_the_backend_fails_at_every_step(tmp_path: Path, machine: Machine) -> None:
    steps = await count_steps(tmp_path, machine)
    for at in range(1, steps + 1):
        machine.__init__()  # type: ignore[misc]
        machine.fail_at = at
        told = Told()
        edge = await open_edge(machine, tmp_path / str(at))
        await scenario(edge, machine, told)
        machine.fail_at = None
        try:
            await check(edge, machine, told)
        except BaseException as error:
            error.add_note(f"failed at step {at}: {machine.steps[at - 1 : at]}")
            raise
        await edge.close(keep=False)


async def test_the_caller_goes_away_at_every_step(tmp_path: Path, machine: Machine) -> None:
    steps = await count_steps(tmp_path, machine)
    for at in range(1, steps + 1):
        machine.__init__()  # type: ignore[misc]
        machine.cancel_at = at
        told = Told()
        edge = await open_edge(machine, tmp_path / str(at))
        machine.cancel = asyncio.ensure_future(scenario(edge, machine, told))
        await asyncio.gather(machine.cancel, return_exceptions=True)
        try:
            await check(edge, machine, told)
        except BaseException as error:
            error.add_note(f"cancelled at step {at}: {machine.steps[at - 1 : at]}")
            raise
        await edge.close(keep=False)


async def test_removal_that_fails_is_tried_again_and_said(tmp_path: Path, machine: Machine) -> None:
    edge = await open_edge(machine, tmp_path / "state")
    info = (await edge.create(spec(), project="p")).sandbox
    machine.fail_at = len(machine.steps) + 4  # in the middle of the removal
    with pytest.raises(DsecError, match="could not be removed yet"):
        await edge.delete(info.id)
    assert edge.node().stuck == 1
    assert edge.get(info.id).state is State.ENDING
    ended = await edge.delete(info.id)
    assert ended.state is State.ENDED
    assert machine.resources == set()
    await edge.close(keep=False)


async def test_a_zygote_that_is_gone_loses_its_sandboxes_and_says_so(tmp_path: Path, machine: Machine) -> None:
    edge = await open_edge(machine, tmp_path / "state")
    info = (await edge.create(spec(), project="p")).sandbox
    await edge.close(keep=True)
    machine.resources.discard((info.id, "guest"))
    edge = await open_edge(machine, tmp_path / "state")
    await calm(edge)
    lost = edge.get(info.id)
    assert (lost.state, lost.cause, lost.infra) == (State.ENDED, Cause.NODE_LOST, True)
    assert machine.resources == set()
    await edge.close(keep=False)


async def test_a_ttl_that_passed_while_the_server_was_down(tmp_path: Path, machine: Machine) -> None:
    edge = await open_edge(machine, tmp_path / "state")
    info = (await edge.create(spec(ttl_s=0.05), project="p")).sandbox
    await edge.close(keep=True)
    await asyncio.sleep(0.06)
    edge = await open_edge(machine, tmp_path / "state")
    await until(lambda: edge.get(info.id).state is State.ENDED)
    assert edge.get(info.id).cause is Cause.TTL
    await edge.close(keep=False)
