"""`group`: sandboxes that are started and ended as one."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import BinaryIO

import click

from dsec import AsyncClient, AsyncGroup, SandboxInfo
from dsec.cli import signals
from dsec.cli.output import json_option, wants_json, write_json, write_table
from dsec.errors import InvalidRequest, ServiceFailed
from dsec.spec.groups import services_of


@click.group("group")
def group() -> None:
    """Sandboxes that are started and ended as one, and reach each other by name."""


@group.command("up")
@click.argument("file", type=click.File("rb"))
@click.option("--name", help="Of the group (default: the file's name without its ending).")
@json_option
def up(file: BinaryIO, name: str | None, as_json: bool) -> None:
    """Start the services of a TOML file, and wait until all are ready. Again: what is there stays."""
    try:
        services = services_of(tomllib.loads(file.read().decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file.name}: {error}") from None

    async def work() -> dict[str, SandboxInfo]:
        async with AsyncClient() as client:
            made = await AsyncGroup.create(services, name=name or Path(file.name).stem, client=client)
            return {each: made.sandbox(each).info for each in services}

    try:
        found = signals.run(work())
    except ServiceFailed as error:
        click.echo(error.details.get("log", ""), err=True, nl=False)
        raise
    if wants_json(as_json):
        write_json(found)
    else:
        write_table(["service", "id", "state"], [(each, info.id, info.state) for each, info in found.items()], empty="")


@group.command("down")
@click.argument("name")
def down(name: str) -> None:
    """End all of a group."""

    async def work() -> None:
        async with AsyncClient() as client:
            await (await AsyncGroup.find(name, client=client)).kill()

    signals.run(work())
    click.echo(name)


@group.command("ls")
@json_option
def list_groups(as_json: bool) -> None:
    """List groups, and whether their services are ready."""

    async def work() -> list[tuple[str, str, str, bool]]:
        async with AsyncClient() as client:
            rows = []
            for name, infos in sorted((await AsyncGroup.list(client=client)).items()):
                checks = await (await AsyncGroup.find(name, client=client)).check()
                rows += [(name, each, info.id, checks.get(each, False)) for each, info in sorted(infos.items())]
            return rows

    rows = signals.run(work())
    if wants_json(as_json):
        write_json([dict(zip(("group", "service", "id", "ready"), row, strict=True)) for row in rows])
    else:
        shown = [(*row[:3], "yes" if row[3] else "no") for row in rows]
        write_table(["group", "service", "id", "ready"], shown, empty="no groups")


COMMANDS: tuple[click.Command, ...] = (group,)
