"""An operation of a machine's guest that goes on as long as the machine does: what ends inside is begun again.

The guest is hostile, and so is whatever it says. Invariants: an operation that somebody inside has ended is begun
again, ever more slowly; one that ends before its guest was ever ready isn't, and whoever waits hears why; `over`
follows each `begin`; after `stop` no task or operation of this is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from dsec.errors import DsecError, Unavailable, Unsupported
from dsec.ports import GuestChannel, Operation
from dsec.spec.operations import EndKind, OpEnd, OpRequest, Stage
from dsec.wire.frames import ProtocolError

READY_S = 20.0
"""How long a guest may take to begin, in imitation too."""

log = logging.getLogger(__name__)


class Pace(Struct, frozen=True):
    """How soon it is begun again, in seconds."""

    first_s: float
    most_s: float
    good_s: float
    """After so long of good behaviour it is at first again."""


class Terms(Struct, frozen=True, kw_only=True):
    """What one is."""

    what: str
    """In words, for logs."""
    stage: Stage
    """Where a kernel that can't do it fails."""
    takes: str
    """What such a kernel lacks."""
    silent: str
    """What it is that a guest which isn't ready in time does not do."""
    refused: Callable[[str], Unsupported]
    """Of a reason."""
    pace: Pace


class Listener(Protocol):
    """Whom it is for."""

    def begin(self, operation: Operation) -> None:
        """It runs; what came of an earlier one is of no use any more."""
        ...

    async def hear(self, data: bytes) -> None:
        """Output. What this waits for, the guest waits for. Raises `ProtocolError` at what no guest may say."""
        ...

    def over(self) -> None:
        """It has ended, or is to."""
        ...


class Standing:
    """One of a machine, from `start` to `stop`."""

    def __init__(
        self, machine: str, channel: GuestChannel, request: OpRequest, listener: Listener, terms: Terms
    ) -> None:
        """`machine`: its name, for logs."""
        self._machine = machine
        self._channel = channel
        self._request = request
        self._listener = listener
        self._terms = terms
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def start(self, on_end: Callable[[str], None] = lambda _: None) -> None:
        """From now on. `on_end(why)`: it was ended inside, and is begun again."""
        self._task = asyncio.create_task(self._serve(on_end), name=f"{self._terms.what}, {self._machine}")

    def note_ready(self) -> None:
        """The guest says that it does what it is for."""
        if not self._ready.done():
            self._ready.set_result(None)

    async def ready(self, timeout_s: float = READY_S) -> None:
        """Wait until it does. Raises `Unsupported` where its kernel can't, `Unavailable` where it says nothing."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise Unavailable(
                f"the machine's guest does not {self._terms.silent}", remedy="Create a new sandbox."
            ) from None

    def stop(self) -> None:
        """Its operation is released. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if not self._ready.done():
            self._ready.cancel()

    async def _serve(self, on_end: Callable[[str], None]) -> None:
        loop, wait_s = asyncio.get_running_loop(), self._terms.pace.first_s
        while True:
            began = loop.time()
            try:
                why = await self._round()
            except DsecError as error:  # the channel is gone, or there is no guest of ours
                self._failed(error)
                return
            if not self._ready.done():
                self._failed(self._terms.refused(why))
                return
            log.info("sandbox %s: %s ended inside: %s", self._machine, self._terms.what, why)
            on_end(why)
            if loop.time() - began > self._terms.pace.good_s:
                wait_s = self._terms.pace.first_s
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._terms.pace.most_s)

    async def _round(self) -> str:
        """One operation, until the guest's side ends: why. Raises `DsecError`."""
        operation = await self._channel.start(self._request)
        try:
            self._listener.begin(operation)
            async with contextlib.aclosing(operation.read()) as items:
                async for item in items:
                    if isinstance(item, OpEnd):
                        return self._why(item)
                    if not item.stderr:
                        await self._listener.hear(item.data)
            return "it said no more"
        except ProtocolError as error:
            return str(error)
        finally:
            self._listener.over()
            await operation.release()

    def _why(self, end: OpEnd) -> str:
        if end.kind is EndKind.START_FAILED and end.stage is self._terms.stage:
            return f"{end.message}; it takes {self._terms.takes}"
        return end.message or f"it ended ({end.kind.name.lower()}, {end.code})"

    def _failed(self, error: DsecError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # perhaps nobody waits
