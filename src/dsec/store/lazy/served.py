"""A layer that is open in the filler, and whose it is at the moment: the filler's, which fetches its chunks, or the
copier's, which then serves its reads alone.

Invariant: while it is the copier's (`plan`) nobody else writes its data or its bits, or takes data away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from dsec.errors import Internal
from dsec.store.lazy.cache import CachedLayer
from dsec.store.lazy.copier import Copier, CopierGone
from dsec.store.lazy.plan import Plan
from dsec.store.lazy.readahead import Readahead
from dsec.store.lazy.trace import Recorder

log = logging.getLogger(__name__)


class Served:
    """One layer."""

    def __init__(self, cached: CachedLayer, number: int, recorder: Recorder | None) -> None:
        self.cached = cached
        self.number = number
        """The holder's."""
        self.recorder = recorder
        self.told_complete = False
        self.users = True
        """Something may be mounted of it."""
        self.plan: Plan | None = None
        """The copier has it."""
        self._copier: Copier | None = None
        self._changing_hands = asyncio.Lock()
        """The copier carries out what it is told by several threads at once: what it was told before is answered first.
        """

    @cached_property
    def readahead(self) -> Readahead:
        return Readahead(self.cached.offsets)

    async def hand_over(self, copier: Copier, packs: Sequence[Path], ahead: Sequence[int], streams: int) -> bool:
        """Let the copier serve it; no read of it and no chunk may be with us. `packs`: the placement's, `ahead`: chunks
        to fetch at once, `streams`: so many at a time. False: it doesn't."""
        async with self._changing_hands:
            plan = Plan(self.cached, packs, ahead, streams)
            try:
                begun = copier.plan(self.number, (plan.descriptor, self.cached.data, self.cached.bitmap))
                self.plan, self._copier = plan, copier
                await begun
            except (CopierGone, Internal, OSError):
                self.plan = None
                plan.close()
                return False
            return True

    def learn(self) -> int:
        """What the copier brought since we looked is known to `cached` and the recorder. Returns its bytes."""
        if self.plan is None:
            return 0
        came = self.plan.news()
        self.cached.learn(came)
        if self.recorder is not None:
            self.recorder.read(came)
        return sum(self.cached.chunks[index].size for index in came)

    async def take_back(self) -> int:
        """When it returns the layer is the filler's, which knows all that is there. Returns as `learn`."""
        async with self._changing_hands:
            plan = self.plan
            if plan is None or self._copier is None:
                return 0
            await self._copier.withdraw(self.number)
            size = self.learn()
            self.plan = None
            plan.close()
            return size

    def sync(self) -> None:
        """Bring what came to disk: one that is full, or fails, promises less after a power loss. Blocks."""
        try:
            self.cached.sync()
        except OSError as error:
            log.warning("layer %s can't be brought to disk: %s", self.cached.layer, error)

    def close(self) -> None:
        """What the copier serves it goes on to serve."""
        self.cached.close()
        if self.plan is not None:
            self.plan.close()
