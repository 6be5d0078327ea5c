"""Watches and connections to ports over HTTP, with the SDK: what arrives, what is refused, what breaks, who waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote

import aiohttp
import pytest
from api_kit import Served, served, unchunked
from edge_kit import until

from dsec import AsyncClient, AsyncSandbox
from dsec.errors import (
    FileMissing,
    InvalidRequest,
    PermissionDenied,
    PortClosed,
    SandboxEnded,
    SandboxNotFound,
    Unauthenticated,
    Unavailable,
)

PORT = 80


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as server:
        yield server


@pytest.fixture
async def client(server: Served) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client


@pytest.fixture
async def box(client: AsyncClient) -> AsyncSandbox:
    return await client.create("base")


async def listen(box: AsyncSandbox, port: int = PORT) -> None:
    """The fake guest's echo server."""
    command = await box.commands.start(["python3", "-c", "", str(port)])
    async for output in command:
        assert output.data == b"ready\n"
        return


# --- watching --------------------------------------------------------------------------------------------------------


async def test_a_watch(box: AsyncSandbox) -> None:
    await box.files.mkdir("/w")
    watch = await box.files.watch("/w", recursive=True)
    await box.files.write("/w/d/f\udcff", b"x", parents=True)
    await box.files.move("/w/d", "/w/e")
    await box.files.remove("/w", recursive=True)
    told = [(event.kind, event.path, event.from_path, event.directory) async for event in watch]
    assert told == [
        ("create", "d", None, True),
        ("create", "d/f\udcff", None, False),
        ("write", "d/f\udcff", None, False),
        ("rename", "e", "d", True),
        ("remove", "", None, True),
    ]
    await watch.close()


async def test_a_watch_that_is_left(server: Served, box: AsyncSandbox) -> None:
    async with await box.files.watch("/tmp") as watch:
        await box.files.write("/tmp/a", b"")
        async for event in watch:
            assert event.path == "a"
            break
        await box.files.write("/tmp/b", b"")
        async for event in watch:
            if event.path == "b":
                break
    guest = server.kit.host.guests[box.id]
    await until(lambda: not guest.operations and not guest.fs.listeners)


async def test_what_can_not_be_watched(server: Served, box: AsyncSandbox) -> None:
    with pytest.raises(FileMissing):
        await box.files.watch("/missing")
    await box.kill()
    with pytest.raises(SandboxEnded):
        await box.files.watch("/tmp")
    assert (await server.error("GET", f"/v1/sandboxes/{box.id}/files/watch"))[:2] == (400, "invalid_request")
    assert (await server.error("PUT", f"/v1/sandboxes/{box.id}/files/watch?path=/"))[:2] == (405, "method_not_allowed")


async def test_a_watch_ends_with_its_sandbox(box: AsyncSandbox) -> None:
    watch = await box.files.watch("/tmp")
    await box.kill()
    with pytest.raises(SandboxEnded):
        async for _ in watch:
            pass


async def test_a_watch_is_cut_with_its_server(server: Served, box: AsyncSandbox) -> None:
    watch = await box.files.watch("/tmp")
    await server.restart()
    with pytest.raises(Unavailable):
        async for _ in watch:
            pass
    await until(lambda: not server.kit.host.guests[box.id].fs.listeners)


async def test_events_on_the_wire(server: Served, box: AsyncSandbox) -> None:
    await box.files.mkdir("/w")
    asked = asyncio.create_task(server.raw("GET", f"/v1/sandboxes/{box.id}/files/watch?path=/w"))
    await until(lambda: bool(server.kit.host.guests[box.id].fs.listeners))
    await box.files.mkdir("/w/d\udcff")
    await box.files.remove("/w", recursive=True)
    status, headers, body = await asked
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    assert [json.loads(line)["event"] for line in body.split()] == [
        {"kind": "create", "path": "d�", "directory": True, "path_b64": "ZP8="},
        {"kind": "remove", "directory": True},
    ]
    assert unchunked(b"0\r\n\r\n") == b""


# --- ports -----------------------------------------------------------------------------------------------------------


