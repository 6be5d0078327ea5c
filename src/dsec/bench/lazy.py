"""Layers that are filled on demand, against layers that are all here and layers that are fetched whole first.

What is timed is the first sandbox on a node that has nothing: from asking for the layers to the end of its command,
with cold page cache and cold node cache each time. The variants take turns; ratios are medians over the rounds, and
(`_quickest`) of the quickest of each. Two commands: `python3 -c 1`, and the tests of a real project (fetched by pip, by
name). The store is simulated: 0 ms, and 2 ms with 200 MB/s a stream. Then how a filled layer reads against a plain
file, and what a second reader of a large file adds to the page cache. Lazy nodes read large files ahead as the product
does (`store.lazy.large`); the local one doesn't read hot files beside the command as the product does: with that it
takes longer. Needs root and an environment that is built; starts no server.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from dsec.bench.layers_command import MIB, layers_command, place_for
from dsec.bench.lazy_node import Distance, LocalNode, Place, drop_caches, overlay, start, unmounted_after
from dsec.bench.output import say
from dsec.rollout import project
from dsec.store.build import build_directory_layer
from dsec.store.layers import Entry, LayerStore

NEAR = Distance()
FAR = Distance(latency_s=0.002, bytes_per_s=200e6)
PYTHON = ["python3", "-c", "1"]
COMMANDS = ("python", "tests")
TESTS = ["python3", "-m", "unittest", "discover", "-q", "-s", "/work", "-t", "/work"]


class Plan(Struct, frozen=True):
    """What to measure."""

    environment: str
    rounds: int
    commands: tuple[str, ...]
    large_mb: int


class _Case(Struct, frozen=True):
    name: str
    layers: list[str]
    words: list[str]


async def measure(plan: Plan, state: Path) -> dict[str, Any]:
    """All figures, by their keys. Raises `EnvironmentNotFound`, `DsecError`."""
    async with place_for(plan.environment, state) as (place, own, base):
        cases = []
        if "python" in plan.commands:
            cases.append(_Case("python", base, PYTHON))
        if "tests" in plan.commands:
            source = project.fetch(project.CACHETOOLS, state / "rollout")
            files = project.read_files(project.CACHETOOLS, source)
            work = build_directory_layer(own, {f"work/{name}": Entry(data) for name, data in files.items()}).digest
            await place.publish(own, [work])
            cases.append(_Case("tests", [work, *base], TESTS))
        result: dict[str, Any] = {}
        for case in cases:
            result |= await _case(case, plan, place, LocalNode(own))
        result |= await _reading(place, plan.large_mb * MIB)
        result["rounds"] = plan.rounds
        return result


async def _case(case: _Case, plan: Plan, place: Place, local: LocalNode) -> dict[str, Any]:
    """One command's figures; those of `python` have no prefix."""
    at = place.fresh("sandbox")
    seconds: dict[str, list[float]] = {}
    traces: dict[str, bytes | None] = {}
    fetched = 0
    for number in range(plan.rounds + 1):  # the first one warms up, and records what it reads
        turns: dict[str, float] = {"local": await start(local, at, case.layers, case.words)}
        for name, distance, traced in (
            ("lazy", NEAR, False),
            ("lazy_far", FAR, False),
            ("traced", NEAR, True),
            ("traced_far", FAR, True),
        ):
            for layer in case.layers:
                place.set_trace(layer, traces.get(layer) if traced else None)
            async with place.lazy(distance) as node:
                turns[name] = await start(node, at, case.layers, case.words)
                if name == "lazy":
                    fetched = await node.fetched(case.layers)
                    for layer in case.layers:
                        await node.lazy.release(layer)
                        traces[layer] = place.trace(layer)
        async with place.whole(FAR) as whole:
            turns["whole_far"] = await start(whole, at, case.layers, case.words)
        say(f"{case.name}: " + ", ".join(f"{name} {value * 1000:.0f} ms" for name, value in turns.items()))
        if number:
            for name, value in turns.items():
                seconds.setdefault(name, []).append(value)

    def ratio(one: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True)), 3)

    def quickest(name: str) -> float:
        return min(seconds[name])

    prefix = "" if case.name == "python" else f"{case.name}_"
    total = sum(local.data_bytes(layer) for layer in case.layers)
    return {
        f"{prefix}lazy_vs_local": ratio("lazy", "local"),
        f"{prefix}lazy_far_vs_local": ratio("lazy_far", "local"),
        f"{prefix}whole_vs_lazy": ratio("whole_far", "lazy_far"),
        f"{prefix}traced_vs_local": ratio("traced_far", "local"),
        f"{prefix}traced_near_vs_local": ratio("traced", "local"),
        f"{prefix}lazy_vs_local_quickest": round(quickest("lazy") / quickest("local"), 3),
        f"{prefix}traced_vs_local_quickest": round(quickest("traced_far") / quickest("local"), 3),
        f"{prefix}traced_near_vs_local_quickest": round(quickest("traced") / quickest("local"), 3),
        f"{prefix}bytes_fetched_share": round(fetched / total, 4),
        f"{prefix}ms": {name: round(1000 * statistics.median(values), 1) for name, values in seconds.items()},
        f"{prefix}quickest_ms": {name: round(1000 * quickest(name), 1) for name in seconds},
    }


