"""Verbs of a cluster's processes: `edge`, `apiserver`, `cluster init`, `cluster key`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dsec.cli.in_vm import in_vm_options
from dsec.cli.output import json_option, write_json
from dsec.errors import InvalidRequest, Unsupported
from dsec.sdk._config import DEFAULT_PORT

_JOIN = (
    click.option("--join", "urls", multiple=True, required=True, help="A server of the cluster, nats:// or tls://."),
    click.option("--credentials", type=click.Path(path_type=Path), required=True, help="As `cluster init` wrote them."),
    click.option("--plain", is_flag=True, help="nats:// to other machines: nobody else is on that network."),
)
_SERVE = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option("--log-format", type=click.Choice(["human", "json"]), default="human", show_default=True),
    click.option(
        "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
    ),
)
_REPLICAS = click.option(
    "--replicas",
    type=click.IntRange(1, 5),
    default=3,
    show_default=True,
    help="Of the cluster's records; 1: one server.",
)


def _with(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command("edge")
@_with(*_JOIN, *_SERVE)
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0: any free one.")
@click.option("--advertise", default="", help="URL by which apiservers reach it (default: where it listens).")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="Of this node, for placement.")
@click.option("--state", type=click.Path(path_type=Path), help="State directory (default: DSEC_STATE, /var/lib/dsec).")
@click.option("--on-exit", type=click.Choice(["keep", "destroy"]), default="keep", show_default=True)
@click.option(
    "--tls/--no-tls", default=None, help="HTTPS, with a certificate of its own (default: unless on loopback)."
)
@in_vm_options
def edge(labels: tuple[str, ...], state: Path | None, on_exit: str, in_vm: bool, **options: Any) -> int:
    """Run this node as an edge of a cluster, in the foreground.

    With a directory of edge-N.json as --credentials it is given a number that is free, and keeps it. With --in-vm the
    edge and its sandboxes are in a machine with a kernel of its own.
    """
    app = _app()
    pairs = dict(_pair(label) for label in labels)
    machine = {name: options.pop(name) for name in ("vm_cpus", "vm_memory_mib", "vm_state_gib")}
    if in_vm:
        from dsec import app_shield, app_shield_edge

        return app_shield_edge.serve_edge_in_vm(
            _joining(app, options),
            _listening(app, options),
            shape=app_shield.shape_of(**machine),
            state=state,
            labels=pairs,
            on_exit=on_exit,
        )
    return int(
        app.serve_edge(_joining(app, options), _listening(app, options), state=state, labels=pairs, on_exit=on_exit)
    )


@click.command("apiserver")
@_with(*_JOIN, *_SERVE, _REPLICAS)
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0: any free one.")
@click.option(
    "--lost-after",
    type=click.FloatRange(2, 86400),
    default=30.0,
    show_default=True,
    help="Seconds of a node's silence.",
)
@click.option(
    "--cut-off-after",
    type=click.FloatRange(5, 86400),
    default=30.0,
    show_default=True,
    help="Seconds without word from a majority of the servers, then no keys are taken.",
)
@click.option(
    "--overflow",
    type=click.Path(path_type=Path),
    help="A file that says how nodes for overflow are started and stopped: docs/DEPLOY.md.",
)
@click.option(
    "--log-mib", type=click.IntRange(0), default=0, help="What logs may take in the servers; 0: all there is."
)
@click.option(
    "--sweep-every",
    type=click.FloatRange(1, 86400),
    default=3600.0,
    show_default=True,
    help="Seconds between two looks for records of moved sandboxes that are long over.",
)
def apiserver(
    *,
    lost_after: float,
    cut_off_after: float,
    replicas: int,
    overflow: Path | None,
    log_mib: int,
    sweep_every: float,
    **options: Any,
) -> int:
    """Run an apiserver of a cluster, in the foreground. It keeps nothing: any number may run, and any may die."""
    app = _app()
    return int(
        app.serve_api(
            _joining(app, options),
            _listening(app, options),
            lost_s=lost_after,
            cut_off_s=cut_off_after,
            replicas=replicas,
            overflow=overflow,
            log_bytes=log_mib << 20,
            sweep_s=sweep_every,
        )
    )


@click.group("cluster")
def cluster() -> None:
    """A cluster's keys."""


@cluster.command("init")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--edges", type=click.IntRange(1, 65535), required=True, help="Most nodes that it may have.")
@click.option("--ca-file", default="", help="Authority of the servers' certificates: its path on all machines.")
def init(directory: Path, edges: int, ca_file: str) -> int:
    """Write the credentials of a new cluster: nats.conf for its servers, apiserver.json, edge-N.json."""
    for path in _app().init_cluster(directory, edges, ca_file):
        click.echo(str(path))
    return 0


@cluster.command("key")
@_with(*_JOIN, _REPLICAS)
@click.option("--project", default="default", show_default=True)
@click.option("--label", default="")
@click.option("--ttl-s", type=click.FloatRange(1), help="It ends so long from now.")
@json_option
def key(project: str, label: str, ttl_s: float | None, replicas: int, as_json: bool, **options: Any) -> int:
    """Make an API key of a project, straight in the cluster's store."""
    app = _app()
    made = app.create_key(_joining(app, options), project, label, ttl_s, replicas)
    if as_json:
        write_json({"project": project, "key": made})
    else:
        click.echo(made)
    return 0


def _app() -> Any:
    try:
        from dsec import app_cluster
    except ImportError as error:
        raise Unsupported("this needs the cluster's packages", remedy="pip install 'dsec[cluster]'") from error
    return app_cluster


def _joining(app: Any, options: dict[str, Any]) -> Any:
    return app.Joining(urls=list(options["urls"]), credentials=options["credentials"], plain=options["plain"])


def _listening(app: Any, options: dict[str, Any]) -> Any:
    names = ("host", "port", "advertise", "tls", "log_format", "log_level")
    return app.Listening(**{name: options[name] for name in names if name in options})


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise InvalidRequest(f"label {text!r} is not of the form k=v")
    return name, value


COMMANDS = [edge, apiserver, cluster]
