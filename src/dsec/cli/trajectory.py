"""`trajectory`, `replay`, `rebuild`: what was done to a sandbox, as a person reads it, as a file, and once more."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dsec import AsyncClient
from dsec.cli import signals
from dsec.cli.complete import SANDBOX
from dsec.cli.output import json_option, note, wants_json, write_json, write_table
from dsec.errors import Conflict
from dsec.spec.sandbox import State
from dsec.spec.trajectory import Broken, Entry, EntryType, Rebuilt, verify

if TYPE_CHECKING:
    from rich.console import Console

EXIT_DIVERGED = 1
_LINES = 12
_WIDTH = 2000
_encode = msgspec.json.Encoder().encode


@click.group("trajectory")
def trajectory() -> None:
    """What was done to a sandbox and what came of it: a chain of entries that shows any change."""


@trajectory.command("ls")
@click.option("--run", help="Of this run only.")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="With this label only.")
@json_option
def listing(run: str | None, labels: tuple[str, ...], as_json: bool) -> None:
    """Sandboxes that have a trajectory: live ones, and ended ones while their records are kept."""
    wanted = dict(label.partition("=")[::2] for label in labels)

    async def work() -> list[Any]:
        async with AsyncClient() as client:
            return await client.list(states=list(State), run=run, labels=wanted)

    found = signals.run(work())
    if wants_json(as_json):
        write_json(found)
        return
    rows = [(each.id, each.state, each.spec.run or "", each.spec.name or "", each.spec.environment) for each in found]
    write_table(["id", "state", "run", "name", "environment"], rows)


@trajectory.command("export")
@click.option("--follow", "-f", is_flag=True, help="Go on until the sandbox has ended.")
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
def export(sandbox_id: str, follow: bool) -> None:
    """Write a trajectory to stdout, a JSON line an entry, as `verify` reads it."""

    async def work() -> None:
        async with AsyncClient() as client:
            sandbox = await client.connect(sandbox_id)
            async for entry in sandbox.trajectory(follow=follow):
                sys.stdout.buffer.write(_encode(entry) + b"\n")
                if follow:
                    sys.stdout.buffer.flush()

    signals.run(work())


@trajectory.command("verify")
@click.argument("what", metavar="FILE|ID")
@json_option
def check(what: str, as_json: bool) -> None:
    """Check the chain of an exported file (`-`: stdin), or of a sandbox's trajectory on the server."""
    if what == "-":
        lines = list(sys.stdin.buffer)
    elif Path(what).is_file():
        lines = Path(what).read_bytes().splitlines()
    else:
        lines = [_encode(entry) for entry in signals.run(_entries(what))]
    try:
        entries = verify(lines)
    except Broken as error:
        raise Conflict(
            f"the chain doesn't hold at {error}", remedy="It was changed, or part of it is missing."
        ) from None
    whole = bool(entries) and entries[-1].type == EntryType.END
    found = {
        "sandbox": entries[0].data.get("sandbox", "") if entries else "",
        "entries": len(entries),
        "ended": whole,
        "hash": entries[-1].hash if entries else "",
    }
    if wants_json(as_json):
        write_json(found)
    else:
        click.echo(f"{len(entries)} entries hold" + ("" if whole else "; it has no end (yet): more may have followed"))
        click.echo(f"last hash: {found['hash']}")


@click.command("replay")
@click.option("--full", is_flag=True, help="All of each output that is in the entries, not its first lines.")
@click.option("--after", type=click.IntRange(min=0), default=0, help="Above this number only.")
@click.argument("sandbox_id", metavar="ID|FILE")
@json_option
def replay(sandbox_id: str, full: bool, after: int, as_json: bool) -> None:
    """Show a trajectory as a person would read it: each command, what it said, how it ended."""
    if Path(sandbox_id).is_file():
        entries = verify(Path(sandbox_id).read_bytes().splitlines())
    else:
        entries = signals.run(_entries(sandbox_id))
    entries = [entry for entry in entries if entry.seq > after]
    if as_json:
        for entry in entries:
            sys.stdout.buffer.write(_encode(entry) + b"\n")
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    began: dict[int, float] = {}
    for entry in entries:
        _show(console, entry, began, full)


