"""Entry point of `dsec`."""

from __future__ import annotations

import asyncio
import gc
import sys

import click

from dsec.cli import (
    audit,
    calling,
    cluster,
    commands,
    complete,
    copy,
    disks,
    forward,
    grading,
    group,
    host,
    inside,
    judging,
    kernels,
    layers,
    machines,
    network,
    nodes,
    rights,
    sandboxes,
    session,
    signals,
    sim,
    state,
    terminal,
    trajectory,
)
from dsec.cli.output import EXIT_CODES, EXIT_PIPE, complain, exit_code, leave, tell_of_waiting
from dsec.errors import DsecError


@click.group(
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def cli() -> None:
    """Sandboxes for training and evaluating AI agents.

    The server is found by DSEC_URL and DSEC_API_KEY, or else by the client.json that `dsec serve` writes.
    """


for _command in (
    *sandboxes.COMMANDS,
    *state.COMMANDS,
    *layers.COMMANDS,
    *commands.COMMANDS,
    *terminal.COMMANDS,
    *inside.COMMANDS,
    *trajectory.COMMANDS,
    *session.COMMANDS,
    *copy.COMMANDS,
    *forward.COMMANDS,
    *network.COMMANDS,
    *group.COMMANDS,
    *machines.COMMANDS,
    *disks.COMMANDS,
    *host.COMMANDS,
    *kernels.COMMANDS,
    *audit.COMMANDS,
    *nodes.COMMANDS,
    *rights.COMMANDS,
    *sim.COMMANDS,
    *cluster.COMMANDS,
    *grading.COMMANDS,
    *judging.COMMANDS,
    *calling.COMMANDS,
    *complete.COMMANDS,
):
    cli.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process."""
    signals.as_interrupts()
    tell_of_waiting()
    gc.set_threshold(100_000, 20, 50)  # what is imported stays: to look through it is a tenth of a server's start
    try:
        code = cli.main(args=arguments, prog_name="dsec", standalone_mode=False)
    except DsecError as error:
        complain(error)
        code = exit_code(error)
    except (click.exceptions.Abort, KeyboardInterrupt, asyncio.CancelledError):
        code = signals.exit_code()
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except BrokenPipeError:
        sys.stdout = sys.stderr  # nothing more for the pipe that is gone
        code = EXIT_PIPE
    leave(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
