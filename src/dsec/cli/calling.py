"""`call`: a function or a program in fresh, jailed processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from dsec import Client, FunctionCall, FunctionResult
from dsec.cli.output import EXIT_PLATFORM, json_option, wants_json, write_json
from dsec.errors import InvalidRequest
from dsec.spec.judging import SUFFIXES, Language


@click.command("call")
@click.argument("target")
@click.argument("arguments", nargs=-1)
@click.option("--environment", default="debian", show_default=True)
@click.option("--name", default="", help="What is called in the file TARGET; else the file is a program.")
@click.option("--import", "imports", multiple=True, help="A module that is there already when the call begins.")
@click.option("--language", type=click.Choice([str(each) for each in Language]), help="Else the file's suffix says it.")
@click.option("--wall-s", type=float, help="Limit of time.")
@click.option("--memory-mib", type=int, help="Limit of memory.")
@json_option
def call(  # noqa: PLR0917 (click passes by name)
    target: str,
    arguments: tuple[str, ...],
    environment: str,
    name: str,
    imports: tuple[str, ...],
    language: str | None,
    wall_s: float | None,
    memory_mib: int | None,
    as_json: bool,
) -> int:
    """Call TARGET, a file or `module:name`, on the server's side (docs/FUNCTIONS.md).

    ARGUMENTS are JSON, or text where they are none. A program, which is a file without --name, gets stdin instead and
    ends with its exit code.
    """
    fields: dict[str, Any] = {"environment": environment, "imports": list(imports)}
    limits = {"wall_s": wall_s, "cpu_s": wall_s, "memory_bytes": memory_mib and memory_mib << 20}
    fields["limits"] = {key: value for key, value in limits.items() if value is not None}
    path = Path(target)
    by_name = ":" in target and not path.exists()
    if not by_name:
        fields["language"] = language or SUFFIXES.get(path.suffix, Language.PYTHON)
        target = _read(path)
    program = not by_name and not name
    if program and arguments:
        raise InvalidRequest("a program takes stdin, not arguments", remedy="Name what is called: --name NAME.")
    with Client() as client:
        function = client.function(target, name, **fields)
        if program:
            result = function.run(stdin=b"" if sys.stdin.isatty() else sys.stdin.buffer.read())
        else:
            result = function.run(FunctionCall(args=[_value(each) for each in arguments]))
    if wants_json(as_json):
        write_json(result)
    else:
        _show(result, program=program)
    return EXIT_PLATFORM if result.infra else result.exit_code if program else int(not result.ok)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: {error}", remedy="TARGET is a file or module:name.") from None


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return text


def _show(result: FunctionResult, *, program: bool) -> None:
    sys.stdout.buffer.write(result.stdout)
    sys.stdout.flush()
    sys.stderr.buffer.write(result.stderr)
    sys.stderr.flush()
    if result.error is not None:
        click.echo(result.error.traceback or f"{result.error.type}: {result.error.message}", err=True)
    elif result.message:
        click.echo(result.message, err=True)
    elif not program:
        click.echo(repr(result.value))


COMMANDS = (call,)
