"""The conformance suite on the backend of full machines: a real Debian that booted by UEFI, with systemd, once; every
machine here is a clone of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.register_assert_rewrite("dsec.testing.conformance")

from dsec.app import open_full_machines, open_host, open_machines  # noqa: E402
from dsec.backends.container.host import Host  # noqa: E402
from dsec.backends.vm.backend import VmBackend  # noqa: E402
from dsec.backends.vm.instance import FullInstance  # noqa: E402
from dsec.backends.vm.node import FullNode  # noqa: E402
from dsec.configuration import Config  # noqa: E402
from dsec.edge.config import SystemClock  # noqa: E402
from dsec.ports import Backend, Handle, InstanceEnd  # noqa: E402
from dsec.spec.sandbox import SandboxSpec  # noqa: E402
from dsec.store.views import remove_dev  # noqa: E402
from dsec.testing.conformance import *  # noqa: E402, F403
from dsec.testing.conformance.kit import Feature  # noqa: E402

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("qemu-system-x86_64") is None or not Path("/usr/share/OVMF").is_dir(),
        reason="QEMU or its firmware is not installed",
    ),
]


class KeptBackend(VmBackend):
    """What a test ends is ended; launcher and templates stay for the next one."""

    handles: dict[str, Handle]

    async def open(self, known: dict[str, Handle]) -> Mapping[str, FullInstance | InstanceEnd]:
        self.handles = dict(known)
        return await super().open(known)

    def reserve(self, sandbox_id: str, spec: SandboxSpec, tenant: int = 0, capture: str = "") -> Handle:
        handle = self.handles[sandbox_id] = super().reserve(sandbox_id, spec, tenant, capture)
        return handle

    async def close(self, *, keep: bool) -> None:
        for sandbox_id, handle in () if keep else self.handles.items():
            await self.destroy(sandbox_id, handle)
        await super().close(keep=True)


class VmFactory:
    features = Feature.LOCAL | {Feature.PROCESSES, Feature.KILL_GUEST, Feature.FAIL_CREATE}
    """Its disk is as large as its image at least: tests/e2e has one that is full."""
    crowd = 2
    usual: ClassVar[dict[str, Any]] = {"disk_bytes": 1 << 30}

    def __init__(self, config: Config, host: Host, templates: Path, disk: str) -> None:
        self.config = config
        self.host = host
        self.templates = templates
        self.environment = disk
        self.backend: VmBackend | None = None

    def make(self) -> Backend:
        self.backend = KeptBackend(self.node(), SystemClock())
        return self.backend

    def node(self) -> FullNode:
        """The parts of a backend."""
        beside = open_machines(self.config, self.host)
        assert beside is not None
        return open_full_machines(self.config, self.host, beside, self.templates)

    async def kill_guest(self, sandbox_id: str) -> None:
        assert self.backend is not None
        os.kill(self.backend.pid(sandbox_id), signal.SIGKILL)

    def fail_next_create(self) -> None:
        """Its disk is there already: a leftover that nobody knows of."""
        assert self.backend is not None
        disks = self.backend.node.disks
        copy = disks.copy

        def fail(name: str, source: Path) -> int:
            if name.startswith("s"):  # a stem's: without one machines are plain clones
                return copy(name, source)
            disks.copy = copy  # type: ignore[method-assign]
            os.close(copy(name, source))
            return copy(name, source)

        disks.copy = fail  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def factory(
    debian_module_state: Path, full_templates: Path, vm_disk: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VmFactory]:
    run = tmp_path_factory.mktemp("machines") / f"run-{os.getpid()}"  # its name is its cgroups'
    config = Config(state=debian_module_state, run=run, vm_accel="tcg", vm_spare=0)
    host = open_host(config)
    made = VmFactory(config, host, full_templates, vm_disk)
    try:
        yield made
        asyncio.run(end_all(made))
    finally:
        host.volume.close(keep=False)
        host.layers.unmount_all()
        host.views.remove()
        remove_dev(host.run)


async def end_all(factory: VmFactory) -> None:
    """The launcher, and what it holds."""
    backend = VmBackend(factory.node(), SystemClock())
    await backend.open({})
    await backend.close(keep=False)
    assert not list(factory.host.run.glob("full*"))
    assert not list((factory.host.volume.root / "full").glob("*"))
