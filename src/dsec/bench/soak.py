"""A steady rate of creations with kills for as long as it is told, then the comparison of before and after.

Each sandbox gets one of a few short lives: `true` and delete; a command that is killed in the middle by ending the
sandbox; a file of 1 MiB and delete; a fork of children that outlive their parent and delete; nothing at all and delete.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
import msgspec
from msgspec import Struct

from dsec import AsyncClient, AsyncSandbox
from dsec.bench import meter
from dsec.bench.output import say, write_result
from dsec.errors import DsecError
from dsec.kernel import census
from dsec.rollout.server import LocalServer, default_state, run
from dsec.spec.sandbox import MIB, SandboxSpec

_MEBIBYTE = bytes(MIB)
_LINGER = "for i in 1 2 3; do (setsid sleep 600 &) ; done"
_MAX_LIVE = 400
_AT_ONCE = 100
"""Live before the first look, so that pools are as full then as they will ever be."""


class Look(Struct, frozen=True):
    """What the machine holds at one moment."""

    memory_used_kib: int
    server_rss_kib: int
    disk_free_bytes: int
    counts: dict[str, int]


class Soak(Struct, frozen=True):
    """How it went."""

    seconds: float
    created: int
    wanted_per_s: float
    failures: int
    first_failure: str
    lives: dict[str, int]
    before: Look
    after: Look
    middle: list[Look]
    """One look a tenth of the time, under load."""

    @property
    def created_per_s(self) -> float:
        return self.created / self.seconds

    @property
    def left(self) -> dict[str, int]:
        """What there is more of than before, by kind."""
        return {
            kind: self.after.counts[kind] - count
            for kind, count in self.before.counts.items()
            if self.after.counts[kind] > count
        }


async def soak(
    server: LocalServer,
    spec: SandboxSpec,
    *,
    minutes: float,
    per_s: float,
    told: Callable[[Look, int], None],
) -> Soak:
    """Keep `per_s` creations a second going for `minutes`; at most 400 sandboxes are live. `told` hears of each
    look."""
    client, rng = server.client, random.Random(1)
    lives: Counter[str] = Counter()
    problems: list[str] = []
    running: set[asyncio.Task[None]] = set()
    kinds = {"true": _true, "killed": _killed, "file": _file, "orphans": _orphans, "idle": _idle}
    names = list(kinds)
    await asyncio.gather(*(_life(client, spec, kinds[name], problems) for name in names * 20))
    await client.kill_many([item.sandbox async for item in client.create_many(spec, count=_AT_ONCE) if item.sandbox])
    settling_s = min(2.0, minutes * 3)
    before = await _look(server, settling_s)
    began = time.monotonic()
    until, next_look, middle, created = began + minutes * 60, began + minutes * 6, list[Look](), 0
    while (now := time.monotonic()) < until:
        due = int((now - began) * per_s) - created
        for _ in range(min(due, _MAX_LIVE - len(running))):
            name = rng.choice(names)
            lives[name] += 1
            created += 1
            task = asyncio.create_task(_life(client, spec, kinds[name], problems))
            running.add(task)
            task.add_done_callback(running.discard)
        if now >= next_look:
            next_look += minutes * 6
            middle.append(await _look(server))
            told(middle[-1], created)
        await asyncio.sleep(0.01)
    await asyncio.gather(*running)
    seconds = time.monotonic() - began
    after = await _look(server, settling_s)
    return Soak(
        seconds=seconds,
        created=created,
        wanted_per_s=per_s,
        failures=len(problems),
        first_failure=problems[0] if problems else "",
        lives=dict(lives),
        before=before,
        after=after,
        middle=middle,
    )


async def _look(server: LocalServer, settling_s: float = 0.0) -> Look:
    used = (await meter.settled_memory(settling_s) if settling_s else meter.memory()).used_kib
    node = await server.client.node()
    return Look(used, meter.resident_kib(server.pid), node["disk_free_bytes"], census.take(server.state).counts())


async def _life(
    client: AsyncClient, spec: SandboxSpec, live: Callable[[AsyncSandbox], Awaitable[None]], problems: list[str]
) -> None:
    try:
        sandbox = await client.create(spec, deadline_s=60.0)
        try:
            await live(sandbox)
        finally:
            await sandbox.kill()
    except DsecError as error:
        problems.append(str(error))


async def _true(sandbox: AsyncSandbox) -> None:
    (await sandbox.commands.run(["/bin/true"])).check()


async def _killed(sandbox: AsyncSandbox) -> None:
    await sandbox.commands.start(["sleep", "600"])


async def _file(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("/file", _MEBIBYTE)


async def _orphans(sandbox: AsyncSandbox) -> None:
    (await sandbox.commands.run(["/bin/sh", "-c", _LINGER])).check()


async def _idle(sandbox: AsyncSandbox) -> None:
    await sandbox.refresh()


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--environment", default="debian", show_default=True)
@click.option("--minutes", type=click.FloatRange(0.05, 24 * 60), default=60.0, show_default=True)
@click.option(
    "--per-s", type=click.FloatRange(0.1, 10_000), default=300.0, show_default=True, help="Creations a second."
)
@click.option("--state", type=click.Path(path_type=Path), help="State directory of the server (DSEC_STATE).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def command(environment: str, minutes: float, per_s: float, state: Path | None, as_json: bool) -> int:
    result = run(_run(environment, minutes, per_s, state or default_state()))
    summary = {
        **msgspec.to_builtins(result),
        "created_per_s": round(result.created_per_s, 1),
        "left": result.left,
        "memory_growth_kib": result.after.memory_used_kib - result.before.memory_used_kib,
    }
    write_result(summary, as_json=as_json)
    return 1 if result.failures or result.left else 0


def main(arguments: list[str]) -> int:
    """Run with these arguments; returns the exit code."""
    return int(command.main(arguments, prog_name="dsec bench soak", standalone_mode=False) or 0)


async def _run(environment: str, minutes: float, per_s: float, state: Path) -> Soak:
    server = await LocalServer.start(state)

    def told(look: Look, created: int) -> None:
        say(f"{created} created; {look.memory_used_kib >> 10} MiB used, server {look.server_rss_kib >> 10} MiB")

    try:
        spec = SandboxSpec(environment=environment, disk_bytes=64 * MIB)
        return await soak(server, spec, minutes=minutes, per_s=per_s, told=told)
    finally:
        await server.stop()
