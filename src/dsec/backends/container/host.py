"""What container sandboxes of one node stand on: its parts, put together by `dsec.app`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from dsec.errors import Unavailable
from dsec.kernel.cgroup_pool import CgroupPool
from dsec.kernel.cgroups import CgroupRoot
from dsec.store.environments import EnvironmentStore
from dsec.store.layers import LayerMounts
from dsec.store.lazy.large import FOLLOW
from dsec.store.lazy.service import LazyLayers
from dsec.store.remote import RemoteCatalog
from dsec.store.shared import SharedLayers
from dsec.store.views import CpuPicker, Views, make_dev
from dsec.store.volume import Volume

log = logging.getLogger(__name__)


class Host:
    """What the backend stands on: the parts of one node, opened by `dsec.app`."""

    def __init__(
        self,
        *,
        state: Path,
        run: Path,
        volume: Volume,
        environments: EnvironmentStore,
        layers: LayerMounts,
        views: Views,
        cgroups: CgroupRoot,
        shared: SharedLayers | None = None,
        lazy: LazyLayers | None = None,
        remote: RemoteCatalog | None = None,
        make_swap: Callable[[], None] = lambda: None,
    ) -> None:
        """`make_swap`: called before memory of a paused sandbox is paged out, in a thread."""
        self.state = state
        self.run = run
        self.volume = volume
        self.environments = environments
        self.layers = layers
        self.views = views
        self.pool = CgroupPool(cgroups)
        self.picker = CpuPicker()
        self.shared = shared
        self.lazy = lazy
        self.remote = remote
        self.dev = make_dev(run)
        self.make_swap = make_swap

    async def open_lazy(self, holder: Path) -> bool:
        """Begin to fill layers on demand, where a store is shared and the kernel can. `holder`: the compiled program.
        False where what was mounted of lazy layers can't be trusted any more."""
        if self.lazy is None or self.remote is None:
            return True
        trusted = True
        self.lazy.on_lost = self.layers.unmount
        self.layers.follow = holder.with_name(FOLLOW)
        try:
            trusted = await self.lazy.open(holder)
        except (Unavailable, OSError) as error:
            log.warning("layers are fetched whole, not on demand: %s", error)
            self.lazy = None
            self.remote.fill_whole()
        else:
            for digest in () if trusted else self.lazy.mounted():
                await asyncio.to_thread(self.layers.unmount, digest)
        await self.remote.open()
        return trusted

    async def close_lazy(self, *, keep: bool) -> None:
        """`keep`: what fills layers goes on. Else nothing may be mounted of them any more."""
        if self.remote is not None:
            await self.remote.close()
        if self.lazy is not None:
            await self.lazy.close(keep=keep)

    def image_failures(self, layers: Sequence[str]) -> Callable[[], int]:
        """Counts the reads of these layers that failed. Where the data volume has, so does whatever is done."""
        lazy, more = self.lazy, itertools.count(1)  # the first counts too: what was known before is 0
        if lazy is None or not layers:
            return lambda: next(more) if self.volume.failed else 0
        lost = {layer: lazy.lost[layer] for layer in layers}

        def count() -> int:
            """Where its mount is lost every read fails, uncounted; and nobody hears of any while a filler begins."""
            dead = self.volume.failed or not lazy.hears or any(lazy.lost[layer] > was for layer, was in lost.items())
            return sum(lazy.failures[layer] for layer in layers) + (next(more) if dead else 0)

        return count
