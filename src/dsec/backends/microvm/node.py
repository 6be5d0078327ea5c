"""What microVMs of one node stand on: the driver, the launcher, templates, spare clones.

`<run>/vm.epoch` holds the number that goes into sandbox ids: it changes when the launcher, and with it every machine,
is lost. The launcher is started when the first machine is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from dsec.backends.microvm.spares import Spares
from dsec.backends.microvm.templates import Template, Templates
from dsec.errors import Unavailable
from dsec.kernel.cgroup_pool import CgroupPool
from dsec.kernel.cgroups import CgroupRoot
from dsec.store.environments import EnvironmentStore
from dsec.store.kernels import KernelStore
from dsec.store.remote import RemoteCatalog
from dsec.store.volume import Volume
from dsec.vmm.disks import Disks
from dsec.vmm.driver import Shape, Start, VmmDriver
from dsec.vmm.launching import LauncherClient, LauncherState, start_launcher
from dsec.vmm.machine import Machine, Machines

log = logging.getLogger(__name__)

_NOBODY = LauncherState(0, {}, {}, frozenset())


class VmHost(Struct, frozen=True, kw_only=True):
    """Parts of the host that other backends stand on too. They are opened before and closed after this one."""

    state: Path
    run: Path
    volume: Volume
    environments: EnvironmentStore
    remote: RemoteCatalog | None
    make_swap: Callable[[], None]
    build_guest: Callable[[], Path]
    """The compiled guest; blocks while it is compiled first."""


class VmNode:
    """Owns everything of this backend's that isn't one sandbox's."""

    def __init__(
        self,
        host: VmHost,
        driver: VmmDriver,
        cgroups: CgroupRoot,
        *,
        accel_reason: str = "",
        spare: int = 0,
        templates: Path | None = None,
    ) -> None:
        """`accel_reason`: why the driver's accelerator is what it is. `spare`: clones to have ready of a kind that is
        in use. `templates`: where they are kept (default: below the state)."""
        self.host = host
        self.driver = driver
        self.accel_reason = accel_reason
        self.kernels = KernelStore(host.state)
        self.pool = CgroupPool(cgroups, spare=8, refill=1)
        self.disks = Disks(host.volume.root / "vm")
        self.machines = Machines(host.run, driver, self.disks, self.pool, host.environments.layers)
        self.spares = Spares(self.machines, self.clone, each=spare)
        self.epoch = 0
        self._templates_root = templates or host.state / "vm" / "templates"
        self._templates: Templates | None = None
        self._socket = host.run / "vmm.sock"
        self._starting = asyncio.Lock()
        self._on_lost: Callable[[], None] = lambda: None

    @property
    def templates(self) -> Templates:
        """After `open`."""
        assert self._templates is not None
        return self._templates

    async def open(self, on_lost: Callable[[], None]) -> tuple[LauncherState, bool]:
        """What the launcher of an earlier server says, and whether it is there no more. `on_lost()`: the launcher died,
        and all machines with it."""
        self._on_lost = on_lost
        self.machines.root.mkdir(mode=0o700, exist_ok=True)
        guest = await asyncio.to_thread(self.host.build_guest)
        self._templates = Templates(
            self._templates_root, self.machines, self.kernels, self.host.environments.layers, guest
        )
        state, fresh = _NOBODY, True
        client = LauncherClient(on_exit=self.machines.on_exit, on_lost=self._lost)
        with contextlib.suppress(Unavailable):
            state, fresh = await client.connect(self._socket), False
            self.machines.launcher = client
        self._set_epoch(renew=fresh)
        return state, fresh

    async def serving(self) -> None:
        """See to it that there is a launcher. Raises `Unavailable`."""
        if self.machines.launcher is not None:
            return
        async with self._starting:
            if self.machines.launcher is not None:
                return
            await start_launcher(self._socket, self.driver.paths, unit=f"dsec-vmm-{self.host.run.name}")
            client = LauncherClient(on_exit=self.machines.on_exit, on_lost=self._lost)
            await client.connect(self._socket)
            self.machines.launcher = client
            await self.templates.hold_all()

    async def clone(self, name: str, reservation: str, shape: Shape, cpus: float) -> Machine:
        """A machine that waits to become somebody. `Machines.end` removes what it made, also where this fails. Raises
        `CreateFailed`, `Unavailable`, `Unsupported` without a kernel, OSError."""
        await self.serving()
        return await self.go_on(name, reservation, shape, cpus, await self.templates.get(shape))

    async def go_on(
        self, name: str, reservation: str, shape: Shape, cpus: float, template: Template, *, devices_only: bool = False
    ) -> Machine:
        """The same of a template that is at hand. `devices_only`: as in `Start`."""
        state = template.open_state()
        try:
            machine = await self.machines.start(
                name,
                reservation,
                self.machines.group_shape(shape.memory_bytes, cpus),
                disk=lambda: self.disks.copy(name, template.disk),
                disk_bytes=shape.disk_bytes,
                layers=shape.layers,
                make=lambda channel, control, disk, layers: Start(
                    shape=shape,
                    machine=template.machine,
                    channel=channel,
                    control=control,
                    memory=template.memory,
                    disk=disk,
                    layers=layers,
                    state=state,
                    devices_only=devices_only,
                ),
            )
        finally:
            os.close(state)
        try:
            await machine.control.restored()
        except BaseException:
            machine.control.close()
            raise
        return machine

    async def close(self, *, keep: bool) -> None:
        """`keep`: machines and templates go on for the next server."""
        await self.spares.close(keep=keep)
        if self._templates is not None:
            await self._templates.close()
        launcher, self.machines.launcher = self.machines.launcher, None
        if launcher is not None and keep:
            launcher.close()
        elif launcher is not None:
            with contextlib.suppress(Unavailable):
                await launcher.shutdown()
        await asyncio.to_thread(self.pool.close, keep=keep)
        if not keep:
            self.disks.remove_all()
            shutil.rmtree(self.machines.root, ignore_errors=True)
            for path in (self._socket, self._epoch_path):
                path.unlink(missing_ok=True)

    @property
    def _epoch_path(self) -> Path:
        return self.host.run / "vm.epoch"

    def _set_epoch(self, *, renew: bool) -> None:
        if not renew:
            with contextlib.suppress(OSError, ValueError):
                self.epoch = int(self._epoch_path.read_text()) & 0xFFFFFF
                return
        self.epoch = secrets.randbelow(0xFFFFFF) + 1
        self._epoch_path.write_text(str(self.epoch))

    def _lost(self) -> None:
        log.error("the launcher of virtual machines died, and with it all machines")
        self.machines.launcher = None
        self._set_epoch(renew=True)
        self.machines.lose_all()
        self.spares.drop_all()
        self._on_lost()
