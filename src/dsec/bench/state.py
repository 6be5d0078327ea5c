"""What state that outlives everything costs: `log_overhead`, the share of the trajectory log in a command.

Starts an edge of its own on the state directory and ends it; nothing else may serve there. Ratios are of one run, both
sides in turns. Exit code 1 where a goal isn't met.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from dsec.bench import log_overhead
from dsec.bench.output import write_result
from dsec.rollout.server import default_state

P50_PERCENT = 20.0
THROUGHPUT_PERCENT = 10.0


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--environment", default="debian", show_default=True)
@click.option("--rounds", type=click.IntRange(1, 1000), default=7, show_default=True, help="Turns of each side.")
@click.option("--alone", type=click.IntRange(1, 100_000), default=150, show_default=True, help="One at a time, a turn.")
@click.option("--parallel", type=click.IntRange(32, 100_000), default=600, show_default=True, help="At once, a turn.")
@click.option("--state", type=click.Path(path_type=Path), help="State directory (DSEC_STATE).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def command(state: Path | None, as_json: bool, **fields: Any) -> int:
    result = asyncio.run(log_overhead.measure(log_overhead.Plan(**fields), state or default_state()))
    write_result({"log_overhead": result}, as_json=as_json)
    return 0 if _met(result) else 1


def _met(result: dict[str, Any]) -> bool:
    return bool(result["exec_p50_percent"] <= P50_PERCENT and result["throughput_percent"] <= THROUGHPUT_PERCENT)


def main(arguments: list[str]) -> int:
    """Run with these arguments; returns the exit code."""
    return int(command.main(arguments, prog_name="dsec bench state", standalone_mode=False) or 0)
