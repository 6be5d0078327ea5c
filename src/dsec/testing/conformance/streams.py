"""Terminals, watches, connections to ports: what goes on, through `dsec.channel`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dsec.channel import files, streams
from dsec.errors import FileError, FileMissing, InvalidRequest, PortClosed
from dsec.ports import Instance, Operation
from dsec.spec.operations import Chunk, EndKind, ExecFlag
from dsec.spec.sandbox import FileEvent
from dsec.testing.conformance.files import put
from dsec.testing.conformance.kit import PATIENCE_S, Factory, Feature, Sandboxes, collect, needs, ok, request

PORT = 7411
SERVER = """
import socket, sys, threading
def serve(c):
    while data := c.recv(65536): c.sendall(data)
    c.close()
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
while True: threading.Thread(target=serve, args=(server.accept()[0],)).start()
"""


class _Local:
    """For backends whose channel is a `SocketChannel`."""

    @pytest.fixture(autouse=True)
    def _local(self, factory: Factory) -> None:
        needs(factory, Feature.SOCKET_CHANNEL)


async def terminal(instance: Instance, *argv: str, **fields: Any) -> Operation:
    """A command on a terminal."""
    return await instance.channel.start(request(*argv, flags=ExecFlag.PTY, **fields))


async def until(operation: Operation, word: bytes) -> bytes:
    """What it wrote until `word` came."""
    seen = b""
    async with asyncio.timeout(PATIENCE_S):
        async for item in operation.read():
            assert isinstance(item, Chunk), (seen, item)
            seen += item.data
            if word in seen:
                return seen
    raise AssertionError(seen)


class TestTerminals(_Local):
    """Size, signals, one stream, and nothing lost."""

    @pytest.mark.parametrize(
        ("asked", "shown"),
        [(None, b"24 80"), (0, b"24 80"), (132 << 16 | 50, b"50 132"), (0xFFFFFFFF, b"4096 4096"), (7, b"7 80")],
    )
    async def test_size(self, sandboxes: Sandboxes, asked: int | None, shown: bytes) -> None:
        operation = await terminal(await sandboxes.one(), "stty", "size", pty_size=asked)
        assert operation.pty
        assert ok(await collect(operation)) == shown + b"\r\n"

    async def test_resize(self, sandboxes: Sandboxes) -> None:
        operation = await terminal(await sandboxes.one(), "sh", "-c", "cat; stty size")
        await operation.started()
        await operation.resize(100, 0)
        await operation.write(b"typed\n")
        await operation.close_stdin()
        assert ok(await collect(operation)).replace(b"^D\b\b", b"") == b"typed\r\ntyped\r\n24 100\r\n"
        await operation.resize(1, 1)  # it has ended: nothing

    async def test_no_terminal(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        operation = await channel.start(request("sleep", "600"))
        assert not operation.pty
        with pytest.raises(InvalidRequest):
            await operation.resize(80, 24)
        await operation.release()
        operation = await terminal(await sandboxes.one(), "sleep", "600")
        with pytest.raises(InvalidRequest):
            await operation.resize(-1, 24)
        with pytest.raises(InvalidRequest):
            await operation.resize(80, 65_536)
        await operation.release()

    async def test_a_typed_signal(self, sandboxes: Sandboxes) -> None:
        operation = await terminal(await sandboxes.one(), "sleep", "600")
        await operation.write(b"\x03")
        end = (await collect(operation)).end
        assert (end.kind, end.code) == (EndKind.SIGNALED, 2)

    async def test_both_streams_are_one_and_whole(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.one()
        outcome = await collect(await terminal(instance, "sh", "-c", "echo out; echo err >&2; env"))
        assert (outcome.out[:10], outcome.err) == (b"out\r\nerr\r\n", b"")
        assert b"TERM=xterm-256color\r\n" in outcome.out
        for _ in range(3):
            outcome = await collect(await terminal(instance, "seq", "1", "20000"))
            assert outcome.out == b"".join(b"%d\r\n" % number for number in range(1, 20_001))

    async def test_the_next_edge_goes_on_with_it(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.one()
        operation = await terminal(instance, "cat", key=b"shell", pty_size=90 << 16 | 30)
        await operation.write(b"one\n")
        await until(operation, b"one\r\none\r\n")
        pid, began = operation.pid, operation.started_at
        await sandboxes.next_edge()
        found = sandboxes.channel(instance).find(b"shell")
        assert found is not None
        assert (found.pty, found.pid) == (True, pid)
        assert abs(found.started_at - began) < 30
        assert found.started_at <= time.time()
        await found.write(b"two\n")
        await until(found, b"two\r\ntwo\r\n")
        await found.resize(10, 10)
        await found.close_stdin()
        assert (await collect(found)).end.kind is EndKind.EXITED

    async def test_many_at_once(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.one()
        many = await asyncio.gather(*(terminal(instance, "cat") for _ in range(20)))
        for number, operation in enumerate(many):
            await operation.write(b"%d\n" % number)
        for number, operation in enumerate(many):
            await until(operation, b"%d\r\n%d\r\n" % (number, number))
            await operation.release()


class Following:
    """A watch and what it has told."""

    def __init__(self, watch: streams.Watch) -> None:
        self.watch = watch
        self.events: list[FileEvent] = []

    async def until(self, kind: str, path: str) -> FileEvent:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for event in self.events:
                    if (event.kind, event.path) == (kind, path):
                        return event
                self.events.append(await anext(self.watch))


class TestWatching(_Local):
    """What happens in a directory is told, from the moment that `watch` returns on."""

    async def test_what_is_told(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await files.mkdir(channel, "/tmp/w")
        seen = Following(await streams.watch(channel, "/tmp/w"))
        await put(channel, "/tmp/w/f", b"x")
        await seen.until("create", "f")
        await seen.until("write", "f")
        await files.move(channel, "/tmp/w/f", "/tmp/w/g")
        assert (await seen.until("rename", "g")).from_path == "f"
        await files.move(channel, "/tmp/w/g", "/tmp/away")
        await seen.until("remove", "g")
        await files.move(channel, "/tmp/away", "/tmp/w/back")
        await seen.until("create", "back")
        seen.events.clear()
        await put(channel, "/tmp/w/back", b"more")
        await seen.until("write", "back")
        assert "create" not in {event.kind for event in seen.events}
        await files.mkdir(channel, "/tmp/w/d")
        assert (await seen.until("create", "d")).directory
        await put(channel, "/tmp/w/d/deep", b"")
        await files.remove(channel, "/tmp/w/back")
        await seen.until("remove", "back")
        assert not [event for event in seen.events if "deep" in event.path]
        await seen.watch.aclose()
        await seen.watch.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(seen.watch)

    async def test_a_tree(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await files.mkdir(channel, "/tmp/w/old", parents=True)
        seen = Following(await streams.watch(channel, "/tmp/w", recursive=True))
        await put(channel, "/tmp/w/old/f")
        await seen.until("create", "old/f")
        await files.mkdir(channel, "/tmp/w/a/b/c", parents=True)
        await seen.until("create", "a/b/c")
        await put(channel, "/tmp/w/a/b/c/f")
        await seen.until("create", "a/b/c/f")
        await files.move(channel, "/tmp/w/a", "/tmp/w/z")
        await seen.until("rename", "z")
        await put(channel, "/tmp/w/z/b/c/g")
        await seen.until("create", "z/b/c/g")
        await put(channel, "/tmp/w/odd\udcff")
        assert (await seen.until("create", "odd\udcff")).path_b64 == "b2Rk/w=="
        await seen.watch.aclose()

    async def test_it_ends_with_its_directory(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        for how in ("remove", "move"):
            await files.mkdir(channel, "/tmp/w/d", parents=True)
            watch = await streams.watch(channel, "/tmp/w", recursive=True)
            if how == "remove":
                await files.remove(channel, "/tmp/w", recursive=True)
            else:
                await files.move(channel, "/tmp/w", "/tmp/elsewhere")
            async with asyncio.timeout(PATIENCE_S):
                events = [event async for event in watch]
            assert (events[-1].kind, events[-1].path) == ("remove", "")

    async def test_what_can_not_be_watched(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        await put(channel, "/tmp/f")
        with pytest.raises(FileMissing):
            await streams.watch(channel, "/tmp/missing")
        with pytest.raises(FileError):
            await streams.watch(channel, "/tmp/f")
        with pytest.raises(InvalidRequest):
            await streams.watch(channel, "tmp")
        with pytest.raises(InvalidRequest):
            await streams.watch(channel, "/tmp", user="stranger")
        assert not channel.operations()

    async def test_the_next_edge_drops_it(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.one()
        await streams.watch(instance.channel, "/tmp", recursive=True)
        await sandboxes.next_edge()
        assert not sandboxes.channel(instance).operations()


@asynccontextmanager
async def server(instance: Instance) -> AsyncIterator[None]:
    """An echo server inside."""
    operation = await instance.channel.start(request("python3", "-c", SERVER, str(PORT)))
    await until(operation, b"ready")
    try:
        yield
    finally:
        await operation.release()


async def read_all(stream: streams.Stream, size: int | None = None) -> bytes:
    """To the end, or so many bytes."""
    found = bytearray()
    async with asyncio.timeout(PATIENCE_S):
        while size is None or len(found) < size:
            data = await stream.read()
            if not data:
                break
            found += data
    return bytes(found)


class TestPorts(_Local):
    """Connections to what listens inside."""

    async def test_both_directions(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.one()
        async with server(instance):
            stream = await streams.connect(instance.channel, PORT)
            await stream.write(b"hello")
            assert await read_all(stream, 5) == b"hello"
            await stream.close_write()
            await stream.close_write()
            assert await read_all(stream) == b""
            await stream.close()
            await stream.close()
            assert len(instance.channel.operations()) == 1

    async def test_much_at_once(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.one()
        data = bytes(range(256)) * 8000

        async def talk() -> None:
            stream = await streams.connect(instance.channel, PORT)

            async def send() -> None:
                await stream.write(data)
                await stream.close_write()

            _, found = await asyncio.gather(send(), read_all(stream))
            assert found == data
            await stream.close()

        async with server(instance):
            await asyncio.gather(*(talk() for _ in range(5)))

    async def test_nobody_listens(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        with pytest.raises(PortClosed):
            await streams.connect(channel, 9)
        with pytest.raises(InvalidRequest):
            await streams.connect(channel, 0)
        with pytest.raises(InvalidRequest):
            await streams.connect(channel, 65_536)
        with pytest.raises(PortClosed):
            await streams.connect(channel, b"/tmp/missing.sock")
        assert not channel.operations()

    async def test_the_next_edge_drops_it(self, sandboxes: Sandboxes) -> None:
        instance = await sandboxes.one()
        async with server(instance):
            await streams.connect(instance.channel, PORT)
            await sandboxes.next_edge()
            kept = [each for each in sandboxes.channel(instance).operations() if each.kind != 0]
            assert not kept
            for operation in sandboxes.channel(instance).operations():
                await operation.release()
