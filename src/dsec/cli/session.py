"""`dsec session`: named shells in a sandbox, which keep their state from command to command."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import click
from click.shell_completion import CompletionItem

from dsec import AsyncClient, AsyncSession, SessionInfo, SessionResult
from dsec.cli import signals
from dsec.cli.complete import SANDBOX
from dsec.cli.output import EXIT_PIPE, json_option, note, readable, wants_json, write_json, write_table
from dsec.cli.sandboxes import pairs
from dsec.errors import Conflict, DsecError

_ENDED_BY_FORCE = 137
_POLL_S = 0.1
_PART = 1 << 20


class _Name(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A session's name; the sandbox named before it can complete it."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        async def ask() -> list[SessionInfo]:
            async with AsyncClient(retry_s=0.0) as client:
                sandbox = await client.connect(ctx.params["sandbox_id"], request_timeout_s=1.0)
                return await sandbox.sessions.list(request_timeout_s=1.0)

        try:
            found = signals.run(ask())
        except (DsecError, OSError, KeyError):
            return []
        return [CompletionItem(info.name, help=_state(info)) for info in found if info.name.startswith(incomplete)]


_ID = click.argument("sandbox_id", metavar="ID", type=SANDBOX)
_NAME = click.argument("name", metavar="NAME", type=_Name())


@click.group("session")
def session() -> None:
    """Shell sessions: named shells in a sandbox that keep their variables, directory and jobs.

    They outlive this program and the server, not their sandbox.
    """


@contextlib.asynccontextmanager
async def _found(sandbox_id: str, name: str) -> AsyncIterator[AsyncSession]:
    async with AsyncClient() as client:
        yield await (await client.connect(sandbox_id)).sessions.get(name)


@session.command("create")
@click.option("--env", "-e", "variables", multiple=True, metavar="K=V", help="Environment variable.")
@click.option("--cwd", help="Directory to start in.")
@click.option("--user", "-u", help="User inside.")
@_ID
@click.argument("name", metavar="[NAME]", default="default")
@json_option
def create(  # noqa: PLR0917 (click passes by name)
    sandbox_id: str, name: str, variables: tuple[str, ...], cwd: str | None, user: str | None, as_json: bool
) -> None:
    """Open a session, or find the one of this name; one whose shell has ended is replaced."""

    async def work() -> SessionInfo:
        async with AsyncClient() as client:
            sessions = (await client.connect(sandbox_id)).sessions
            return await (await sessions.open(name, cwd=cwd, env=pairs(variables), user=user)).info()

    info = signals.run(work())
    if wants_json(as_json):
        write_json(info)
    else:
        click.echo(info.name)


@session.command("ls")
@_ID
@json_option
def list_sessions(sandbox_id: str, as_json: bool) -> None:
    """List a sandbox's sessions."""

    async def work() -> list[SessionInfo]:
        async with AsyncClient() as client:
            return await (await client.connect(sandbox_id)).sessions.list()

    found = signals.run(work())
    if wants_json(as_json):
        write_json(found)
        return
    rows = [(info.name, _state(info), info.exit_code, readable(info.log_bytes)) for info in found]
    write_table(["name", "state", "exit", "log"], rows, empty="no sessions")


@session.command("run", context_settings={"ignore_unknown_options": True})
@click.option("--command-timeout-s", type=float, help="Then it is interrupted, and killed where that doesn't help.")
@_ID
@_NAME
@click.argument("words", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED, required=True)
@click.option("--json", "as_json", is_flag=True, help="The whole result as JSON, instead of the output.")
def run(sandbox_id: str, name: str, words: tuple[str, ...], command_timeout_s: float | None, as_json: bool) -> int:
    """Run a command in a session's shell; its output and exit code are passed on.

    The words are joined by spaces: this is text for bash. An interrupt stops the command; the session goes on.
    """

    async def work() -> int:
        async with _found(sandbox_id, name) as found:
            try:
                result = await found.run(" ".join(words), command_timeout_s=command_timeout_s)
            except asyncio.CancelledError:
                await asyncio.shield(found.interrupt())
                raise
            if as_json:
                write_json(result)
            else:
                await _write_output(found, result)
            return _explained(result)

    return signals.run(work())


@session.command("log")
@click.option("--offset", type=click.IntRange(min=0), default=0, help="From this byte of the log on.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the shell has ended.")
@_ID
@_NAME
def log(sandbox_id: str, name: str, offset: int, follow: bool) -> int:
    """What a session's commands wrote, from its beginning."""

    async def work() -> int:
        async with _found(sandbox_id, name) as found:
            at = offset
            while True:
                ended = follow and (await found.info()).ended  # asked first: what comes after its end is read
                while (part := await found.read_log(at, limit=_PART)).next_offset != at:
                    sys.stdout.buffer.write(part.data)
                    sys.stdout.buffer.flush()
                    at = part.next_offset
                if not follow or ended:
                    return 0
                await asyncio.sleep(_POLL_S)

    try:
        return signals.run(work())
    except BrokenPipeError:
        return EXIT_PIPE


