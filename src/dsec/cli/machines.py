"""`dsec vm`: full machines from outside: screen, keys, mouse, serial console, checkpoints."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from dsec import AsyncClient, AsyncSandbox
from dsec.cli import signals
from dsec.cli.complete import SANDBOX
from dsec.cli.output import json_option, readable, size, wants_json, write_json, write_table

T = TypeVar("T")
_WAIT_S = 20.0
_LEAVE = b"\x1d"


@click.group("vm")
def vm_group() -> None:
    """A full virtual machine's screen, keys, mouse and console (backend vm)."""


def _with(sandbox_id: str, work: Callable[[AsyncSandbox], Awaitable[T]]) -> T:
    async def run() -> T:
        async with AsyncClient() as client:
            return await work(await client.connect(sandbox_id))

    return signals.run(run())


@vm_group.command("start")
@click.argument("disk")
@click.option("--cpus", type=float, help="CPUs (default 1).")
@click.option("--memory", callback=lambda _, __, text: size(text) if text else None, help="Memory, as 512M or 2GiB.")
@click.option("--disk-size", callback=lambda _, __, text: size(text) if text else None, help="Of its disk, likewise.")
@click.option("--ttl-s", type=float, help="It ends after this long, whatever happens here.")
@json_option
def start(  # noqa: PLR0917 (click passes by name)
    disk: str, cpus: float | None, memory: int | None, disk_size: int | None, ttl_s: float | None, as_json: bool
) -> None:
    """Start a machine from DISK and print its id."""
    fields = {"cpus": cpus, "memory_bytes": memory, "disk_bytes": disk_size, "ttl_s": ttl_s}
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}

    async def work() -> AsyncSandbox:
        async with AsyncClient() as client:
            return await client.create(disk, backend="vm", **given)

    made = signals.run(work())
    if wants_json(as_json):
        write_json(made.info)
    else:
        click.echo(made.id)


@vm_group.command("screenshot")
@click.argument("sandbox_id", type=SANDBOX)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def screenshot(sandbox_id: str, file: Path) -> None:
    """Write the screen to FILE as a PNG (`-`: to the output)."""
    picture = _with(sandbox_id, lambda box: box.screenshot())
    if str(file) == "-":
        sys.stdout.buffer.write(picture)
    else:
        file.write_bytes(picture)


@vm_group.command("click")
@click.argument("sandbox_id", type=SANDBOX)
@click.argument("x", type=click.IntRange(0, 16383))
@click.argument("y", type=click.IntRange(0, 16383))
@click.option("--button", type=click.Choice(["left", "middle", "right"]), default="left", help="Which (left).")
@click.option("--count", type=click.IntRange(0, 3), default=1, help="2: a double click; 0: only move there.")
def click_at(sandbox_id: str, x: int, y: int, button: Literal["left", "middle", "right"], count: int) -> None:
    """Press a mouse button at a pixel; 0 0 is the upper left."""
    _with(sandbox_id, lambda box: box.click(x, y, button=button, count=count))


@vm_group.command("scroll", context_settings={"ignore_unknown_options": True})
@click.argument("sandbox_id", type=SANDBOX)
@click.argument("x", type=click.IntRange(0, 16383))
@click.argument("y", type=click.IntRange(0, 16383))
@click.argument("lines", type=click.IntRange(-100, 100))
def scroll(sandbox_id: str, x: int, y: int, lines: int) -> None:
    """Turn the mouse's wheel at a pixel; below 0: upwards."""
    _with(sandbox_id, lambda box: box.scroll(x, y, lines))


@vm_group.command("type")
@click.argument("sandbox_id", type=SANDBOX)
@click.argument("text")
@click.option("--enter", is_flag=True, help="Press enter behind it.")
def type_text(sandbox_id: str, text: str, enter: bool) -> None:
    """Type TEXT on the keyboard."""
    _with(sandbox_id, lambda box: box.type(text + "\n" * enter))


@vm_group.command("press")
@click.argument("sandbox_id", type=SANDBOX)
@click.argument("keys", nargs=-1, required=True)
def press(sandbox_id: str, keys: tuple[str, ...]) -> None:
    """Press KEYS, one after the other: enter, ctrl-l, alt-f4."""

    async def work(box: AsyncSandbox) -> None:
        for each in keys:
            await box.press(each)

    _with(sandbox_id, work)


@vm_group.command("console")
@click.argument("sandbox_id", type=SANDBOX)
@click.option("--follow", "-f", is_flag=True, help="Go on printing, and type what is typed here; ctrl-] leaves.")
def console(sandbox_id: str, follow: bool) -> None:
    """Print what the serial console printed."""

    async def work(box: AsyncSandbox) -> None:
        typing = asyncio.create_task(_type(box)) if follow else None
        after = -1
        try:
            while True:
                piece = await box.console.read(after, wait_s=_WAIT_S if follow and after >= 0 else 0.0)
                sys.stdout.buffer.write(piece.data)
                sys.stdout.flush()
                after = piece.offset + len(piece.data)
                if typing is None or typing.done():
                    return
        finally:
            if typing is not None:
                typing.cancel()

    _with(sandbox_id, work)


async def _type(box: AsyncSandbox) -> None:
    """Lines of the input, until its end or the character that leaves."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while data := await reader.read(4096):
            before, leave, _ = data.partition(_LEAVE)
            if before:
                await box.console.write(before)
            if leave:
                return
        await asyncio.Event().wait()  # its end is no reason to stop printing
    finally:
        transport.close()


@vm_group.command("checkpoint")
@click.argument("sandbox_id", type=SANDBOX)
@click.argument("name")
def checkpoint(sandbox_id: str, name: str) -> None:
    """Keep the machine as it is now, memory and disk, as NAME."""
    made = _with(sandbox_id, lambda box: box.checkpoints.create(name))
    click.echo(f"{made.name}: {readable(made.memory_bytes)} of memory")


@vm_group.command("checkpoints")
@click.argument("sandbox_id", type=SANDBOX)
@click.option("--delete", "delete", metavar="NAME", help="Drop this one.")
@json_option
def checkpoints(sandbox_id: str, delete: str | None, as_json: bool) -> None:
    """What a machine can go back to."""
    if delete is not None:
        _with(sandbox_id, lambda box: box.checkpoints.delete(delete))
        return
    found = _with(sandbox_id, lambda box: box.checkpoints.all())
    if wants_json(as_json):
        write_json(found)
    else:
        write_table(["name", "memory"], [(each.name, readable(each.memory_bytes)) for each in found])


@vm_group.command("revert")
@click.argument("sandbox_id", type=SANDBOX)
@click.argument("name")
def revert(sandbox_id: str, name: str) -> None:
    """Have the machine go back to the checkpoint NAME."""
    _with(sandbox_id, lambda box: box.checkpoints.revert(name))


COMMANDS: tuple[click.Command, ...] = (vm_group,)
