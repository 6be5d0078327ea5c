"""How current it is what an apiserver knows of keys and rights.

Who leads a bucket is asked again and again for its last revision: only a server that speaks for a majority answers
(one that lost it notices within some 10 s), and only when all up to this revision was heard does the answer count.
Invariant: longer than `limit_s` after the last answer that counts no key is taken, so that one that was revoked, or
whose project was deleted, isn't good for long at an apiserver that was cut off: from all servers, or with some of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from dsec.errors import Unavailable

CHECK_S = 2.0
log = logging.getLogger("dsec.cluster")


class Followed(Protocol):
    """A bucket that is followed."""

    heard: int

    async def last(self) -> int: ...


class Freshness:
    """For the event loop."""

    def __init__(self, limit_s: float, *buckets: Followed) -> None:
        self._buckets = buckets
        self._limit_s = limit_s
        self._known_at = time.monotonic()
        self._stale = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._check_on(), name="freshness")

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

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
            asked_at = time.monotonic()
            try:
                last = [await bucket.last() for bucket in self._buckets]
            except Unavailable as error:
                log.debug("asking how new keys and rights are: %s", error)
            else:
                if all(bucket.heard >= number for bucket, number in zip(self._buckets, last, strict=True)):
                    self._known_at = asked_at
            await asyncio.sleep(CHECK_S)