@click.command("rebuild")
@click.option("--upto", type=click.IntRange(min=1), help="Entries up to this number only.")
@click.option("--stop", is_flag=True, help="Stop at the first difference.")
@click.option("--from-start", is_flag=True, help="From the environment on, whatever snapshots there are.")
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@json_option
@click.pass_context
def rebuild(  # noqa: PLR0917 (click passes by name)
    context: click.Context, sandbox_id: str, upto: int | None, stop: bool, from_start: bool, as_json: bool
) -> None:
    """Make a sandbox again from its trajectory, and say where the outcomes first differ. Exit code 1 where they do."""

    async def work() -> Rebuilt:
        async with AsyncClient() as client:
            return await client.rebuild(sandbox_id, upto=upto, stop=stop, from_start=from_start)

    found = signals.run(work())
    if wants_json(as_json):
        write_json(found)
    else:
        click.echo(found.sandbox.id)
        note(f"begun from {found.base}")
        note(f"{found.replayed} operations were done again, {found.differences} came out different")
        if found.not_replayed:
            note(f"not done again: {', '.join(found.not_replayed)}")
        if found.diverged is not None:
            first = found.diverged
            note(f"first at entry {first.seq}, {first.what}: {_clean(first.expected)!r} was {_clean(first.got)!r} now")
    context.exit(EXIT_DIVERGED if found.diverged is not None else 0)


async def _entries(sandbox_id: str) -> list[Entry]:
    async with AsyncClient() as client:
        sandbox = await client.connect(sandbox_id)
        return [entry async for entry in sandbox.trajectory()]


def _show(console: Console, entry: Entry, began: dict[int, float], full: bool) -> None:
    from rich.text import Text

    data = entry.data
    clock = time.strftime("%H:%M:%S", time.localtime(entry.time))
    line = Text.assemble((f"{entry.seq:>5}  {clock}  ", "dim"))
    match entry.type:
        case EntryType.CREATE:
            line.append(f"sandbox {data['sandbox']} of {data['environment']}", "bold")
            line.append(f"  run {data['run']}" if data.get("run") else "", "dim")
        case EntryType.EXEC:
            began[entry.seq] = entry.time
            line.append("$ " + _clean(_command(data["argv"])), "bold cyan")
            where = [f"{name}={data[name]}" for name in ("user", "cwd", "key") if data.get(name)]
            line.append("   " + _clean("  ".join(where)), "dim")
        case EntryType.RESULT:
            _show_result(console, line, data, full)
            return
        case EntryType.SESSION_RUN:
            line.append(f"{_clean(data['session'])} $ " + _clean(data["command"].get("text", "...")), "bold cyan")
        case EntryType.SESSION_RESULT:
            _show_stream(console, data.get("output"), "", full)
            line.append(f"= {data.get('exit_code')} of {data['run']}", "" if data.get("exit_code") == 0 else "bold red")
        case EntryType.END:
            line.append(f"ended: {data['cause']} {_clean(data.get('message', ''))}", "bold")
        case _:
            line.append(entry.type, "yellow")
            hidden = ("sha256", "blob", "request_id")
            line.append("  " + _clean("  ".join(f"{k}={v}" for k, v in data.items() if k not in hidden)))
    console.print(line)


def _show_stream(console: Console, stream: dict[str, Any] | None, style: str, full: bool) -> None:
    from rich.text import Text

    if stream is None:
        return
    rows = str(stream.get("text", "")).splitlines()
    if "text" not in stream:
        rows = [f"<{stream['bytes']} bytes that are not in the entry>"]
    shown = rows if full else rows[:_LINES]
    for row in shown:
        console.print(Text("       " + _clean(row), style))
    if len(shown) < len(rows):
        console.print(Text(f"       ... {len(rows) - len(shown)} more lines", "dim"))


def _show_result(console: Console, line: Any, data: dict[str, Any], full: bool) -> None:
    for name, style in (("stdout", ""), ("stderr", "red")):
        _show_stream(console, data.get(name), style, full)
    status = data["status"]
    good = status["exit_code"] == 0
    line.append(f"= {status['exit_code']}", "green" if good else "bold red")
    line.append(f" of {data['exec']}", "dim")
    if status["cause"] != "exited":
        line.append(f"  {status['cause']} {_clean(status.get('message', ''))}", "red")
    line.append(f"  {status.get('wall_s', 0.0) * 1e3:.0f} ms", "dim")
    console.print(line)


def _command(argv: list[str]) -> str:
    if len(argv) == 3 and argv[1] in ("-c", "-lc") and argv[0].rpartition("/")[2] in ("sh", "bash"):
        return argv[2]
    return " ".join(argv)


def _clean(text: str) -> str:
    """What came from inside can't control the terminal."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text[:_WIDTH])


COMMANDS: tuple[click.Command, ...] = (trajectory, replay, rebuild)
