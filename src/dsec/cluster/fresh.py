"""How current it is what an apiserver knows of keys and rights.

It writes a record of no meaning into each bucket again and again: a majority of the servers takes it or nobody, and
when it comes back to who follows the bucket, all that was written before has come, too. Invariant: longer than
`limit_s` after it began to write the last one that came back no key is taken, so that one that was revoked, or whose
project was deleted, isn't good for longer at an apiserver that was cut off: from all servers, or with some of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from dsec.cluster.bus import PULSE, Bucket, Bus
from dsec.errors import Unavailable
from dsec.tasks import ended

CHECK_S = 3.0
HEAR_S = 5.0
log = logging.getLogger("dsec.cluster")


class Freshness:
    """For the event loop."""

    def __init__(self, limit_s: float, bus: Bus, pulses: dict[Bucket[Any], object]) -> None:
        """`pulses`: the buckets that are followed, and for each a record that says nothing."""
        self._bus = bus
        self._pulses = pulses
        self._limit_s = limit_s
        self._known_at = time.monotonic()
        self._stale = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._check_on(), name="freshness")

    async def close(self) -> None:
        """Idempotent."""
        await ended([self._task])

    def within(self, limit_s: float) -> bool:
        """Whether a majority of the servers was heard of so lately."""
        return time.monotonic() - self._known_at < limit_s

    def check(self) -> None:
        """Raises `Unavailable` where what is known is too old."""
        age_s = time.monotonic() - self._known_at
        stale = age_s > self._limit_s
        if stale != self._stale:
            self._stale = stale
            log.warning("keys are %s", f"not taken: nothing was heard of them for {age_s:.0f} s" if stale else "taken")
        if stale:
            raise Unavailable(
                "this server is cut off from its cluster, and doesn't know which keys are still good",
                remedy="Ask another one, or try again in a moment.",
            )

    async def _check_on(self) -> None:
        while True:
            begun_at = time.monotonic()
            try:
                wanted = [(bucket, await bucket.put(PULSE, record)) for bucket, record in self._pulses.items()]
                async with asyncio.timeout(HEAR_S):
                    while any(bucket.heard < revision for bucket, revision in wanted):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
            except (Unavailable, TimeoutError) as error:
                log.debug("how new keys and rights are: %s", error or type(error).__name__)
                await self._bus.elsewhere()
            else:
                self._known_at = begun_at
            await asyncio.sleep(CHECK_S)
