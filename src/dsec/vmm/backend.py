"""What every backend of machines does alike: taking over what an earlier server left, hearing of ends, forks.

Owns the node, the moments, and per sandbox an instance and the task that waits for its end. Invariants:

- All names are in the handle, so `destroy` works on what a dead server left half-made.
- VMMs and the launcher outlive this object; when the launcher dies, so do the machines, and a new one is started.
- What a machine says of itself is a claim: only its VMM's cgroups and its end are facts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

from dsec.errors import CreateFailed, DsecError, InvalidRequest, OutcomeUnknown, Unavailable, Unsupported
from dsec.kernel.cgroups import Slot
from dsec.ports import Clock, Handle, InstanceEnd
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec
from dsec.vmm.driver import VmmEnd
from dsec.vmm.ends import stopped, why
from dsec.vmm.instance import MachineInstance
from dsec.vmm.launching import Ended
from dsec.vmm.machine import Machine, StartLost
from dsec.vmm.moments import Moments
from dsec.vmm.node import MachineNode

log = logging.getLogger(__name__)

MOST_MEMORY = 512 << 30
"""An imitated CPU has 40 bits of address, and devices need some of that."""

NodeT = TypeVar("NodeT", bound=MachineNode)
InstanceT = TypeVar("InstanceT", bound=MachineInstance)


class MachineBackend(ABC, Generic[NodeT, InstanceT]):
    """A base of the backends of one node."""

    api_version: ClassVar[int] = 1
    adopt_s: ClassVar[float]
    """How long the guest of a machine that was left may take to answer."""

    def __init__(self, node: NodeT, clock: Clock) -> None:
        self.node = node
        self._clock = clock
        self._instances: dict[str, InstanceT] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self.moments = Moments(node.machines, node.stems.drop, layered=node.stems.wanted)

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

    async def open(self, known: dict[str, Handle]) -> Mapping[str, InstanceT | InstanceEnd]:
        node = self.node
        state, fresh = await node.open(self._on_lost)
        wanted = {handle["slot"]: handle["vm"] for handle in known.values() if handle}
        slots = await asyncio.to_thread(node.pool.open, wanted)
        node.machines.expect(state.live)
        found: dict[str, InstanceT | InstanceEnd] = {}
        if fresh:
            found = dict.fromkeys(known, InstanceEnd(Cause.NODE_LOST, "the launcher of virtual machines was gone"))
        await self._adopt_kept(state.held)
        left = state.live.keys() | state.ended.keys() | node.machines.names()
        for sandbox_id, handle in known.items():
            if not handle:
                continue
            live = handle["vm"] in state.live
            if (spoiled := self._spoiled(handle)) is not None:
                found[sandbox_id] = spoiled
            elif handle["vm"] in state.ended:
                found[sandbox_id] = self._why(state.ended[handle["vm"]])
            elif (live or self._waits(handle["vm"])) and handle["slot"] in slots:
                try:
                    found[sandbox_id] = await self._adopt(sandbox_id, handle, live)
                except DsecError as error:
                    log.warning("sandbox %s cannot be adopted: %s", sandbox_id, error)
                    if not live:
                        words = f"it can't be resumed: {error.message}"
                        found[sandbox_id] = InstanceEnd(Cause.PLATFORM_KILLED, words)
        for sandbox_id, handle in known.items():
            if sandbox_id not in self._instances:
                await self.destroy(sandbox_id, handle)
        ours = {instance.machine.name for instance in self._instances.values()}
        for name in left - ours:
            await node.machines.end(name, "")
        return found

    @abstractmethod
    async def _adopt_kept(self, held: frozenset[str]) -> None:
        """Take over what the launcher holds."""

    def _spoiled(self, handle: Handle) -> InstanceEnd | None:
        """Why one that was left can't go on, whether it runs or not."""
        del handle
        return None

    def _waits(self, name: str) -> bool:
        """Whether a machine without a VMM is to go on in one."""
        del name
        return False

    async def _adopt(self, sandbox_id: str, handle: Handle, live: bool) -> InstanceT:
        """`live`: it has a VMM; else it gets one, to stand still in it."""
        slot = self.node.pool.find(handle["slot"], handle["vm"])
        assert slot is not None
        frozen = slot.frozen or not live
        slot.thaw()  # its guest has to answer once
        machine = await (self.node.machines.adopt(handle["vm"], slot) if live else self._restore(handle, slot))
        with contextlib.suppress(Unavailable):  # the last server may have died while it stood still for a copy
            await machine.control.resume()
        try:
            async with asyncio.timeout(self.adopt_s):
                instance = await self._serve_again(sandbox_id, machine, handle)
        except TimeoutError:
            machine.close()
            raise Unavailable("its guest doesn't answer") from None
        if frozen:
            instance.freeze(True)
        return instance

    async def _restore(self, handle: Handle, slot: Slot) -> Machine:
        """One that waits, in a VMM."""
        raise NotImplementedError

    @abstractmethod
    async def _serve_again(self, sandbox_id: str, machine: Machine, handle: Handle) -> InstanceT:
        """Connect to a machine that was left."""

    async def close(self, *, keep: bool) -> None:
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        self._watches.clear()
        for instance in self._instances.values():
            instance.forget()
            await instance.channel.close()
            self._let_go(instance)
        self._instances.clear()
        await self.moments.close(keep=keep)
        await self.node.close(keep=keep)

    def _let_go(self, instance: InstanceT) -> None:
        """Of what is open of one that goes on, or ends."""
        instance.machine.close()

    def _on_lost(self) -> None:
        """The launcher died; its VMMs die with it."""
        for instance in self._instances.values():
            instance.machine.slot.kill()
            instance.note_end(InstanceEnd(Cause.NODE_LOST, "the launcher of virtual machines died"))

    # --- making ---

    def _check_alike(self, spec: SandboxSpec, kind: str, least_bytes: int, most_vcpus: int) -> None:
        """As `check`, of what is the same for all machines. `kind`: in words, with an article."""
        if spec.gpus is not None:
            raise Unsupported(f"{kind} can be given no GPU in this version", remedy="Leave it out.", field="gpus")
        if spec.require_kvm and self.node.driver.accel != "kvm":
            raise Unsupported(
                f"this node has no KVM that is fit to run machines: {self.node.accel_reason}",
                remedy="Leave require_kvm out, and the machine runs slowly.",
                field="require_kvm",
            )
        if spec.memory_bytes < least_bytes:
            raise InvalidRequest(f"{kind} needs {least_bytes >> 20} MiB of memory", field="memory_bytes")
        if spec.memory_bytes > MOST_MEMORY:
            raise Unsupported(f"{kind} has at most {MOST_MEMORY >> 30} GiB of memory", field="memory_bytes")
        if spec.cpus > most_vcpus:
            raise Unsupported(f"{kind} has at most {most_vcpus} CPUs", field="cpus")

    async def create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> InstanceT:
        try:
            try:
                return await self._create(sandbox_id, spec, handle)
            except StartLost as error:
                log.warning("sandbox %s begins once more: %s", sandbox_id, error.message)
                await self.node.machines.clear(handle["vm"], handle["slot"])
                return await self._create(sandbox_id, spec, handle)
        except BaseException as error:
            gone = isinstance(error, (Unavailable, OutcomeUnknown))
            end = await self.node.machines.early_end(handle["vm"]) if gone else None
            await asyncio.shield(self.destroy(sandbox_id, handle))
            if end is not None:
                raise CreateFailed(f"the machine ended while it was made: {self._why(end).message}") from error
            if isinstance(error, OSError):
                raise CreateFailed(f"the host refused a step: {error}", remedy="See `dsec doctor`.") from error
            if isinstance(error, OutcomeUnknown):
                raise CreateFailed(f"the machine went away while it was made: {error.message}") from error
            raise

    @abstractmethod
    async def _create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> InstanceT:
        """As `create`; `destroy` removes what it made. Raises `StartLost` where it is worth another try."""

    # --- copies ---

    async def split(self, sandbox_id: str, handle: Handle) -> str:
        """As in `ports.ForkHost`."""
        self._check_same(handle)
        return await self.moments.take(await self._running(sandbox_id), handle)

    async def drop(self, name: str) -> None:
        """As in `ports.ForkHost`."""
        self.moments.drop(name)

    def _check_same(self, handle: Handle) -> None:
        """Raises `Unsupported` where its state can't go on in another VMM."""
        if handle.get("vmm") != self.node.driver.fingerprint:
            raise Unsupported(
                "this machine was started by another version of the virtual machine monitor, or on another CPU: its "
                "state can't go on in one of this node's",
                remedy="Create a new sandbox.",
            )

    async def _running(self, sandbox_id: str) -> InstanceT:
        """One that runs or stands still, in a VMM. Raises `Unavailable`."""
        instance = self._instances.get(sandbox_id)
        if instance is None:
            raise Unavailable("the machine is not there", remedy="Ask for its state.")
        return instance

    # --- ending ---

    @abstractmethod
    async def destroy(self, sandbox_id: str, handle: Handle) -> None:
        """As in `ports.Backend`."""

    def _served(self, instance: InstanceT) -> InstanceT:
        """It is there from now on."""
        self._instances[instance.sandbox_id] = instance
        self._watching(instance, True)
        return instance

    def _watching(self, instance: InstanceT, whether: bool) -> None:
        """Hear of its VMM's end, or not any more."""
        if whether:
            watch = asyncio.create_task(self._watch(instance), name=f"end of {instance.sandbox_id}")
            self._watches[instance.sandbox_id] = watch
        elif instance.sandbox_id in self._watches:
            self._watches.pop(instance.sandbox_id).cancel()

    async def _watch(self, instance: InstanceT) -> None:
        """Say why it ended: its VMM did, or its kernel stopped."""
        exited = self.node.machines.exited(instance.machine.name)
        halted = asyncio.ensure_future(instance.machine.control.ended())
        try:
            await asyncio.wait((exited, halted), return_when=asyncio.FIRST_COMPLETED)
            if halted.done() and not halted.cancelled():
                instance.note_end(stopped(halted.result().reason, self._last_words(instance, halted.result())))
            elif exited.done():
                instance.note_end(self._why(exited.result()))
        finally:
            halted.cancel()

    def _last_words(self, instance: InstanceT, end: VmmEnd) -> str:
        """What its console said last."""
        del instance
        return end.console

    def _why(self, end: Ended) -> InstanceEnd:
        own = self.node.driver.own_end(end.status, end.said)
        return why(end) if own is None else stopped(own.reason, own.console)

    async def _end(self, sandbox_id: str, handle: Handle, machine: Machine | None = None) -> None:
        """Remove every trace of it. `machine`: one that no instance has yet."""
        instance = self._instances.pop(sandbox_id, None)
        watch = self._watches.pop(sandbox_id, None)
        if watch is not None:
            watch.cancel()
        async with instance.lock if instance is not None else contextlib.nullcontext():
            if instance is not None:
                instance.forget()
                instance.frozen = False  # a thread that pages it out stops
                await instance.channel.close()
                self._let_go(instance)
            if handle:
                await self.node.machines.end(handle["vm"], handle["slot"], instance.machine if instance else machine)
        self.node.host.volume.remove_spool(sandbox_id)
