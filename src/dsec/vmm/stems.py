"""Stems: clones that have rehearsed what every machine does first, stand still, and branch (native/stem/stem.c).

Where QEMU imitates the CPU, most of a clone's first second is translation of the guest's code. A stem has done that
once, and its branches share the result, as they share whatever memory none of them changes. KVM needs none of it.

A machine as it was (`vmm.moments`) is a branch, too, which reads another state: of the template's stem, and what is
translated stays where that can be (native/stem/translated.c), or of a *blank* one, which has read none before.

One stem for a template that is in use, STEMS_MOST in all; what wasn't asked for for IDLE_S goes. A stem runs nothing
but the guest and, in its rehearsals, programs of the environment that it is for: /bin/sh and /bin/true. Branches don't
depend on it when they are made. Where no stem can be had, machines are plain clones.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from dsec.errors import CreateFailed, DsecError, Unavailable
from dsec.kernel.cgroups import Shape, Slot
from dsec.vmm.first_words import rehearse, settle_in
from dsec.vmm.machine import SOCKETS, Machine, Machines, StartLost, restored
from dsec.vmm.qemu import QemuControl
from dsec.vmm.screens import show
from dsec.vmm.template_cache import Template

log = logging.getLogger(__name__)

STEMS_MOST = 8
STEM = "stem.so"
"""Beside the guest: what makes a stem of a VMM."""
IDLE_S = 600.0
REHEARSALS = 3
"""The first translates, the others link what was translated; a fourth is no faster."""
REHEARSAL_S = 60.0
SETTLE_S = 0.2


class Stem(Struct, frozen=True):
    """One that stands still."""

    key: str
    memory: os.stat_result
    """Of the file that it has mapped."""
    state: os.stat_result | None
    """Of the file that a blank one has not read; None: it isn't blank."""
    machine: Machine
    reservation: str
    connections: tuple[socket.socket, ...]
    """Its ends of a branch's port and console are copies of these'."""
    token: bytes = b""
    """What the guest of a moment's takes for a channel's begin."""


StartStem = Callable[[str, str], Awaitable[Machine]]
"""`start(name, reservation)`: a clone, as a stem, which waits until it is told to read its state."""
Prepare = Callable[[Machine, socket.socket], Awaitable[bytes]]


