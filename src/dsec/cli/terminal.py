"""`shell` and what else puts this terminal at a command inside: raw mode, sizes, the end.

Invariants: the terminal is given back as it was however this ends, by a signal too (but SIGKILL); every byte of output
is written before the end; what is typed goes in order. Ctrl-P Ctrl-Q lets go of the command, which goes on; `dsec
attach` finds it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from typing import Any

import click

from dsec import AsyncClient, AsyncCommand, AsyncSandbox, PtySize
from dsec.cli import signals
from dsec.cli.complete import ENVIRONMENT_OR_SANDBOX, is_id
from dsec.cli.output import EXIT_PLATFORM, no_option, note
from dsec.cli.sandboxes import pairs
from dsec.errors import DsecError, InvalidRequest

DETACH = b"\x10\x11"
_READ_AT_ONCE = 64 << 10
_FOREVER_S = 366 * 86400.0
_SHELL = ("/bin/sh", "-c", "if command -v bash >/dev/null 2>&1; then exec bash -i; else exec sh -i; fi")


class Left(Exception):
    """Whoever sits here lets go of the command."""


class Ended(Exception):
    """A signal ends this process."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


@click.command("shell", context_settings={"ignore_unknown_options": True})
@click.option("--env", "-e", "variables", multiple=True, metavar="K=V", help="Environment variable.")
@click.option("--cwd", help="Working directory.")
@click.option("--user", "-u", help="User inside: name, uid, or with :group.")
@click.argument("target", metavar="ID|ENVIRONMENT", type=ENVIRONMENT_OR_SANDBOX, callback=no_option)
@click.argument("argv", metavar="[COMMAND...]", nargs=-1, type=click.UNPROCESSED, callback=no_option)
def shell(target: str, argv: tuple[str, ...], variables: tuple[str, ...], cwd: str | None, user: str | None) -> int:
    """A terminal in a sandbox: of an ID, or in a new one of ENVIRONMENT, which ends with the shell.

    Runs bash, or sh where there is none, or COMMAND. Its exit code is passed on. Ctrl-P Ctrl-Q leaves it running.
    """
    need_terminal()

    async def work() -> int:
        async with AsyncClient() as client:
            made = not is_id(target)
            sandbox = await (client.create(target) if made else client.connect(target))
            return await at_terminal(sandbox, argv, ends=made, env=pairs(variables), cwd=cwd, user=user)

    return signals.run(work())


async def at_terminal(
    sandbox: AsyncSandbox, argv: tuple[str, ...], *, ends: bool, command_timeout_s: float | None = None, **options: Any
) -> int:
    """Be the terminal of a command inside, or of a shell where `argv` is empty; its exit code. `ends`: the sandbox ends
    with it, unless who sits here lets go of it."""
    left = False
    try:
        return await _run(sandbox, argv or _SHELL, command_timeout_s or _FOREVER_S, options)
    except Left:
        left = True
        return 0
    except Ended as ended:
        return ended.exit_code
    finally:
        if ends and not left:
            await asyncio.shield(sandbox.kill())


async def _run(sandbox: AsyncSandbox, argv: tuple[str, ...], timeout_s: float, options: dict[str, Any]) -> int:
    """Raises `Left`, `Ended`."""
    key = f"shell-{secrets.token_hex(4)}"
    with raw_terminal() as terminal:
        command = await sandbox.commands.start(
            argv, pty=terminal.size(), key=key, command_timeout_s=timeout_s, output_bytes=1 << 40, **options
        )
        try:
            code = await terminal.hold(command)
        except (asyncio.CancelledError, Ended):
            await asyncio.shield(command.kill("group", signal=signal.SIGHUP))
            raise
        except Left:
            terminal.restore()
            note(f"left running; `dsec attach {sandbox.id} {key}` goes back to it")
            raise
    with contextlib.suppress(DsecError):
        await command.release()
    return code


def need_terminal() -> None:
    """Raises `InvalidRequest` where this process has none."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest(
            "this needs a terminal", remedy="use `dsec run`, `dsec exec` without -t in scripts and pipes"
        )


@contextlib.contextmanager
def raw_terminal() -> Iterator[Terminal]:
    """This process's terminal, raw until the end."""
    terminal = Terminal(sys.stdin.fileno(), sys.stdout.fileno())
    try:
        yield terminal
    finally:
        terminal.restore()


class Terminal:
    """Use `raw_terminal`."""

    def __init__(self, source: int, sink: int) -> None:
        import termios  # not on every platform
        import tty

        self._source = source
        self._sink = sink
        self._was: list[Any] | None = termios.tcgetattr(source)
        self._typed: asyncio.Queue[bytes] = asyncio.Queue()
        self._before = b""
        tty.setraw(source, termios.TCSADRAIN)

    def restore(self) -> None:
        """As it was. Idempotent."""
        import termios

        was, self._was = self._was, None
        if was is not None:
            termios.tcsetattr(self._source, termios.TCSADRAIN, was)

    def size(self) -> PtySize:
        """In characters; 0 where it doesn't know."""
        size = os.get_terminal_size(self._sink)
        return PtySize(cols=size.columns, rows=size.lines)

    async def hold(self, command: AsyncCommand) -> int:
        """Be the terminal of a command until its end; its exit code. Raises `Left`, `Ended`."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        ended_by: list[int] = []

        def end(number: int) -> None:
            ended_by.append(number)
            task.cancel()

        resized = asyncio.Event()
        loop.add_signal_handler(signal.SIGWINCH, resized.set)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, end, number)
        loop.add_reader(self._source, self._read)
        writing = asyncio.ensure_future(self._show(command))
        helpers: list[asyncio.Future[None]] = [
            asyncio.ensure_future(self._type(command)),
            asyncio.ensure_future(self._resize(command, resized)),
        ]
        both: list[asyncio.Future[Any]] = [writing, *helpers]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if writing not in done:  # typing failed, or they leave
                for helper in helpers:
                    if helper.done():
                        await helper
            return await writing
        except asyncio.CancelledError:
            if ended_by:
                task.uncancel()
                raise Ended(ended_by[0]) from None
            raise
        finally:
            loop.remove_reader(self._source)
            for number in (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                loop.remove_signal_handler(number)
            for each in both:
                each.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _show(self, command: AsyncCommand) -> int:
        async for output in command:
            view = memoryview(output.data)
            while view:
                view = view[os.write(self._sink, view) :]
        result = await command.wait()
        if result.infra:
            return EXIT_PLATFORM
        return result.exit_code

    def _read(self) -> None:
        try:
            data = os.read(self._source, _READ_AT_ONCE)
        except OSError:
            data = b""
        self._typed.put_nowait(data)
        if not data:  # the terminal is gone: SIGHUP is on its way
            asyncio.get_running_loop().remove_reader(self._source)

    async def _type(self, command: AsyncCommand) -> None:
        while data := await self._typed.get():
            while not self._typed.empty():
                data += self._typed.get_nowait()
            at = (self._before + data).find(DETACH)
            if at >= 0:
                await command.write_stdin(data[: max(0, at - len(self._before))])
                raise Left
            self._before = data[-1:]
            await command.write_stdin(data)
        await asyncio.Event().wait()

    async def _resize(self, command: AsyncCommand, resized: asyncio.Event) -> None:
        while True:
            await resized.wait()
            resized.clear()
            size = self.size()
            await command.resize(size.cols, size.rows)


COMMANDS: tuple[click.Command, ...] = (shell,)
