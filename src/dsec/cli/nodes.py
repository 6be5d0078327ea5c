"""Verbs about a cluster's nodes: `node ls`, `cordon`, `uncordon`, `drain`."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from dsec import AsyncClient
from dsec.cli import signals
from dsec.cli.output import json_option, wants_json, write_json, write_table

GIB = 1 << 30


@click.group("node")
def node() -> None:
    """Nodes of a cluster, with a key of its operator's."""


@node.command("ls")
@json_option
def list_nodes(as_json: bool) -> None:
    """Nodes with their health and load."""

    async def run() -> list[dict[str, Any]]:
        async with AsyncClient() as client:
            return await client.nodes.list()

    found = signals.run(run())
    if wants_json(as_json):
        write_json(found)
        return
    rows = [
        (
            str(each["edge"]),
            each["health"] + (", cordoned" if each["cordoned"] else ""),
            f"{each['live']}/{each['max_live']}",
            f"{each['memory_committed_bytes'] / GIB:.1f}/{each['memory_capacity_bytes'] / GIB:.1f}",
            " ".join(each["backends"]),
            " ".join(f"{name}={value}" for name, value in each["labels"].items()),
        )
        for each in found
    ]
    write_table(["node", "health", "live", "GiB", "backends", "labels"], rows, empty="no node has joined")


@node.command("cordon")
@click.argument("number", type=click.IntRange(0))
def cordon(number: int) -> None:
    """It gets no new sandboxes; those that it has go on."""
    _say(number, "cordon")


@node.command("uncordon")
@click.argument("number", type=click.IntRange(0))
def uncordon(number: int) -> None:
    """It gets new sandboxes again."""
    _say(number, "uncordon")


def _say(number: int, verb: str) -> None:
    async def run() -> None:
        async with AsyncClient() as client:
            await getattr(client.nodes, verb)(number)

    signals.run(run())


@node.command("drain")
@click.argument("number", type=click.IntRange(0))
@click.option("--deadline-s", type=click.FloatRange(0, 86400, min_open=True), help="For commands to end (300).")
@json_option
def drain(number: int, deadline_s: float | None, as_json: bool) -> int:
    """Cordon it and move what it has, before maintenance.

    Exit code 1 where something stays; asked again, it goes on.
    """

    async def run() -> int:
        stays = 0
        async with AsyncClient() as client:
            async for each in client.nodes.drain(number, deadline_s=deadline_s):
                error = each.get("error")
                stays += error is not None
                if wants_json(as_json):
                    click.echo(msgspec.json.encode(each))  # a line each, as they come
                elif error is not None:
                    click.echo(f"{each['id']} stays: {error['message']}", err=True)
                else:
                    click.echo(f"{each['id']} is on node {each['edge']}")
        return int(stays > 0)

    return signals.run(run())


COMMANDS = [node]
