"""Sandboxes: made, isolated, counted, adopted, ended, gone."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from dsec.channel import files
from dsec.errors import CreateFailed, EnvironmentNotFound, OutcomeUnknown, Unsupported
from dsec.ports import Backend, InstanceEnd
from dsec.spec.causes import Cause
from dsec.testing.conformance.kit import (
    PATIENCE_S,
    Factory,
    Feature,
    Sandboxes,
    collect,
    needs,
    ok,
    request,
    run,
    until,
)

KILLED_FROM_OUTSIDE = {Cause.GUEST_EXITED, Cause.PLATFORM_KILLED}
"""A backend that can tell says that it was no doing of the sandbox's."""


class TestLifecycle:
    """`ports.Backend` and `ports.Instance`."""

    def test_what_it_says_of_itself(self, backend: Backend) -> None:
        assert backend.api_version == 1
        assert backend.name
        assert 0 < backend.epoch < 1 << 24

    async def test_an_environment_that_is_not_there(self, sandboxes: Sandboxes) -> None:
        await sandboxes.refuses(EnvironmentNotFound, environment="no-such-environment")

    async def test_what_is_not_built_is_refused(self, sandboxes: Sandboxes) -> None:
        await sandboxes.refuses(Unsupported, gpus=1)

    @pytest.mark.parametrize("name", ["latency", "batch"])
    async def test_a_class_of_cpus(self, sandboxes: Sandboxes, name: Literal["latency", "batch"]) -> None:
        instance = await sandboxes.create(cpu_class=name)
        assert ok(await run(instance.channel, "true")) == b""

    async def test_reserving_makes_nothing_and_can_be_destroyed(self, sandboxes: Sandboxes) -> None:
        handle = sandboxes.backend.reserve("reservedonly", sandboxes.spec())
        await sandboxes.backend.destroy("reservedonly", handle)

    async def test_destroy_is_idempotent(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.create()
        handle = sandboxes.handles[instance.sandbox_id]
        await sandboxes.backend.destroy(instance.sandbox_id, handle)
        await sandboxes.backend.destroy(instance.sandbox_id, handle)

    async def test_destroy_ends_what_runs(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.create()
        operation = await instance.channel.start(request("sleep", "1000"))
        await operation.started()
        reader = asyncio.create_task(collect(operation))
        await sandboxes.destroy(instance.sandbox_id)
        done, _ = await asyncio.wait([reader], timeout=PATIENCE_S)
        assert done
        assert reader.exception() is not None or reader.result().end is not None

    async def test_a_creation_that_fails_leaves_nothing_and_says_where(
        self, sandboxes: Sandboxes, factory: Factory
    ) -> None:
        needs(factory, Feature.FAIL_CREATE)
        factory.fail_next_create()
        with pytest.raises(CreateFailed):
            await sandboxes.create()
        (failed,) = sandboxes.handles
        await sandboxes.next_edge()
        assert failed not in sandboxes.instances
        assert ok(await run((await sandboxes.create()).channel, "true")) == b""

    async def test_a_creation_that_is_cancelled_can_be_destroyed(self, sandboxes: Sandboxes) -> None:
        creation = asyncio.create_task(sandboxes.create())
        await asyncio.sleep(0)
        creation.cancel()
        await asyncio.wait([creation])
        for sandbox_id in list(sandboxes.handles):
            await sandboxes.destroy(sandbox_id)
        await sandboxes.next_edge()
        assert sandboxes.instances == {}

    async def test_it_ends_by_itself_with_a_cause(self, sandboxes: Sandboxes, factory: Factory) -> None:
        needs(factory, Feature.KILL_GUEST)
        instance = await sandboxes.create()
        ended = [asyncio.ensure_future(instance.ended()) for _ in range(2)]
        operation = await instance.channel.start(request("sleep", "1000"))
        await operation.started()
        await factory.kill_guest(instance.sandbox_id)
        for end in await asyncio.wait_for(asyncio.gather(*ended), PATIENCE_S):
            assert end.cause in KILLED_FROM_OUTSIDE
        with pytest.raises(OutcomeUnknown):
            await collect(operation)
        with pytest.raises(OutcomeUnknown):
            await instance.channel.start(request("true"))
        assert (await instance.ended()).cause in KILLED_FROM_OUTSIDE

    async def test_waiting_for_an_end_can_be_given_up(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.create()
        waiting = asyncio.ensure_future(instance.ended())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not asyncio.ensure_future(instance.ended()).done()

    async def test_a_crowd_that_comes_at_once_is_apart(self, sandboxes: Sandboxes) -> None:
        instances = await asyncio.gather(*(sandboxes.create() for _ in range(sandboxes.crowd)))

        async def mark(number: int) -> None:
            channel = instances[number].channel

            async def content() -> Any:
                yield b"marker %d" % number

            await files.write_file(channel, "/tmp/marker", content())
            await files.write_file(channel, f"/tmp/only-{number}", content())

        await asyncio.gather(*(mark(number) for number in range(sandboxes.crowd)))
        for number, instance in enumerate(instances):
            assert ok(await run(instance.channel, "cat", "/tmp/marker")) == b"marker %d" % number
            names = {entry.name for entry in await files.list_dir(instance.channel, "/tmp")}
            assert {name for name in names if name.startswith("only-")} == {f"only-{number}"}

    async def test_the_environment_is_not_written_to(self, sandboxes: Sandboxes) -> None:
        first = await sandboxes.create()
        await files.remove(first.channel, "/etc/passwd")
        second = await sandboxes.create()
        assert ok(await run(second.channel, "cat", "/etc/passwd")).startswith(b"root:")

    async def test_counters(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.create()
        before = instance.usage()
        assert before.disk_limit_bytes > 0

        async def content() -> Any:
            yield bytes(5 << 20)

        await files.write_file(instance.channel, "/tmp/f", content())
        await run(instance.channel, "true")
        assert instance.usage().cpu_us >= before.cpu_us
        assert instance.usage().pids >= 1


class TestAdoption:
    """Sandboxes outlive the edge."""

    async def test_a_new_edge_finds_them_with_their_files_and_commands(self, sandboxes: Sandboxes) -> None:
        instances = [await sandboxes.create() for _ in range(3)]
        epoch = sandboxes.backend.epoch
        for number, instance in enumerate(instances):
            script = f"echo {number}; sleep 0.5; echo end"
            operation = await instance.channel.start(request("sh", "-c", script, key=b"k"))
            await operation.started()  # else the edge may be gone before the request was taken: then it never ran
        await sandboxes.next_edge()
        assert sandboxes.backend.epoch == epoch
        assert set(sandboxes.instances) == {instance.sandbox_id for instance in instances}
        for number, instance in enumerate(instances):
            again = sandboxes.channel(instance).find(b"k")
            assert again is not None
            assert ok(await collect(again)) == b"%d\nend\n" % number

    async def test_a_result_waits_through_two_edges(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.create()
        operation = await instance.channel.start(request("sh", "-c", "seq 1 100000; exit 9", key=b"k"))
        await until(lambda: operation.end is not None)
        for _ in range(2):
            await sandboxes.next_edge()
            again = sandboxes.channel(instance).find(b"k")
            assert again is not None
            outcome = await collect(again)
            assert (outcome.end.code, len(outcome.out)) == (9, 588_895)

    async def test_what_is_not_on_record_is_removed(self, sandboxes: Sandboxes) -> None:
        kept, forgotten = await sandboxes.create(), await sandboxes.create()
        await sandboxes.next_edge(forget=forgotten.sandbox_id)
        assert set(sandboxes.instances) == {kept.sandbox_id}
        await sandboxes.next_edge()
        assert ok(await run(sandboxes.channel(kept), "echo", "here")) == b"here\n"

    async def test_what_died_meanwhile_is_not_returned(self, sandboxes: Sandboxes, factory: Factory) -> None:
        needs(factory, Feature.KILL_GUEST)
        alive, dead = await sandboxes.create(), await sandboxes.create()
        await factory.kill_guest(dead.sandbox_id)
        await sandboxes.next_edge()
        assert set(sandboxes.instances) == {alive.sandbox_id}
        assert all(end.cause in KILLED_FROM_OUTSIDE for end in sandboxes.ends.values())
        await sandboxes.destroy(dead.sandbox_id)

    async def test_an_adopted_one_ends_with_its_cause(self, sandboxes: Sandboxes, factory: Factory) -> None:
        needs(factory, Feature.KILL_GUEST)
        instance = await sandboxes.create()
        await sandboxes.next_edge()
        ended = asyncio.ensure_future(sandboxes.instances[instance.sandbox_id].ended())
        await factory.kill_guest(instance.sandbox_id)
        assert (await asyncio.wait_for(ended, PATIENCE_S)).cause in KILLED_FROM_OUTSIDE

    async def test_an_adopted_one_can_be_destroyed(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.create()
        await sandboxes.next_edge()
        await sandboxes.destroy(instance.sandbox_id)
        await sandboxes.next_edge()
        assert sandboxes.instances == {}

    async def test_closing_for_good_leaves_nothing(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.create()
        handle = sandboxes.handles[instance.sandbox_id]
        await sandboxes.backend.close(keep=False)
        sandboxes.backend = sandboxes.factory.make()
        found = await sandboxes.backend.open({instance.sandbox_id: handle})
        assert all(isinstance(each, InstanceEnd) for each in found.values())
