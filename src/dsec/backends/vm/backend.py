"""`ports.Backend` of full virtual machines: any bootable disk, cloned from a template where it has our guest.

Its checkpoints are moments that outlive the server. What it owns besides is `vmm.backend`'s.
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dsec.backends.vm.instance import FullInstance, NoGuest
from dsec.backends.vm.line import FullShape, firmware_files
from dsec.backends.vm.node import Full, FullNode, Seat
from dsec.channel import SocketChannel, Spool
from dsec.errors import (
    Conflict,
    Internal,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    Unsupported,
)
from dsec.plan.tripwires import from_outside, from_within
from dsec.ports import Clock, Handle, InstanceEnd
from dsec.spec.sandbox import SandboxSpec
from dsec.spec.screen import Checkpoint
from dsec.vmm.backend import MachineBackend
from dsec.vmm.driver import VmmEnd
from dsec.vmm.ends import whole
from dsec.vmm.first_words import Identity, become, configure, new_token
from dsec.vmm.images import Image
from dsec.vmm.machine import Machine

log = logging.getLogger(__name__)

MIB = 1 << 20
LEAST_MEMORY = 128 * MIB
MOST_VCPUS = 64
MOST_CHECKPOINTS = 16
"""Of one machine."""


class _Of(Struct, frozen=True):
    """What a moment is kept for."""

    sandbox_id: str
    checkpoint: Checkpoint


class _Kept(Struct, frozen=True):
    moment: str
    checkpoint: Checkpoint


class VmBackend(MachineBackend[FullNode, FullInstance]):
    """Full machines of one node."""

    name: ClassVar[str] = "vm"
    adopt_s: ClassVar[float] = 30.0

    def __init__(self, node: FullNode, clock: Clock) -> None:
        super().__init__(node, clock)
        self._checkpoints: dict[str, dict[str, _Kept]] = {}
        self._adopted: dict[str, str] = {}

    # --- opening and closing ---

    async def open(self, known: dict[str, Handle]) -> Mapping[str, FullInstance | InstanceEnd]:
        found = await super().open(known)
        for name, what in self._adopted.items():
            of = msgspec.json.decode(what, type=_Of)
            if of.sandbox_id in self._instances:
                self._checkpoints.setdefault(of.sandbox_id, {})[of.checkpoint.name] = _Kept(name, of.checkpoint)
            else:
                self.moments.drop(name)
        return found

    async def _adopt_kept(self, held: frozenset[str]) -> None:
        self._adopted = await self.moments.adopt(held)
        await self.node.templates.adopt(held, self._adopted.keys())

    async def _serve_again(self, sandbox_id: str, machine: Machine, handle: Handle) -> FullInstance:
        full = Full(machine)
        try:
            return await self._serve(sandbox_id, full, handle, machine.connect() if handle["guest"] else None)
        except BaseException:
            full.close()
            raise

    def _let_go(self, instance: FullInstance) -> None:
        instance.full.close()

    # --- making ---

    def check(self, spec: SandboxSpec) -> None:
        self._check_alike(spec, "a full machine", LEAST_MEMORY, MOST_VCPUS)
        image = self._image(spec)
        if image.traits.guest:
            from_within(spec.tripwires)
        else:
            from_outside(spec.tripwires)
        if spec.disk_bytes < image.size_bytes:
            raise InvalidRequest(
                f"the disk {spec.environment!r} has {image.size_bytes} bytes: a machine's can't be smaller",
                remedy=f"Ask for disk_bytes of at least {image.size_bytes}.",
                field="disk_bytes",
            )
        if image.traits.firmware == "uefi":
            firmware_files()

    def resolve(self, spec: SandboxSpec, project: str) -> SandboxSpec:
        """As `ports.EnvironmentHost`: the environment is a disk, which its digest names in `layers`."""
        image = self.node.images.find(spec.environment)
        if spec.layers and spec.layers != [image.digest]:
            raise Unsupported("a full machine has no layers", remedy="Leave layers out.", field="layers")
        return replace(spec, layers=[image.digest])

    def knows(self, spec: SandboxSpec, project: str) -> bool:
        """As in `ports.EnvironmentHost`: what isn't here is nowhere."""
        return True

    async def learn(self, spec: SandboxSpec, project: str) -> None:
        """As in `ports.EnvironmentHost`."""

    def _image(self, spec: SandboxSpec) -> Image:
        return self.node.images.find(spec.layers[0] if spec.layers else spec.environment)

    def create_timeout_s(self, spec: SandboxSpec) -> float:
        """As in `ports.PatientBackend`: the first of its kind boots."""
        return 2 * self._image(spec).traits.boot_s

    def reserve(self, sandbox_id: str, spec: SandboxSpec, tenant: int = 0, capture: str = "") -> Handle:
        image, memory_bytes = self._image(spec), whole(spec.memory_bytes)
        return {
            "vm": f"v{secrets.token_hex(8)}",
            "slot": self.node.pool.reserve(self.node.machines.group_shape(memory_bytes, spec.cpus)),
            "accel": self.node.driver.accel,
            "token": new_token().hex(),
            "vmm": self.node.driver.fingerprint,
            "capture": capture,
            "image": image.digest,
            "guest": image.traits.guest,
            "vcpus": math.ceil(spec.cpus),
            "memory_bytes": memory_bytes,
            "cpus": spec.cpus,
            "disk_bytes": max(image.size_bytes, spec.disk_bytes) // MIB * MIB,
        }

    async def _create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> FullInstance:
        node, begun = self.node, self._clock.monotonic()
        node.host.volume.check_space()
        image = node.images.find(handle["image"])
        shape = FullShape(image.digest, handle["vcpus"], handle["memory_bytes"], handle["disk_bytes"])
        seat = Seat(handle["vm"], handle["slot"], handle["cpus"])
        moment, before = self.moments.get(handle["capture"]) if handle["capture"] else None, b""
        if moment is not None:
            full, before = await node.child(seat, shape, image, moment)
        elif image.traits.guest:
            full = await node.clone(seat, shape, image)
        else:
            full = await node.boot(seat, shape, image)
        restored = self._clock.monotonic()
        if spec.cpu_class == "batch":
            full.machine.slot.set_idle()
        try:
            sock = await self._begin(sandbox_id, spec, handle, full, before)
            configured = self._clock.monotonic()
            instance = await self._serve(sandbox_id, full, handle, sock, fresh=True)
        except BaseException:
            full.close()
            raise
        if moment is not None and moment.held:
            instance.channel.hold(0)
        instance.phases_s = {
            "clone": restored - begun,
            "configure": configured - restored,
            "hello": self._clock.monotonic() - configured,
        }
        return instance

    async def _begin(
        self, sandbox_id: str, spec: SandboxSpec, handle: Handle, full: Full, before: bytes
    ) -> socket.socket | None:
        """Let it go on, as somebody: the connection to its guest, where it has one. `before`: as of `child`."""
        if handle["guest"] or before:
            await full.control.resume()
        if not handle["guest"]:
            return None
        sock = full.machine.connect()
        try:
            identity = Identity(
                token=bytes.fromhex(handle["token"]),
                hostname=spec.hostname or sandbox_id,
                pids=spec.pids,
                no_new_privs=spec.no_new_privs,
            )
            await (become(sock, before, identity) if before else configure(sock, identity))
        except BaseException:
            sock.close()
            raise
        return sock

    async def _serve(
        self, sandbox_id: str, full: Full, handle: Handle, sock: socket.socket | None, *, fresh: bool = False
    ) -> FullInstance:
        channel: SocketChannel | NoGuest = NoGuest()
        if sock is not None:
            channel = await SocketChannel.open(
                sock,
                clock=self._clock,
                spool=Spool(self.node.host.volume.spool_path(sandbox_id), fresh=fresh),
                on_broken=partial(log.warning, "sandbox %s: its guest broke the protocol: %s", sandbox_id),
                token=bytes.fromhex(handle["token"]),
            )
        instance = FullInstance(
            sandbox_id,
            channel,
            full,
            disk_limit_bytes=handle["disk_bytes"],
            make_swap=self.node.host.make_swap,
        )
        instance.adopted = not fresh
        return self._served(instance)

    # --- checkpoints ---

    async def checkpoint(self, sandbox_id: str, handle: Handle, name: str) -> Checkpoint:
        """As in `screen_ports.CheckpointHost`."""
        kept = self._checkpoints.setdefault(sandbox_id, {})
        if name in kept:
            raise Conflict(f"there is a checkpoint {name!r} already", remedy="Take another name, or delete it.")
        if len(kept) >= MOST_CHECKPOINTS:
            raise QuotaExceeded(f"a machine has at most {MOST_CHECKPOINTS} checkpoints", remedy="Delete one.")
        moment = await self.split(sandbox_id, handle)
        if name in kept or sandbox_id not in self._instances:  # meanwhile
            self.moments.drop(moment)
            raise Conflict(f"the checkpoint {name!r} was made by another call, or the machine ended")
        copied = self.moments.get(moment).copied_bytes
        made = Checkpoint(name=name, created_at=self._clock.now(), memory_bytes=copied)
        kept[name] = _Kept(moment, made)
        try:
            await self.moments.keep(moment, msgspec.json.encode(_Of(sandbox_id, made)).decode())
        except BaseException:
            kept.pop(name, None)
            self.moments.drop(moment)
            raise
        return made

    def checkpoints(self, sandbox_id: str) -> list[Checkpoint]:
        """As in `screen_ports.CheckpointHost`."""
        return [each.checkpoint for each in self._checkpoints.get(sandbox_id, {}).values()]

    def drop_checkpoint(self, sandbox_id: str, name: str) -> None:
        """As in `screen_ports.CheckpointHost`."""
        self.moments.drop(self._kept(sandbox_id, name).moment)
        del self._checkpoints[sandbox_id][name]

    def reserve_revert(self, sandbox_id: str, handle: Handle, name: str) -> Handle:
        """As in `screen_ports.CheckpointHost`."""
        moment = self._kept(sandbox_id, name).moment
        if not self.moments.get(moment).template.has_disk(handle["disk_bytes"]):  # the machine would end for nothing
            raise Internal(
                f"there is no way back to {name!r}: the checkpoint's disk was removed or cut on the node",
                remedy="The machine goes on; make another checkpoint.",
            )
        groups = self.node.machines.group_shape(handle["memory_bytes"], handle["cpus"])
        return handle | {
            "vm": f"v{secrets.token_hex(8)}",
            "slot": self.node.pool.reserve(groups),
            "token": new_token().hex(),
            "capture": moment,
        }

    async def revert(self, sandbox_id: str, spec: SandboxSpec, handle: Handle, before: Handle) -> FullInstance:
        """As in `screen_ports.CheckpointHost`."""
        await self._end(sandbox_id, before)
        return await self.create(sandbox_id, spec, handle)

    def _kept(self, sandbox_id: str, name: str) -> _Kept:
        found = self._checkpoints.get(sandbox_id, {}).get(name)
        if found is None:
            raise NotFound(f"there is no checkpoint {name!r}", remedy="Ask for the list.")
        return found

    # --- ending ---

    def _last_words(self, instance: FullInstance, end: VmmEnd) -> str:
        del end
        return instance.full.console.tail()

    async def destroy(self, sandbox_id: str, handle: Handle) -> None:
        for kept in self._checkpoints.pop(sandbox_id, {}).values():
            self.moments.drop(kept.moment)
        await self._end(sandbox_id, handle)
