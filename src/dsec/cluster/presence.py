"""Which apiservers are there: each says so every two seconds, and hears itself say it.

Invariants: an apiserver that hasn't heard itself for `FROZEN_S` is frozen: it spends nothing, well before the others
take it for dead (`DEAD_S`: nothing that it sent can arrive any more); what goes on only while it is heard
(`while_heard`) ends before that, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from nats.aio.msg import Msg

from dsec.cluster.bus import Bus
from dsec.cluster.wire import ORDER_S
from dsec.errors import Unavailable
from dsec.tasks import ended

HERE_S = 2.0
FROZEN_S = 10.0
DEAD_S = 2 * ORDER_S
LET_GO_S = 40.0
"""What goes on only while it is heard ends then."""


class Presence:
    """For the event loop."""

    def __init__(self, bus: Bus, name: str, freeze: Callable[[bool], None]) -> None:
        """`name`: this apiserver's. `freeze` is told whether it is frozen."""
        self._bus = bus
        self._name = name
        self._freeze = freeze
        self._heard: dict[str, float] = {}
        self._since = time.monotonic()
        self._going: set[asyncio.Timeout] = set()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._bus.listen("dsec.holder.*", self._hear)
        self._freeze(True)
        self._task = asyncio.create_task(self._stay(), name="presence")

    async def close(self) -> None:
        """Idempotent."""
        await ended([self._task])

    def count(self) -> int:
        """Apiservers that are there, this one included."""
        now = time.monotonic()
        return max(1, sum(now - at < FROZEN_S for at in self._heard.values()))

    def absent_s(self, name: str) -> float:
        """For how long an apiserver hasn't been heard, as far as this one can know."""
        return time.monotonic() - max(self._heard.get(name, 0.0), self._since)

    def is_dead(self, name: str) -> bool:
        """Whether nothing that it sent can arrive any more."""
        return name != self._name and self.absent_s(name) > DEAD_S

    def may_be_dead(self, name: str) -> bool:
        """Whether it should have been heard again by now."""
        return name != self._name and self.absent_s(name) > HERE_S * 2

    @asynccontextmanager
    async def while_heard(self) -> AsyncIterator[None]:
        """Raises `Unavailable` within it when this apiserver was cut off for so long that its shares may become
        another's."""
        try:
            async with asyncio.timeout(None) as limit:
                self._going.add(limit)
                try:
                    yield
                finally:
                    self._going.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Unavailable(
                "this server is cut off from the cluster, and can't count what runs any more", remedy="Ask another."
            ) from None

    async def _stay(self) -> None:
        while True:
            await self._bus.publish(f"dsec.holder.{self._name}", None)
            await asyncio.sleep(HERE_S)
            heard = self._heard.get(self._name)
            now = time.monotonic()
            self._freeze(heard is None or now - heard > FROZEN_S)
            if heard is not None and now - heard > LET_GO_S:
                for limit in self._going:
                    if limit.when() is None:
                        limit.reschedule(asyncio.get_running_loop().time())
            self._heard = {name: at for name, at in self._heard.items() if now - at < 10 * DEAD_S}

    async def _hear(self, message: Msg) -> None:
        name = message.subject.rpartition(".")[2]
        self._heard[name] = time.monotonic()
        if name == self._name:
            self._freeze(False)
