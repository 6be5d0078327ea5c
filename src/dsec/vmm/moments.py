"""Moments: running machines as they were, memory, devices and disk, for others to go on from.

A moment is a template (`template_cache.Template`) made of a machine that goes on itself: memory and state in sealed
memfds, a disk beside those of templates, which share what none has changed. It lives until it is dropped, or the server
ends; what is to outlive the server (`keep`) is held by the launcher, too, and `<volume>/<name>/NAME.moment` says what
it is. Machines that were made of one keep what they have mapped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.errors import Unavailable
from dsec.kernel.private_pages import Copy
from dsec.ports import Handle
from dsec.vmm.instance import MachineInstance
from dsec.vmm.kept import held_bytes
from dsec.vmm.machine import Machines
from dsec.vmm.template_cache import Template, seal

log = logging.getLogger(__name__)

MEMORY_RESERVE = 256 << 20
"""What has to be left of the host's when the memory of a machine has been copied."""


class Moment(Struct, frozen=True):
    """A machine as it was."""

    template: Template
    token: bytes
    """What its guest takes for a channel's begin."""
    held: bool
    """Its guest was told that time stands still."""
    stood_s: float
    """How long the machine stood still for it."""
    copied_bytes: int
    """Of memory that is no template's."""


class _Note(Struct, frozen=True):
    """`NAME.moment`."""

    token: str
    held: bool
    copied_bytes: int
    machine: str
    what: str


class Moments:
    """All moments of a node."""

    def __init__(self, machines: Machines, on_drop: Callable[[str], None]) -> None:
        """`on_drop(name)`: nobody begins as this one any more."""
        self._machines = machines
        self._disks = machines.disks
        self._memory = machines.kept
        self._dropping: set[asyncio.Task[None]] = set()
        self._on_drop = on_drop
        self._kept: dict[str, Moment] = {}

    def get(self, name: str) -> Moment:
        """Raises `Unavailable` where it was dropped."""
        found = self._kept.get(name)
        if found is None:
            raise Unavailable("the machine that it was to be a copy of is not kept any more", remedy="Fork again.")
        return found

    async def take(self, instance: MachineInstance, handle: Handle) -> str:
        """Its name. Raises `Unavailable`."""
        taking = asyncio.ensure_future(self._take(instance, handle))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._unwanted)
            raise

    def _unwanted(self, taking: asyncio.Future[str]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            self.drop(taking.result())

    async def _take(self, instance: MachineInstance, handle: Handle) -> str:
        name = f"m{secrets.token_hex(8)}"
        _check_memory(handle["memory_bytes"])
        with contextlib.ExitStack() as undo:
            try:
                copy = await asyncio.to_thread(Copy, instance.machine.pid, handle["memory_bytes"])
                undo.callback(copy.close)
                await asyncio.to_thread(copy.begin)
                state = os.memfd_create("state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, state)
                undo.callback(self._disks.template_path(name).unlink, missing_ok=True)
                memory, held, stood_s = await self._split(instance, copy, state, name)
            except OSError as error:
                log.warning("sandbox %s can't be copied: %s", instance.sandbox_id, error)
                raise Unavailable(
                    f"the machine can't be copied: {error.strerror}", remedy="See `dsec doctor`; it goes on itself."
                ) from error
            seal(state)
            template = Template(name, memory, state, self._disks.template_path(name), handle.get("machine", ""))
            token = bytes.fromhex(handle["token"])
            self._kept[name] = Moment(template, token, held, stood_s, copy.private_bytes)
            self._memory.put(name, held_bytes(memory, state))
            undo.pop_all()
        return name

    async def _split(self, instance: MachineInstance, copy: Copy, state: int, name: str) -> tuple[int, bool, float]:
        writable = os.open(f"/proc/self/fd/{state}", os.O_WRONLY | os.O_CLOEXEC)
        own = self._disks.path(instance.machine.name)
        began = time.monotonic()
        try:
            async with instance.still():
                held = instance.frozen
                copying = asyncio.ensure_future(asyncio.to_thread(copy.finish))
                try:
                    await instance.machine.control.split(writable)
                    await asyncio.to_thread(self._disks.bring, own, name)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.close(await copying)
                    raise
                memory = await copying
        finally:
            os.close(writable)
        return memory, held, time.monotonic() - began

    async def keep(self, name: str, what: str) -> None:
        """Have it outlive this server, with words for the next one (`adopt`). Raises `Unavailable`, OSError."""
        moment, launcher = self.get(name), self._machines.launcher
        if launcher is None:
            raise Unavailable("the launcher of virtual machines is being started again")
        template = moment.template
        note = _Note(moment.token.hex(), moment.held, moment.copied_bytes, template.machine, what)
        await launcher.hold(name, [template.memory, template.state])
        self._note(name).write_bytes(msgspec.json.encode(note))

    async def adopt(self, held: frozenset[str]) -> dict[str, str]:
        """What an earlier server kept: names, with its words."""
        found: dict[str, str] = {}
        for path in self._disks.root.glob("*.moment"):
            name, launcher, disk = path.stem, self._machines.launcher, self._disks.template_path(path.stem)
            try:
                if launcher is None or name not in held or not disk.exists():
                    raise Unavailable("nobody holds it")
                note = msgspec.json.decode(path.read_bytes(), type=_Note)
                memory, state = await launcher.take(name)
            except (OSError, msgspec.MsgspecError, Unavailable):
                path.unlink(missing_ok=True)
                continue
            template = Template(name, memory, state, disk, note.machine)
            self._kept[name] = Moment(template, bytes.fromhex(note.token), note.held, 0.0, note.copied_bytes)
            self._memory.put(name, held_bytes(memory, state))
            found[name] = note.what
        return found

    def _note(self, name: str) -> Path:
        return self._disks.root / f"{name}.moment"

    def drop(self, name: str) -> None:
        """Idempotent."""
        if name in self._kept:
            self._let_go(name).unlink(missing_ok=True)
        if self._note(name).exists():
            self._note(name).unlink()
            dropping = asyncio.get_running_loop().create_task(self._drop_held(name), name="end of a moment")
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)

    async def _drop_held(self, name: str) -> None:
        if self._machines.launcher is not None:
            with contextlib.suppress(Unavailable):
                await self._machines.launcher.drop(name)

    def _let_go(self, name: str) -> Path:
        """Its disk."""
        moment = self._kept.pop(name)
        self._on_drop(name)
        self._memory.drop(name)
        os.close(moment.template.memory)
        os.close(moment.template.state)
        return moment.template.disk

    async def close(self, *, keep: bool) -> None:
        """`keep`: what is to outlive this server does. All else is dropped."""
        for name in list(self._kept):
            if keep and self._note(name).exists():
                self._let_go(name)
            else:
                self.drop(name)
        await asyncio.gather(*self._dropping, return_exceptions=True)


def _check_memory(needed: int) -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if free < needed + MEMORY_RESERVE:
        raise Unavailable(
            f"the host has {free >> 20} MiB of memory free; a copy of this machine may take {needed >> 20}",
            remedy="Try again when other sandboxes have ended.",
        )
