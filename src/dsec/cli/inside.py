"""Looking inside: `inspect`, `events`, `logs`, `attach`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Any

import click
import msgspec

from dsec import AsyncClient, AsyncCommand, AsyncSandbox, ProcessInfo, SandboxEvent
from dsec.cli import signals
from dsec.cli.commands import explain, feed_stdin
from dsec.cli.complete import SANDBOX
from dsec.cli.output import (
    EXIT_INTERRUPTED,
    EXIT_PIPE,
    EXIT_PLATFORM,
    age,
    json_option,
    note,
    printable,
    readable,
    wants_json,
    write_json,
    write_table,
)
from dsec.errors import DsecError, NotFound
from dsec.spec.events import EventType

_QUIET_S = 0.3
"""So long without output, and a command that runs has said what it had to say until now."""


@click.command("inspect")
@click.argument("ids", nargs=-1, required=True, type=SANDBOX)
@json_option
def inspect(ids: tuple[str, ...], as_json: bool) -> None:
    """All about sandboxes: their spec, their counters, the commands that run in them."""

    async def work() -> list[dict[str, Any]]:
        async with AsyncClient() as client:
            return [await _about(await client.connect(each)) for each in ids]

    found = signals.run(work())
    if wants_json(as_json):
        write_json(found)
        return
    for each in found:
        rows = [(name, value) for name, value in _flat(each) if value not in (None, {}, [])]
        write_table(["", ""], rows)
        click.echo()


async def _about(sandbox: AsyncSandbox) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(sandbox.info)
    with contextlib.suppress(DsecError):  # it has ended, or ends just now
        access = await sandbox.ports.access()
        found["ports"] = {"host": f"PORT-{sandbox.id}.{access.domain}", "public": access.public}
        found["usage"] = msgspec.to_builtins(await sandbox.usage())
        found["commands"] = msgspec.to_builtins(await sandbox.commands.list())
    return found


def _flat(value: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, each in value.items():
        if isinstance(each, dict) and each:
            rows += _flat(each, f"{before}{name}.")
        elif isinstance(each, list):
            rows += [(f"{before}{name}", "  ".join(f"{k}={v}" for k, v in item.items())) for item in each]
        elif name.endswith("_bytes"):
            rows.append((before + name, readable(each)))
        elif name.endswith("_at") and each:
            rows.append((before + name, f"{_clock(each)}  ({age(max(0.0, time.time() - each))} ago)"))
        else:
            rows.append((before + name, each))
    return rows


@click.command("events")
@click.option("--follow", "-f", is_flag=True, help="Go on until the sandbox has ended.")
@click.option("--after", type=click.IntRange(min=0), default=0, help="Above this number only.")
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@json_option
def events(sandbox_id: str, follow: bool, after: int, as_json: bool) -> None:
    """What happened to a sandbox, also after its end: how long each phase of its making took, its commands and file
    calls, limits, its end. As JSON: an object a line.
    """
    plain = wants_json(as_json)

    async def work() -> None:
        async with AsyncClient() as client:
            sandbox = await client.connect(sandbox_id)
            async for event in sandbox.events(after=after, follow=follow):
                text = msgspec.json.encode(event).decode() if plain else _line(event)
                click.echo(text)

    signals.run(work())


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _line(event: SandboxEvent) -> str:
    parts = []
    for name, value in event.data.items():
        if isinstance(value, dict):
            parts += [f"{each}={number}" for each, number in value.items()]
        elif value is not False:
            parts.append(f"{name}={printable(value)}")
    millis = int(event.time * 1000) % 1000
    return f"{event.seq:>5}  {_clock(event.time)}.{millis:03}  {event.type:<16} {'  '.join(parts)}"


@click.command("logs")
@click.option("--follow", "-f", is_flag=True, help="Go on until the command has ended.")
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@click.argument("key", metavar="[KEY]", default="")
@json_option
def logs(sandbox_id: str, key: str, follow: bool, as_json: bool) -> int:
    """The output of a command that was started with a key; without KEY: the commands of the sandbox."""

    async def work() -> int:
        async with AsyncClient() as client:
            sandbox = await client.connect(sandbox_id)
            if key:
                return await _output(await sandbox.commands.attach(key), None if follow else _QUIET_S)
            await _commands(sandbox, as_json)
            return 0

    return signals.run(work())


async def _commands(sandbox: AsyncSandbox, as_json: bool) -> None:
    """From the event log, with the ones that run now."""
    found: dict[str, dict[str, Any]] = {}
    async for event in sandbox.events():
        key = str(event.data.get("command", ""))
        if event.type == EventType.COMMAND_STARTED:
            found[key] = {"key": key, "argv0": event.data.get("argv0"), "started_at": event.time}
        elif event.type == EventType.COMMAND_ENDED and key in found:
            found[key] |= {"cause": event.data.get("cause"), "exit_code": event.data.get("exit_code")}
            found[key]["output_bytes"] = event.data.get("stdout_bytes", 0) + event.data.get("stderr_bytes", 0)
    running: list[ProcessInfo] = []
    with contextlib.suppress(DsecError):
        running = await sandbox.commands.list()
    for each in running:
        argv0 = each.argv[0] if each.argv else ""
        found.setdefault(each.key, {"key": each.key, "argv0": argv0, "started_at": each.started_at})["pid"] = each.pid
    if wants_json(as_json):
        write_json(list(found.values()))
        return
    rows = [
        (
            each["key"],
            each["argv0"] or "",
            _clock(each["started_at"]),
            "running" if "pid" in each else each.get("cause", ""),
            each.get("exit_code"),
            readable(each["output_bytes"]) if "output_bytes" in each else "",
        )
        for each in found.values()
    ]
    write_table(["key", "program", "started", "", "exit", "output"], rows, empty="no commands")


async def _output(command: AsyncCommand, quiet_s: float | None) -> int:
    """Write its output; without an end when it has been quiet for so long."""
    outputs = aiter(command)
    try:
        while True:
            async with asyncio.timeout(quiet_s):
                output = await anext(outputs)
            stream = sys.stderr.buffer if output.stderr else sys.stdout.buffer
            stream.write(output.data)
            stream.flush()
    except TimeoutError:
        note("it runs on (--follow waits for more)")
        return 0
    except StopAsyncIteration:
        result = await command.wait()
        explain(result)
        return EXIT_PLATFORM if result.infra else result.exit_code
    except BrokenPipeError:
        return EXIT_PIPE
    finally:
        await command.detach()


@click.command("attach")
@click.option("--stdin/--no-stdin", "stdin", default=None, help="Pass stdin on (default: if it is no terminal).")
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@click.argument("key", metavar="KEY")
def attach(sandbox_id: str, key: str, stdin: bool | None) -> int:
    """Go back to a command that runs: its output from the start, its terminal where it has one, its exit code.

    An interrupt (on a terminal: Ctrl-P Ctrl-Q) leaves it running.
    """

    async def work() -> int:
        async with AsyncClient() as client:
            sandbox = await client.connect(sandbox_id)
            process = next((each for each in await sandbox.commands.list() if each.key == key), None)
            if process is not None and process.pty and sys.stdin.isatty() and sys.stdout.isatty():
                return await _on_terminal(sandbox, key)
            command = await sandbox.commands.attach(key)
            if not sys.stdin.isatty() if stdin is None else stdin:
                feed_stdin(command)
            try:
                return await _output(command, None)
            except asyncio.CancelledError:
                note("left running")
                return EXIT_INTERRUPTED

    return signals.run(work())


async def _on_terminal(sandbox: AsyncSandbox, key: str) -> int:
    from dsec.cli.terminal import Ended, Left, raw_terminal

    with raw_terminal() as terminal:
        command = await sandbox.commands.attach(key, interactive=True)
        size = terminal.size()
        with contextlib.suppress(NotFound):
            await command.resize(size.cols, size.rows)
        try:
            return await terminal.hold(command)
        except (Left, Ended) as how:
            terminal.restore()
            note("left running")
            return how.exit_code if isinstance(how, Ended) else 0


COMMANDS: tuple[click.Command, ...] = (inspect, events, logs, attach)
