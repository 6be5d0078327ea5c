"""The port proxy over real sandboxes: HTTP, WebSockets, streams and large bodies to programs that run inside."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from dsec import AsyncSandbox
from server_kit import Server, serving

pytestmark = pytest.mark.root

PORT = 8000
PROGRAM = r"""
import asyncio, base64, hashlib
async def serve(reader, writer):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    path = head.split()[1]
    fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    if path == "/upload":
        digest, left = hashlib.sha256(), int(fields["content-length"])
        while left:
            data = await reader.read(min(left, 1 << 16))
            digest.update(data); left -= len(data)
        say(writer, 200, digest.hexdigest().encode())
    elif path == "/download":
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64): writer.write(bytes(1 << 20)); await writer.drain()
    elif path == "/events":
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for n in range(3): writer.write(b"data: %d\n\n" % n); await writer.drain(); await seen.get()
    elif path == "/seen":
        seen.put_nowait(None)
        say(writer, 200, b"")
    elif path == "/socket":
        key = [l.split(": ")[1] for l in head.split("\r\n") if l.lower().startswith("sec-websocket-key")][0].encode()
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        writer.write(b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n")
        writer.write(b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n")
        while True:
            first, size = await reader.readexactly(2)
            mask, data = await reader.readexactly(4), await reader.readexactly(size & 127)
            data = bytes(b ^ mask[i % 4] for i, b in enumerate(data))
            writer.write(bytes([first, len(data)]) + data); await writer.drain()
            if first & 15 == 8: break
    else:
        say(writer, 200, head.encode())
    await writer.drain(); writer.close()
def say(writer, status, body):
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
async def main():
    global seen
    seen = asyncio.Queue()
    server = await asyncio.start_server(serve, "127.0.0.1", PORT, limit=1 << 17)
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
""".replace("PORT", str(PORT))


@pytest.fixture
def server(debian_state: Path) -> Iterator[Server]:
    with serving(debian_state) as found:
        yield found


async def start(box: AsyncSandbox) -> None:
    program = await box.commands.start(["python3", "-c", PROGRAM])
    async for output in program:
        assert b"ready" in output.data
        return


async def test_programs_inside_are_served(server: Server) -> None:
    async with asyncio.timeout(120), server.client() as client, aiohttp.ClientSession() as session:
        box, public = await asyncio.gather(client.create("debian"), client.create("debian", public_ports=[PORT]))
        host, access = await box.get_host(PORT), await box.ports.access()
        headers = {"Host": host, "X-Dsec-Token": access.token}
        async with session.get(server.url, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error_code"]) == (502, "port_closed")
        await asyncio.gather(start(box), start(public))
        async with session.get(f"{server.url}/own", headers={"Host": host}) as answer:
            assert answer.status == 401
        async with session.get(f"{server.url}/own", headers={"Host": await public.get_host(PORT)}) as answer:
            assert (await answer.text()).startswith("GET /own HTTP/1.1\r\n")
        async with session.get(f"{server.url}/own", headers={**headers, "Authorization": "Bearer own"}) as answer:
            seen = await answer.text()
        assert "Bearer own" in seen
        assert access.token not in seen

        data = bytes(range(256)) * (32 << 12)
        async with session.post(f"{server.url}/upload", headers=headers, data=data) as answer:
            assert await answer.text() == hashlib.sha256(data).hexdigest()
        async with session.get(f"{server.url}/download", headers=headers) as answer:
            assert sum([len(piece) async for piece in answer.content.iter_any()]) == 64 << 20
        async with session.get(f"{server.url}/events", headers=headers) as answer:
            for number in range(3):  # each comes by itself, before there is another
                assert await answer.content.readany() == b"data: %d\n\n" % number
                async with session.get(f"{server.url}/seen", headers=headers) as told:
                    assert told.status == 200
            assert await answer.content.readany() == b""
        async with session.ws_connect(f"{server.url}/socket", headers=headers) as socket:
            await socket.send_str("text")
            assert await socket.receive_str() == "text"
            await socket.send_bytes(b"\xff\x00")
            assert await socket.receive_bytes() == b"\xff\x00"
            await socket.close(code=4001)
            assert socket.close_code == 4001

        for path in ("/v1/sandboxes", "/metrics", "/healthz"):  # whatever the path
            async with session.get(server.url + path, headers=headers) as answer:
                assert (await answer.text()).startswith(f"GET {path} HTTP/1.1")
        await box.kill()
        async with session.get(server.url, headers=headers) as answer:
            body = await answer.json()
        assert (answer.status, body["error_code"]) == (502, "sandbox_ended")
        assert "was not found" in body["message"]
        await public.kill()
