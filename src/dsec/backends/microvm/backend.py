"""`ports.Backend` of microVMs: sandboxes with a kernel of their own, each a clone of a template.

Owns on the host what `machine.Machines` owns for each, a launcher, and templates. Invariants:

- All names are in the handle, so `destroy` works on what a dead server left half-made.
- VMMs and the launcher outlive this object; when the launcher dies, so do the machines, and a new one is started.
- What a machine says of itself is a claim: only its VMM's cgroups and its end are facts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from dsec.backends.microvm.captures import Captures
from dsec.backends.microvm.node import VmNode
from dsec.backends.microvm.spares import Wanted
from dsec.backends.microvm.suspends import Suspends
from dsec.channel import Spool
from dsec.channel.movable import MovableChannel
from dsec.errors import CreateFailed, DsecError, InvalidRequest, OutcomeUnknown, Unavailable, Unsupported
from dsec.plan.tripwires import from_outside
from dsec.ports import Captured, Clock, Handle, InstanceEnd
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec
from dsec.vmm.disks import disk_size
from dsec.vmm.driver import Shape
from dsec.vmm.ends import stopped, whole, why
from dsec.vmm.first_words import Identity, become, configure, new_token
from dsec.vmm.instance import MachineInstance
from dsec.vmm.launching import Ended
from dsec.vmm.machine import Machine
from dsec.vmm.moments import Moments

log = logging.getLogger(__name__)

MIB = 1 << 20
LEAST_MEMORY = 96 * MIB
_ADOPT_S = 10.0


class MicroVmBackend:
    """MicroVMs of one node."""

    name: ClassVar[str] = "microvm"
    api_version: ClassVar[int] = 1

    def __init__(self, node: VmNode, clock: Clock, *, suspend: bool = False) -> None:
        """`suspend`: what is paused is written to a file, and its VMM ends; else it is frozen and paged out."""
        self.node = node
        self._clock = clock
        self._instances: dict[str, MachineInstance] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self.moments = Moments(node.machines, node.stems.drop)
        self.captures = Captures(node, self.moments)
        self.suspends = Suspends(node, self._watching)
        self._suspend = suspend

    @property
    def epoch(self) -> int:
        return self.node.epoch

    def gauges(self) -> dict[str, dict[str, float]]:
        """As in `edge.observer.Inspectable`."""
        return {"cgroups": dict(self.node.pool.counts()), "machines": {"spare": self.node.spares.count}}

    async def check_ready(self) -> None:
        """As in `edge.observer.Inspectable`."""
        self.node.host.volume.check_space()

    def pid(self, sandbox_id: str) -> int:
        """The host's number of a machine's VMM. Raises KeyError."""
        return self._instances[sandbox_id].machine.pid

    # --- opening and closing ---

    async def open(self, known: dict[str, Handle]) -> Mapping[str, MachineInstance | InstanceEnd]:
        node = self.node
        state, fresh = await node.open(self._on_lost)
        wanted = {handle["slot"]: handle["vm"] for handle in known.values() if handle}
        slots = await asyncio.to_thread(node.pool.open, wanted)
        node.machines.expect(state.live)
        found: dict[str, MachineInstance | InstanceEnd] = {}
        if fresh:
            found = dict.fromkeys(known, InstanceEnd(Cause.NODE_LOST, "the launcher of virtual machines was gone"))
        await node.templates.adopt(state.held)
        left = state.live.keys() | state.ended.keys() | node.machines.names()
        for sandbox_id, handle in known.items():
            if not handle:
                continue
            if handle.get("lazy") and node.host.zeros_read():
                found[sandbox_id] = InstanceEnd(Cause.INFRA_IMAGE, "what filled its files was gone for a while")
            elif handle["vm"] in state.ended:
                found[sandbox_id] = self._why(state.ended[handle["vm"]])
            elif (handle["vm"] in state.live or self.suspends.has(handle["vm"])) and handle["slot"] in slots:
                try:
                    found[sandbox_id] = await self._adopt(sandbox_id, handle, handle["vm"] in state.live)
                except DsecError as error:
                    log.warning("sandbox %s cannot be adopted: %s", sandbox_id, error)
                    if handle["vm"] not in state.live:
                        why = f"it can't be resumed: {error.message}"
                        found[sandbox_id] = InstanceEnd(Cause.PLATFORM_KILLED, why)
        for sandbox_id, handle in known.items():
            if sandbox_id not in self._instances:
                await self.destroy(sandbox_id, handle)
        ours = {instance.machine.name for instance in self._instances.values()}
        for name in left - ours:
            await node.machines.end(name, "")
        return found

    async def close(self, *, keep: bool) -> None:
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        self._watches.clear()
        for instance in self._instances.values():
            self.suspends.let_go(instance.sandbox_id)
            instance.forget()
            await instance.channel.close()
            instance.machine.close()
        self._instances.clear()
        await self.moments.close(keep=False)
        await self.node.close(keep=keep)

    def _on_lost(self) -> None:
        """The launcher died; its VMMs die with it."""
        for instance in self._instances.values():
            instance.machine.slot.kill()
            instance.note_end(InstanceEnd(Cause.NODE_LOST, "the launcher of virtual machines died"))

    # --- making ---

    def check(self, spec: SandboxSpec) -> None:
        kernel = self.node.kernel()
        if spec.gpus is not None:
            raise Unsupported("a machine can be given no GPU in this version", remedy="Leave it out.", field="gpus")
        from_outside(spec.tripwires)
        if spec.network and not kernel.leads_out:
            raise Unsupported(
                f"the kernel of microVMs here ({kernel.release}) was imported without what a network by name takes",
                remedy="Import it again: `dsec kernel import`.",
                field="network",
            )
        if spec.require_kvm and self.node.driver.accel != "kvm":
            raise Unsupported(
                f"this node has no KVM that is fit to run machines: {self.node.accel_reason}",
                remedy="Leave require_kvm out, and the machine runs slowly.",
                field="require_kvm",
            )
        if spec.memory_bytes < LEAST_MEMORY:
            raise InvalidRequest(f"a microVM needs {LEAST_MEMORY >> 20} MiB of memory", field="memory_bytes")
        if spec.cpus > self.node.driver.most_vcpus:
            raise Unsupported(f"a microVM has at most {self.node.driver.most_vcpus} CPUs", field="cpus")
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

    async def create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> MachineInstance:
        try:
            return await self._create(sandbox_id, spec, handle)
        except BaseException as error:
            end = await self.node.machines.early_end(handle["vm"]) if isinstance(error, Unavailable) else None
            await asyncio.shield(self.destroy(sandbox_id, handle))
            if end is not None:
                raise CreateFailed(f"the machine ended while it was made: {self._why(end).message}") from error
            if isinstance(error, OSError):
                raise CreateFailed(f"the host refused a step: {error}", remedy="See `dsec doctor`.") from error
            if isinstance(error, OutcomeUnknown):
                raise CreateFailed(f"the machine went away while it was made: {error.message}") from error
            raise

    async def _create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> MachineInstance:
        node, begun = self.node, self._clock.monotonic()
        node.host.volume.check_space()
        layers = spec.layers or node.host.environments.get(spec.environment).layers
        shape = Shape(handle["vcpus"], handle["memory_bytes"], handle["disk_bytes"], tuple(layers))
        moment = self.moments.get(handle["capture"]) if handle["capture"] else None
        machine, before = node.spares.take(handle["vm"]), b""
        if moment is not None:
            machine, before = await node.child(handle["vm"], handle["slot"], shape, handle["cpus"], moment)
        elif machine is None:
            machine = await node.clone(handle["vm"], handle["slot"], shape, handle["cpus"])
        restored = self._clock.monotonic()
        if spec.cpu_class == "batch":
            machine.slot.set_idle()
        await machine.control.resume()
        sock = await machine.port()
        try:
            token = bytes.fromhex(handle["token"])
            identity = Identity(
                token=token,
                hostname=spec.hostname or sandbox_id,
                pids=spec.pids,
                no_new_privs=spec.no_new_privs,
            )
            inside_s = await (become(sock, before, identity) if before else configure(sock, identity))
        except BaseException:
            sock.close()
            raise
        configured = self._clock.monotonic()
        instance = await self._serve(sandbox_id, sock, machine, handle, fresh=True)
        instance.phases_s = {
            "clone": restored - begun,
            "configure": configured - restored,
            "configure_inside": inside_s,
            "hello": self._clock.monotonic() - configured,
        }
        if moment is None:
            node.spares.refill(Wanted(shape, handle["cpus"]))
        elif moment.held:
            instance.channel.hold(0)
        return instance

    # --- copies ---

    async def split(self, sandbox_id: str, handle: Handle) -> str:
        """As in `ports.ForkHost`."""
        self._check_same(handle)
        return await self.moments.take(await self._in_a_vmm(sandbox_id), handle)

    async def capture(self, sandbox_id: str, handle: Handle) -> Captured:
        """As in `ports.CaptureHost`."""
        self._check_same(handle)
        return await self.captures.take(await self._in_a_vmm(sandbox_id), handle, tuple(handle["layers"]))

    def _check_same(self, handle: Handle) -> None:
        """Raises `Unsupported` where its state can't go on in another VMM."""
        if handle.get("vmm") != self.node.driver.fingerprint:
            raise Unsupported(
                "this machine was started by another version of the virtual machine monitor, or on another CPU: its "
                "state can't go on in one of this node's",
                remedy="Create a new sandbox.",
            )

    async def drop(self, name: str) -> None:
        """As in `ports.CaptureHost`."""
        self.moments.drop(name)
        await self.captures.drop(name)

    async def _in_a_vmm(self, sandbox_id: str) -> MachineInstance:
        """One that runs or stands still, but isn't suspended any more."""
        instance = self._instances.get(sandbox_id)
        if instance is None:
            raise Unavailable(f"sandbox {sandbox_id} does not run")
        await self.suspends.awake(instance)
        return instance

    async def _serve(
        self, sandbox_id: str, sock: socket.socket, machine: Machine, handle: Handle, *, fresh: bool = False
    ) -> MachineInstance:
        channel = await MovableChannel.open(
            sock,
            clock=self._clock,
            spool=Spool(self.node.host.volume.spool_path(sandbox_id), fresh=fresh),
            on_broken=partial(log.warning, "sandbox %s: its guest broke the protocol: %s", sandbox_id),
            token=bytes.fromhex(handle["token"]),
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
        self._instances[sandbox_id] = instance
        self._watching(instance, True)
        if self._suspend:
            self.suspends.serve(instance, handle)
        return instance

    def _watching(self, instance: MachineInstance, whether: bool) -> None:
        if whether:
            watch = asyncio.create_task(self._watch(instance), name=f"end of {instance.sandbox_id}")
            self._watches[instance.sandbox_id] = watch
        elif instance.sandbox_id in self._watches:
            self._watches.pop(instance.sandbox_id).cancel()

    async def _adopt(self, sandbox_id: str, handle: Handle, live: bool) -> MachineInstance:
        """`live`: it has a VMM; else it is suspended, and gets one, to stand still in it."""
        slot = self.node.pool.find(handle["slot"], handle["vm"])
        assert slot is not None
        await self._hold(handle.get("lazy", []))
        frozen = slot.frozen or not live
        slot.thaw()  # its guest has to answer once
        if live:
            machine = await self.node.machines.adopt(handle["vm"], slot)
        else:
            machine = await self.suspends.restore(handle, slot)
        with contextlib.suppress(Unavailable):  # the last server may have died while it stood still for a copy
            await machine.control.resume()
        try:
            async with asyncio.timeout(_ADOPT_S):
                instance = await self._serve(sandbox_id, await machine.port(), machine, handle)
        except TimeoutError:
            machine.control.close()
            raise Unavailable("its guest doesn't answer") from None
        self.suspends.remove(handle["vm"])
        if frozen:
            instance.freeze(True)
        return instance

    async def _hold(self, lazy: list[str]) -> None:
        """Where they can't be held, what was read stays and other reads fail."""
        if lazy and self.node.host.remote is not None:
            try:
                await self.node.host.remote.hold(lazy)
            except DsecError as error:
                log.warning("layers of a machine can't be filled: %s", error.message)

    # --- ending ---

    async def _watch(self, instance: MachineInstance) -> None:
        """Say why it ended: its VMM did, or its kernel stopped."""
        exited = self.node.machines.exited(instance.machine.name)
        halted = asyncio.ensure_future(instance.machine.control.ended())
        try:
            await asyncio.wait((exited, halted), return_when=asyncio.FIRST_COMPLETED)
            if halted.done() and not halted.cancelled():
                instance.note_end(stopped(halted.result().reason, halted.result().console))
            elif exited.done():
                instance.note_end(self._why(exited.result()))
        finally:
            halted.cancel()

    def _why(self, end: Ended) -> InstanceEnd:
        own = self.node.driver.own_end(end.status, end.said)
        return why(end) if own is None else stopped(own.reason, own.console)

    async def destroy(self, sandbox_id: str, handle: Handle) -> None:
        instance = self._instances.pop(sandbox_id, None)
        watch = self._watches.pop(sandbox_id, None)
        if watch is not None:
            watch.cancel()
        self.suspends.let_go(sandbox_id)
        async with instance.lock if instance is not None else contextlib.nullcontext():
            if instance is not None:
                instance.forget()
                instance.frozen = False  # a thread that pages it out stops
                await instance.channel.close()
            if handle:
                spare = self.node.spares.take(handle["vm"])
                await self.node.machines.end(handle["vm"], handle["slot"], instance.machine if instance else spare)
                self.suspends.remove(handle["vm"])
        self.node.host.volume.remove_spool(sandbox_id)
