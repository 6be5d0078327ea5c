"""The conformance suite on the backend of full machines: a real Debian that booted by UEFI, with systemd, once; every
machine here is a clone of it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dsec.app import open_full_machines, open_machines
from dsec.backends.container.host import Host
from dsec.backends.vm.backend import VmBackend
from dsec.backends.vm.instance import FullInstance
from dsec.backends.vm.node import FullNode
from dsec.configuration import Config
from dsec.edge.config import SystemClock
from dsec.testing.conformance import *  # noqa: F403
from machines_kit import KeptBackend, MachineFactory, machine_host

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("qemu-system-x86_64") is None or not Path("/usr/share/OVMF").is_dir(),
        reason="QEMU or its firmware is not installed",
    ),
]


class KeptVms(KeptBackend[FullNode, FullInstance], VmBackend):
    """For a test."""


class VmFactory(MachineFactory):
    """Its disk is as large as its image at least: tests/e2e has one that is full."""

    crowd = 2
    usual: ClassVar[dict[str, Any]] = {"disk_bytes": 1 << 30}

    def __init__(self, config: Config, host: Host, templates: Path, disk: str) -> None:
        super().__init__(config, host, templates)
        self.environment = disk

    def new(self) -> KeptVms:
        return KeptVms(self.node(), SystemClock())

    def node(self) -> FullNode:
        """The parts of a backend."""
        beside = open_machines(self.config, self.host)
        assert beside is not None
        return open_full_machines(self.config, self.host, beside, self.templates)


@pytest.fixture(scope="module")
def factory(
    debian_module_state: Path, full_templates: Path, vm_disk: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VmFactory]:
    run = tmp_path_factory.mktemp("machines") / f"run-{os.getpid()}"  # its name is its cgroups'
    with machine_host(debian_module_state, run) as (config, host):
        made = VmFactory(config, host, full_templates, vm_disk)
        yield made
        asyncio.run(end_all(made))


async def end_all(factory: VmFactory) -> None:
    """The launcher, and what it holds."""
    backend = VmBackend(factory.node(), SystemClock())
    await backend.open({})
    await backend.close(keep=False)
    assert not list(factory.host.run.glob("full*"))
    assert not list((factory.host.volume.root / "full").glob("*"))
