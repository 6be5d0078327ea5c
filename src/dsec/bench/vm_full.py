"""The part of `dsec bench vm` that is about full machines.

`vm_boot_ms`: a Debian with systemd from its disk until its guest is ready; `vm_clone_ms`: a clone of that, until its
guest answers; `vm_clone_vs_boot`: the first over the second. `vm_first_ms`: until the clone's first command has
answered. `vm_checkpoint_ms`: how long one stands still for a checkpoint; `vm_revert_ms`: going back to it, until the
guest answers. `vm_mib`: memory of a clone's own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from dsec.app import open_full_machines, open_machines
from dsec.backends.vm.backend import VmBackend
from dsec.bench.output import say
from dsec.bench.vm_host import bench_host
from dsec.edge.config import SystemClock
from dsec.ports import GuestChannel
from dsec.spec.operations import OpEnd, OpRequest
from dsec.spec.sandbox import GIB, MIB, SandboxSpec
from dsec.vmm.instance import MachineInstance

_SETTLE_S = 1.0


async def full_machines(
    disk: str, count: int, state: Path | None, mib_of: Callable[[MachineInstance], float]
) -> dict[str, Any]:
    """All figures, by their keys. `mib_of`: memory that only one machine has. Raises `EnvironmentNotFound`."""
    async with bench_host(state) as (config, host):
        beside = await asyncio.to_thread(open_machines, config, host)
        assert beside is not None  # the others have run
        node = open_full_machines(config, host, beside)
        image = node.images.find(disk)
        backend = VmBackend(node, SystemClock())
        await backend.open({})
        try:
            size = max(2 * GIB, image.size_bytes)
            spec = SandboxSpec(environment=disk, backend="vm", memory_bytes=512 * MIB, disk_bytes=size, cpus=1)
            return await _measure(backend, backend.resolve(spec, ""), count, mib_of)
        finally:
            await backend.close(keep=False)


async def _measure(
    backend: VmBackend, spec: SandboxSpec, count: int, mib_of: Callable[[MachineInstance], float]
) -> dict[str, Any]:
    clones, firsts, stood, reverts, own = list[float](), list[float](), list[float](), list[float](), list[float]()
    for number in range(count + 1):
        name = secrets.token_hex(8)
        handle = backend.reserve(name, spec)
        began = time.perf_counter()
        made = await backend.create(name, spec, handle)
        cloned = time.perf_counter()
        await _ask(made.channel)
        answered = time.perf_counter()
        if number:  # the first one waited for the template
            clones.append((cloned - began) * 1e3)
            firsts.append((answered - began) * 1e3)
        if number > count - 3:
            await asyncio.sleep(_SETTLE_S)
            own.append(mib_of(made))
            await backend.checkpoint(name, handle, "one")
            stood.append(backend.moments.get(backend.reserve_revert(name, handle, "one")["capture"]).stood_s * 1e3)
            again = backend.reserve_revert(name, handle, "one")
            began = time.perf_counter()
            await _ask((await backend.revert(name, spec, again, handle)).channel)
            reverts.append((time.perf_counter() - began) * 1e3)
            handle = again
        await backend.destroy(name, handle)
    boot_ms, clone_ms = backend.node.templates.boots_s[0] * 1e3, median(clones)
    say(f"a full machine booted in {boot_ms:.0f} ms; clones took {min(clones):.0f} to {max(clones):.0f}")
    return {
        "vm_boot_ms": round(boot_ms, 1),
        "vm_clone_ms": round(clone_ms, 1),
        "vm_clone_vs_boot": round(boot_ms / clone_ms, 1),
        "vm_first_ms": round(median(firsts), 1),
        "vm_checkpoint_ms": round(median(stood), 1),
        "vm_revert_ms": round(median(reverts), 1),
        "vm_mib": round(median(own), 1),
    }


async def _ask(channel: GuestChannel) -> None:
    operation = await channel.start(OpRequest(argv=(b"/bin/true",)))
    try:
        async for item in operation.read():
            if isinstance(item, OpEnd) and item.code:
                raise RuntimeError(f"/bin/true ended with {item}")
    finally:
        await operation.release()
