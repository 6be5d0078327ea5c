"""Terminals, watches and ports of real sandboxes, through SDK and HTTP, also over a server that is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import AsyncCommand, PtySize
from dsec.errors import PortClosed, Unavailable
from dsec.testing.conformance.streams import PORT, SERVER
from server_kit import Server, serving

pytestmark = pytest.mark.root


@pytest.fixture
def server(debian_state: Path) -> Iterator[Server]:
    with serving(debian_state, on_exit="keep") as found:
        yield found


async def until(command: AsyncCommand, word: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(60):
        async for output in command:
            seen += output.data
            if word in seen:
                return seen
    raise AssertionError(seen)


async def test_a_terminal_outlives_the_server(server: Server) -> None:
    async with server.client() as client:
        box = await client.create("debian")
        shell = await box.commands.start(
            ["bash", "--norc", "-i"], pty=PtySize(cols=100, rows=30), env={"PS1": "> "}, key="shell"
        )
        await until(shell, b"> ")
        await shell.write_stdin("x=kept; stty size\n")
        await until(shell, b"30 100")
        server.kill()
        server.start()
        await shell.resize(90, 20)
        await shell.write_stdin("echo $x; stty size; tty\n")
        seen = await until(shell, b"/dev/pts/0")
        assert b"kept" in seen
        assert b"20 90" in seen
        (listed,) = await box.commands.list()
        assert listed.pty
        await shell.write_stdin("exit 3\n")
        assert (await shell.wait()).exit_code == 3
        await box.kill()


async def test_watching_and_ports(server: Server) -> None:
    async with asyncio.timeout(120), server.client() as client:
        box = await client.create("debian")
        watch = await box.files.watch("/tmp", recursive=True)
        await box.files.write("/tmp/a/b/c", b"x", parents=True)
        kinds = []
        async for event in watch:
            kinds.append((event.kind, event.path))
            if event.path == "a/b/c":  # found by looking into a directory that has just appeared: made, perhaps whole
                break
        assert ("create", "a") in kinds
        with pytest.raises(PortClosed):
            await box.ports.connect(PORT)
        listener = await box.commands.start(["python3", "-c", SERVER, str(PORT)])
        await until(listener, b"ready")
        async with await box.ports.connect(PORT) as stream:
            await stream.write(b"hello")
            assert await stream.read() == b"hello"
            server.kill()
            with pytest.raises(Unavailable):
                await stream.read()
        with pytest.raises(Unavailable):
            async for _ in watch:
                pass
        server.start()
        async with await box.ports.connect(PORT) as stream:
            await stream.write(b"again")
            assert await stream.read() == b"again"
        await box.kill()


async def test_programs_make_terminals_of_their_own(server: Server) -> None:
    """Before anybody asked for a terminal."""
    python = "import os, pty; master, slave = pty.openpty(); os.write(slave, b'hello'); print(os.read(master, 5))"
    async with server.client() as client:
        box = await client.create("debian")
        assert (await box.commands.run(["script", "-qc", "tty", "/dev/null"])).check().stdout.strip() == "/dev/pts/0"
        assert (await box.commands.run(["python3", "-c", python])).check().stdout == "b'hello'\n"
        await box.kill()
