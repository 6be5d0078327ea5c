"""The conformance suite on the microVM backend: a real QEMU, a real kernel, clones of one template."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.app import open_machines
from dsec.backends.container.host import Host
from dsec.backends.microvm.backend import MicroVmBackend
from dsec.backends.microvm.node import VmNode
from dsec.edge.config import SystemClock
from dsec.testing.conformance import *  # noqa: F403
from dsec.testing.conformance.kit import Feature
from dsec.vmm.instance import MachineInstance
from machines_kit import KeptBackend, MachineFactory, machine_host

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed"),
]


class KeptMicroVms(KeptBackend[VmNode, MachineInstance], MicroVmBackend):
    """For a test."""


class MicroVmFactory(MachineFactory):
    features = MachineFactory.features | {Feature.DISK_LIMIT}
    environment = "debian"
    crowd = 5

    def new(self) -> KeptMicroVms:
        return KeptMicroVms(self.node(), SystemClock())

    def node(self) -> VmNode:
        """The parts of a backend."""
        node = open_machines(self.config, self.host, self.templates)
        assert node is not None
        return node


@pytest.fixture(scope="module")
def factory(
    debian_module_state: Path, vm_templates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MicroVmFactory]:
    run = tmp_path_factory.mktemp("machines") / f"run-{os.getpid()}"  # its name is its cgroups'
    with machine_host(debian_module_state, run) as (config, host):
        made = MicroVmFactory(config, host, vm_templates)
        yield made
        asyncio.run(end_all(made))


async def end_all(factory: MicroVmFactory) -> None:
    """The launcher, and what it holds."""
    backend = MicroVmBackend(factory.node(), SystemClock())
    await backend.open({})
    await backend.close(keep=False)
    assert not list(host_files(factory.host))


def host_files(host: Host) -> Iterator[Path]:
    """What machines leave where they shouldn't."""
    yield from host.run.glob("vm*")
    yield from (host.volume.root / "vm").glob("*")