async def _reading(place: Place, size: int) -> dict[str, Any]:
    """A large file of a layer that was filled: against a plain one, and read twice."""
    made = place.fresh("large")
    layers = LayerStore(made)
    (made / "tree").mkdir()
    content = random.Random(1).randbytes(size)
    (made / "tree" / "large").write_bytes(content)
    plain = made / "plain"
    plain.write_bytes(content)
    layer = build_directory_layer(layers, made / "tree").digest
    await place.publish(layers, [layer])
    async with place.lazy(NEAR) as node:
        at = place.fresh("reading")
        with unmounted_after(at):
            await node.lazy.attach(layer)
            await node.lazy.complete(layer)
            lower = at / "layer"
            await node.mount(layer, lower)
            tops = [overlay([lower], at / name) / "large" for name in ("one", "two")]
            cold, warm = list[float](), list[float]()
            for number in range(7):
                order = (plain, tops[0]) if number % 2 else (tops[0], plain)
                await asyncio.to_thread(drop_caches)
                times = {path: await asyncio.to_thread(_read, path) for path in order}
                cold.append(times[tops[0]] / times[plain])
                times = {path: await asyncio.to_thread(_read, path) for path in order}
                warm.append(times[tops[0]] / times[plain])
            await asyncio.to_thread(drop_caches)
            data = (await node.lazy.attach(layer)).data
            assert data is not None
            pages = list[int]()
            for path in tops:
                await asyncio.to_thread(_read, path)
                pages.append(cached_bytes(lower / "large") + cached_bytes(data))
            second = pages[1] - pages[0]
    say(f"filled layer against a plain file: cold {statistics.median(cold):.3f}, warm {statistics.median(warm):.3f}")
    return {
        "filled_read_ratio": round(statistics.median(cold), 3),
        "filled_read_warm_ratio": round(statistics.median(warm), 3),
        "first_reader_mb": round(pages[0] / 1e6, 1),
        "second_reader_mb": round(second / 1e6, 1),
    }


def _read(path: Path) -> float:
    """Seconds of reading a file through. Blocks."""
    buffer = bytearray(MIB)
    began = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - began


_libc = ctypes.CDLL(None, use_errno=True)
_CACHESTAT = 451


def cached_bytes(path: Path) -> int:
    """Of a file, in the page cache (cachestat, Linux 6.5)."""
    whole, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    with open(path, "rb") as file:
        if _libc.syscall(_CACHESTAT, file.fileno(), whole, counts, 0) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    return int(counts[0]) * 4096


main = layers_command(
    "lazy",
    __doc__,
    Plan,
    measure,
    click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True),
    click.option(
        "--command",
        "commands",
        type=click.Choice(COMMANDS),
        multiple=True,
        default=COMMANDS,
        help="Only this.  [default: all]",
    ),
    click.option("--large-mb", type=click.IntRange(1, 10_000), default=200, show_default=True, help="The large file."),
)
