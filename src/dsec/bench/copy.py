"""`dsec cp` of a tree of small files into a sandbox, against what bounds it: the sandbox's own `tar` that unpacks the
same files, from an archive that is there already, into the same file system.

Starts a server of its own and stops it. The two take turns, each into a fresh directory; figures are medians. Exit code
1 where a copy left something out.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from dsec import AsyncSandbox
from dsec.bench.output import say, write_result
from dsec.rollout.server import LocalServer, default_state, run
from dsec.spec.sandbox import GIB, SandboxSpec

MB = 1_000_000


class Plan(Struct, frozen=True):
    """What to copy."""

    environment: str
    files: int
    mean_bytes: int
    rounds: int


class _Copied(Struct):
    """What `dsec cp --json` says."""

    files: int
    seconds: float
    left_out: list[str]


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--environment", default="debian", show_default=True)
@click.option("--files", type=click.IntRange(1, 200_000), default=10_000, show_default=True)
@click.option("--mean-bytes", type=click.IntRange(1, 1_000_000), default=8_000, show_default=True, help="Of a file.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--state", type=click.Path(path_type=Path), help="State directory of the server (DSEC_STATE).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def command(state: Path | None, as_json: bool, **fields: Any) -> int:
    result = run(measure(Plan(**fields), state or default_state()), asyncio.new_event_loop)
    write_result(result, as_json=as_json)
    return 1 if result["left_out"] else 0


def main(arguments: list[str]) -> int:
    """Run with these arguments; returns the exit code."""
    return int(command.main(arguments, prog_name="dsec bench copy", standalone_mode=False) or 0)


async def measure(plan: Plan, state: Path) -> dict[str, Any]:
    """All figures, by their keys. Raises `DsecError` where the server doesn't start."""
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as directory:
        tree, archive = Path(directory, "tree"), Path(directory, "tree.tar")
        size = _grow(tree, plan)
        packed = _packed(tree, archive)
        server = await LocalServer.start(state)
        try:
            spec = SandboxSpec(environment=plan.environment, disk_bytes=4 * size + 8 * len(packed) + GIB)
            async with await server.client.create(spec) as sandbox:
                await sandbox.files.write("/tmp/tree.tar", packed)
                return await _rounds(sandbox, plan, tree, size, state)
        finally:
            await server.stop()


async def _rounds(sandbox: AsyncSandbox, plan: Plan, tree: Path, size: int, state: Path) -> dict[str, Any]:
    copies, bounds, left_out = list[float](), list[float](), 0
    for number in range(plan.rounds + 1):  # the first one warms up
        bound = await _unpacked(sandbox, f"/tmp/bound{number}")
        copied = await _copied(f"{tree}/.", f"{sandbox.id}:/tmp/copy{number}", state)
        left_out += len(copied.left_out) + (copied.files != plan.files)
        (await sandbox.commands.run(["rm", "-rf", f"/tmp/bound{number}", f"/tmp/copy{number}"])).check()
        if number:
            copies.append(copied.seconds)
            bounds.append(bound)
            say(f"cp {size / copied.seconds / MB:.0f} MB/s, tar inside {size / bound / MB:.0f} MB/s")
    return {
        "copy_mb_per_s": round(size / statistics.median(copies) / MB, 1),
        "untar_mb_per_s": round(size / statistics.median(bounds) / MB, 1),
        "copy_vs_untar": round(statistics.median(b / c for b, c in zip(bounds, copies, strict=True)), 3),
        "files_per_s": round(plan.files / statistics.median(copies)),
        "files": plan.files,
        "bytes": size,
        "rounds": plan.rounds,
        "left_out": left_out,
    }


def _packed(tree: Path, archive: Path) -> bytes:
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as writer:
        writer.add(tree, ".")
    return archive.read_bytes()


def _grow(tree: Path, plan: Plan) -> int:
    """Files of sizes around the mean, a hundred a directory; returns their bytes."""
    dice, total = random.Random(1), 0
    for number in range(plan.files):
        path = tree / f"d{number // 100:04}" / f"file{number:06}.py"
        if number % 100 == 0:
            path.parent.mkdir(parents=True)
        data = dice.randbytes(dice.randrange(2 * plan.mean_bytes))
        path.write_bytes(data)
        total += len(data)
    return total


async def _unpacked(sandbox: AsyncSandbox, path: str) -> float:
    """Seconds of the sandbox's `tar`."""
    await sandbox.files.mkdir(path)
    began = time.perf_counter()
    (await sandbox.commands.run(["tar", "-xpof", "/tmp/tree.tar", "-C", path])).check()
    return time.perf_counter() - began


async def _copied(source: str, target: str, state: Path) -> _Copied:
    """A copy by a process of its own; the seconds are its, without the start of Python."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dsec.cli.main", "cp", "--json", source, target),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "DSEC_STATE": str(state)},
    )
    written, _ = await process.communicate()
    return msgspec.json.decode(written, type=_Copied)
