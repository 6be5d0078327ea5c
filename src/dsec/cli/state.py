"""Verbs about the state of sandboxes: pausing and resuming, forks, snapshots."""

from __future__ import annotations

import click

from dsec import AsyncClient, SandboxInfo
from dsec.cli import signals
from dsec.cli.complete import SANDBOX
from dsec.cli.output import complain, json_option, wants_json, write_json
from dsec.cli.sandboxes import pairs
from dsec.errors import DsecError
from dsec.spec.snapshots import SnapshotInfo


def _move(verb: str, ids: tuple[str, ...], run: str | None, labels: tuple[str, ...], *, as_json: bool) -> int:
    if bool(ids) == bool(run or labels):
        raise click.UsageError("name sandboxes by their ids, or by --run and --label")

    async def work() -> dict[str, DsecError | None]:
        async with AsyncClient() as client:
            move = client.pause_many if verb == "pause" else client.resume_many
            if ids:
                return await move(ids)
            return await move(run=run, labels=pairs(labels))

    moved = signals.run(work())
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


@click.command("fork")
@click.argument("sandbox_id", type=SANDBOX)
@click.option("-n", "count", type=click.IntRange(1, 256), default=1, help="So many children.")
@json_option
def fork(sandbox_id: str, count: int, as_json: bool) -> None:
    """Make children that begin with a sandbox's files, with fresh processes."""

    async def work() -> list[SandboxInfo]:
        async with AsyncClient() as client:
            return [child.info for child in await (await client.connect(sandbox_id)).fork(count)]

    children = signals.run(work())
    if wants_json(as_json):
        write_json(children)
        return
    for child in children:
        click.echo(child.id)


@click.command("snapshot")
@click.argument("sandbox_id", type=SANDBOX)
@click.argument("name", metavar="NAME@VERSION")
@click.option("--remove", multiple=True, metavar="GLOB", help="Leave this out too.")
@click.option("--keep", multiple=True, metavar="GLOB", help="Keep this all the same.")
@click.option("--no-scrub", is_flag=True, help="Keep histories, caches, temporary files and logs.")
@json_option
def snapshot(  # noqa: PLR0917 (click passes by name)
    sandbox_id: str, name: str, remove: tuple[str, ...], keep: tuple[str, ...], no_scrub: bool, as_json: bool
) -> None:
    """Make an environment of what a sandbox has written."""

    async def work() -> SnapshotInfo:
        async with AsyncClient() as client:
            box = await client.connect(sandbox_id)
            return await box.pack_diff(name, scrub=not no_scrub, remove=remove, keep=keep)

    made = signals.run(work())
    if wants_json(as_json):
        write_json(made)
    else:
        click.echo(f"{made.name}  {made.layer[:12]}  kept {made.kept} files, removed {made.removed}")


COMMANDS: tuple[click.Command, ...] = (pause, resume, fork, snapshot)
