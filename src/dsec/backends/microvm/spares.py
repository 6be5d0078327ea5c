"""Spare clones: they run no more than what each machine does first, as somebody whom nobody knows, and wait, stopped.
Who asks for a machine like one of them gets it within milliseconds.

Only what was asked for lately has spares, a few each and SPARES_MOST in all; what isn't asked for any more goes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial

from msgspec import Struct

from dsec.errors import DsecError
from dsec.vmm.driver import Shape
from dsec.vmm.launching import Ended
from dsec.vmm.machine import Machine, Machines

log = logging.getLogger(__name__)

SPARES_MOST = 16
IDLE_S = 600.0
"""A kind that was not asked for this long keeps no spares."""


class Wanted(Struct, frozen=True):
    """A kind of machine."""

    shape: Shape
    cpus: float


class Spare(Struct, frozen=True):
    """One that waits."""

    machine: Machine
    reservation: str
    token: bytes
    """What its guest takes for a channel's begin."""


Make = Callable[[str, str, Shape, float], Awaitable[tuple[Machine, bytes]]]
"""A machine that waits, and its token."""


class Spares:
    """All spare clones of a node."""

    def __init__(self, machines: Machines, make: Make, *, each: int) -> None:
        """`each`: how many of a kind."""
        self._machines = machines
        self._make = make
        self._each = each
        self._ready: dict[Wanted, list[Spare]] = {}
        self._claimed: dict[str, Spare] = {}
        self._idle: dict[Wanted, asyncio.TimerHandle] = {}
        self._filling: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """How many wait."""
        return sum(map(len, self._ready.values()))

    def claim(self, wanted: Wanted) -> Spare | None:
        """One of this kind, for `take` by its name. It may have ended a moment ago. No I/O."""
        ready = self._ready.get(wanted)
        if not ready:
            return None
        spare = ready.pop()
        self._claimed[spare.machine.name] = spare
        return spare

    def take(self, name: str) -> Spare | None:
        """One that was claimed; the caller's from now on."""
        return self._claimed.pop(name, None)

    def refill(self, wanted: Wanted) -> None:
        """This kind is asked for: have some ready soon."""
        if not self._each:
            return
        loop = asyncio.get_running_loop()
        if wanted in self._idle:
            self._idle.pop(wanted).cancel()
        self._idle[wanted] = loop.call_later(IDLE_S, self._drop, wanted)
        self._ready.setdefault(wanted, [])
        if self._filling is None or self._filling.done():
            self._filling = loop.create_task(self._fill(), name="spare machines")

    def let_go(self, layer: str) -> None:
        """End those that have it."""
        for wanted in [wanted for wanted in self._ready if layer in wanted.shape.layers]:
            self._drop(wanted)

    def drop_all(self) -> None:
        """They are gone, or shall go: nobody gets one."""
        for wanted in list(self._ready):
            self._drop(wanted)

    async def close(self, *, keep: bool) -> None:
        """`keep`: the next server ends what is left."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        if keep:
            for ready in self._ready.values():
                for spare in ready:
                    spare.machine.close()
            self._ready.clear()
        self.drop_all()
        for timer in self._idle.values():
            timer.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _short(self) -> Wanted | None:
        if self.count >= SPARES_MOST:
            return None
        return next((wanted for wanted, ready in reversed(self._ready.items()) if len(ready) < self._each), None)

    async def _fill(self) -> None:
        while wanted := self._short():
            name = f"v{secrets.token_hex(8)}"
            groups = self._machines.group_shape(wanted.shape.memory_bytes, wanted.cpus)
            reservation = self._machines.pool.reserve(groups)
            try:
                machine, token = await self._make(name, reservation, wanted.shape, wanted.cpus)
            except (DsecError, OSError) as error:
                log.warning("no spare machine can be made: %s", error)
                await self._machines.end(name, reservation)
                return
            except asyncio.CancelledError:
                await asyncio.shield(self._machines.end(name, reservation))
                raise
            ready = self._ready.get(wanted)
            if ready is None:
                await self._machines.end(name, reservation, machine)
                continue
            ready.append(spare := Spare(machine, reservation, token))
            self._machines.exited(name).add_done_callback(partial(self._on_exit, wanted, spare))

    def _on_exit(self, wanted: Wanted, spare: Spare, _: asyncio.Future[Ended]) -> None:
        """Its VMM is gone: if it still waits, nobody shall get it. Another one is made when one is asked for."""
        ready = self._ready.get(wanted, [])
        if spare in ready:
            log.warning("a spare machine ended by itself")
            ready.remove(spare)
            self._end(spare)

    def _drop(self, wanted: Wanted) -> None:
        if wanted in self._idle:
            self._idle.pop(wanted).cancel()
        for spare in self._ready.pop(wanted, ()):
            self._end(spare)

    def _end(self, spare: Spare) -> None:
        ending = asyncio.get_running_loop().create_task(
            self._machines.end(spare.machine.name, spare.reservation, spare.machine), name="end of a spare machine"
        )
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
