"""Moments: running machines as they were, memory, devices and disk, for others to go on from.

A moment is a template (`template_cache.Template`) made of a machine that goes on itself: memory and state in sealed
memfds, a disk beside those of templates, which share what none has changed. What differs of its memory lies over what
the machine itself was made of (`Template.own`), where its clones can begin so. It lives until it is dropped, or the
server ends; what is to outlive the server (`keep`) is held by the launcher, too, and `<volume>/<name>/NAME.moment` says
what it is. Machines that were made of one keep what they have mapped.
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
from dsec.kernel.private_pages import Layer, Written
from dsec.ports import Handle
from dsec.vmm.instance import MachineInstance
from dsec.vmm.kept import held_bytes
from dsec.vmm.machine import Machine, Machines
from dsec.vmm.screens import Screen
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
    """Of memory while it stood still."""


class _Note(Struct, frozen=True):
    """`NAME.moment`."""

    token: str
    held: bool
    copied_bytes: int
    machine: str
    what: str
    own: bool = False
    screen: bool = False


class Moments:
    """All moments of a node."""

    def __init__(self, machines: Machines, on_drop: Callable[[str], None], *, layered: bool) -> None:
        """`on_drop(name)`: nobody begins as this one any more. `layered`: clones can begin with memory in two files."""
        self._layered = layered
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
                layer = await asyncio.to_thread(self._memory_of, instance.machine, handle["memory_bytes"])
                undo.callback(layer.close)
                await asyncio.to_thread(layer.begin)
                state = os.memfd_create("state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, state)
                undo.callback(self._disks.template_path(name).unlink, missing_ok=True)
                shown = await instance.find_screen()
                held, stood_s, screen = await self._split(instance, layer, state, name, shown)
                if screen >= 0:
                    undo.callback(os.close, screen)
                memory, own = await asyncio.to_thread(layer.detach if self._layered else layer.whole)
            except OSError as error:
                log.warning("sandbox %s can't be copied: %s", instance.sandbox_id, error)
                raise Unavailable(
                    f"the machine can't be copied: {error.strerror}", remedy="See `dsec doctor`; it goes on itself."
                ) from error
            seal(state)
            disk, machine = self._disks.template_path(name), handle.get("machine", "")
            template = Template(name, memory, state, disk, machine, own, screen)
            token = bytes.fromhex(handle["token"])
            self._put(name, Moment(template, token, held, stood_s, layer.private_bytes))
            undo.pop_all()
        return name

    @staticmethod
    def _memory_of(machine: Machine, size: int) -> Layer | Written:
        return Written(size) if machine.copies_whole else Layer(machine.pid, size)

    def _put(self, name: str, moment: Moment) -> None:
        self._kept[name] = moment
        memory, *others = moment.template.files
        self._memory.put(name, held_bytes(*others, *([memory] if moment.template.own < 0 else [])))

    async def _split(
        self, instance: MachineInstance, layer: Layer | Written, state: int, name: str, shown: Screen | None
    ) -> tuple[bool, float, int]:
        writable = os.open(f"/proc/self/fd/{state}", os.O_WRONLY | os.O_CLOEXEC)
        own = self._disks.path(instance.machine.name)
        began = time.monotonic()
        try:
            async with instance.still():
                held = instance.frozen
                copying = asyncio.ensure_future(asyncio.to_thread(layer.finish))
                try:
                    await instance.machine.control.split(writable, layer.fd)
                    await asyncio.to_thread(self._disks.bring, own, name)
                    screen = await asyncio.to_thread(shown.read) if shown is not None else -1
                except BaseException:
                    await asyncio.gather(copying, return_exceptions=True)
                    raise
                await copying
        finally:
            os.close(writable)
        return held, time.monotonic() - began, screen

    async def keep(self, name: str, what: str) -> None:
        """Have it outlive this server, with words for the next one (`adopt`). Raises `Unavailable`, OSError."""
        moment, launcher = self.get(name), self._machines.launcher
        if launcher is None:
            raise Unavailable("the launcher of virtual machines is being started again")
        template = moment.template
        files = template.own >= 0, template.screen >= 0
        note = _Note(moment.token.hex(), moment.held, moment.copied_bytes, template.machine, what, *files)
        await launcher.hold(name, template.files)
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
                memory, state, *others = await launcher.take(name)
            except (OSError, msgspec.MsgspecError, Unavailable):
                path.unlink(missing_ok=True)
                continue
            own = others.pop(0) if note.own else -1
            screen = others.pop(0) if note.screen else -1
            template = Template(name, memory, state, disk, note.machine, own, screen)
            self._put(name, Moment(template, bytes.fromhex(note.token), note.held, 0.0, note.copied_bytes))
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
        for fd in moment.template.files:
            os.close(fd)
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
