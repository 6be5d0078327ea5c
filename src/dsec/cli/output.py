"""How the command line speaks: tables on a terminal, JSON when asked to or piped, errors on stderr with a documented
exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import click
import msgspec

from dsec.errors import CallerError, DsecError

EXIT_CALLER = 2
EXIT_PLATFORM = 3
EXIT_PARTIAL = 4
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
EXIT_CODES = """
Exit codes: 0 done; 2 the request is at fault; 3 the platform is at fault; 4 `cp` left something out; 130 interrupted;
141 nobody reads the output. `run`, `exec`, `shell` and `attach` pass the command's own code on: 128 + signal where it
was ended by one, 126 or 127 where it could not be started.
"""


def exit_code(error: DsecError) -> int:
    """Of an error that ends the program."""
    return EXIT_CALLER if isinstance(error, CallerError) else EXIT_PLATFORM


def printable(text: object, *, keep: str = "") -> str:
    """What came from others (a sandbox, an image, a registry), so that it can't control the terminal. `keep`: control
    characters that stay."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in str(text))


def complain(error: DsecError) -> None:
    """On stderr: `error: message [code] remedy`, where to read on, and what to ask the server's log for."""
    click.echo(printable(f"error: {error}", keep="\n\t"), err=True)
    request_id = error.details.get("request_id") if error.infra else None
    click.echo(f"see docs/errors.md#{error.code}{f' (request {request_id})' if request_id else ''}", err=True)


def note(text: str) -> None:
    """A remark on stderr."""
    click.echo(printable(f"dsec: {text}", keep="\n\t"), err=True)


class _Notes(logging.Handler):
    """What the SDK has to say, as remarks."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def tell_of_waiting() -> None:
    """From now on, on stderr: why a verb waits for its server."""
    sdk = logging.getLogger("dsec.sdk")
    sdk.addHandler(_Notes())
    sdk.propagate = False


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --json."""
    return click.option("--json", "as_json", is_flag=True, help="JSON, also the default when the output is piped.")(
        function
    )


def wants_json(as_json: bool) -> bool:
    """Whether to write JSON."""
    return as_json or not sys.stdout.isatty()


def write_json(value: object) -> None:
    """One JSON value on stdout."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    sys.stdout.buffer.flush()


def write_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str = "none") -> None:
    """A table on stdout. NO_COLOR is respected."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=position == 0)  # what one copies is whole
    for row in rows:
        table.add_row(*(Text(printable(cell, keep="\n") if cell is not None else "") for cell in row))
    console = Console(highlight=False)
    if table.row_count:
        console.print(table)
    else:
        console.print(empty)


def no_option(context: click.Context, _: click.Parameter, words: Any) -> Any:
    """What stands where an argument should, and is an option that we don't know: say so. Options of the command's own
    come after its name."""
    first = words if isinstance(words, str) else next(iter(words), "")
    if first.startswith("-"):
        raise click.NoSuchOption(first, ctx=context)
    return words


def size(text: str) -> int:
    """`512M`, `2GiB`, `1g` or a plain number, in bytes (powers of 1024). Raises click.BadParameter."""
    units = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
    bare = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = bare[-1:] if bare[-1:] in units else ""
    try:
        return int(float(bare.removesuffix(unit)) * 1024 ** units[unit])
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a size: write 512M or 2GiB") from None


def readable(size_bytes: int) -> str:
    """A size for people."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def age(seconds: float) -> str:
    """A duration for people."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def leave(code: int) -> NoReturn:
    """End the program at once: a thread may still be waiting for the terminal or a pipe."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (BrokenPipeError, ValueError):
            code = code or EXIT_PIPE
    os._exit(code)
