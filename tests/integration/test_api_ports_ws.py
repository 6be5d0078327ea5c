"""WebSockets to programs inside, by host name: passed through as they are, between others' clients and servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from port_kit import Ports, ports
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosedError

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[Ports]:
    async with ports(tmp_path) as found:
        yield found


async def program(socket: ServerConnection) -> None:
    """Echoes; closes with 4321 when it is told so."""
    with contextlib.suppress(ConnectionClosedError):
        await echo(socket)


async def echo(socket: ServerConnection) -> None:
    async for message in socket:
        if message == "close":
            await socket.close(4321, "told so")
        elif message == "headers":
            assert socket.request is not None
            await socket.send("\n".join(f"{k.lower()}: {v}" for k, v in socket.request.headers.raw_items()))
        else:
            await socket.send(message)


@pytest.fixture
async def server(kit: Ports) -> AsyncIterator[Server]:
    async with serve(program, "127.0.0.1", 0, subprotocols=["chat"], max_size=1 << 24) as found:  # type: ignore[list-item]
        address = next(iter(found.sockets)).getsockname()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(*address)

            async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                with contextlib.suppress(ConnectionError):
                    while data := await source.read(65536):
                        sink.write(data)
                        await sink.drain()
                sink.close()

            await asyncio.gather(copy(reader, back), copy(there, writer))

        kit.inside.handler = relay
        yield found


def connect(kit: Ports, session: aiohttp.ClientSession, **headers: str) -> aiohttp.client._WSRequestContextManager:
    return session.ws_connect(
        f"{kit.server.url}/path?x=1",
        headers={"Host": kit.host(), "X-Dsec-Token": kit.token, **headers},
        protocols=("other", "chat"),
        max_msg_size=1 << 24,
        compress=15,
    )


async def test_messages_both_ways(kit: Ports, server: Server) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession() as session, connect(kit, session) as socket:
        assert socket.protocol == "chat"
        assert socket.compress
        await socket.send_str("text")
        assert await socket.receive_str() == "text"
        big = bytes(range(256)) * (5 << 12)  # more than one of ours may be
        await socket.send_bytes(big)
        assert await socket.receive_bytes() == big
        await socket.ping(b"x")  # answered by the program, unseen
        await socket.send_str("headers")
        headers = await socket.receive_str()
        assert f"host: {kit.host()}" in headers
        assert "x-forwarded-for: 127.0.0.1" in headers
        assert kit.token not in headers
        await socket.send_str("close")
        message = await socket.receive()
        assert (message.type, message.data, message.extra) == (aiohttp.WSMsgType.CLOSE, 4321, "told so")


async def test_either_side_may_go(kit: Ports, server: Server) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        async with connect(kit, session) as socket:
            await socket.send_str("text")
            await socket.receive_str()
            (there,) = server.connections
            await socket.close(code=4000)
            await there.wait_closed()
            assert there.close_code == 4000
        reader, writer = await handshake(kit)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        (there,) = server.connections
        writer.transport.abort()
        await there.wait_closed()
        reader, writer = await handshake(kit)
        await reader.readuntil(b"\r\n\r\n")
        (there,) = server.connections
        there.transport.abort()
        assert await reader.read() == b""
        writer.close()


async def handshake(kit: Ports, *lines: str, token: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await kit.server.dial()
    lines = ("connection: keep-alive, Upgrade", "upgrade: WebSocket", *lines)
    shown = kit.token if token else "none"
    head = ["GET / HTTP/1.1", f"host: {kit.host()}", f"x-dsec-token: {shown}", f"sec-websocket-key: {KEY}", *lines]
    head += ["sec-websocket-version: 13", "sec-websocket-protocol: chat"]
    writer.write("\r\n".join([*head, "", ""]).encode())
    return reader, writer


async def refused(kit: Ports, status: int, *lines: str, token: bool = True) -> bytes:
    """The answer, after which the connection ends."""
    reader, writer = await handshake(kit, *lines, token=token)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer
    return answer


async def test_who_may(kit: Ports, server: Server) -> None:
    assert b"unauthenticated" in await refused(kit, 401, token=False)
    assert not kit.inside.connected
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        async with connect(kit, session, **{"X-Dsec-Token": "", "Cookie": f"dsec_token={kit.token}"}) as socket:
            await socket.send_str("text")
            assert await socket.receive_str() == "text"
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await connect(kit, session, Host=kit.host(9000))
    assert caught.value.status == 502


async def test_a_body_has_no_place(kit: Ports, server: Server) -> None:
    await refused(kit, 400, "content-length: 5")
    await refused(kit, 400, "transfer-encoding: chunked")
    assert not kit.inside.connected


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 403 No\r\ncontent-length: 2\r\n\r\nno", 403),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", 200),
        (b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", 502),
        (b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: h2c\r\nsec-websocket-accept: %b\r\n\r\n", 502),
        (b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nsec-websocket-accept: %b\r\nx: " + b"x" * (1 << 20), 502),
        (b"", 502),
    ],
)
async def test_programs_that_refuse_or_cheat(kit: Ports, answer: bytes, status: int) -> None:
    kit.answers(answer.replace(b"%b", ACCEPT.encode()))
    await refused(kit, status)


async def test_frames_that_come_with_the_handshake_are_not_lost(kit: Ports) -> None:
    kit.answers(
        b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nsec-websocket-accept: %b\r\nx-dsec-a: 1\r\nset-cookie: a=1; domain=x"
        b"\r\n\r\nframe" % ACCEPT.encode()
    )
    reader, writer = await handshake(kit)
    answer = await reader.read()
    head, _, frames = answer.partition(b"\r\n\r\n")
    assert frames == b"frame"
    assert b"set-cookie: a=1\r\n" in head
    assert b"x-dsec-a" not in head
    writer.close()


async def test_what_a_client_does_not_read_waits(kit: Ports) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nsec-websocket-accept: %b\r\n\r\n" % ACCEPT.encode())
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    kit.inside.handler = flood
    _, writer = await handshake(kit)
    last = -1
    while sent != last:
        last = sent
        await asyncio.sleep(0.3)
    assert sent < 64 << 20
    writer.transport.abort()


async def test_shutdown_ends_it(kit: Ports, server: Server) -> None:
    reader, writer = await handshake(kit)
    await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(60):
        await kit.server.server.stop()
        assert await reader.read() == b""
    writer.close()
