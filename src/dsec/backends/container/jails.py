"""Jails for function calls: made by the zygote like a sandbox, but with the program in them that makes cells.

`backends.fncall` asks for them through its protocol `JailHost`, so that the two backends don't know each other. A jail
is no sandbox: no record, no guest, nothing that outlives the server. What a killed server leaves of them the next one's
container backend takes for strays, and removes.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence

from dsec.backends.container.backend import ID_BASE, OOM_SCORE_ADJ, ContainerBackend
from dsec.backends.container.native import WARM, build_native
from dsec.backends.container.zygote import SpawnRequest
from dsec.errors import CreateFailed
from dsec.kernel.cgroups import Shape, Slot
from dsec.spec.sandbox import MIB
from dsec.store.layers import ID_COUNT

_DISK_BYTES = 64 * MIB
"""Of a jail's own upper directory, in which only mount points are made."""


class ContainerJails:
    """As `backends.fncall.host.JailHost`."""

    def __init__(self, backend: ContainerBackend, tenant: Callable[[str], int], promise: Callable[[int], None]) -> None:
        """`tenant`: the number of a project. `promise`: see `JailHost`."""
        self._backend = backend
        self.promise = promise
        self._tenant = tenant
        self._reservations: dict[str, str] = {}

    def native_part(self) -> int:
        return os.open(build_native(self._backend.host.state) / WARM, os.O_RDONLY | os.O_CLOEXEC)

    async def make(self, name: str, layers: Sequence[str], project: str, shape: Shape) -> socket.socket:
        host = self._backend.host
        id_base = ID_BASE + self._tenant(project) * ID_COUNT
        reservation = self._reservations[name] = host.pool.reserve(shape)
        try:
            host.volume.check_space()
            slot = host.pool.take(reservation, shape, name, id_base)
            upper, work = await asyncio.to_thread(host.volume.make, name, _DISK_BYTES, id_base)
            request = SpawnRequest(
                sandbox=name,
                lowers=tuple(str(host.layers.path(digest, id_base)) for digest in layers),
                upper=str(upper),
                work=str(work),
                id_base=id_base,
                id_count=ID_COUNT,
                cgroup2=slot.v2,
                cgroups=slot.v1,
                dev=str(host.dev),
                hostname="function",
                oom_score_adj=OOM_SCORE_ADJ,
                cells=True,
            )
            spawned = await self._backend.spawn_cells(request)
        except BaseException as error:
            await asyncio.shield(self.destroy(name))
            if isinstance(error, OSError):
                raise CreateFailed(f"the host refused a step: {error}", remedy="See `dsec doctor`.") from error
            raise
        if spawned.pidfd >= 0:
            os.close(spawned.pidfd)
        spawned.channel.setblocking(False)
        return spawned.channel

    async def destroy(self, name: str) -> None:
        reservation = self._reservations.pop(name, None)
        await self._backend.destroy(name, {"slot": reservation} if reservation else {})

    def take_slot(self, owner: str, project: str, shape: Shape) -> Slot:
        pool = self._backend.host.pool
        return pool.take(pool.reserve(shape), shape, owner, ID_BASE + self._tenant(project) * ID_COUNT)

    def give_back(self, slot: Slot) -> None:
        self._backend.host.pool.give_back(slot)
