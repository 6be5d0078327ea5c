"""The node's part of the backend: kernels, templates and spare machines, beside what `MachineNode` owns."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dsec.backends.microvm.spares import Spares
from dsec.backends.microvm.templates import Templates
from dsec.errors import CreateFailed, Unavailable
from dsec.kernel.cgroups import CgroupRoot, Slot
from dsec.kernel.cgroups import Shape as GroupShape
from dsec.store.kernels import Kernel, KernelStore
from dsec.vmm.driver import Shape, Start, VmmDriver
from dsec.vmm.first_words import Identity, configure, new_token, settle_in
from dsec.vmm.launching import LauncherState
from dsec.vmm.machine import Machine, StartLost, restored
from dsec.vmm.moments import Moment
from dsec.vmm.node import MachineNode, VmHost
from dsec.vmm.qemu import QemuDriver
from dsec.vmm.stems import REHEARSAL_S, STEM, StartStem, Stem, Stems
from dsec.vmm.template_cache import Template

_WRITE = os.O_RDWR | os.O_CLOEXEC
SPARE_SETTLE_S = 0.02
"""After what a spare machine has done: its kernel comes to rest."""


class VmNode(MachineNode):
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
        """`spare`: clones to have ready of a kind that is in use. `templates`: where they are kept (default: below the
        state). The others as `MachineNode`."""
        super().__init__("vm", host, driver, cgroups, accel_reason=accel_reason)
        self.kernels = KernelStore(host.state)
        self.spares = Spares(self.machines, self._spare, each=spare)
        self.stems = Stems(
            self.machines,
            wanted=driver.name == "qemu" and driver.accel == "tcg",
            reload=isinstance(driver, QemuDriver) and driver.reloads,
        )
        self._templates_root = templates or host.state / "vm" / "templates"
        self._templates: Templates | None = None

    @property
    def templates(self) -> Templates:
        """After `open`."""
        assert self._templates is not None
        return self._templates

    async def open(self, on_lost: Callable[[], None]) -> tuple[LauncherState, bool]:
        """As `connect`."""
        guest = await asyncio.to_thread(self.host.build_guest)
        self._templates = Templates(
            self._templates_root, self.machines, self.kernels, self.host.environments.layers, guest
        )
        return await self.connect(on_lost)

    def kernel(self) -> Kernel:
        """What machines boot with. Raises `Unsupported` where there is none."""
        return self.kernels.best(built=self.driver.built_kernel)

    async def launcher_started(self) -> None:
        await self.templates.hold_all()

    def launcher_lost(self) -> None:
        self.spares.drop_all()
        self.stems.drop_all()

    def let_go(self, layer: str) -> None:
        """Its files may go: machines that are nobody's yet, and have them open, end."""
        self.spares.let_go(layer)
        self.stems.let_go(layer)

    async def clone(self, name: str, reservation: str, shape: Shape, cpus: float) -> Machine:
        """A machine that waits to become somebody. `Machines.end` removes what it made, also where this fails. Raises
        `CreateFailed`, `Unavailable`, `Unsupported` without a kernel, OSError."""
        await self.serving()
        template = await self.templates.of(shape)
        stem = await self.stems.get(template, *self._stem(shape, template))
        if stem is not None:
            groups = self.machines.group_shape(shape.memory_bytes, cpus)
            return await self.stems.branch(stem, name, reservation, groups)
        try:
            machine = await restored(await self._start(name, reservation, shape, cpus, template))
        except (CreateFailed, Unavailable):
            await self.templates.doubt(template)
            raise
        self.templates.trust(template)
        return machine

    async def _spare(self, name: str, reservation: str, shape: Shape, cpus: float) -> tuple[Machine, bytes]:
        """As `clone`, of one that has been somebody, and stands still; and what its guest takes for a channel's
        begin."""
        machine = await self.clone(name, reservation, shape, cpus)
        try:
            async with asyncio.timeout(REHEARSAL_S):
                await machine.control.resume()
                machine.keep(port := await machine.port())
                await configure(port, Identity(token=(token := new_token()), hostname="spare", pids=0))
                token = await settle_in(port, token)
                await asyncio.sleep(SPARE_SETTLE_S)
                await machine.control.stop()
        except BaseException as error:
            machine.close()
            if isinstance(error, TimeoutError):
                raise Unavailable("a spare machine isn't ready in time") from None
            raise
        return machine, token

    def _stem(self, shape: Shape, template: Template) -> tuple[GroupShape, StartStem]:
        async def start(name: str, reservation: str) -> Machine:
            return await self._start(name, reservation, shape, shape.vcpus, template, stem=True)

        return self.machines.group_shape(shape.memory_bytes, shape.vcpus), start

    async def _start(
        self,
        name: str,
        reservation: str,
        shape: Shape,
        cpus: float,
        template: Template,
        *,
        slot: Slot | None = None,
        stem: bool = False,
    ) -> Machine:
        """A VMM that waits until it is told to read the template's state. `slot`: of a machine that goes on where it
        ran before, with its own disk. `stem`: as in `LauncherClient.spawn`."""
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, state := template.open_state())
            stack.callback(os.close, memory := await asyncio.to_thread(template.open_memory))
            library = None
            if self.driver.name == "qemu":
                library = os.open(self.templates.guest.with_name(STEM), os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, library)
            return await self.machines.start(
                name,
                reservation,
                self.machines.group_shape(shape.memory_bytes, cpus),
                disk=self._disk(name, template, slot),
                disk_bytes=shape.disk_bytes,
                layers=shape.layers,
                make=lambda channel, control, disk, layers: self.driver.command(
                    Start(
                        shape=shape,
                        machine=template.machine,
                        channel=channel,
                        control=control,
                        memory=memory,
                        disk=disk,
                        layers=layers,
                        state=state,
                    )
                ),
                slot=slot,
                library=library,
                stem=stem,
            )

    async def go_on_from(
        self, name: str, reservation: str, shape: Shape, cpus: float, moment: Template, *, slot: Slot | None = None
    ) -> Machine:
        """As `clone`, of a machine as it was (`VmmControl.split`). `slot`: it goes on where it ran before, with its own
        disk."""
        await self.serving()
        stem = await self._ground(shape, moment)
        if stem is not None:
            groups, disk = self.machines.group_shape(shape.memory_bytes, cpus), self._disk(name, moment, slot)
            try:
                return await self.stems.branch(stem, name, reservation, groups, moment=moment, disk=disk, slot=slot)
            except StartLost:
                await self.machines.clear(name, reservation, disk=slot is None)
        return await restored(await self._start(name, reservation, shape, cpus, moment, slot=slot))

    async def child(
        self, name: str, reservation: str, shape: Shape, cpus: float, moment: Moment
    ) -> tuple[Machine, bytes]:
        """As `go_on_from`, one of several; and what its guest takes for a channel's begin."""
        await self.serving()
        stem, then = None, moment.template
        ground = await self._ground(shape, then)
        if ground is not None:

            async def start(own: str, reserved: str) -> Machine:
                disk = partial(self.disks.copy, own, then.disk)
                return await self.stems.branch(ground, own, reserved, groups, moment=then, disk=disk, also=True)

            groups = self.machines.group_shape(shape.memory_bytes, shape.vcpus)
            stem = await self.stems.of_moment(then, moment.token, groups, start)
        if stem is None:
            return await self.go_on_from(name, reservation, shape, cpus, then), moment.token
        groups = self.machines.group_shape(shape.memory_bytes, cpus)
        return await self.stems.branch(stem, name, reservation, groups), stem.token

    async def _ground(self, shape: Shape, moment: Template) -> Stem | None:
        """What a machine as it was is made of."""
        template = self.templates.opened_of(shape)
        if template is None:
            return None
        return await self.stems.ground(template, moment, *self._stem(shape, template))

    def _disk(self, name: str, template: Template, slot: Slot | None) -> Callable[[], int]:
        return lambda: os.open(template.disk, _WRITE) if slot else self.disks.copy(name, template.disk)

    async def close(self, *, keep: bool) -> None:
        """`keep`: machines and templates go on for the next server."""
        await self.spares.close(keep=keep)
        await self.stems.close()
        if self._templates is not None:
            await self._templates.close()
        await self.disconnect(keep=keep)
