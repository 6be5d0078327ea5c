"""The node's part of the backend: disks, templates and checkpoints of full machines, beside what `MachineNode` owns.

Templates are kept in `<state>/full/templates`. A template of a disk with our guest is a machine that has booted and
whose guest waits for CONFIGURE; one of a checkpoint is a machine as it was then. A disk without our guest has no
template: nobody knows when it has booted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
from msgspec import Struct

from dsec.backends.vm.console import Console
from dsec.backends.vm.line import (
    Firmware,
    FullShape,
    Sockets,
    command,
    firmware_files,
    memory_file,
    open_firmware,
    own_variables,
)
from dsec.errors import CreateFailed
from dsec.kernel.cgroups import CgroupRoot
from dsec.kernel.cgroups import Shape as GroupShape
from dsec.vmm import seed
from dsec.vmm.first_words import wait_ready
from dsec.vmm.images import Image, ImageStore, Traits
from dsec.vmm.launching import LauncherState
from dsec.vmm.machine import Machine, restored
from dsec.vmm.moments import Moment
from dsec.vmm.node import MachineNode, VmHost
from dsec.vmm.qemu import QemuControl, QemuDriver
from dsec.vmm.screens import show
from dsec.vmm.stems import STEM, StartStem, Stem, Stems
from dsec.vmm.template_cache import Size, Template, TemplateCache

VERSION = 3
KEEP = 8
KEEP_OPEN = 6
SETTLE_S = 1.0
"""After a boot: what else was just started comes to rest, and need not do so in each clone."""
REHEARSED_S = 0.5
"""The same after a rehearsal."""


class Seat(Struct, frozen=True):
    """Names for everything that one machine takes of the host."""

    name: str
    reservation: str
    """Of cgroups."""
    cpus: float


class Full:
    """A machine that runs, with its consoles."""

    def __init__(self, machine: Machine) -> None:
        """Raises `Unavailable`, and the machine is let go of."""
        self.machine = machine
        self.control = cast(QemuControl, machine.control)
        try:
            self.console = Console(machine.connect("console"))
        except BaseException:
            machine.close()
            raise

    def close(self) -> None:
        """Let go of its sockets; it goes on."""
        self.console.close()
        self.machine.close()


class FullNode(MachineNode):
    """Owns everything of this backend's that isn't one sandbox's."""

    driver: QemuDriver

    def __init__(
        self,
        host: VmHost,
        driver: QemuDriver,
        cgroups: CgroupRoot,
        *,
        accel_reason: str = "",
        templates: Path | None = None,
    ) -> None:
        """`templates`: where they are kept (default: below the state). The others as `MachineNode`."""
        super().__init__("full", host, driver, cgroups, accel_reason=accel_reason)
        self.images = ImageStore(host.state)
        self.templates = TemplateCache(
            templates or host.state / "full" / "templates", self.machines, keep=KEEP, keep_open=KEEP_OPEN
        )
        self.stems = Stems(self.machines, wanted=driver.accel == "tcg", settle_s=REHEARSED_S, console=True)
        self._variables: dict[str, os.stat_result] = {}
        """Of stems."""
        self._seed = b""
        self._guest = Path()

    async def open(self, on_lost: Callable[[], None]) -> tuple[LauncherState, bool]:
        """As `connect`."""
        guest = await asyncio.to_thread(self.host.build_guest)
        self._guest = guest
        self._seed = seed.make(await asyncio.to_thread(guest.read_bytes))
        return await self.connect(on_lost)

    async def launcher_started(self) -> None:
        await self.templates.hold_all()

    def launcher_lost(self) -> None:
        self.stems.drop_all()

    # --- machines ---

    async def boot(self, seat: Seat, shape: FullShape, image: Image) -> Full:
        """One from its disk, which has just been switched on. `Machines.end` removes what it made, also where this
        fails. Raises `CreateFailed`, `Unavailable`, `Unsupported`, OSError."""
        memory = os.memfd_create("memory", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, shape.memory_bytes)
            disk = partial(self._new_disk, seat.name, shape, image)
            return Full(await self._start(seat, shape, image.traits, memory=memory, disk=disk))
        finally:
            os.close(memory)

    async def clone(self, seat: Seat, shape: FullShape, image: Image) -> Full:
        """One that goes on from its template, and waits. As `boot`."""
        template = await self.template(shape, image)
        stem = await self.stems.get(template, *self._stem(shape, image.traits, template))
        if stem is None:
            return Full(await restored(await self._start_clone(seat, shape, image.traits, template)))
        return Full(await self._branch(seat, shape, image.traits, stem))

    async def child(self, seat: Seat, shape: FullShape, image: Image, moment: Moment) -> tuple[Full, bytes]:
        """The same of a machine as it was; and what its guest takes for a channel's begin."""
        await self.serving()
        key, traits, then = await asyncio.to_thread(self.key, shape, image), image.traits, moment.template
        template = self.templates.opened(key) if traits.guest else None
        blank = await self.stems.blank(template, *self._stem(shape, traits, template)) if template else None
        if blank is not None:

            async def start(name: str, reservation: str) -> Machine:
                return await self._branch(Seat(name, reservation, shape.vcpus), shape, traits, blank, also_of=then)

            groups = self.machines.group_shape(shape.memory_bytes, shape.vcpus)
            stem = await self.stems.of_moment(then, moment.token, groups, start)
            if stem is not None:
                return Full(await self._branch(seat, shape, traits, stem)), stem.token
        machine = await restored(await self._start_clone(seat, shape, traits, then))
        if then.screen >= 0:
            await show(machine, then.screen)
        return Full(machine), moment.token

    async def _branch(
        self, seat: Seat, shape: FullShape, traits: Traits, stem: Stem, *, also_of: Template | None = None
    ) -> Machine:
        """`also_of`: a stem, too, of a machine as it was then."""
        with contextlib.ExitStack() as stack:
            files: list[tuple[os.stat_result, int]] = []
            if traits.firmware == "uefi":
                files.append((self._variables[stem.machine.name], own := stack.enter_context(own_variables())))
                if also_of is not None:
                    self._variables[seat.name] = os.fstat(own)
            return await self.stems.branch(
                stem,
                seat.name,
                seat.reservation,
                self.machines.group_shape(shape.memory_bytes, seat.cpus),
                moment=also_of,
                disk=partial(self.disks.copy, seat.name, also_of.disk) if also_of else None,
                files=files,
                also=also_of is not None,
            )

    def _stem(self, shape: FullShape, traits: Traits, template: Template) -> tuple[GroupShape, StartStem]:
        async def start(name: str, reservation: str) -> Machine:
            return await self._start_clone(Seat(name, reservation, shape.vcpus), shape, traits, template, stem=True)

        return self.machines.group_shape(shape.memory_bytes, shape.vcpus), start

    async def _start_clone(
        self,
        seat: Seat,
        shape: FullShape,
        traits: Traits,
        template: Template,
        *,
        stem: bool = False,
    ) -> Machine:
        """A VMM that waits until it is told to read the template's state."""
        disk, state = partial(self.disks.copy, seat.name, template.disk), template.open_state()
        memory = await asyncio.to_thread(template.open_memory)
        try:
            return await self._start(seat, shape, traits, memory=memory, disk=disk, state=state, stem=stem)
        finally:
            os.close(state)
            os.close(memory)

    async def template(self, shape: FullShape, image: Image) -> Template:
        """The booted machine of a disk with our guest; booted where there is none yet. Raises as `boot`."""
        await self.serving()
        size = Size(shape.memory_bytes, shape.disk_bytes)
        key = await asyncio.to_thread(self.key, shape, image)

        async def make(memory: int, state: int) -> float:
            return await self._boot_template(key, shape, image, memory, state)

        return await self.templates.get(key, size, make)

    def key(self, shape: FullShape, image: Image) -> str:
        """Names a template by all that goes into it."""
        firmware = hashlib.sha256()
        if image.traits.firmware == "uefi":
            for path in firmware_files():
                firmware.update(path.read_bytes())
        parts = (VERSION, self._guest.parent.name, self.driver.fingerprint, firmware.hexdigest(), image.digest, shape)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]

    async def _boot_template(self, key: str, shape: FullShape, image: Image, memory: int, state: int) -> float:
        groups = self.machines.group_shape(shape.memory_bytes, shape.vcpus)
        seat = Seat(f"t{os.urandom(8).hex()}", self.pool.reserve(groups), shape.vcpus)
        full: Full | None = None
        begun = time.monotonic()
        try:
            disk = partial(self._new_disk, seat.name, shape, image)
            full = Full(await self._start(seat, shape, image.traits, memory=memory, disk=disk, own_memory=True))
            boot_s = await self._wait_ready(full, image.traits.boot_s, begun)
            await asyncio.sleep(SETTLE_S)
            await full.control.save(state)
            await asyncio.to_thread(self.disks.keep, seat.name, key)
            return boot_s
        finally:
            if full is not None:
                full.console.close()
            await asyncio.shield(self.machines.end(seat.name, seat.reservation, full.machine if full else None))

    async def _wait_ready(self, full: Full, timeout_s: float, begun: float) -> float:
        sock = full.machine.connect()
        ended = asyncio.ensure_future(full.control.ended())
        ready = asyncio.ensure_future(wait_ready(sock))
        try:
            async with asyncio.timeout(timeout_s):
                exited = self.machines.exited(full.machine.name)
                await asyncio.wait((ready, ended, exited), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                said = full.console.tail() if ended.done() else exited.result().said
                raise CreateFailed(f"a virtual machine could not boot: {said.strip()[-1000:]}")
            await ready
            return time.monotonic() - begun
        except TimeoutError:
            raise CreateFailed(
                f"the guest of a machine said nothing for {timeout_s:g} s; its console: {full.console.tail(500)}",
                remedy="A disk without our guest is imported with --no-guest.",
            ) from None
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)
            sock.close()

    async def _start(
        self,
        seat: Seat,
        shape: FullShape,
        traits: Traits,
        *,
        memory: int,
        disk: Callable[[], int],
        state: int | None = None,
        own_memory: bool = False,
        stem: bool = False,
    ) -> Machine:
        await self.serving()
        consoles: list[int] = []
        with contextlib.ExitStack() as stack:
            firmware: Firmware | None = stack.enter_context(open_firmware(traits))
            seed_fd = memory_file("seed", self._seed if traits.guest else seed.make(None), read_only=True)
            stack.callback(os.close, seed_fd)
            library = None
            if state is not None:
                library = os.open(self._guest.with_name(STEM), os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, library)
            if stem and firmware is not None:
                self._variables[seat.name] = os.fstat(firmware.variables)
            return await self.machines.start(
                seat.name,
                seat.reservation,
                self.machines.group_shape(shape.memory_bytes, seat.cpus),
                disk=disk,
                disk_bytes=shape.disk_bytes,
                layers=(),
                console=consoles.append,
                make=lambda channel, control, own, _: command(
                    self.driver,
                    shape,
                    traits,
                    Sockets(channel, control, consoles[0]),
                    memory=memory,
                    disk=own,
                    seed=seed_fd,
                    firmware=firmware,
                    state=state,
                    own_memory=own_memory,
                ),
                library=library,
                stem=stem,
            )

    def _new_disk(self, name: str, shape: FullShape, image: Image) -> int:
        fd = self.disks.copy(name, self.images.path(image))
        os.ftruncate(fd, shape.disk_bytes)
        return fd

    async def close(self, *, keep: bool) -> None:
        """`keep`: machines and templates go on for the next server."""
        await self.stems.close()
        await self.templates.close()
        await self.disconnect(keep=keep)
