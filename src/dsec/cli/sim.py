"""`dsec sim`: a cluster in virtual time."""

from __future__ import annotations

import click
import msgspec

from dsec.cli.output import EXIT_PLATFORM, json_option, wants_json, write_json, write_table
from dsec.errors import Unsupported


@click.command("sim")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same events.")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="So many, from --seed on.")
@click.option("--nodes", type=click.IntRange(1, 2000), default=16, show_default=True)
@click.option("--hours", type=click.FloatRange(0.01, 1000), default=0.5, show_default=True, help="Of virtual time.")
@click.option("--apiservers", type=click.IntRange(1, 32), default=3, show_default=True)
@click.option(
    "--faults", type=click.FloatRange(0), default=1.0, show_default=True, help="How much goes wrong; 0: nothing."
)
@click.option("--load", type=click.FloatRange(0.01, 10), default=1.0, show_default=True, help="Of the published one.")
@json_option
def sim(  # noqa: PLR0917 (click passes by name)
    seed: int, seeds: int, nodes: int, hours: float, apiservers: int, faults: float, load: float, as_json: bool
) -> int:
    """Simulate a cluster with the real placement, fairness, watcher, quotas and fences.

    Nodes, network and store are simulated, and fail; sandboxes come and go as published for production. Exit code 3
    where an invariant was broken: the seed replays it.
    """
    try:
        from dsec.testing.sim import SimConfig, simulate
    except ImportError as error:
        raise Unsupported("this needs the server's packages", remedy="pip install 'dsec[server]'") from error
    broken = 0
    for each in range(seed, seed + seeds):
        outcome = simulate(SimConfig(seed=each, nodes=nodes, hours=hours, apis=apiservers, faults=faults, load=load))
        broken += outcome.invariant_violations
        if wants_json(as_json):
            write_json(outcome)
        else:
            values = msgspec.to_builtins(outcome)
            write_table(["figure", "value"], [(name, str(value)) for name, value in values.items()])
    return EXIT_PLATFORM if broken else 0


COMMANDS = [sim]
