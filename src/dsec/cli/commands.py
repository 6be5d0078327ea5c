"""`run` and `exec`: commands in sandboxes, with their streams and exit codes passed through."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import click

from dsec import AsyncClient, AsyncCommand, AsyncSandbox, Cause, CommandResult
from dsec.cli import signals
from dsec.cli.complete import ENVIRONMENT, SANDBOX
from dsec.cli.network import grants, network_option
from dsec.cli.output import EXIT_PIPE, EXIT_PLATFORM, no_option, note, size
from dsec.cli.sandboxes import pairs
from dsec.cli.terminal import at_terminal, need_terminal
from dsec.errors import DsecError

_CHUNK = 256 << 10


def command_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that `run` and `exec` share."""
    for option in (
        click.option("--env", "-e", "variables", multiple=True, metavar="K=V", help="Environment variable."),
        click.option("--cwd", help="Working directory."),
        click.option("--user", "-u", help="User inside: name, uid, or with :group."),
        click.option("--command-timeout-s", type=float, help="Wall time of the command, then it is ended whole."),
        click.option(
            "--stdin/--no-stdin", "stdin", default=None, help="Pass stdin on (default: if it is no terminal)."
        ),
        click.option("-i", "stdin", flag_value=True, help="The same as --stdin."),
        click.option("--tty", "-t", is_flag=True, help="On this terminal, as `shell`; so -it is as docker's."),
    ):
        function = option(function)
    return function


@click.command("exec", context_settings={"ignore_unknown_options": True})
@command_options
@click.argument("sandbox_id", metavar="ID", type=SANDBOX, callback=no_option)
@click.argument("argv", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED, required=True, callback=no_option)
def execute(sandbox_id: str, argv: tuple[str, ...], tty: bool, **options: Any) -> int:
    """Run a command in a sandbox that exists; its exit code is passed on.

    COMMAND is run as it is, without a shell.
    """
    if tty:
        need_terminal()

    async def work() -> int:
        async with AsyncClient() as client:
            sandbox = await client.connect(sandbox_id)
            return await _run_in(sandbox, argv, tty=tty, ends=False, **options)

    return signals.run(work())


@click.command("run", context_settings={"ignore_unknown_options": True})
@command_options
@click.option("--backend", help="Kind of sandbox: container (default), microvm or vm.")
@click.option("--cpus", type=float, help="CPUs (default 1).")
@click.option("--memory", callback=lambda _, __, text: size(text) if text else None, help="Memory, as 512M or 2GiB.")
@click.option("--disk", callback=lambda _, __, text: size(text) if text else None, help="Disk, likewise.")
@click.option("--ttl-s", type=float, help="The sandbox ends after this long, whatever happens here.")
@click.option("--run", "run_name", help="Run that it belongs to.")
@click.option("--name", help="Name within the run: the sandbox of this name is used where it exists.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="Label.")
@click.option("--require", "features", multiple=True, metavar="FEATURE", help="The node's kernel must have this.")
@network_option
@click.option(
    "--tripwires", multiple=True, metavar="SET", help="Rules to watch it by: default, swe (docs/TRIPWIRES.md)."
)
@click.option("--keep", is_flag=True, help="Leave the sandbox running and print its id on stderr.")
@click.argument("environment", type=ENVIRONMENT, callback=no_option)
@click.argument("argv", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED, required=True, callback=no_option)
def run(  # noqa: PLR0917 (click passes by name)
    environment: str,
    argv: tuple[str, ...],
    backend: str | None,
    cpus: float | None,
    memory: int | None,
    disk: int | None,
    ttl_s: float | None,
    run_name: str | None,
    name: str | None,
    labels: tuple[str, ...],
    features: tuple[str, ...],
    network: tuple[str, ...],
    tripwires: tuple[str, ...],
    keep: bool,
    tty: bool,
    **options: Any,
) -> int:
    """Make a sandbox of ENVIRONMENT, run a command in it, end it; the command's exit code is passed on."""
    if tty:
        need_terminal()
    fields: dict[str, Any] = {
        "backend": backend,
        "cpus": cpus,
        "memory_bytes": memory,
        "disk_bytes": disk,
        "ttl_s": ttl_s,
        "run": run_name,
        "name": name,
        "labels": pairs(labels) or None,
        "require_features": list(features) or None,
        "network": grants(network) or None,
        "tripwires": list(tripwires) or None,
    }

    async def work() -> int:
        async with AsyncClient() as client:
            sandbox = await client.create(
                environment, **{field: value for field, value in fields.items() if value is not None}
            )
            if keep:
                note(f"sandbox {sandbox.id}")
            return await _run_in(sandbox, argv, tty=tty, ends=not keep, **options)

    return signals.run(work())


async def _run_in(sandbox: AsyncSandbox, argv: tuple[str, ...], *, tty: bool, ends: bool, **options: Any) -> int:
    """The command's exit code. `ends`: the sandbox does, with it."""
    if tty:
        options.pop("stdin")
        return await at_terminal(sandbox, argv, ends=ends, env=pairs(options.pop("variables")), **options)
    async with sandbox if ends else contextlib.nullcontext():
        return await passed_through(sandbox, argv, **options)


async def passed_through(
    sandbox: AsyncSandbox,
    argv: tuple[str, ...],
    *,
    variables: tuple[str, ...],
    cwd: str | None,
    user: str | None,
    command_timeout_s: float | None,
    stdin: bool | None,
) -> int:
    """Run a command with this process's streams; returns its exit code. An interrupt ends the command."""
    piped = not sys.stdin.isatty() if stdin is None else stdin
    command = await sandbox.commands.start(
        argv,
        env=pairs(variables),
        cwd=cwd,
        user=user,
        stdin=piped,
        command_timeout_s=command_timeout_s,
    )
    if piped:
        feed_stdin(command)
    try:
        async for output in command:
            stream = sys.stderr.buffer if output.stderr else sys.stdout.buffer
            stream.write(output.data)
            stream.flush()
        result = await command.wait()
        with contextlib.suppress(DsecError):  # this process asks for nothing more that would carry the word along
            await command.release()
    except BrokenPipeError:
        await command.kill()
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, ASYNC230 (for the flush at exit)
        return EXIT_PIPE
    except asyncio.CancelledError:
        await asyncio.shield(command.kill())
        raise
    explain(result)
    return EXIT_PLATFORM if result.infra else result.exit_code


def explain(result: CommandResult) -> None:
    """Say on stderr what an exit code can't."""
    if result.cause not in (Cause.EXITED, Cause.SIGNALED):
        note(f"{result.cause}{': ' + result.message if result.message else ''}")
    elif result.truncated:
        note(f"{result.dropped_bytes} bytes of output were dropped")


def feed_stdin(command: AsyncCommand) -> None:
    """Pass this process's stdin on to a command, in the background."""
    _Feeder(command).start()


class _Feeder:
    """Passes stdin on from a thread of its own, because reading a pipe can't be interrupted. The thread ends with the
    process."""

    def __init__(self, command: AsyncCommand) -> None:
        self._command = command
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        threading.Thread(target=self._main, name="stdin", daemon=True).start()

    def _main(self) -> None:
        try:
            while data := os.read(sys.stdin.fileno(), _CHUNK):
                self._do(self._command.write_stdin(data))
            self._do(self._command.close_stdin())
        except (OSError, RuntimeError, DsecError, concurrent.futures.CancelledError):
            return  # the command or the loop has ended: nobody reads on

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            done = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()  # else Python complains of it, on stderr
            raise
        done.result()


COMMANDS: tuple[click.Command, ...] = (run, execute)
