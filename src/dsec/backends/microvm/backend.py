"""`ports.Backend` of microVMs: sandboxes with a kernel of their own, each a clone of a template.

Some wait already when they are asked for (`spares`), some are paused without a VMM (`suspends`). What it owns besides
is `vmm.backend`'s.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
from functools import partial
from typing import ClassVar

from dsec.backends.microvm.captures import Captures
from dsec.backends.microvm.node import VmNode
from dsec.backends.microvm.spares import Wanted
from dsec.backends.microvm.suspends import Suspends
from dsec.channel import Spool
from dsec.channel.movable import MovableChannel
from dsec.errors import DsecError, InvalidRequest, OutcomeUnknown, Unavailable, Unsupported
from dsec.kernel.cgroups import Slot
from dsec.plan.tripwires import from_within
from dsec.ports import Captured, Clock, Handle, InstanceEnd
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec
from dsec.vmm.backend import MachineBackend
from dsec.vmm.disks import disk_size
from dsec.vmm.driver import Shape
from dsec.vmm.ends import whole
from dsec.vmm.first_words import Identity, Introduce, introduction, new_token
from dsec.vmm.instance import MachineInstance
from dsec.vmm.machine import Machine, StartLost

log = logging.getLogger(__name__)

MIB = 1 << 20
LEAST_MEMORY = 96 * MIB


class MicroVmBackend(MachineBackend[VmNode, MachineInstance]):
    """MicroVMs of one node."""

    name: ClassVar[str] = "microvm"
    adopt_s: ClassVar[float] = 10.0

    def __init__(self, node: VmNode, clock: Clock, *, suspend: bool = False) -> None:
        """`suspend`: what is paused is written to a file, and its VMM ends; else it is frozen and paged out."""
        super().__init__(node, clock)
        self.captures = Captures(node, self.moments)
        self.suspends = Suspends(node, self._watching)
        self._suspend = suspend

    def gauges(self) -> dict[str, dict[str, float]]:
        """As in `edge.observer.Inspectable`."""
        return super().gauges() | {"machines": {"spare": self.node.spares.count}}

    # --- opening and closing ---

    async def _adopt_kept(self, held: frozenset[str]) -> None:
        await self.node.templates.adopt(held)

    def _spoiled(self, handle: Handle) -> InstanceEnd | None:
        if handle.get("lazy") and self.node.host.zeros_read():
            return InstanceEnd(Cause.INFRA_IMAGE, "what filled its files was gone for a while")
        return None

    def _waits(self, name: str) -> bool:
        return self.suspends.has(name)

    async def _adopt(self, sandbox_id: str, handle: Handle, live: bool) -> MachineInstance:
        await self._hold(handle.get("lazy", []))
        return await super()._adopt(sandbox_id, handle, live)

    async def _hold(self, lazy: list[str]) -> None:
        """Where they can't be held, what was read stays and other reads fail."""
        if lazy and self.node.host.remote is not None:
            try:
                await self.node.host.remote.hold(lazy)
            except DsecError as error:
                log.warning("layers of a machine can't be filled: %s", error.message)

    async def _restore(self, handle: Handle, slot: Slot) -> Machine:
        return await self.suspends.restore(handle, slot)

    async def _serve_again(self, sandbox_id: str, machine: Machine, handle: Handle) -> MachineInstance:
        instance = await self._serve(sandbox_id, await machine.port(), machine, handle)
        self.suspends.remove(handle["vm"])
        return instance

    def _let_go(self, instance: MachineInstance) -> None:
        self.suspends.let_go(instance.sandbox_id)
        instance.machine.close()

    # --- making ---

    def check(self, spec: SandboxSpec) -> None:
        kernel = self.node.kernel()
        self._check_alike(spec, "a microVM", LEAST_MEMORY, self.node.driver.most_vcpus)
        from_within(spec.tripwires)
        if spec.network and not kernel.leads_out:
            raise Unsupported(
                f"the kernel of microVMs here ({kernel.release}) was imported without what a network by name takes",
                remedy="Import it again: `dsec kernel import`.",
                field="network",
            )
        if (spec.workdir and not spec.workdir.startswith("/")) or "\0" in spec.workdir:
            raise InvalidRequest("workdir is an absolute path", field="workdir")
        layers = spec.layers or self.node.host.environments.get(spec.environment).layers
        if len(layers) > (most := self.node.driver.most_layers(kernel.machine)):
            raise Unsupported(
                f"{len(layers)} layers; a microVM of this node has room for {most}",
                remedy="Merge some: `dsec layer merge`.",
                field="layers",
            )

    def resolve(self, spec: SandboxSpec, project: str) -> SandboxSpec:
        """As `ports.EnvironmentHost`."""
        return self.node.host.environments.resolve(spec, project)

    def knows(self, spec: SandboxSpec, project: str) -> bool:
        """As in `ports.EnvironmentHost`."""
        return self.node.host.remote is None or self.node.host.remote.knows(spec, project)

    async def learn(self, spec: SandboxSpec, project: str) -> None:
        """As in `ports.EnvironmentHost`."""
        if self.node.host.remote is not None:
            await self.node.host.remote.learn(spec, project)

    def reserve(self, sandbox_id: str, spec: SandboxSpec, tenant: int = 0, capture: str = "") -> Handle:
        layers = spec.layers or self.node.host.environments.get(spec.environment).layers
        shape = Shape(math.ceil(spec.cpus), whole(spec.memory_bytes), disk_size(spec.disk_bytes), tuple(layers))
        spare = None if capture else self.node.spares.claim(Wanted(shape, spec.cpus))
        groups = self.node.machines.group_shape(shape.memory_bytes, spec.cpus)
        return {
            "vm": spare.machine.name if spare else f"v{secrets.token_hex(8)}",
            "slot": spare.reservation if spare else self.node.pool.reserve(groups),
            "accel": self.node.driver.accel,
            "vmm": self.node.driver.fingerprint,
            "machine": self.node.kernel().machine,
            "token": new_token().hex(),
            "vcpus": shape.vcpus,
            "memory_bytes": shape.memory_bytes,
            "cpus": spec.cpus,
            "disk_bytes": shape.disk_bytes,
            "layers": layers,
            "lazy": [each for each in layers if self.node.host.environments.layers.is_lazy(each)],
            "capture": capture,
        }

    async def _create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> MachineInstance:
        node, begun = self.node, self._clock.monotonic()
        node.host.volume.check_space()
        layers = spec.layers or node.host.environments.get(spec.environment).layers
        shape = Shape(handle["vcpus"], handle["memory_bytes"], handle["disk_bytes"], tuple(layers))
        moment = self.moments.get(handle["capture"]) if handle["capture"] else None
        spare, before = node.spares.take(handle["vm"]), b""
        if spare is not None:
            machine, before = spare.machine, spare.token
        elif moment is not None:
            machine, before = await node.child(handle["vm"], handle["slot"], shape, handle["cpus"], moment)
        else:
            machine = await node.clone(handle["vm"], handle["slot"], shape, handle["cpus"])
        restored = self._clock.monotonic()
        identity = Identity(
            token=bytes.fromhex(handle["token"]),
            hostname=spec.hostname or sandbox_id,
            pids=spec.pids,
            no_new_privs=spec.no_new_privs,
            own=spare is not None,
        )
        if spec.cpu_class == "batch":
            machine.slot.set_idle()
        try:
            instance = await self._begin(sandbox_id, machine, handle, introduction(identity, before))
        except BaseException as error:
            machine.close()
            if spare is None or not isinstance(error, (Unavailable, OutcomeUnknown)):
                raise
            if await node.machines.early_end(machine.name) is None:
                raise
            raise StartLost(f"a spare machine had ended: {error.message}") from error
        instance.phases_s = {"clone": restored - begun, "begin": self._clock.monotonic() - restored}
        if moment is None:
            node.spares.refill(Wanted(shape, handle["cpus"]))
        elif moment.held:
            instance.channel.hold(0)
        return instance

    async def _begin(self, sandbox_id: str, machine: Machine, handle: Handle, introduce: Introduce) -> MachineInstance:
        """Let it go on, as somebody: said at once, and answered once."""
        resuming = asyncio.ensure_future(machine.control.resume())
        try:
            await asyncio.sleep(0)  # it is on its way
            instance = await self._serve(sandbox_id, await machine.port(), machine, handle, introduce)
            await resuming
        finally:
            resuming.cancel()
            await asyncio.gather(resuming, return_exceptions=True)
        return instance

    # --- copies ---

    async def capture(self, sandbox_id: str, handle: Handle) -> Captured:
        """As in `ports.CaptureHost`."""
        self._check_same(handle)
        if self.node.driver.copies_whole:
            raise Unsupported(
                f"files of a machine of {self.node.driver.name}'s can't be kept as a layer in this version",
                remedy="Copy them out, or use QEMU: DSEC_VMM=qemu.",
            )
        return await self.captures.take(await self._running(sandbox_id), handle, tuple(handle["layers"]))

    async def drop(self, name: str) -> None:
        """As in `ports.CaptureHost`."""
        self.moments.drop(name)
        await self.captures.drop(name)

    async def _running(self, sandbox_id: str) -> MachineInstance:
        instance = await super()._running(sandbox_id)
        await self.suspends.awake(instance)
        return instance

    async def _serve(
        self,
        sandbox_id: str,
        sock: socket.socket,
        machine: Machine,
        handle: Handle,
        introduce: Introduce | None = None,
    ) -> MachineInstance:
        """`introduce`: of one that begins."""
        fresh = introduce is not None
        channel = await MovableChannel.open(
            sock,
            clock=self._clock,
            spool=Spool(self.node.host.volume.spool_path(sandbox_id), fresh=fresh),
            on_broken=partial(log.warning, "sandbox %s: its guest broke the protocol: %s", sandbox_id),
            token=bytes.fromhex(handle["token"]),
            introduce=introduce,
        )
        instance = MachineInstance(
            sandbox_id,
            channel,
            machine,
            disk_limit_bytes=handle["disk_bytes"],
            make_swap=self.node.host.make_swap,
            image_failures=self.node.host.image_failures(handle.get("lazy", [])),
        )
        instance.adopted = not fresh
        self._served(instance)
        if self._suspend:
            self.suspends.serve(instance, handle)
        return instance

    # --- ending ---

    async def destroy(self, sandbox_id: str, handle: Handle) -> None:
        self.suspends.let_go(sandbox_id)
        spare = self.node.spares.take(handle["vm"]) if handle else None
        await self._end(sandbox_id, handle, spare.machine if spare is not None else None)
        if handle:
            self.suspends.remove(handle["vm"])