@session.command("interrupt")
@click.option("--grace-s", type=float, default=2.0, help="How long ^C may take, before SIGKILL.", show_default=True)
@_ID
@_NAME
@json_option
def interrupt(sandbox_id: str, name: str, grace_s: float, as_json: bool) -> None:
    """Stop the command that runs in a session: ^C, then SIGKILL. The session goes on."""

    async def work() -> SessionInfo:
        async with _found(sandbox_id, name) as found:
            return await found.interrupt(grace_s=grace_s)

    info = signals.run(work())
    if wants_json(as_json):
        write_json(info)
    else:
        click.echo(_state(info))


@session.command("close")
@_ID
@_NAME
def close(sandbox_id: str, name: str) -> None:
    """End a session with all that it started, and forget its log."""

    async def work() -> None:
        async with AsyncClient() as client:
            sessions = (await client.connect(sandbox_id)).sessions
            await (await sessions.get(name)).close()

    signals.run(work())


@session.command("attach")
@click.option("--offset", type=click.IntRange(min=0), help="Show its output from this byte of the log on.")
@_ID
@_NAME
def attach(sandbox_id: str, name: str, offset: int | None) -> int:
    """Work in a session line by line: a line is a command; typed on a terminal, it is input for the command that runs.

    Ctrl-C interrupts the command; the end of the input (Ctrl-D) leaves the session as it is, after the command that
    was asked for last.
    """

    async def work() -> int:
        async with _found(sandbox_id, name) as found:
            start = (await found.info()).log_bytes if offset is None else offset
            return await _Attached(found, start).hold()

    try:
        return signals.run(work())
    except BrokenPipeError:
        return EXIT_PIPE


class _Attached:
    """Lines in, output out, until either ends."""

    def __init__(self, found: AsyncSession, offset: int) -> None:
        self._session = found
        self._at = offset
        self._running: asyncio.Task[SessionResult] | None = None
        self._interrupting: asyncio.Task[None] | None = None
        self._code = 0
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self._holding: asyncio.Task[Any] | None = None

    async def hold(self) -> int:
        loop = asyncio.get_running_loop()
        self._holding = asyncio.current_task()
        threading.Thread(target=self._read, args=[loop], name="stdin", daemon=True).start()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        output = asyncio.create_task(self._follow())
        try:
            while line := await self._line(output):
                await self._take(line)
            if self._running is not None:
                await asyncio.wait([self._running])
                self._settle()
            output.cancel()
            await asyncio.wait([output])
            await self._copy()
        finally:
            output.cancel()
            loop.remove_signal_handler(signal.SIGINT)
        return self._code

    async def _line(self, output: asyncio.Task[None]) -> str:
        """The next line; '' at the end of the input or of the shell."""
        line = asyncio.create_task(self._lines.get())
        await asyncio.wait([line, output], return_when=asyncio.FIRST_COMPLETED)
        if output.done():
            line.cancel()
            output.result()
            return ""
        return line.result()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread that ends with the process: reading can't be interrupted."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            line = "\n"
            while line:
                line = sys.stdin.readline()
                loop.call_soon_threadsafe(self._lines.put_nowait, line)

    async def _take(self, line: str) -> None:
        if self._interrupting is not None:  # what is typed after it is for the shell
            await self._interrupting
        self._settle()
        if self._running is None:
            self._running = asyncio.create_task(self._session.run(line.rstrip("\n")))
            return
        while sys.stdin.isatty() and not self._running.done():
            try:
                await self._session.send(line)
                return
            except Conflict:  # nothing runs: it has yet to begin, or ends just now and the line is the next command
                await asyncio.wait([self._running], timeout=_POLL_S)
        await asyncio.wait([self._running])
        await self._take(line)

    def _settle(self) -> None:
        if self._running is not None and self._running.done():
            self._code = _explained(self._running.result())
            self._running = None

    def _interrupt(self) -> None:
        if signals.ending() and self._holding is not None:
            self._holding.cancel()
            return

        async def work() -> None:
            with contextlib.suppress(DsecError):
                await self._session.interrupt()

        self._interrupting = asyncio.create_task(work())

    async def _copy(self) -> None:
        """Write what there is; can be cancelled between its parts."""
        while True:
            part = await self._session.read_log(self._at, limit=_PART)
            sys.stdout.buffer.write(part.data)
            sys.stdout.buffer.flush()
            if part.next_offset == self._at:
                return
            self._at = part.next_offset

    async def _follow(self) -> None:
        """Output as it comes; returns when the shell has ended."""
        while True:
            ended = (await self._session.info()).ended
            await self._copy()
            if ended:
                note("the session's shell has ended")
                return
            await asyncio.sleep(_POLL_S)


async def _write_output(found: AsyncSession, result: SessionResult) -> None:
    data = result.data
    if result.truncated and result.log_to > result.log_from:
        at, data = result.log_from, b""
        while at < result.log_to:
            part = await found.read_log(at, limit=min(_PART, result.log_to - at))
            if part.next_offset == at:
                break
            sys.stdout.buffer.write(part.data)
            at = part.next_offset
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _explained(result: SessionResult) -> int:
    """The exit code, and on stderr what it can't say."""
    if result.timed_out:
        note("its time was over: it was stopped")
    elif result.output_limit:
        note("it wrote too much: it was stopped")
    if result.ended:
        note("the session's shell has ended")
    return _ENDED_BY_FORCE if result.exit_code is None else result.exit_code


def _state(info: SessionInfo) -> str:
    return "ended" if info.ended else "busy" if info.busy else "idle"


COMMANDS: tuple[click.Command, ...] = (session,)
