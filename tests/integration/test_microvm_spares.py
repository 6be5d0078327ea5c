"""What machines begin from ends by itself, as by the OOM killer: spare ones and stems. No creation fails by it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from microvm_node_kit import PATIENCE_S, SPEC, Node, needs, node_on
from msgspec.structs import replace

from dsec.backends.container.host import Host
from dsec.configuration import Config
from dsec.errors import CreateFailed
from dsec.kernel.paging import pids_in
from dsec.testing.conformance.kit import ok, shell
from dsec.vmm.instance import MachineInstance
from machines_kit import machine_host

pytestmark = needs


@pytest.fixture(scope="module")
def place(
    debian_module_state: Path, vm_templates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Config, Host, Path]]:
    run = tmp_path_factory.mktemp("spares") / f"run-{os.getpid()}"
    with machine_host(debian_module_state, run, spare=2) as host:
        yield *host, vm_templates


@pytest.fixture
async def node(place: tuple[Config, Host, Path]) -> AsyncIterator[Node]:
    async with node_on(*place) as node:
        await node.make()
        yield node


async def alive(instance: MachineInstance) -> None:
    assert ok(await shell(instance.channel, "echo alive")) == b"alive\n"


WHO = "cat /proc/sys/kernel/random/boot_id /etc/machine-id; head -c 16 /dev/urandom | od -An -tx1; hostname; date +%s"
LIMITS = "cat /sys/fs/cgroup/dsec/pids.max; grep NoNewPrivs /proc/self/status"


async def test_a_spare_one_becomes_who_is_asked_for(node: Node) -> None:
    await node.filled()
    spec = replace(SPEC, pids=17, no_new_privs=True, hostname="asked-for")
    found = []
    for each in (spec, SPEC):
        name = node.reserve(spec=each)
        instance = await node.create(name)
        assert not instance.channel.operations()
        found.append(ok(await shell(instance.channel, WHO)).decode().splitlines())
        inside = ok(await shell(instance.channel, LIMITS))
        assert inside.decode().split() == [str(each.pids), "NoNewPrivs:", str(int(each.no_new_privs))]
        assert found[-1][3] == (each.hostname or name)
        assert abs(int(found[-1][4]) - time.time()) < PATIENCE_S
    assert not set(found[0][:3]) & set(found[1][:3])


async def test_a_commands_group_is_there_for_the_next(node: Node) -> None:
    instance = await node.make()
    first = ok(await shell(instance.channel, "cat /proc/self/cgroup"))
    await asyncio.sleep(0.5)  # for longer than groups are kept that are too many
    assert ok(await shell(instance.channel, "cat /proc/self/cgroup")) == first


async def test_spare_ones_are_killed_while_they_wait(node: Node) -> None:
    for pid in await node.filled():
        os.kill(pid, signal.SIGKILL)
    one, two = await asyncio.gather(node.make(), node.make())  # nobody has heard of their ends yet
    await alive(one)
    await alive(two)
    killed = await node.filled()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while set(killed) & set(node.ready()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await alive(await node.make())


async def test_a_spare_one_is_killed_when_it_is_claimed(node: Node) -> None:
    pids = await node.filled()
    name = node.reserve()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await alive(await node.create(name))


async def test_a_spare_one_is_killed_while_it_becomes_somebody(node: Node) -> None:
    """It may also be done by then: then it is a machine that ends."""
    for after_ms in (0.0, 0.5, 1.5, 3.0, 5.0, 8.0):
        pids = await node.filled()
        name = node.reserve()
        creating = asyncio.ensure_future(node.create(name))
        await asyncio.sleep(after_ms / 1e3)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        instance = await creating
        if instance.machine.pid not in pids:
            await alive(instance)


async def test_a_stem_is_killed(node: Node) -> None:
    parent = next(iter(node.handles))
    await node.filled()
    node.backend.node.spares.drop_all()
    for pid in node.stems():
        os.kill(pid, signal.SIGKILL)
    await alive(await node.make())
    moment = await node.backend.split(parent, node.handles[parent])
    try:
        await alive(await node.make(capture=moment))
        for pid in node.stems():
            os.kill(pid, signal.SIGKILL)
        await alive(await node.make(capture=moment))
    finally:
        await node.backend.drop(moment)


async def test_one_that_was_made_for_it_is_killed(node: Node) -> None:
    """That is its own end, and it isn't tried again."""
    await node.filled()
    node.backend.node.spares.drop_all()
    name, vm = node.reserve(), node.backend.node
    handle = node.handles[name]
    creating = asyncio.ensure_future(node.create(name))
    pids: list[int] = []
    while not pids and not creating.done():
        await asyncio.sleep(0)
        slot = vm.pool.find(handle["slot"], handle["vm"])
        pids = pids_in(slot) if slot is not None and vm.machines._exits.get(handle["vm"]) else []
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(CreateFailed, match="signal 9"):
        await creating
