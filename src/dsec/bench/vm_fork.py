"""The part of `dsec bench vm` about forks of a machine that runs, with 60 MB of memory written to.

`fork_pause_ms`: how long the parent stands still; `fork_ms`: until the copy is there for children to be made of;
`fork_4_ms`: from the request until four children have answered a command; `fork_child_mib`: memory of an idle child's
own; `fork_copied_mib`: what of the parent's memory was copied.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from statistics import median

from dsec.backends.microvm.backend import MicroVmBackend
from dsec.ports import Handle
from dsec.spec.operations import OpEnd, OpRequest
from dsec.spec.sandbox import SandboxSpec
from dsec.vmm.instance import MachineInstance

DIRTY = b"head -c 60000000 /dev/zero | tr '\\0' x > /dev/shm/filled"
CHILDREN = 4


async def forks(
    backend: MicroVmBackend, spec: SandboxSpec, rounds: int, own_mib: Callable[[MachineInstance], float]
) -> dict[str, float]:
    """The figures."""
    name = secrets.token_hex(8)
    handle = backend.reserve(name, spec)
    parent = await backend.create(name, spec, handle)
    pauses, splits, fours, own, copied = [], [], [], [], []
    try:
        await run(parent, b"/bin/sh", b"-c", DIRTY)
        for _ in range(rounds):
            began = time.perf_counter()
            moment = await backend.split(name, handle)
            splits.append(time.perf_counter() - began)
            pauses.append(backend.moments.get(moment).stood_s)
            copied.append(backend.moments.get(moment).copied_bytes / 2**20)
            children = [(secrets.token_hex(8), backend.reserve("child", spec, capture=moment)) for _ in range(CHILDREN)]
            try:
                made = await asyncio.gather(*(_answering(backend, spec, *each) for each in children))
                fours.append(time.perf_counter() - began)
                own.append(median(map(own_mib, made)))
            finally:
                for child in children:
                    await backend.destroy(*child)
                await backend.drop(moment)
    finally:
        await backend.destroy(name, handle)
    return {
        "fork_pause_ms": round(median(pauses) * 1e3, 1),
        "fork_ms": round(median(splits) * 1e3, 1),
        "fork_4_ms": round(median(fours) * 1e3, 1),
        "fork_child_mib": round(median(own), 1),
        "fork_copied_mib": round(median(copied), 1),
    }


async def _answering(backend: MicroVmBackend, spec: SandboxSpec, name: str, handle: Handle) -> MachineInstance:
    child = await backend.create(name, spec, handle)
    await run(child, b"/bin/true")
    return child


async def run(instance: MachineInstance, *argv: bytes) -> None:
    """A command to its end. Raises RuntimeError where it fails."""
    operation = await instance.channel.start(OpRequest(argv=argv))
    try:
        async for item in operation.read():
            if isinstance(item, OpEnd) and item.code:
                raise RuntimeError(f"{argv} ended with {item}")
    finally:
        await operation.release()
