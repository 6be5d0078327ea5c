"""What files cost that outlive their sandbox: a snapshot of them against a copy, a fork into eight children, a layer of
them against `mkfs.erofs`.

A sandbox writes 100 MB in 2,500 files, which are then on the disk. In each round, in turns: a capture (what snapshots,
forks and `pack_diff` begin with) against `cp -a` of the same on the same file system; eight children; and `pack_diff`
whole against `mkfs.erofs` alone, each of a fresh capture, whose pages are in no cache. `mkfs.erofs` doesn't wait for
the disk, `pack_diff` does. All of it in process, without HTTP.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct

from dsec.backends.container.host import Host
from dsec.bench.output import say
from dsec.edge.node import Edge
from dsec.errors import DsecError, Unsupported
from dsec.spec.sandbox import GIB, ExecSpec, ExecStatus, SandboxSpec
from dsec.spec.snapshots import SnapshotRequest
from dsec.store.service import LayerService
from dsec.store.snapshots import pack

PROJECT = "bench"
CHILDREN = 8
_NAME = "bench-packed@1"
_GROW = """
import os, random, sys
dice, files, size = random.Random(1), int(sys.argv[1]), int(sys.argv[2])
for number in range(files):
    os.makedirs(f"/work/d{number // 100:04}", exist_ok=True)
    with open(f"/work/d{number // 100:04}/file{number:06}", "wb") as file:
        file.write(dice.randbytes(size // files))
"""


class Plan(Struct, frozen=True, kw_only=True):
    """How much to do."""

    environment: str
    rounds: int
    files: int
    bytes: int


async def measure(edge: Edge, host: Host, layers: LayerService, plan: Plan) -> dict[str, Any]:
    """All figures. Raises `DsecError`."""
    spec = SandboxSpec(environment=plan.environment, disk_bytes=2 * plan.bytes + GIB)
    box = (await edge.create(spec, project=PROJECT)).sandbox.id
    times: dict[str, list[float]] = {}
    try:
        await _grow(edge, box, plan)
        for _ in range(plan.rounds + 1):
            for name, took in (await _round(edge, host, layers, box)).items():
                times.setdefault(name, []).append(took)
    finally:
        await edge.delete(box)
    found = {name: taken[1:] for name, taken in times.items()}  # the first one warms up
    figures = {
        "snapshot_vs_copy": _ratio(found["copy"], found["capture"]),
        "fork8_ms": round(median(found["fork"]), 1),
        "pack_vs_mkfs": _ratio(found["pack"], found["mkfs"]),
        "files_ms": {name: round(median(taken), 1) for name, taken in found.items()},
    }
    say(f"files: {figures}")
    return figures


async def _round(edge: Edge, host: Host, layers: LayerService, box: str) -> dict[str, float]:
    times: dict[str, float] = {}
    root = host.volume.root

    def settle() -> None:
        subprocess.run(["sync", "-f", root], check=True)

    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir=root) as scratch:
        await asyncio.to_thread(settle)
        began = time.perf_counter()
        async with edge.captured(box) as captured:
            times["capture"] = _since(began)
            times["copy"] = await _timed("cp", "-a", "--reflink=never", captured.upper, Path(scratch, "copy"))
        await asyncio.to_thread(shutil.rmtree, Path(scratch, "copy"))
    await asyncio.to_thread(settle)
    began = time.perf_counter()
    children = [item.sandbox.id for item in await edge.fork(box, CHILDREN) if item.sandbox is not None]
    times["fork"] = _since(began)
    await edge.delete_many(children, project=PROJECT)
    if len(children) < CHILDREN:
        raise Unsupported("not all children could be made")
    with layers.layers.scratch() as scratch:
        await asyncio.to_thread(settle)
        began = time.perf_counter()
        async with edge.captured(box) as captured:
            await _timed("mkfs.erofs", "--quiet", Path(scratch, "image"), captured.upper)
        times["mkfs"] = _since(began)
    await asyncio.to_thread(settle)
    began = time.perf_counter()
    async with edge.captured(box) as captured:
        asked = SnapshotRequest(name=_NAME)
        made = await pack(layers, captured, box, edge.get(box).spec, PROJECT, asked, f"{PROJECT}/{began}")
    times["pack"] = _since(began)
    with suppress(DsecError):
        layers.environments.remove(_NAME, PROJECT)
        layers.environments.remove_layer_name(_NAME, PROJECT)
    layers.layers.remove(made.layer)
    return times


async def _grow(edge: Edge, box: str, plan: Plan) -> None:
    argv = ["python3", "-c", _GROW, str(plan.files), str(plan.bytes)]
    execution = await edge.exec(box, ExecSpec(argv=argv))
    async for event in execution.events():
        if isinstance(event, ExecStatus) and event.exit_code:
            raise Unsupported(f"the files can't be made: {event}")


async def _timed(*argv: str | Path) -> float:
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL)
    if await process.wait():
        raise Unsupported(f"{argv[0]} failed", remedy="apt-get install erofs-utils")
    return _since(began)


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3


def _ratio(ones: list[float], others: list[float]) -> float:
    """The median of the ratios of each round: a machine that others use changes slowly."""
    return round(median(one / other for one, other in zip(ones, others, strict=True)), 2)
