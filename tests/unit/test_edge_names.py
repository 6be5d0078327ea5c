"""Names, idempotency keys, batches: who gets which sandbox."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from edge_kit import Kit, spec, until

from dsec.edge.client import Created
from dsec.edge.config import EdgeConfig
from dsec.edge.kept import BatchItem
from dsec.edge.node import Edge
from dsec.errors import Conflict, CreateFailed, InvalidRequest, SandboxNotFound, Unsupported
from dsec.spec.sandbox import SandboxSpec, State


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


async def batch(edge: Edge, specs: list[SandboxSpec], **options: object) -> list[BatchItem]:
    items = [item async for item in edge.create_many(specs, project="p", **options)]  # type: ignore[arg-type]
    assert sorted(item.index for item in items) == list(range(len(specs)))
    return sorted(items, key=lambda item: item.index)


def ids(items: list[BatchItem]) -> list[str]:
    return [item.sandbox.id for item in items if item.sandbox is not None]


async def test_a_name_is_got_or_created(kit: Kit) -> None:
    async with kit.edge() as edge:
        named = spec(run="r", name="task17/3")
        kit.host.create_delay_s = 0.01
        answers: list[Created] = await asyncio.gather(*(edge.create(named, project="p") for _ in range(10)))
        assert len({answer.sandbox.id for answer in answers}) == 1
        assert [answer.existed for answer in answers].count(False) == 1
        assert len({answer.sandbox.token for answer in answers}) == 1  # who waited for the creation has its token
        later = await edge.create(named, project="p")
        assert later.existed
        assert later.sandbox.token is None
        assert edge.find_named("p", "r", "task17/3").id == later.sandbox.id
        for project, run, name in (("q", "r", "task17/3"), ("p", None, "task17/3"), ("p", "r", "other")):
            with pytest.raises(SandboxNotFound):
                edge.find_named(project, run, name)


async def test_what_the_node_lacks_is_refused_by_name(tmp_path: Path) -> None:
    kit = Kit(tmp_path, config=EdgeConfig(features=frozenset({"landlock", "kvm"})))
    async with kit.edge() as edge:
        await edge.create(spec(require_features=["landlock"]), project="p")
        wanted = spec(require_features=["zram", "kvm"], name="n")
        with pytest.raises(Unsupported, match="this node has no 'zram'") as refused:
            await edge.create(wanted, project="p", key="k")
        assert (refused.value.details["field"], refused.value.details["missing"]) == ("require_features", ["zram"])
        items = await batch(edge, [wanted, spec()])
        assert [item.error.code if item.error is not None else "" for item in items] == ["unsupported", ""]
        assert edge.node().features == ["kvm", "landlock"]


async def test_names_are_apart_by_project_and_run(kit: Kit) -> None:
    async with kit.edge() as edge:
        answers = [
            await edge.create(spec(run=run, name="n"), project=project)
            for project in ("p", "q")
            for run in (None, "a", "b")
        ]
        assert len({answer.sandbox.id for answer in answers}) == 6


async def test_another_spec_under_a_live_name_is_a_conflict_that_says_what_differs(kit: Kit) -> None:
    async with kit.edge() as edge:
        await edge.create(spec(name="n"), project="p")
        with pytest.raises(Conflict) as caught:
            await edge.create(spec(name="n", cpus=2.0, env={"A": "b"}), project="p")
        assert caught.value.details["fields"] == ["cpus", "env"]
        assert "cpus, env" in caught.value.message


async def test_a_name_is_free_again_when_its_sandbox_has_ended(kit: Kit) -> None:
    async with kit.edge() as edge:
        first = await edge.create(spec(name="n"), project="p")
        deletion = asyncio.ensure_future(edge.delete(first.sandbox.id))
        await asyncio.sleep(0)
        assert edge.get(first.sandbox.id).state is State.ENDING
        seconds = await asyncio.gather(*(edge.create(spec(name="n", cpus=2.0), project="p") for _ in range(3)))
        assert deletion.done()
        assert len({second.sandbox.id for second in seconds}) == 1
        assert seconds[0].sandbox.id != first.sandbox.id


async def test_a_shared_creation_that_fails_fails_for_all_and_frees_the_name(kit: Kit) -> None:
    async with kit.edge() as edge:
        kit.host.create_delay_s = 0.01
        kit.host.fail_next_create("mount")
        answers = await asyncio.gather(
            *(edge.create(spec(name="n"), project="p") for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(answer, CreateFailed) for answer in answers)
        assert not (await edge.create(spec(name="n"), project="p")).existed


async def test_one_of_several_callers_that_goes_away_takes_nothing_from_the_others(kit: Kit) -> None:
    async with kit.edge() as edge:
        kit.host.go_on = asyncio.Event()
        callers = [asyncio.ensure_future(edge.create(spec(name="n"), project="p")) for _ in range(3)]
        await until(lambda: edge.node().starting == 1)
        callers[0].cancel()
        kit.host.go_on.set()
        assert (await callers[1]).sandbox.id == (await callers[2]).sandbox.id


async def test_a_batch_with_an_error_per_item(kit: Kit) -> None:
    async with kit.edge() as edge:
        items = await batch(
            edge, [spec(), spec(environment="nobody"), spec(name="n"), spec(name="n"), spec(name="n", cpus=2.0)]
        )
        assert [item.error.code if item.error else None for item in items] == [
            None,
            "environment_not_found",
            None,
            None,
            "conflict",
        ]
        found = ids(items)
        assert found[1] == found[2] != found[0]
        assert len(kit.host.guests) == 2


async def test_a_batch_larger_than_what_starts_at_once(kit: Kit) -> None:
    kit.config = EdgeConfig(max_starting=3)
    async with kit.edge() as edge:
        items = await batch(edge, [spec()] * 300)
        assert len(set(ids(items))) == 300
        assert len({item.sandbox.token for item in items if item.sandbox}) == 300


async def test_batches_have_bounds(kit: Kit) -> None:
    kit.config = EdgeConfig(max_batch=5)
    async with kit.edge() as edge:
        for count in (0, 6):
            with pytest.raises(InvalidRequest):
                await batch(edge, [spec()] * count)


async def test_a_reader_that_goes_away_stops_no_batch(kit: Kit) -> None:
    async with kit.edge() as edge:
        kit.host.create_delay_s = 0.002
        items = edge.create_many([spec()] * 40, project="p")
        await anext(items)
        await items.aclose()
        await until(lambda: len(kit.host.guests) == 40 and edge.node().starting == 0)


async def test_a_keyed_batch_again_gives_the_same_sandboxes(kit: Kit) -> None:
    specs = [spec(labels={"n": str(n)}) for n in range(10)]
    async with kit.edge(keep=True) as edge:
        kit.host.create_delay_s = 0.005
        both = await asyncio.gather(batch(edge, specs, key="k"), batch(edge, specs, key="k"))
        assert ids(both[0]) == ids(both[1])
        assert len(kit.host.guests) == 10
        await edge.delete(ids(both[0])[3])
        again = await batch(edge, specs, key="k")
        assert ids(again) == ids(both[0])
        assert again[3].sandbox is not None
        assert again[3].sandbox.state is State.ENDED  # a key never makes a second one
        with pytest.raises(Conflict):
            await batch(edge, [*specs, spec()], key="k")
        other = await batch(edge, specs, key="k2")
        assert not set(ids(other)) & set(ids(again))
    async with kit.edge() as edge:
        assert ids(await batch(edge, specs, key="k")) == ids(again)
        assert len(kit.host.guests) == 19


async def test_a_keyed_creation(kit: Kit) -> None:
    async with kit.edge() as edge:
        first = await edge.create(spec(), project="p", key="k")
        second = await edge.create(spec(), project="p", key="k")
        assert second.existed
        assert second.sandbox.id == first.sandbox.id
        elsewhere = await edge.create(spec(), project="q", key="k")
        assert elsewhere.sandbox.id != first.sandbox.id
        with pytest.raises(Conflict):
            await edge.create(spec(cpus=2.0), project="p", key="k")
        for bad in ("", "x" * 201):
            with pytest.raises(InvalidRequest):
                await edge.create(spec(), project="p", key=bad)


async def test_a_key_whose_creation_was_not_admitted_makes_it_next_time(kit: Kit) -> None:
    kit.config = EdgeConfig(max_live=1)
    async with kit.edge() as edge:
        holder = await edge.create(spec(), project="p")
        items = await batch(edge, [spec()], key="k", deadline_s=0.01)
        assert items[0].error is not None
        assert items[0].error.code == "admission_timeout"
        await edge.delete(holder.sandbox.id)
        assert ids(await batch(edge, [spec()], key="k")) == list(kit.host.guests)


async def test_a_reservation_of_an_earlier_life_of_the_node_fails_fast(kit: Kit) -> None:
    kit.config = EdgeConfig(max_live=1)
    edge = await kit.open()
    await edge.create(spec(), project="p")
    await batch(edge, [spec()], key="k", deadline_s=0.01)
    await edge.close(keep=False)
    kit.host.epoch ^= 1
    async with kit.edge() as edge:
        items = await batch(edge, [spec()], key="k")
        assert items[0].error is not None
        assert items[0].error.code == "sandbox_lost"
        assert items[0].error.infra


async def test_ids_are_never_given_twice(kit: Kit) -> None:
    seen: list[str] = []
    for _ in range(3):
        async with kit.edge(keep=True) as edge:
            seen += ids(await batch(edge, [spec()] * 20))
    assert len(set(seen)) == 60
    assert seen == sorted(seen)
    async with kit.edge():
        pass


async def test_a_key_whose_creation_failed_can_be_tried_again(kit: Kit) -> None:
    async with kit.edge(keep=True) as edge:
        specs = [spec(labels={"n": str(n)}) for n in range(3)]
        kit.host.fail_next_create("mount")
        first = await batch(edge, specs, key="k")
        assert [item.error.code for item in first if item.error] == ["create_failed"]
        second, third = await asyncio.gather(batch(edge, specs, key="k"), batch(edge, specs, key="k"))
        assert len(set(ids(second))) == 3
        assert set(ids(first)) < set(ids(second)), "what was made stays"
        assert ids(third) == ids(second)
        states = (await edge.list_sandboxes("p", states=list(State))).sandboxes
        assert sorted(info.state for info in states) == [State.ENDED, *[State.RUNNING] * 3]
    async with kit.edge() as edge:
        assert ids(await batch(edge, specs, key="k")) == ids(second)
