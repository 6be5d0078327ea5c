"""Many callers at once, random faults, an edge that dies now and then: from a seed. What holds at any time holds at
the end."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest
from edge_double import KINDS, NOT_NOW, Machine, abandon, count_journal_steps, open_edge
from edge_kit import spec, until

from dsec.edge.node import Edge
from dsec.errors import DsecError
from dsec.ports import InstanceEnd
from dsec.spec.causes import Cause
from dsec.spec.sandbox import State

CALLERS = 12
CALLS = 25


class Model:
    """What the callers may rely on."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.doomed: set[str] = set()
        """Those whose end was asked for, or happened: an edge that died at once may not have heard of it."""
        self.ended: set[str] = set()
        """Those whose end was confirmed."""


async def caller(edge: Edge, machine: Machine, model: Model, rng: random.Random) -> None:
    for _ in range(CALLS):
        await asyncio.sleep(0)
        mine = sorted(model.running - model.doomed)
        choice = rng.random()
        try:
            if choice < 0.35 or not mine:
                created = await edge.create(spec(), project="p")
                model.running.add(created.sandbox.id)
            elif choice < 0.5:
                created = await edge.create(spec(name=f"n{rng.randrange(3)}"), project="p")
                model.running.add(created.sandbox.id)
            elif choice < 0.6:
                async for item in edge.create_many([spec()] * 3, project="p", key=f"k{rng.randrange(3)}"):
                    if item.sandbox is not None and item.sandbox.state is State.RUNNING:
                        model.running.add(item.sandbox.id)
            elif choice < 0.8:
                victim = rng.choice(mine)
                model.doomed.add(victim)
                await edge.delete(victim)
                model.ended.add(victim)
            elif choice < 0.87:
                victim = rng.choice(mine)
                instance = machine.instances.get(victim)
                if instance is not None and not instance.end.done():
                    model.doomed.add(victim)
                    instance.end.set_result(InstanceEnd(Cause.GUEST_EXITED, "died"))
            elif choice < 0.93:
                await edge.renew(rng.choice(mine), 1000.0)
            else:
                leaver = asyncio.ensure_future(edge.create(spec(), project="p"))
                await asyncio.sleep(0)
                leaver.cancel()
        except DsecError:
            continue


async def verify(edge: Edge, machine: Machine, model: Model) -> None:
    def calm() -> bool:
        node = edge.node()
        return not (node.starting or node.queued or node.ending)

    await until(calm)
    live = (await edge.list_sandboxes("p", limit=1000)).sandboxes
    running = {info.id for info in live}
    assert all(info.state is State.RUNNING for info in live)
    assert machine.owners() == running
    assert all(machine.of(sandbox_id) == set(KINDS) for sandbox_id in running)
    assert model.running - model.doomed <= running
    assert edge.node().live == len(running)
    names = [info.spec.name for info in live if info.spec.name]
    assert len(set(names)) == len(names)
    assert len(set(machine.made)) == len(machine.made)
    assert not model.ended & running
    for sandbox_id in model.doomed - running:
        assert edge.get(sandbox_id).cause in (Cause.DELETED, Cause.GUEST_EXITED)
    model.doomed -= running  # the edge died before it had begun


@pytest.mark.parametrize("seed", range(12))
async def test_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine()
    count_journal_steps(monkeypatch, machine)
    model = Model()
    state = tmp_path / "0"
    for life in range(3):
        edge = await open_edge(machine, state)
        await verify(edge, machine, model)
        machine.killed.clear()
        machine.kill_at = len(machine.steps) + rng.randrange(50, 800) if life < 2 else None
        machine.fail_at = len(machine.steps) + rng.randrange(1, 300)
        callers = [
            asyncio.ensure_future(caller(edge, machine, model, random.Random(rng.random()))) for _ in range(CALLERS)
        ]
        killed = asyncio.ensure_future(machine.killed.wait())
        at_work = asyncio.gather(*callers, return_exceptions=True)
        await asyncio.wait([at_work, killed], return_when=asyncio.FIRST_COMPLETED)
        died = machine.killed.is_set()
        machine.kill_at = None
        if died:
            state = tmp_path / str(life + 1)
            shutil.copytree(tmp_path / str(life), state, ignore=NOT_NOW)
        for task in (*callers, killed):
            task.cancel()
        assert not [result for result in await at_work if isinstance(result, Exception)]
        await asyncio.gather(killed, return_exceptions=True)
        if died:
            await abandon(edge)
            continue
        await verify(edge, machine, model)
        await edge.close(keep=life < 2)
        if life < 2:
            state = tmp_path / str(life + 1)
            shutil.copytree(tmp_path / str(life), state, ignore=NOT_NOW)
    if not died:
        assert machine.resources == set()