async def test_a_connection(server: Served, box: AsyncSandbox) -> None:
    await listen(box)
    async with await box.ports.connect(PORT) as stream:
        await stream.write(b"hello")
        assert await stream.read() == b"hello"
        await stream.close_write()
        await stream.close_write()
        assert await stream.read() == b""
        assert await stream.read() == b""
        with pytest.raises(InvalidRequest):
            await stream.write(b"late")
    guest = server.kit.host.guests[box.id]
    await until(lambda: len(guest.operations) == 1)


async def test_much_in_both_directions(box: AsyncSandbox) -> None:
    await listen(box)
    data = bytes(range(256)) * 20_000

    async def talk() -> None:
        async with await box.ports.connect(PORT) as stream:

            async def send() -> None:
                await stream.write(data)
                await stream.close_write()

            sending = asyncio.create_task(send())
            found = bytearray()
            while piece := await stream.read():
                found += piece
            await sending
            assert found == data

    await asyncio.gather(*(talk() for _ in range(3)))


async def test_who_does_not_read_makes_the_writer_wait(box: AsyncSandbox) -> None:
    await listen(box)
    async with await box.ports.connect(PORT) as stream:
        sending = asyncio.create_task(stream.write(bytes(200 << 20)))
        done, _ = await asyncio.wait([sending], timeout=2)
        assert not done
        sending.cancel()


async def test_what_keeps_a_connection_from_being_made(server: Served, client: AsyncClient, box: AsyncSandbox) -> None:
    with pytest.raises(PortClosed) as refused:
        await box.ports.connect(9)
    assert refused.value.details["errno"] == "ECONNREFUSED"
    for port in (0, 65_536, 99_999):
        with pytest.raises(InvalidRequest):
            await box.ports.connect(port)
    async with AsyncClient(server.url, "dsk_wrong") as stranger:
        elsewhere = AsyncSandbox(stranger._transport, box.info)
        with pytest.raises(Unauthenticated):
            await elsewhere.ports.connect(PORT)
    await box.kill()
    with pytest.raises(SandboxEnded):
        await box.ports.connect(PORT)
    missing = AsyncSandbox(client._transport, box.info)
    missing.ports._path = "/v1/sandboxes/nobody/ports"
    with pytest.raises(SandboxNotFound):
        await missing.ports.connect(PORT)


@pytest.mark.parametrize("path", ["/", "/v1/node", "/v1/sandboxes/{id}", "/v1/sandboxes/{id}/ports/x", "/openapi.json"])
async def test_other_websockets_are_refused(server: Served, box: AsyncSandbox, path: str) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {server.key}"}) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(server.url + path.format(id=box.id))
    assert refused.value.status in (400, 404)
    assert refused.value.headers is not None
    told = json.loads(unquote(refused.value.headers["x-dsec-error"]))
    assert told["code"] in ("invalid_request", "not_found")


async def test_a_sandbox_token_opens_its_own_ports(server: Served, client: AsyncClient) -> None:
    own, other = await client.create("base"), await client.create("base")
    await listen(own)
    assert own.info.token
    async with AsyncClient(server.url, own.info.token) as bearer:
        async with await AsyncSandbox(bearer._transport, own.info).ports.connect(PORT) as stream:
            await stream.write(b"x")
            assert await stream.read() == b"x"
        with pytest.raises(PermissionDenied):
            await AsyncSandbox(bearer._transport, other.info).ports.connect(PORT)


async def test_a_connection_ends_with_its_sandbox(box: AsyncSandbox) -> None:
    await listen(box)
    stream = await box.ports.connect(PORT)
    await box.kill()
    with pytest.raises(SandboxEnded):
        await stream.read()
    await stream.close()


async def test_a_client_that_vanishes_ends_the_connection(server: Served, box: AsyncSandbox) -> None:
    await listen(box)
    stream = await box.ports.connect(PORT)
    guest = server.kit.host.guests[box.id]
    assert len(guest.operations) == 2
    connection = stream._socket._response.connection
    assert connection is not None
    assert connection.transport is not None
    connection.transport.abort()
    await until(lambda: len(guest.operations) == 1)


async def test_a_server_that_stops_says_so(server: Served, box: AsyncSandbox) -> None:
    await listen(box)
    stream = await box.ports.connect(PORT)
    await server.restart()
    with pytest.raises(Unavailable):
        await stream.read()
    async with await box.ports.connect(PORT) as again:
        await again.write(b"x")
        assert await again.read() == b"x"
