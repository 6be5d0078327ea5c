"""Commands in sandboxes that run, through SDK and HTTP: latency and rate of `/bin/true` without a shell, the echo of a
terminal, output, upload.

Where E2B's package is at hand, `e2b_extra_ms` is by how much the median of its `commands.run("true")`, a login shell,
is above ours. Starts a server of its own and stops it. Peak memory is that of each process during the transfers. Exit
code 1 where something failed.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from dsec.bench import e2b_client, load, meter
from dsec.bench.output import say, write_result
from dsec.bench.rounds import percentile
from dsec.rollout.server import LocalServer, default_state, run
from dsec.sdk._config import FILE_NAME, Endpoint
from dsec.spec.sandbox import GIB, SandboxSpec

MB = 1_000_000
_SETTLING_S = 2.0
"""What opening many streams leaves to do is done by then: the event log is saved within a second."""


class Plan(Struct, frozen=True):
    """What to measure."""

    environment: str
    alone: int
    parallel: int
    sandboxes: int
    at_once: int
    output_mb: int
    upload_mb: int
    streams: int
    idle_s: float
    e2b: Path | None = None


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--environment", default="debian", show_default=True)
@click.option("--alone", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="One at a time.")
@click.option("--parallel", type=click.IntRange(1, 1_000_000), default=6000, show_default=True, help="Side by side.")
@click.option("--sandboxes", type=click.IntRange(1, 1000), default=16, show_default=True, help="To spread them over.")
@click.option("--at-once", type=click.IntRange(1, 1000), default=32, show_default=True, help="At the same time.")
@click.option(
    "--output-mb", type=click.IntRange(1, 10_000), default=100, show_default=True, help="One command's output."
)
@click.option("--upload-mb", type=click.IntRange(1, 10_000), default=500, show_default=True, help="An uploaded file.")
@click.option(
    "--streams",
    type=click.IntRange(1, 2000),
    default=500,
    show_default=True,
    help="Open ones on which nothing happens.",
)
@click.option("--idle-s", type=click.FloatRange(0.1, 600), default=10.0, show_default=True, help="To watch them for.")
@click.option("--e2b", type=click.Path(path_type=Path), help="Directory with E2B's package, where it isn't found.")
@click.option("--state", type=click.Path(path_type=Path), help="State directory of the server (DSEC_STATE).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def command(state: Path | None, as_json: bool, **fields: Any) -> int:
    name, loop_factory = load.event_loop()
    result = run(measure(Plan(**fields), state or default_state()), loop_factory) | {"client_loop": name}
    write_result(result, as_json=as_json)
    return 1 if result["failures"] else 0


def main(arguments: list[str]) -> int:
    """Run with these arguments; returns the exit code."""
    return int(command.main(arguments, prog_name="dsec bench exec", standalone_mode=False) or 0)


async def measure(plan: Plan, state: Path) -> dict[str, Any]:
    """All figures, by their keys. Raises `DsecError` where the server doesn't start or a transfer fails."""
    server = await LocalServer.start(state)
    try:
        client = server.client
        spec = SandboxSpec(environment=plan.environment, disk_bytes=2 * plan.upload_mb * MB + GIB)
        sandboxes = await load.make(client, spec, plan.sandboxes)
        try:
            first = sandboxes[0]
            await load.exec_times(first, min(50, plan.alone))
            times = await load.exec_times(first, plan.alone)
            say(f"one at a time: p50 {percentile(times, 50):.2f} ms, p99 {percentile(times, 99):.2f} ms")
            echoes = await load.echo_times(first, min(200, plan.alone))
            say(f"a key's echo by a terminal: p50 {percentile(echoes, 50):.2f} ms")
            e2b_times = await _e2b_times(plan, state, first.id)
            turn = await load.exec_parallel(sandboxes, plan.parallel, plan.at_once)
            say(f"{plan.at_once} at once: {turn.rate:.0f}/s, {turn.failures} failed")
            quiet = await meter.cpu_percent([server.pid], plan.idle_s)
            async with load.idle_streams(sandboxes, plan.streams):
                await asyncio.sleep(_SETTLING_S)
                idle = await meter.cpu_percent([server.pid], plan.idle_s)
            say(f"{plan.streams} idle streams: {idle:.2f} % of a core, without them {quiet:.2f} %")
            watched = {"server": server.pid, "client": os.getpid(), **_holders(state)}
            before = {name: meter.resident_kib(pid) for name, pid in watched.items()}
            for pid in watched.values():
                meter.reset_peak(pid)
            speeds = {
                "output_mb_per_s": await load.output(first, plan.output_mb * MB),
                "upload_mb_per_s": await load.upload(first, plan.upload_mb * MB),
                "download_mb_per_s": await load.download(first, plan.upload_mb * MB),
            }
            peaks = {name: meter.peak_kib(pid) for name, pid in watched.items()}
        finally:
            await client.kill_many(sandboxes)
    finally:
        await server.stop()
    for name, speed in speeds.items():
        say(f"{name} {speed:.0f}")
    return {
        "exec_p50_ms": round(percentile(times, 50), 3),
        "exec_p99_ms": round(percentile(times, 99), 3),
        "exec_per_s": round(turn.rate, 1),
        "pty_echo_p50_ms": round(percentile(echoes, 50), 3),
        "idle_streams_cpu_percent": round(idle, 3),
        "no_streams_cpu_percent": round(quiet, 3),
        "streams": plan.streams,
        "e2b_extra_ms": round(percentile(e2b_times, 50) - percentile(times, 50), 3) if e2b_times else None,
        **{name: round(speed, 1) for name, speed in speeds.items()},
        "peak_mib": {name: round(kib / 1024, 1) for name, kib in peaks.items()},
        "peak_growth_mib": {name: round((kib - before[name]) / 1024, 1) for name, kib in peaks.items()},
        "failures": turn.failures,
        "first_failure": turn.error,
        "at_once": plan.at_once,
        "sandboxes": plan.sandboxes,
    }


async def _e2b_times(plan: Plan, state: Path, sandbox_id: str) -> list[float]:
    package = e2b_client.find(plan.e2b)
    if package is None:
        say("E2B's package isn't here: not measured")
        return []
    endpoint = msgspec.json.decode((state / FILE_NAME).read_bytes(), type=Endpoint)
    times = await e2b_client.run_times(package, endpoint, sandbox_id, min(200, plan.alone))
    say(f"E2B's client: p50 {percentile(times, 50):.2f} ms")
    return times


def _holders(state: Path) -> dict[str, int]:
    """The zygote, and the largest guest: each by a name."""
    zygote = meter.zygote_of(state)
    return {"zygote": zygote, "guest": max(meter.descendants(zygote), key=meter.resident_kib)}
