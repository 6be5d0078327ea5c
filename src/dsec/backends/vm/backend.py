"""`ports.Backend` of full virtual machines: any bootable disk, cloned from a template where it has our guest.

Owns on the host what `machine.Machines` owns for each, a launcher of its own, and templates. Invariants as of microVMs:

- All names are in the handle, so `destroy` works on what a dead server left half-made.
- VMMs and the launcher outlive this object; when the launcher dies, so do the machines, and a new one is started.
- What a machine says of itself is a claim: only its VMM's cgroups and its end are facts.
"""

from __future__ import annotations

import asyncio
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
    CreateFailed,
    DsecError,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    QuotaExceeded,
    Unavailable,
    Unsupported,
)
from dsec.plan.tripwires import from_outside
from dsec.ports import Clock, Handle, InstanceEnd
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec
from dsec.spec.screen import Checkpoint
from dsec.vmm.ends import stopped, whole, why
from dsec.vmm.first_words import Identity, become, configure, new_token
from dsec.vmm.images import Image
from dsec.vmm.moments import Moments

log = logging.getLogger(__name__)

MIB = 1 << 20
LEAST_MEMORY = 128 * MIB
MOST_VCPUS = 64
MOST_CHECKPOINTS = 16
"""Of one machine."""
_ADOPT_S = 30.0


class _Of(Struct, frozen=True):
    """What a moment is kept for."""

    sandbox_id: str
    checkpoint: Checkpoint


class _Kept(Struct, frozen=True):
    moment: str
    checkpoint: Checkpoint


