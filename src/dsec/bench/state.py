"""What state that outlives everything costs: pauses (`paged_out`, `net_given_back`, `resume_extra_ms`), files that are
kept (`snapshot_vs_copy`, `pack_vs_mkfs`, `fork8_ms`), and the trajectory log's share in a command (`log_overhead`).

Starts an edge of its own on the state directory and ends it; nothing else may serve there. Ratios are of one run, both
sides in turns. Exit code 1 where a goal isn't met.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from dsec.app import open_edge, open_layers
from dsec.backends.container.host import Host
from dsec.bench import load, log_overhead, state_files, state_memory
from dsec.bench.output import say, write_result
from dsec.bench.running import run_bench
from dsec.configuration import read_config
from dsec.rollout.server import default_state

PARTS = ("memory", "files", "log")
MB = 1_000_000
LEAST = {"paged_out": 0.70, "net_given_back": 0.40, "snapshot_vs_copy": 10.0}
MOST = {
    "resume_extra_ms": 5.0,
    "pack_vs_mkfs": 2.0,
    "fork8_ms": 150.0,
    "exec_p50_percent": 20.0,
    "throughput_percent": 10.0,
}


class Plan(Struct, frozen=True, kw_only=True):
    """What to measure."""

    parts: tuple[str, ...]
    memory: state_memory.Plan
    files: state_files.Plan
    log: log_overhead.Plan


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this; any number.  [default: all]")
@click.option("--environment", default="debian", show_default=True)
@click.option(
    "--sandboxes", type=click.IntRange(1, 100), default=7, show_default=True, help="Paused, each three times."
)
@click.option("--many", type=click.IntRange(1, 1000), default=50, show_default=True, help="Paused at once.")
@click.option("--files", type=click.IntRange(1, 100_000), default=2500, show_default=True, help="Of a snapshot.")
@click.option("--megabytes", type=click.IntRange(1, 10_000), default=100, show_default=True, help="In them.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=7, show_default=True, help="Turns of each side.")
@click.option("--alone", type=click.IntRange(1, 100_000), default=150, show_default=True, help="One at a time, a turn.")
@click.option("--parallel", type=click.IntRange(32, 100_000), default=600, show_default=True, help="At once, a turn.")
@click.option("--state", type=click.Path(path_type=Path), help="State directory (DSEC_STATE).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def command(state: Path | None, as_json: bool, **given: Any) -> int:
    environment, rounds = given["environment"], given["rounds"]
    plan = Plan(
        parts=given["parts"] or PARTS,
        memory=state_memory.Plan(sandboxes=given["sandboxes"], many=given["many"]),
        files=state_files.Plan(
            environment=environment, rounds=rounds, files=given["files"], bytes=given["megabytes"] * MB
        ),
        log=log_overhead.Plan(environment=environment, rounds=rounds, alone=given["alone"], parallel=given["parallel"]),
    )
    result = run_bench(measure(plan, state or default_state()), load.event_loop()[1])
    write_result(result, as_json=as_json)
    missed = not_met(result)
    if missed:
        say(f"not met: {', '.join(missed)}")
    return 1 if missed else 0


async def measure(plan: Plan, state: Path) -> dict[str, Any]:
    """All figures, by their keys. Raises `DsecError`."""
    config, hosts, result = read_config(state), list[Host](), dict[str, Any]()
    if "memory" in plan.parts:
        await asyncio.to_thread(state_memory.prepare, config)
    async with (
        open_edge(config, keep=False, on_host=hosts.append) as edge,
        open_layers(config, edge, hosts[0]) as layers,
    ):
        if "memory" in plan.parts:
            result |= await state_memory.measure(edge, plan.memory)
        if "files" in plan.parts:
            result |= await state_files.measure(edge, hosts[0], layers, plan.files)
        if "log" in plan.parts:
            result["log_overhead"] = await log_overhead.measure(edge, plan.log)
    return result


def not_met(result: dict[str, Any]) -> list[str]:
    """The goals that the figures don't reach."""
    figures = result | result.get("log_overhead", {})
    few = [name for name, least in LEAST.items() if name in figures and figures[name] < least]
    return few + [name for name, most in MOST.items() if name in figures and figures[name] > most]


def main(arguments: list[str]) -> int:
    """Run with these arguments; returns the exit code."""
    return int(command.main(arguments, prog_name="dsec bench state", standalone_mode=False) or 0)
