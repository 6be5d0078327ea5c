"""How many sandboxes a second projects make, of which each apiserver has an even part."""

from __future__ import annotations

import asyncio
import time

from dsec.cluster.presence import Presence
from dsec.errors import QuotaExceeded
from dsec.plan.iam import Iam, lineage


class Pace:
    """For the event loop."""

    def __init__(self, iam: Iam, presence: Presence) -> None:
        self._iam = iam
        self._presence = presence
        self._begin: dict[str, float] = {}
        """By project: when the next one may be made."""

    async def wait(self, project: str, count: int, deadline: float) -> None:
        """Wait until so many more may be made by the limits of creations a second. Raises `QuotaExceeded` where that is
        after the deadline (`time.monotonic`)."""
        now, begin = time.monotonic(), 0.0
        rates = []
        for path in lineage(project):
            known = self._iam.known(path)
            if known is not None and known.quota.creates_per_s is not None:
                rates.append((path, known.quota.creates_per_s / self._presence.count()))
                begin = max(begin, self._begin.get(path, 0.0))
        if not rates:
            return
        if begin > deadline:
            raise QuotaExceeded(
                f"the project {rates[0][0]!r} makes as many sandboxes a second as its quota allows",
                remedy="Ask again later, or for a larger quota.",
                project=rates[0][0],
                limit="creates_per_s",
            )
        for path, rate in rates:
            self._begin[path] = max(begin, now - 1.0) + count / rate  # a second's worth is saved up
        if begin > now:
            await asyncio.sleep(begin - now)