class VmBackend:
    """Full machines of one node."""

    name: ClassVar[str] = "vm"
    api_version: ClassVar[int] = 1

    def __init__(self, node: FullNode, clock: Clock) -> None:
        self.node = node
        self._clock = clock
        self.moments = Moments(node.machines, node.stems.drop)
        self._checkpoints: dict[str, dict[str, _Kept]] = {}
        self._instances: dict[str, FullInstance] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    @property
    def epoch(self) -> int:
        return self.node.epoch

    def gauges(self) -> dict[str, dict[str, float]]:
        """As in `edge.observer.Inspectable`."""
        return {"cgroups": dict(self.node.pool.counts())}

    async def check_ready(self) -> None:
        """As in `edge.observer.Inspectable`."""
        self.node.host.volume.check_space()

    def pid(self, sandbox_id: str) -> int:
        """The host's number of a machine's VMM. Raises KeyError."""
        return self._instances[sandbox_id].machine.pid

    # --- opening and closing ---

    async def open(self, known: dict[str, Handle]) -> Mapping[str, FullInstance | InstanceEnd]:
        node = self.node
        state, fresh = await node.open(self._on_lost)
        wanted = {handle["slot"]: handle["vm"] for handle in known.values() if handle}
        slots = await asyncio.to_thread(node.pool.open, wanted)
        node.machines.expect(state.live)
        found: dict[str, FullInstance | InstanceEnd] = {}
        if fresh:
            found = dict.fromkeys(known, InstanceEnd(Cause.NODE_LOST, "the launcher of virtual machines was gone"))
        moments = await self.moments.adopt(state.held)
        await node.templates.adopt(state.held, moments.keys())
        left = state.live.keys() | state.ended.keys() | node.machines.names()
        for sandbox_id, handle in known.items():
            if not handle:
                continue
            if handle["vm"] in state.ended:
                found[sandbox_id] = why(state.ended[handle["vm"]])
            elif handle["vm"] in state.live and handle["slot"] in slots:
                try:
                    found[sandbox_id] = await self._adopt(sandbox_id, handle)
                except DsecError as error:
                    log.warning("sandbox %s cannot be adopted: %s", sandbox_id, error)
        for sandbox_id, handle in known.items():
            if sandbox_id not in self._instances:
                await self.destroy(sandbox_id, handle)
        ours = {instance.machine.name for instance in self._instances.values()}
        for name in left - ours:
            await node.machines.end(name, "")
        for name, what in moments.items():
            of = msgspec.json.decode(what, type=_Of)
            if of.sandbox_id in self._instances:
                self._checkpoints.setdefault(of.sandbox_id, {})[of.checkpoint.name] = _Kept(name, of.checkpoint)
            else:
                self.moments.drop(name)
        return found

    async def close(self, *, keep: bool) -> None:
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        self._watches.clear()
        for instance in self._instances.values():
            instance.forget()
            await instance.channel.close()
            instance.full.close()
        self._instances.clear()
        await self.moments.close(keep=keep)
        await self.node.close(keep=keep)

    def _on_lost(self) -> None:
        """The launcher died; its VMMs die with it."""
        for instance in self._instances.values():
            instance.machine.slot.kill()
            instance.note_end(InstanceEnd(Cause.NODE_LOST, "the launcher of virtual machines died"))

    # --- making ---

    def check(self, spec: SandboxSpec) -> None:
        if spec.gpus is not None:
            raise Unsupported("a machine can be given no GPU in this version", remedy="Leave it out.", field="gpus")
        from_outside(spec.tripwires)
        if spec.require_kvm and self.node.driver.accel != "kvm":
            raise Unsupported(
                f"this node has no KVM that is fit to run machines: {self.node.accel_reason}",
                remedy="Leave require_kvm out, and the machine runs slowly.",
                field="require_kvm",
            )
        if spec.memory_bytes < LEAST_MEMORY:
            raise InvalidRequest(f"a full machine needs {LEAST_MEMORY >> 20} MiB of memory", field="memory_bytes")
        if spec.cpus > MOST_VCPUS:
            raise Unsupported(f"a full machine has at most {MOST_VCPUS} CPUs", field="cpus")
        image = self._image(spec)
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

    async def create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> FullInstance:
        try:
            return await self._create(sandbox_id, spec, handle)
        except BaseException as error:
            await asyncio.shield(self.destroy(sandbox_id, handle))
            if isinstance(error, OSError):
                raise CreateFailed(f"the host refused a step: {error}", remedy="See `dsec doctor`.") from error
            if isinstance(error, OutcomeUnknown):
                raise CreateFailed(f"the machine went away while it was made: {error.message}") from error
            raise

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
        self._instances[sandbox_id] = instance
        self._watches[sandbox_id] = asyncio.create_task(self._watch(instance), name=f"end of {sandbox_id}")
        return instance

    async def _adopt(self, sandbox_id: str, handle: Handle) -> FullInstance:
        slot = self.node.pool.find(handle["slot"], handle["vm"])
        assert slot is not None
        frozen = slot.frozen
        if frozen:  # its guest and its VMM have to answer once
            slot.thaw()
        full = Full(await self.node.machines.adopt(handle["vm"], slot))
        try:
            async with asyncio.timeout(_ADOPT_S):
                sock = full.machine.connect() if handle["guest"] else None
                instance = await self._serve(sandbox_id, full, handle, sock)
        except TimeoutError:
            full.close()
            raise Unavailable("its guest doesn't answer") from None
        if frozen:
            instance.freeze(True)
        return instance

    # --- copies ---

    async def split(self, sandbox_id: str, handle: Handle) -> str:
        """As in `ports.ForkHost`."""
        if handle.get("vmm") != self.node.driver.fingerprint:
            raise Unsupported(
                "this machine was started by another version of the virtual machine monitor, or on another CPU: its "
                "state can't go on in one of this node's",
                remedy="Create a new sandbox, and fork that.",
            )
        return await self.moments.take(self._running(sandbox_id), handle)

    async def drop(self, name: str) -> None:
        """As in `ports.ForkHost`."""
        self.moments.drop(name)

    def _running(self, sandbox_id: str) -> FullInstance:
        instance = self._instances.get(sandbox_id)
        if instance is None:
            raise Unavailable("the machine is not there", remedy="Ask for its state.")
        return instance

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
        self._kept(sandbox_id, name)
        groups = self.node.machines.group_shape(handle["memory_bytes"], handle["cpus"])
        return handle | {
            "vm": f"v{secrets.token_hex(8)}",
            "slot": self.node.pool.reserve(groups),
            "token": new_token().hex(),
            "capture": self._kept(sandbox_id, name).moment,
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

    async def _watch(self, instance: FullInstance) -> None:
        """Say why it ended: its VMM did, or its kernel stopped."""
        exited = self.node.machines.exited(instance.machine.name)
        halted = asyncio.ensure_future(instance.machine.control.ended())
        try:
            await asyncio.wait((exited, halted), return_when=asyncio.FIRST_COMPLETED)
            if halted.done() and not halted.cancelled():
                instance.note_end(stopped(halted.result().reason, instance.full.console.tail()))
            elif exited.done():
                instance.note_end(why(exited.result()))
        finally:
            halted.cancel()

    async def destroy(self, sandbox_id: str, handle: Handle) -> None:
        for kept in self._checkpoints.pop(sandbox_id, {}).values():
            self.moments.drop(kept.moment)
        await self._end(sandbox_id, handle)

    async def _end(self, sandbox_id: str, handle: Handle) -> None:
        instance = self._instances.pop(sandbox_id, None)
        watch = self._watches.pop(sandbox_id, None)
        if watch is not None:
            watch.cancel()
        if instance is not None:
            instance.forget()
            instance.frozen = False  # a thread that pages it out stops
            await instance.channel.close()
            instance.full.console.close()
        if handle:
            await self.node.machines.end(handle["vm"], handle["slot"], instance.machine if instance else None)
        self.node.host.volume.remove_spool(sandbox_id)
