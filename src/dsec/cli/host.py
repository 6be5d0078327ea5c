"""Verbs about this host: `serve`, `doctor`, `bench`, `host undo`, `version`.

What they need of the server is imported when they run, so that the client alone has them too and they say what is
missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Literal

import click

from dsec.cli.in_vm import in_vm_options
from dsec.cli.output import EXIT_PLATFORM, json_option, wants_json, write_json, write_table
from dsec.errors import Unsupported
from dsec.sdk._config import DEFAULT_PORT


@click.command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0: any free one.")
@click.option("--state", type=click.Path(path_type=Path), help="State directory (default: DSEC_STATE, /var/lib/dsec).")
@click.option(
    "--on-exit",
    type=click.Choice(["keep", "destroy"]),
    default="keep",
    show_default=True,
    help="keep: sandboxes go on for the next server. destroy: they end, and nothing of them is left.",
)
@in_vm_options
@click.option(
    "--log-format",
    type=click.Choice(["human", "json"]),
    default="human",
    show_default=True,
    help="json: an object a line, with request and sandbox ids.",
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def serve(
    *,
    host: str,
    port: int,
    state: Path | None,
    on_exit: str,
    in_vm: bool,
    log_format: Literal["human", "json"],
    log_level: str,
    **machine: int,
) -> int:
    """Run a one-node server in the foreground; SIGTERM or Ctrl-C stops it.

    With --in-vm a kernel that an agent crashes is the machine's, which is booted again; its sandboxes end with it. It
    writes client.json (its URL and an API key, mode 0600) into its state directory: there
    the client and this command find it.
    """
    try:
        if in_vm:
            from dsec import app_shield

            return app_shield.serve_in_vm(
                host=host,
                port=port,
                shape=app_shield.shape_of(**machine),
                keep=on_exit == "keep",
                state=state,
                log_format=log_format,
                log_level=log_level,
            )
        from dsec import app
    except ImportError as error:
        raise _needs_server(error) from error
    return app.serve(host=host, port=port, state=state, on_exit=on_exit, log_format=log_format, log_level=log_level)


@click.command("filler", hidden=True)
@click.option("--state", type=click.Path(path_type=Path), required=True)
@click.option("--fuse", is_flag=True)
@click.option("--copier", type=click.Path(path_type=Path))
def filler(state: Path, fuse: bool, copier: Path | None) -> int:
    """Fill layers on demand: started by `dsec serve` beside itself."""
    from dsec import app_filler

    return app_filler.run_filler(state, fuse=fuse, copier=copier)


@click.command("doctor")
@click.option("--state", type=click.Path(path_type=Path), help="State directory whose disk is looked at.")
@json_option
def doctor(state: Path | None, as_json: bool) -> int:
    """Say which features of this host the server can use, and what to do about the others.

    Exit code 3 where a feature is missing that the server can't do without.
    """
    try:
        from dsec.app import probe
        from dsec.kernel.host import as_json as findings_as_json
    except ImportError as error:
        raise _needs_server(error) from error
    findings = probe(state)
    if wants_json(as_json):
        write_json(findings_as_json(findings))
    else:
        rows = [
            (each.name, "ok" if each.ok else "MISSING" if each.needed else "no", each.detail, each.remedy)
            for each in findings
        ]
        write_table(["feature", "", "found", "remedy"], rows)
    return EXIT_PLATFORM if any(each.needed and not each.ok for each in findings) else 0


@click.group("bench")
def bench() -> None:
    """Measure this machine, with a server that is started for it."""


_BENCHES = {
    "create": "Create, run `true`, destroy: against crun, runc, bubblewrap and the bare zygote.",
    "exec": "Commands in sandboxes that run: latency, rate, transfers.",
    "copy": "`dsec cp` of many small files, against the sandbox's own tar.",
    "soak": "Creates at a steady rate for long: does everything come back to the start?",
    "state": "What state that outlives everything costs: the trajectory log (`bench state --help`).",
    "net": "A sandbox's network: what the egress costs.",
    "fncall": "Function calls, against forks and fresh interpreters (`bench fncall --help`).",
    "judge": "The judge: many submissions, against the CPU time of their cases.",
    "vm": "MicroVMs: clones against booting, spare ones, memory, pauses.",
    "lazy": "Layers that are filled on demand: against local ones, and whole-layer fetching.",
    "burst": "Many sandboxes of environments that share layers, on a cold node.",
    "cluster": "The control plane of a cluster: creations a second, bursts, memory, balance (`bench cluster --help`).",
}
"""What `dsec.bench` measures, by its modules: each has options of its own."""


def _bench_verb(name: str, text: str) -> click.Command:
    def measure(arguments: tuple[str, ...]) -> int:
        try:
            module = importlib.import_module(f"dsec.bench.{name}")
        except ImportError as error:
            raise _needs_server(error) from error
        return int(module.main(list(arguments)))

    words = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    settings = {"ignore_unknown_options": True}
    return click.Command(
        name, callback=measure, params=[words], help=text, context_settings=settings, add_help_option=False
    )


for _name, _text in _BENCHES.items():
    bench.add_command(_bench_verb(_name, _text))


@click.group("host")
def host_group() -> None:
    """What dsec changes on this host."""


@host_group.command("undo")
@click.option("--state", type=click.Path(path_type=Path), help="State directory (default: DSEC_STATE, /var/lib/dsec).")
@click.option("--packages", is_flag=True, help="Remove the Debian packages too that were installed for it.")
def undo(state: Path | None, packages: bool) -> int:
    """Take back what dsec changed here: sandboxes, mounts, cgroups, kernel settings. Data in the state stays."""
    try:
        from dsec import app
    except ImportError as error:
        raise _needs_server(error) from error
    lines = app.undo_host(state=state, packages=packages)
    for line in lines or ["nothing to take back: there is no such state directory"]:
        click.echo(line)
    return EXIT_PLATFORM if any(line.startswith("FAILED") for line in lines) else 0


@click.command("version")
@json_option
def version(as_json: bool) -> None:
    """The version of this client."""
    try:
        found = importlib.metadata.version("dsec")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that isn't installed
        found = "unknown"
    if as_json:
        write_json({"dsec": found, "python": sys.version.split()[0]})
    else:
        click.echo(found)


def _needs_server(error: ImportError) -> Unsupported:
    """What a client without the server part says."""
    return Unsupported(
        f"this needs the server part of dsec: {error}", remedy='install it with `pip install "dsec[server]"`, on Linux'
    )


COMMANDS: tuple[click.Command, ...] = (serve, filler, doctor, bench, host_group, version)
