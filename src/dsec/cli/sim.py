"""`dsec sim`: a cluster in virtual time."""

from __future__ import annotations

import math
from typing import Any

import click
import msgspec

from dsec.cli.output import EXIT_PLATFORM, json_option, note, wants_json, write_json, write_table
from dsec.cli.progress import Virtual
from dsec.errors import Unsupported


class _Range(click.FloatRange):
    """Without what is no number, which no bound refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        return self.fail(f"{value} is no number.", param, ctx) if math.isnan(number) else number


@click.command("sim")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same events.")
@click.option(
    "--seeds", type=click.IntRange(1), default=1, show_default=True, help="How many to run one after the other."
)
@click.option("--nodes", type=click.IntRange(1, 2000), default=16, show_default=True, help="Of 3,200 sandboxes each.")
@click.option("--hours", type=_Range(0.01, 1000), default=0.5, show_default=True, help="Of virtual time.")
@click.option("--apiservers", type=click.IntRange(1, 32), default=3, show_default=True, help="Of one cluster.")
@click.option(
    "--faults",
    type=_Range(0, 1000),
    default=1.0,
    show_default=True,
    help="How much goes wrong: 0 nothing, 1 some 200 faults in two hours of 160 nodes.",
)
@click.option(
    "--load", type=_Range(0.01, 10), default=1.0, show_default=True, help="1: as published, 2,400 live a node."
)
@click.option("--random", is_flag=True, help="Place at random: what locality and balance are measured against.")
@json_option
def sim(  # noqa: PLR0917 (click passes by name)
    seed: int,
    seeds: int,
    nodes: int,
    hours: float,
    apiservers: int,
    faults: float,
    load: float,
    random: bool,
    as_json: bool,
) -> int:
    """Simulate a cluster with the real placement, fairness, watcher, quotas and fences.

    Nodes, network and store are simulated, and fail; sandboxes come and go as published for production. Exit code 3
    where an invariant was broken; the command that replays it, to the same `digest`, is on stderr.
    """
    try:
        from dsec.testing.sim import SimConfig, simulate
    except ImportError as error:
        raise Unsupported("this needs the server's packages", remedy="pip install 'dsec[server]'") from error
    broken = 0
    for each in range(seed, seed + seeds):
        config = SimConfig(
            seed=each, nodes=nodes, hours=hours, apis=apiservers, faults=faults, load=load, random=random
        )
        with Virtual(f"seed {each}", hours * 3600) as progress:
            outcome = simulate(config, progress.at)
        if outcome.invariant_violations:
            broken += 1
            by = " --random" if random else ""
            options = f"--nodes {nodes} --hours {hours} --apiservers {apiservers} --faults {faults} --load {load}{by}"
            note(f"{outcome.violations[0]}; again: dsec sim --seed {each} {options}")
        if wants_json(as_json):
            write_json(outcome)
        else:
            values = msgspec.to_builtins(outcome)
            write_table(["figure", "value"], [(name, str(value)) for name, value in values.items()])
    return EXIT_PLATFORM if broken else 0


COMMANDS = [sim]