class Stems:
    """All stems of a node."""

    def __init__(
        self,
        machines: Machines,
        *,
        wanted: bool,
        settle_s: float = SETTLE_S,
        console: bool = False,
        reload: bool = False,
    ) -> None:
        """Not `wanted`: there are none. `settle_s`: what the guest does after a rehearsal by itself takes so long.
        `console`: machines have one. `reload`: one that has rehearsed can become a machine as it was."""
        self._machines = machines
        self.wanted = wanted
        self._settle_s = settle_s
        self._console = console
        self._reload = reload
        self._stems: dict[str, Stem] = {}
        self._making: dict[str, asyncio.Task[Stem | None]] = {}
        self._idle: dict[str, asyncio.TimerHandle] = {}
        self._impossible: dict[str, asyncio.TimerHandle] = {}
        """Until it is tried again."""
        self._ending: set[asyncio.Task[None]] = set()

    async def get(self, template: Template, shape: Shape, start: StartStem) -> Stem | None:
        """A template's stem, with these limits; None where there is none to be had. Takes a second or more where it is
        to be made first."""
        return await self._get(template.key, template, shape, start, self._rehearsed)

    async def blank(self, template: Template, shape: Shape, start: StartStem) -> Stem | None:
        """One that has not read any state, and may become any machine of the kind; else as `get`."""
        return await self._get(f"{template.key}.blank", template, shape, start, None)

    async def ground(self, template: Template, moment: Template, shape: Shape, start: StartStem) -> Stem | None:
        """One to become a machine as it was, of the template's kind. Where that began with this template, and a stem
        has rehearsed it, most of its code is translated there: that one, else as `blank`."""
        rehearsed = self._reload and template.key in self._stems
        alike = rehearsed and os.path.samestat(os.fstat(template.memory), os.fstat(moment.memory))
        return await (self.get if alike else self.blank)(template, shape, start)

    async def of_moment(self, moment: Template, token: bytes, shape: Shape, start: StartStem) -> Stem | None:
        """A machine as it was, whose guest has once become another, which it does slowly the first time. `start` makes
        it a stem that has read its state. `drop` it with the moment. Else as `get`."""

        async def become_one(machine: Machine, port: socket.socket) -> bytes:
            await machine.control.resume()
            after = await settle_in(port, token)
            await machine.control.stop()
            return after

        return await self._get(moment.key, moment, shape, start, become_one)

    async def _get(
        self, key: str, template: Template, shape: Shape, start: StartStem, prepare: Prepare | None
    ) -> Stem | None:
        if not self.wanted or key in self._impossible:
            return None
        found = self._stems.get(key)
        if found is not None and self._machines.exited(found.machine.name).done():
            self.drop(key)
            found = None
        if found is None:
            making = self._making.get(key)
            if making is None:
                making = asyncio.create_task(self._make(key, template, shape, start, prepare), name="stem of machines")
                self._making[key] = making
                making.add_done_callback(lambda _: self._making.pop(key, None))
            found = await asyncio.shield(making)
        if found is None:
            return None
        if key in self._idle:
            self._idle.pop(key).cancel()
        if key in self._stems:
            self._stems[key] = self._stems.pop(key)  # the last used is the last to go
            self._idle[key] = asyncio.get_running_loop().call_later(IDLE_S, self.drop, key)
        return found

    async def branch(
        self,
        stem: Stem,
        name: str,
        reservation: str,
        shape: Shape,
        *,
        moment: Template | None = None,
        disk: Callable[[], int] | None = None,
        files: Sequence[tuple[os.stat_result, int]] = (),
        slot: Slot | None = None,
        also: bool = False,
    ) -> Machine:
        """A machine that stands still, as its template's clones; as a machine was (`moment`), with that one's `disk`.
        The others as `Machines.branch`. Raises as that, `StartLost` where the stem can't branch, and the stem goes."""
        state = -1
        try:
            if moment is not None:
                state = moment.open_state()
                files = [*files, (stem.memory, moment.memory)]
                if stem.state is not None:
                    files.append((stem.state, state))
            machine = await self._machines.branch(
                name,
                reservation,
                shape,
                stem.machine,
                QemuControl.over,
                disk=disk,
                files=files,
                sockets=(*SOCKETS, "console") if self._console else SOCKETS,
                slot=slot,
                also=also,
                layer=moment.own if moment is not None else -1,
            )
            if moment is not None:
                await (restored(machine) if stem.state is not None else _reload(machine, state))
                if moment.screen >= 0:
                    await show(machine, moment.screen)
        except CreateFailed as error:
            self.drop(stem.key)
            raise StartLost(error.message) from error
        except Unavailable:
            self.drop(stem.key)
            raise
        finally:
            if moment is not None:
                os.close(state)
        return machine

    def drop(self, key: str) -> None:
        """End it; its branches go on. Idempotent."""
        if key in self._idle:
            self._idle.pop(key).cancel()
        stem = self._stems.pop(key, None)
        if stem is not None:
            ending = asyncio.get_running_loop().create_task(self._end(stem), name="end of a stem")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def let_go(self, layer: str) -> None:
        """End those that have it."""
        for key in [key for key, stem in self._stems.items() if layer in stem.machine.layers]:
            self.drop(key)

    def drop_all(self) -> None:
        """They are gone, or shall go."""
        for key in list(self._stems):
            self.drop(key)

    async def close(self) -> None:
        """End all."""
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        self.drop_all()
        for timer in self._impossible.values():
            timer.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _make(
        self, key: str, template: Template, shape: Shape, start: StartStem, prepare: Prepare | None
    ) -> Stem | None:
        memory, state = os.fstat(template.memory), os.fstat(template.state) if prepare is None else None
        name = f"s{secrets.token_hex(8)}"
        reservation = self._machines.pool.reserve(shape)
        connections: list[socket.socket] = []
        machine: Machine | None = None
        try:
            machine = await start(name, reservation)
            connections.append(port := await machine.port())
            if self._console:
                connections.append(machine.connect("console"))
            async with asyncio.timeout(REHEARSAL_S):
                token = b"" if prepare is None else await prepare(machine, port)
        except BaseException as error:
            for connection in connections:
                connection.close()
            await asyncio.shield(self._machines.end(name, reservation, machine))
            if not isinstance(error, (DsecError, OSError, TimeoutError)):
                raise
            if isinstance(error, StartLost):  # the next one may have better luck
                return None
            log.warning("machines of %s will be plain clones: %s", key, str(error) or "no rehearsal in time")
            self._impossible[key] = asyncio.get_running_loop().call_later(IDLE_S, self._impossible.pop, key)
            return None
        stem = self._stems[key] = Stem(key, memory, state, machine, reservation, tuple(connections), token)
        self._machines.kept.put(name, machine.slot.usage().memory_bytes)
        while len(self._stems) > STEMS_MOST:
            self.drop(next(iter(self._stems)))
        return stem

    async def _rehearsed(self, machine: Machine, port: socket.socket) -> bytes:
        await restored(machine)
        await machine.control.resume()
        for _ in range(REHEARSALS):
            await rehearse(port)
            await asyncio.sleep(self._settle_s)
        await machine.control.stop()
        await asyncio.sleep(SETTLE_S)
        return b""

    async def _end(self, stem: Stem) -> None:
        self._machines.kept.drop(stem.machine.name)
        for connection in stem.connections:
            connection.close()
        await self._machines.end(stem.machine.name, stem.reservation, stem.machine)


async def _reload(machine: Machine, state: int) -> None:
    """It becomes what that says; else let go of it. Raises `Unavailable`."""
    assert isinstance(machine.control, QemuControl)
    try:
        await machine.control.load(state)
    except BaseException:
        machine.close()
        raise
