"""Machines that are paused without a VMM: memory and devices' state in files, until they go on in a new one.

Owns `<volume>/vm/NAME.suspended/` (`memory`, `state`); it is there under this name once it is whole, and goes when the
machine goes on. Meanwhile the sandbox keeps its disk and its cgroups, and its channel keeps what is to be sent. One
lock of the instance's makes moves between both take turns; whoever resumes a machine while it is being suspended wins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from dsec.backends.microvm.node import VmNode
from dsec.channel.movable import MovableChannel
from dsec.errors import DsecError, Unavailable, Unsupported
from dsec.kernel import paging
from dsec.kernel.cgroups import Slot
from dsec.kernel.private_pages import Copy
from dsec.kernel.syscalls import pidfd_getfd
from dsec.ports import Handle, InstanceEnd, PagedOut
from dsec.spec.causes import Cause
from dsec.vmm.driver import Shape
from dsec.vmm.instance import MachineInstance
from dsec.vmm.machine import Machine, uid_of
from dsec.vmm.template_cache import Template

log = logging.getLogger(__name__)

_WHOLE, _HALF = ".suspended", ".suspending"
_FILES = ("memory", "state")
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Suspends:
    """All of a node."""

    def __init__(self, node: VmNode, watch: Callable[[MachineInstance, bool], None]) -> None:
        """`watch(instance, whether)`: hear of its VMM's end, or not any more."""
        self._node = node
        self._watch = watch
        self._handles: dict[str, Handle] = {}
        self._rest: dict[str, bytes] = {}
        """What the last VMM hadn't taken of a channel."""
        self._waking: dict[str, asyncio.Task[None]] = {}

    def serve(self, instance: MachineInstance, handle: Handle) -> None:
        """Its pauses are suspensions from now on."""
        self._handles[instance.sandbox_id] = handle
        instance.suspender = self

    def remove(self, name: str) -> None:
        """A machine's files. Idempotent."""
        for kind in (_WHOLE, _HALF):
            shutil.rmtree(self._path(name, kind), ignore_errors=True)

    def let_go(self, sandbox_id: str) -> None:
        """It is destroyed, or the next server's. Idempotent."""
        self._handles.pop(sandbox_id, None)
        self._rest.pop(sandbox_id, None)
        waking = self._waking.pop(sandbox_id, None)
        if waking is not None:
            waking.cancel()

    def has(self, name: str) -> bool:
        """Whether a machine is suspended."""
        return self._path(name).is_dir()

    def _path(self, name: str, kind: str = _WHOLE) -> Path:
        return self._node.disks.root / f"{name}{kind}"

    # --- from running to files ---

    async def suspend(self, instance: MachineInstance) -> PagedOut:
        """As `PausableHost.page_out` of a frozen one. Raises `Unavailable`, OSError; then it is as before."""
        before = paging.resident_bytes([instance.machine.pid])
        async with instance.lock:
            if instance.suspended or not instance.frozen:
                return PagedOut(before, before)
            await self._suspend(instance)
            return PagedOut(before, 0 if instance.suspended else before)

    async def _suspend(self, instance: MachineInstance) -> None:
        channel, name = _movable(instance), instance.machine.name
        half = self._path(name, _HALF)
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(mode=0o700)
        cut = instance.machine.copies_whole  # its stream is, and ends where nothing is under way
        if not cut:
            channel.quiet(True)
        try:
            async with instance.held():
                if not cut:
                    await instance.machine.control.stop()  # a VMM that answers has done with its sockets what it can
                    while channel.take_in():
                        await instance.machine.control.stop()
                await self._write(instance, half)
                if instance.frozen:
                    half.rename(self._path(name))
                    instance.suspended = True
                    self._watch(instance, False)
                    if not cut:
                        self._rest[instance.sandbox_id] = await asyncio.to_thread(_unread, instance.machine.pid)
                        channel.part()
                    await self._node.machines.stop(instance.machine)
        finally:
            if not instance.suspended:
                if not cut:
                    channel.quiet(False)
                shutil.rmtree(half, ignore_errors=True)

    async def _write(self, instance: MachineInstance, into: Path) -> None:
        uid, size = uid_of(instance.machine.name), self._handles[instance.sandbox_id]["memory_bytes"]
        copy, memory = None, -1
        if instance.machine.copies_whole:
            memory = os.open(into / "memory", _MAKE, 0o600)
        else:
            copy = await asyncio.to_thread(Copy, instance.machine.pid, size, into / "memory")
        state = os.open(into / "state", _MAKE, 0o600)
        try:
            if copy is not None:
                await asyncio.to_thread(copy.begin)
                os.close(await asyncio.to_thread(copy.finish))
            await instance.machine.control.split(state, memory)
        finally:
            os.close(state)
            if copy is not None:
                copy.close()
            else:
                os.close(memory)
        for each in _FILES:
            os.chown(into / each, uid, uid)  # its VMM opens it once more, as itself

    # --- and back ---

    def wake(self, instance: MachineInstance) -> None:
        """It is to go on soon; where it can't, it ends."""
        if instance.sandbox_id not in self._waking:
            waking = self._waking[instance.sandbox_id] = asyncio.create_task(self._wake(instance), name="resume")
            waking.add_done_callback(lambda _: self._waking.pop(instance.sandbox_id, None))

    async def _wake(self, instance: MachineInstance) -> None:
        try:
            await self.awake(instance)
        except (DsecError, OSError) as error:
            why = error.message if isinstance(error, DsecError) else str(error)
            log.warning("sandbox %s can't go on: %s", instance.sandbox_id, why)
            instance.note_end(InstanceEnd(Cause.PLATFORM_KILLED, f"it can't be resumed: {why}"))

    async def awake(self, instance: MachineInstance) -> None:
        """It has a VMM, and goes on unless it is frozen. Raises `Unavailable`, `Unsupported`, `CreateFailed`,
        OSError."""
        async with instance.lock:
            if not instance.suspended:
                return
            handle, slot = self._handles[instance.sandbox_id], instance.machine.slot
            instance.machine = machine = await self.restore(handle, slot)
            if machine.copies_whole:  # its guest has to move to be asked for its port
                await instance.rejoin(_movable(instance))
            else:
                _movable(instance).rejoin(await machine.port(), self._rest.pop(instance.sandbox_id, b""))
            instance.suspended = False
            self._watch(instance, True)
            if machine.copies_whole:
                pass
            elif instance.frozen:
                slot.freeze(True)
                machine.control.resume_soon()
            else:
                await machine.control.resume()
            await asyncio.to_thread(shutil.rmtree, self._path(machine.name), True)

    async def restore(self, handle: Handle, slot: Slot) -> Machine:
        """A suspended machine in a new VMM, stopped. Raises as `awake`."""
        if handle["vmm"] != self._node.driver.fingerprint:
            raise Unsupported("its state is of another version of the virtual machine monitor, or of another CPU")
        shape = Shape(handle["vcpus"], handle["memory_bytes"], handle["disk_bytes"], tuple(handle["layers"]))
        name = handle["vm"]
        with contextlib.ExitStack() as stack:
            try:
                memory, state = (os.open(self._path(name) / each, os.O_RDONLY | os.O_CLOEXEC) for each in _FILES)
            except OSError as error:
                raise Unavailable(f"its files are gone: {error}") from None
            stack.callback(os.close, memory)
            stack.callback(os.close, state)
            if os.fstat(memory).st_size != shape.memory_bytes:
                raise Unavailable("its memory's file was cut")
            moment = Template(name, memory, state, self._node.disks.path(name), handle["machine"])
            return await self._node.go_on_from(name, handle["slot"], shape, handle["cpus"], moment, slot=slot)


def _movable(instance: MachineInstance) -> MovableChannel:
    assert isinstance(instance.channel, MovableChannel)
    return instance.channel


def _unread(pid: int) -> bytes:
    """What a VMM that stands still has not taken of its machine's channel."""
    found = b""
    watched = os.pidfd_open(pid)
    try:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            if not str(each.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=pidfd_getfd(watched, int(each.name))) as sock:
                if sock.family != socket.AF_UNIX or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                if not str(sock.getsockname()).endswith("/channel"):
                    continue
                with contextlib.suppress(BlockingIOError):
                    while data := sock.recv(1 << 16, socket.MSG_DONTWAIT):
                        found += data
    finally:
        os.close(watched)
    return found
