"""A burst of sandboxes of many environments that share layers, on a node that has nothing: layers that are filled on
demand, against fetching layers whole before they are used, and against unpacking a tar for each sandbox.

An environment is a workspace of its own (files of `--workspace-mb`, of which a sandbox reads little, as published for
such images), one of four toolkits and a base that all share. All sandboxes are asked for at once; `--at-once` start at
the same time. The store is 2 ms away, with 200 MB/s a stream; a layer that is fetched whole comes over four streams,
once however many sandboxes want it. Unpacking is measured on fewer sandboxes (`--tar-sandboxes`) and scaled: its
archives are fetched once too and kept, and each sandbox's files are removed when it ends. `written_share`: what lazy
layers wrote to the disk, of what whole ones did. Needs root and an environment that is built; starts no server.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from dsec.bench.layers_command import MIB, layers_command, place_for
from dsec.bench.lazy import FAR
from dsec.bench.lazy_node import (
    STREAMS,
    LazyNode,
    Place,
    WholeNode,
    command,
    disk_bytes,
    drop_caches,
    overlay,
    unmounted_after,
)
from dsec.bench.output import say
from dsec.kernel import mounts
from dsec.store.build import build_directory_layer
from dsec.store.layers import LayerStore

TOOLKITS = 4
FILE_BYTES = 512 << 10
READ = 8
"""Files of its workspace that a sandbox reads."""
WORDS = [
    "python3",
    "-c",
    f"import json, pathlib\nfor p in sorted(pathlib.Path('/work').iterdir())[:{READ}]: p.read_bytes()\n"
    "sorted(pathlib.Path('/tools').iterdir())[0].read_bytes()",
]


class Plan(Struct, frozen=True):
    """What to measure."""

    environment: str
    sandboxes: int
    environments: int
    workspace_mb: int
    toolkit_mb: int
    at_once: int
    tar_sandboxes: int


Layers = Sequence[str]


async def measure(plan: Plan, state: Path) -> dict[str, Any]:
    """All figures, by their keys. Raises `EnvironmentNotFound`, `DsecError`."""
    async with place_for(plan.environment, state) as (place, own, base):
        say("making layers")
        tools = [await _made(place, own, "tools", plan.toolkit_mb, seed) for seed in range(TOOLKITS)]
        works = [
            await _made(place, own, "work", plan.workspace_mb, TOOLKITS + seed) for seed in range(plan.environments)
        ]
        wanted = [
            [works[number % len(works)], tools[number % len(works) % TOOLKITS], *base]
            for number in range(plan.sandboxes)
        ]
        async with place.lazy(FAR) as lazy:
            lazy_s, _ = await _burst(lazy, place, wanted, plan.at_once)
            lazy_bytes = disk_bytes(lazy.root)
        say(f"lazy: {lazy_s:.1f} s, {lazy_bytes / 1e6:.0f} MB written")
        async with place.whole(FAR) as whole:
            whole_s, mounted = await _burst(whole, place, wanted, plan.at_once)
            whole_bytes = disk_bytes(whole.root)
            say(f"whole: {whole_s:.1f} s, {whole_bytes / 1e6:.0f} MB written, ready after {mounted:.1f} s")
            tar_s, tar_bytes = await _tars(whole, place, wanted, plan)
        say(f"tar: {tar_s:.1f} s, {tar_bytes / 1e6:.0f} MB written ({plan.tar_sandboxes} of them, scaled)")
    return {
        "whole_vs_lazy": round(whole_s / lazy_s, 2),
        "tar_vs_lazy": round(tar_s / lazy_s, 2),
        "written_share": round(lazy_bytes / whole_bytes, 4),
        "written_share_of_tar": round(lazy_bytes / tar_bytes, 4),
        "lazy_s": round(lazy_s, 2),
        "whole_s": round(whole_s, 2),
        "tar_s": round(tar_s, 2),
        "sandboxes": plan.sandboxes,
        "environments": plan.environments,
        "tar_sandboxes": min(plan.tar_sandboxes, plan.sandboxes),
    }


async def _made(place: Place, own: LayerStore, name: str, size_mb: int, seed: int) -> str:
    """A layer of random files in the store, and nothing of it elsewhere."""
    tree = place.fresh("tree")
    dice = random.Random(seed)
    for number in range(size_mb * MIB // FILE_BYTES):
        (tree / f"{number:05}").write_bytes(dice.randbytes(FILE_BYTES))
    layer = (await asyncio.to_thread(build_directory_layer, own, tree, at=f"/{name}")).digest
    await place.publish(own, [layer])
    own.remove(layer)
    await asyncio.to_thread(shutil.rmtree, tree)
    return layer


async def _burst(
    node: LazyNode | WholeNode, place: Place, wanted: Sequence[Layers], at_once: int
) -> tuple[float, float]:
    """Seconds until the last sandbox has done its work, and until the last layer was mounted."""
    at = place.fresh("burst")
    await asyncio.to_thread(drop_caches)
    with unmounted_after(at):
        mounted: dict[str, asyncio.Task[Path]] = {}
        fetches = asyncio.Semaphore(STREAMS)
        starts = asyncio.Semaphore(at_once)
        began = time.perf_counter()
        ready = 0.0

        async def mount(layer: str) -> Path:
            nonlocal ready
            async with fetches:
                await node.mount(layer, at / layer)
            ready = time.perf_counter() - began
            return at / layer

        async def sandbox(number: int, layers: Layers) -> None:
            async with starts:
                for layer in layers:
                    if layer not in mounted:
                        mounted[layer] = asyncio.create_task(mount(layer))
                lowers = [await mounted[layer] for layer in layers]
                top = overlay(lowers, at / f"sandbox{number}")
                await command(top, WORDS)
                mounts.unmount(top)

        await asyncio.gather(*(sandbox(number, layers) for number, layers in enumerate(wanted)))
        return time.perf_counter() - began, ready


async def _tars(whole: WholeNode, place: Place, wanted: Sequence[Layers], plan: Plan) -> tuple[float, int]:
    """The burst's seconds and written bytes if each sandbox had its own unpacked files: measured on some."""
    some = wanted[:: max(1, len(wanted) // plan.tar_sandboxes)][: plan.tar_sandboxes]
    at = place.fresh("tar")
    archives: dict[str, Path] = {}
    with unmounted_after(at):
        for layer in sorted({layer for layers in some for layer in layers}):
            tree = at / "layer"
            await whole.mount(layer, tree)
            archives[layer] = at / f"{layer}.tar"
            await _checked("tar", "-cf", str(archives[layer]), "-C", str(tree), ".")
            mounts.unmount(tree)
            tree.rmdir()
    starts, written = asyncio.Semaphore(plan.at_once), 0

    async def sandbox(number: int, layers: Layers) -> None:
        nonlocal written
        top = at / f"sandbox{number}"
        async with starts:
            top.mkdir()
            for layer in reversed(layers):
                await _checked("tar", "-xpf", str(archives[layer]), "-C", str(top))
            await command(top, WORDS)
            written += await asyncio.to_thread(disk_bytes, top)
            await asyncio.to_thread(shutil.rmtree, top)

    await asyncio.to_thread(drop_caches)
    began = time.perf_counter()
    await asyncio.gather(*(sandbox(number, layers) for number, layers in enumerate(some)))
    scale = len(wanted) / len(some)
    return (time.perf_counter() - began) * scale, int(written * scale)


async def _checked(*words: str) -> None:
    process = await asyncio.create_subprocess_exec(*words)
    if await process.wait():
        raise OSError(f"{' '.join(words)} failed")


main = layers_command(
    "burst",
    __doc__,
    Plan,
    measure,
    click.option("--sandboxes", type=click.IntRange(1, 10_000), default=200, show_default=True),
    click.option("--environments", type=click.IntRange(1, 500), default=40, show_default=True),
    click.option("--workspace-mb", type=click.IntRange(8, 1000), default=64, show_default=True),
    click.option("--toolkit-mb", type=click.IntRange(1, 1000), default=96, show_default=True),
    click.option("--at-once", type=click.IntRange(1, 64), default=8, show_default=True),
    click.option("--tar-sandboxes", type=click.IntRange(1, 10_000), default=8, show_default=True),
)
