"""Forks where the CPU is imitated: what of the guest's code stays translated in children, and what must not."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from microvm_node_kit import Node, needs, node_on

from dsec.backends.container.host import Host
from dsec.configuration import Config
from dsec.testing.conformance.kit import ok, shell
from dsec.vmm.instance import MachineInstance
from dsec.vmm.qemu import QemuControl
from machines_kit import machine_host

pytestmark = needs

SLEEPS = "for i in 1 2 3; do sleep 0.01; done; sed -n 's/^nr_wakeups .*: *//p' /proc/$$/sched"
"""How often a shell was woken, where the kernel counts that."""


@pytest.fixture(scope="module")
def place(
    debian_module_state: Path, vm_templates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Config, Host]]:
    with machine_host(debian_module_state, tmp_path_factory.mktemp("forks") / f"run-{os.getpid()}") as host:
        yield host


@pytest.fixture
async def node(place: tuple[Config, Host]) -> AsyncIterator[Node]:
    async with node_on(*place) as node:
        yield node


async def test_code_that_changed_since_is_translated_anew(node: Node) -> None:
    """A switch of the kernel's that is an instruction in code which every machine runs (`static_branch`)."""
    one = await node.make("one")
    assert ok(await shell(one.channel, SLEEPS)) == b""
    assert int(ok(await shell(one.channel, f"echo 1 > /proc/sys/kernel/sched_schedstats; {SLEEPS}"))) >= 3
    moment = await node.backend.split("one", node.handles["one"])
    child = await node.make("child", capture=moment)
    assert int(ok(await shell(child.channel, SLEEPS))) >= 3


async def test_what_is_translated_stays_so(node: Node) -> None:
    one = await node.make("one")
    ok(await shell(one.channel, "true"))
    moment = await node.backend.split("one", node.handles["one"])
    child = await node.make("child", capture=moment)
    ok(await shell(child.channel, "true"))
    assert await thrown_away(child) == await thrown_away(one)


async def test_with_another_qemu_all_is_translated_anew(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of which nobody knows whether it can read a second state."""
    monkeypatch.setattr(node.backend.node.stems, "_reload", False)
    one = await node.make("one")
    ok(await shell(one.channel, "echo of one > /dev/shm/words"))
    moment = await node.backend.split("one", node.handles["one"])
    child = await node.make("child", capture=moment)
    assert ok(await shell(child.channel, "cat /dev/shm/words")) == b"of one\n"
    assert {stem.state is None for stem in node.backend.node.stems._stems.values()} == {True, False}


async def thrown_away(machine: MachineInstance) -> str:
    """How often all translated code was."""
    control = machine.machine.control
    assert isinstance(control, QemuControl)
    said = await control.command("human-monitor-command", **{"command-line": "info jit"})
    return next(line for line in said.splitlines() if line.startswith("TB flush count"))
