"""Verbs about the state of sandboxes: pausing and resuming them."""

from __future__ import annotations

import asyncio

import click

from dsec import AsyncClient
from dsec.cli.complete import SANDBOX
from dsec.cli.output import complain, json_option, wants_json, write_json
from dsec.cli.sandboxes import pairs
from dsec.errors import DsecError


def _move(verb: str, ids: tuple[str, ...], run: str | None, labels: tuple[str, ...], *, as_json: bool) -> int:
    if bool(ids) == bool(run or labels):
        raise click.UsageError("name sandboxes by their ids, or by --run and --label")

    async def work() -> dict[str, DsecError | None]:
        async with AsyncClient() as client:
            move = client.pause_many if verb == "pause" else client.resume_many
            if ids:
                return await move(ids)
            return await move(run=run, labels=pairs(labels))

    moved = asyncio.run(work())
    if wants_json(as_json):
        write_json([{"id": each, "error": error.body() if error else None} for each, error in moved.items()])
    else:
        for each, error in moved.items():
            if error is None:
                click.echo(each)
    failed = [error for error in moved.values() if error is not None]
    for error in failed:
        complain(error)
    return 2 if failed else 0


@click.command("pause")
@click.argument("ids", nargs=-1, type=SANDBOX)
@click.option("--run", help="All running ones of a run.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="All running ones with this label.")
@json_option
def pause(ids: tuple[str, ...], run: str | None, labels: tuple[str, ...], as_json: bool) -> int:
    """Pause sandboxes: they stand still and give their memory back until something is asked of them."""
    return _move("pause", ids, run, labels, as_json=as_json)


@click.command("resume")
@click.argument("ids", nargs=-1, type=SANDBOX)
@click.option("--run", help="All paused ones of a run.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="All paused ones with this label.")
@json_option
def resume(ids: tuple[str, ...], run: str | None, labels: tuple[str, ...], as_json: bool) -> int:
    """Let paused sandboxes go on. Any request does the same for the one that it needs."""
    return _move("resume", ids, run, labels, as_json=as_json)


COMMANDS: tuple[click.Command, ...] = (pause, resume)
