"""Stems: clones that have rehearsed what every machine does first, stand still, and branch (native/stem/stem.c).

Where QEMU imitates the CPU, most of a clone's first second is translation of the guest's code. A stem has done that
once, and its branches share the result, as they share whatever memory none of them changes. KVM needs none of it.

One stem for a template that is in use, STEMS_MOST in all; what wasn't asked for for IDLE_S goes. A stem runs nothing
but the guest and, in its rehearsals, programs of the environment that it is for: /bin/sh and /bin/true. Branches don't
depend on it when they are made. Where no stem can be had, machines are plain clones.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable

from msgspec import Struct

from dsec.errors import DsecError
from dsec.vmm.driver import Shape
from dsec.vmm.first_words import rehearse
from dsec.vmm.machine import Machine, Machines
from dsec.vmm.template_cache import Template

log = logging.getLogger(__name__)

STEMS_MOST = 8
IDLE_S = 600.0
REHEARSALS = 3
"""The first translates, the others link what was translated; a fourth is no faster."""
REHEARSAL_S = 60.0
_SETTLE_S = 0.2
"""What the guest does after a rehearsal by itself."""


class Stem(Struct, frozen=True):
    """One that stands still."""

    machine: Machine
    reservation: str
    port: socket.socket
    """Its end of a branch's port is a copy of this connection's."""


Start = Callable[[str, str, Shape, Template], Awaitable[Machine]]


class Stems:
    """All stems of a node."""

    def __init__(self, machines: Machines, start: Start, *, wanted: bool) -> None:
        """`start(name, reservation, shape, template)`: a clone, as a stem. Not `wanted`: there are none."""
        self._machines = machines
        self._start = start
        self._wanted = wanted
        self._stems: dict[str, Stem] = {}
        self._making: dict[str, asyncio.Task[Stem | None]] = {}
        self._idle: dict[str, asyncio.TimerHandle] = {}
        self._impossible: dict[str, asyncio.TimerHandle] = {}
        """Until it is tried again."""
        self._ending: set[asyncio.Task[None]] = set()

    async def get(self, shape: Shape, template: Template) -> Machine | None:
        """The template's stem; None where there is none to be had. Takes a second where it is to be made first."""
        key = template.key
        if not self._wanted or key in self._impossible:
            return None
        found = self._stems.get(key)
        if found is not None and self._machines.exited(found.machine.name).done():
            self.drop(key)
            found = None
        if found is None:
            making = self._making.get(key)
            if making is None:
                making = self._making[key] = asyncio.create_task(self._make(shape, template), name="stem of machines")
                making.add_done_callback(lambda _: self._making.pop(key, None))
            found = await asyncio.shield(making)
        if found is None:
            return None
        if key in self._idle:
            self._idle.pop(key).cancel()
        if key in self._stems:
            self._stems[key] = self._stems.pop(key)  # the last used is the last to go
            self._idle[key] = asyncio.get_running_loop().call_later(IDLE_S, self.drop, key)
        return found.machine

    def drop(self, key: str) -> None:
        """End it; its branches go on. Idempotent."""
        if key in self._idle:
            self._idle.pop(key).cancel()
        stem = self._stems.pop(key, None)
        if stem is not None:
            ending = asyncio.get_running_loop().create_task(self._end(stem), name="end of a stem")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

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

    async def _make(self, shape: Shape, template: Template) -> Stem | None:
        name = f"s{secrets.token_hex(8)}"
        groups = self._machines.group_shape(shape.memory_bytes, shape.vcpus)
        reservation = self._machines.pool.reserve(groups)
        port: socket.socket | None = None
        machine: Machine | None = None
        try:
            machine = await self._start(name, reservation, shape, template)
            port = await machine.port()
            async with asyncio.timeout(REHEARSAL_S):
                await machine.control.resume()
                for _ in range(REHEARSALS):
                    await rehearse(port)
                    await asyncio.sleep(_SETTLE_S)
                await machine.control.stop()
            await asyncio.sleep(_SETTLE_S)
        except BaseException as error:
            if port is not None:
                port.close()
            await asyncio.shield(self._machines.end(name, reservation, machine))
            if not isinstance(error, (DsecError, OSError, TimeoutError)):
                raise
            log.warning("machines of %s will be plain clones: %s", template.key, str(error) or "no rehearsal in time")
            later = asyncio.get_running_loop().call_later(IDLE_S, self._impossible.pop, template.key)
            self._impossible[template.key] = later
            return None
        stem = self._stems[template.key] = Stem(machine, reservation, port)
        while len(self._stems) > STEMS_MOST:
            self.drop(next(iter(self._stems)))
        return stem

    async def _end(self, stem: Stem) -> None:
        stem.port.close()
        await self._machines.end(stem.machine.name, stem.reservation, stem.machine)
