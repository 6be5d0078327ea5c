"""The port proxy over HTTP: bodies both ways, who may, and programs inside that answer as badly as they can."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
from api_kit import unchunked
from port_kit import PORT, Ports, ports

HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
ID_OF_NOBODY = "0" * 24


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[Ports]:
    async with ports(tmp_path) as found:
        yield found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (polled: what changes it is the code under test)
            await asyncio.sleep(0.01)


async def until_closed(kit: Ports) -> None:
    await until(lambda: kit.inside.open == 0)


def is_error(answer: tuple[int, dict[str, str], bytes], status: int, code: str, words: str = "") -> None:
    """The form of all errors of the proxy's own."""
    body = json.loads(answer[2])
    assert (answer[0], body["code"], body["error_code"]) == (status, status, code)
    assert json.loads(unquote(answer[1]["x-dsec-error"]))["code"] == code
    assert words in body["message"]


# --- the exchange -----------------------------------------------------------------------------------------------------


async def test_requests_and_answers(kit: Ports) -> None:
    heads = kit.answers(
        b"HTTP/1.0 404 Whatever\r\nX-Own: 1\r\nSet-Cookie: a=1; domain=localhost\r\n"
        b"X-Dsec-Error: forged\r\n\r\nto the end"
    )
    status, headers, body = await kit.ask("/v1/sandboxes?a=%20&b", "authorization: Basic own", "x-own: 2")
    assert (status, body) == (404, b"to the end")
    assert (headers["x-own"], headers["set-cookie"]) == ("1", "a=1")
    assert "x-dsec-error" not in headers
    lines = heads[0].decode().split("\r\n")
    assert lines[:2] == ["GET /v1/sandboxes?a=%20&b HTTP/1.1", f"host: {kit.host()}"]
    assert {"authorization: Basic own", "x-own: 2", "x-forwarded-for: 127.0.0.1", "connection: close"} < set(lines)
    assert kit.token not in heads[0].decode()
    await until_closed(kit)


async def test_head_and_answers_without_a_body(kit: Ports) -> None:
    kit.answers(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
    assert (await kit.ask(method="HEAD"))[1]["content-length"] == "5"
    for status in (204, 304):
        kit.answers(b"HTTP/1.1 %d X\r\ncontent-length: 5\r\n\r\n" % status)
        answer = await kit.ask()
        assert (answer[0], answer[2]) == (status, b"")
        assert "content-length" not in answer[1]


async def test_bodies_of_each_framing(kit: Ports) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head:
            body = unchunked(await reader.readuntil(b"\r\n0\r\n\r\n"))
        else:
            body = await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        writer.write(b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for byte in body:
            writer.write(b"1;extension\r\n%c\r\n" % byte)
        writer.write(b"0\r\nX-Trailer: 1\r\n\r\n")

    kit.inside.handler = echo
    assert (await kit.ask(method="PUT", body=b"sent"))[2] == b"sent"
    head = f"POST / HTTP/1.1\r\nhost: {kit.host()}\r\nx-dsec-token: {kit.token}\r\nconnection: close\r\n"
    chunked = head.encode() + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: 1\r\n\r\n"
    status, headers, body = await kit.server.raw_bytes(chunked)
    assert (status, body) == (200, b"abcde")
    assert "x-trailer" not in headers


async def test_a_connection_serves_one_request_after_the_other(kit: Ports) -> None:
    heads = kit.answers(HELLO)
    reader, writer = await kit.server.dial()
    for number in range(3):
        writer.write(f"GET /{number} HTTP/1.1\r\nhost: {kit.host()}\r\nx-dsec-token: {kit.token}\r\n\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\nhello")).startswith(b"HTTP/1.1 200")
    assert [head.split()[1] for head in heads] == [b"/0", b"/1", b"/2"]
    writer.close()


async def test_events_arrive_as_they_are_sent(kit: Ports) -> None:
    go_on = asyncio.Event()

    async def events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for number in range(3):
            await go_on.wait()
            go_on.clear()
            writer.write(b"data: %d\n\n" % number)

    kit.inside.handler = events
    reader, writer = await kit.server.dial()
    writer.write(kit.head())
    async with asyncio.timeout(60):
        assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
        for number in range(3):
            go_on.set()
            await reader.readuntil(b"data: %d\n\n" % number)
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"0\r\n\r\n")
    writer.close()


async def test_a_client_that_goes_ends_the_connection_inside(kit: Ports) -> None:
    kit.answers(b"", close=False)
    _, writer = await kit.server.dial()
    writer.write(kit.head())
    await until(lambda: kit.inside.open == 1)
    writer.transport.abort()
    await until_closed(kit)


@pytest.mark.parametrize(
    "says", [b"HTTP/1.1 100 Continue\r\n\r\n", b"", b"HTTP/1.1 417 No\r\ncontent-length: 0\r\n\r\n"]
)
async def test_a_client_that_asks_before_it_sends(kit: Ports, says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears the program's word, or after a while (of a program that doesn't know of it) ours."""
    monkeypatch.setattr("dsec.api.ports.proxy.CONTINUE_S", 0.2 if not says else 60)

    async def program(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"expect: 100-continue" in await reader.readuntil(b"\r\n\r\n")
        writer.write(says)
        if b"417" not in says:
            assert await reader.readexactly(4) == b"body"
            writer.write(HELLO)

    kit.inside.handler = program
    reader, writer = await kit.server.dial()
    head = f"POST / HTTP/1.1\r\nhost: {kit.host()}\r\nx-dsec-token: {kit.token}\r\ncontent-length: 4\r\n"
    writer.write(head.encode() + b"expect: 100-continue\r\n\r\n")
    async with asyncio.timeout(60):
        first = await reader.readuntil(b"\r\n\r\n")
        if b"417" in says:
            assert first.startswith(b"HTTP/1.1 417")
            assert await reader.read() == b""  # closed: the body may come or not
        else:
            assert first.startswith(b"HTTP/1.1 100")
            writer.write(b"body")
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_an_upload_and_a_download_wait_for_a_slow_reader(kit: Ports) -> None:
    """Nothing grows between both."""
    taken = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
            await asyncio.sleep(30)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()
            taken += 1 << 16

    kit.inside.handler = flood
    head = f"host: {kit.host()}\r\nx-dsec-token: {kit.token}\r\n"
    _, writer = await kit.server.dial()
    writer.write(f"POST / HTTP/1.1\r\n{head}content-length: {1 << 30}\r\n\r\n".encode())
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 256 << 20:
            writer.write(bytes(1 << 20))
            sent += 1 << 20
            async with asyncio.timeout(0.5):
                await writer.drain()
    assert sent < 64 << 20
    writer.transport.abort()
    reader, writer = await kit.server.dial()
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(f"GET / HTTP/1.1\r\n{head}\r\n".encode())
    await until(lambda: taken > 0)
    last = -1
    while taken != last:
        last = taken
        await asyncio.sleep(0.3)
    assert 0 < taken < 64 << 20
    writer.transport.abort()


# --- hostile answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 99 X\r\n\r\n",
        b"HTTP/1.1 999 X\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad name: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nname: a\0b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, chunked\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nname: " + b"x" * (1 << 20) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"name: value\r\n" * (1 << 16) + b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    ],
    ids=lambda answer: answer[:60].decode("latin-1").replace("\r\n", "|") + f" {len(answer)}",
)
async def test_answers_that_are_none(kit: Ports, answer: bytes) -> None:
    kit.answers(answer)
    is_error(await kit.ask(), 502, "bad_answer")
    await until_closed(kit)


@pytest.mark.parametrize(
    "answer",
    [
        b"content-length: 5\r\n\r\nhel",
        b"transfer-encoding: chunked\r\n\r\n5\r\nhel",
        b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\nxyz\r\n",
        b"transfer-encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n" + b"trailer: 1\r\n" * (1 << 16),
        b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * (1 << 20),
        b"transfer-encoding: chunked\r\n\r\n" + b"f" * 100 + b"\r\n",
    ],
)
async def test_answers_that_break_are_cut(kit: Ports, answer: bytes) -> None:
    """They are never ended as if they were whole."""
    kit.answers(b"HTTP/1.1 200 OK\r\n" + answer)
    reader, writer = await kit.server.dial()
    writer.write(kit.head("connection: close"))
    seen = b""
    with contextlib.suppress(ConnectionResetError):
        while data := await reader.read(65536):
            seen += data
    head, _, body = seen.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 200"):
        assert not body.endswith(b"0\r\n\r\n")
        assert b"content-length: 5" not in head or len(body) < 5
    else:
        assert b" 502 " in head.partition(b"\r\n")[0]  # it broke before anything was passed on
    writer.close()
    await until_closed(kit)


async def test_what_comes_after_an_answer_is_nobodys(kit: Ports) -> None:
    """A second answer behind the first must not become that of the next request."""
    kit.answers(HELLO + b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged")
    reader, writer = await kit.server.dial()
    for _ in range(2):
        writer.write(kit.head())
        assert b"forged" not in await reader.readuntil(b"hello")
    writer.close()


# --- smuggling, from the client's side --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        "content-length: 4\r\ntransfer-encoding: chunked",
        "content-length: 4\r\ncontent-length: 5",
        "content-length: 4, 4",
        "content-length: +4",
        "transfer-encoding: gzip, chunked",
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked",
        "transfer-encoding: xchunked",
        "transfer-encoding : chunked",
        " content-length: 4",
        "host: other",
        "host: 127.0.0.1",
    ],
)
async def test_requests_of_two_meanings(kit: Ports, lines: str) -> None:
    heads = kit.answers(HELLO)
    body = "0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
    head = f"POST / HTTP/1.1\r\nhost: {kit.host()}\r\nx-dsec-token: {kit.token}\r\nconnection: close\r\n{lines}\r\n\r\n"
    status, _, answer = await kit.server.raw_bytes((head + body).encode())
    assert status == 400, answer
    assert heads == []


async def test_the_host_is_one(kit: Ports) -> None:
    heads = kit.answers(HELLO)
    token = f"x-dsec-token: {kit.token}"
    assert (await kit.ask(f"http://{kit.host()}/a?b"))[0] == 200
    assert heads[0].startswith(b"GET /a?b HTTP/1.1\r\n")
    assert (await kit.ask("http://other/a"))[0] == 400
    for name in ("x-forwarded-host", "x-original-host", "forwarded"):
        assert (await kit.plain("/a", f"{name}: {kit.host()}", token, host="x"))[0] == 404
    assert len(heads) == 1
    assert (await kit.plain(host=kit.host(49983)))[0] == 404  # the API's own
    assert (await kit.ask(host=kit.host(domain="evil.example")))[0] == 421
    assert (await kit.ask(host=kit.host(0)))[0] == 400
    assert (await kit.ask(host=kit.host().upper() + ".:1"))[0] == 200


# --- who may ----------------------------------------------------------------------------------------------------------


async def test_tokens(kit: Ports) -> None:
    heads = kit.answers(HELLO)
    other, others_token = await kit.make()
    foreign_key = await kit.server.edge.create_key("other")
    access = kit.server.edge.access_token(kit.box)
    good = [
        f"x-dsec-token: {kit.token}",
        f"E2b-Traffic-Access-Token: {kit.token}",
        f"x-dsec-token: {access}",
        f"x-dsec-token: {kit.server.key}",
        f"authorization: Bearer {kit.server.key}",
        f"authorization: Bearer {kit.token}",
        f"cookie: a=1; dsec_token={kit.token}",
    ]
    for line in good:
        assert (await kit.plain("/", line))[0] == 200, line
        secret = line.split()[-1].removeprefix("dsec_token=")
        assert secret not in heads.pop().decode(), line
    bad = [
        "x-own: 1",
        f"x-dsec-token: {others_token}",
        f"x-dsec-token: {kit.server.edge.access_token(other)}",
        f"x-dsec-token: {kit.token[:-1]}",
        "x-dsec-token: \xff",
        "authorization: Bearer own",
        f"cookie: dsec_token={kit.server.key}",
        f"cookie: dsec_token={others_token}",
        f"x-access-token: {access}",
    ]
    for line in bad:
        is_error(await kit.plain("/", line), 401, "unauthenticated", "private")
    is_error(await kit.plain(f"/?dsec_token={kit.server.key}"), 401, "unauthenticated")
    is_error(await kit.plain("/", f"x-dsec-token: {foreign_key}"), 502, "sandbox_not_found", "was not found")
    assert heads == []
    answer = await kit.server.raw("GET", f"/v1/sandboxes/{kit.box}", key=kit.token)
    assert answer[0] == 401, "the token of ports is for ports"


async def test_a_browser_gets_a_cookie(kit: Ports) -> None:
    heads = kit.answers(HELLO)
    status, headers, _ = await kit.plain(f"//x/?a=1&dsec_token={kit.token}&b")
    assert (status, headers["location"]) == (303, "/.//x/?a=1&b")
    assert headers["set-cookie"] == f"dsec_token={kit.token}; path=/; httponly; samesite=lax"
    assert "secure" in (await kit.plain(f"/?dsec_token={kit.token}", "x-forwarded-proto: https"))[1]["set-cookie"]
    assert heads == []
    assert (await kit.plain(f"/p?dsec_token={kit.token}&b", method="POST", body=b"x"))[0] == 200
    assert heads[0].startswith(b"POST /p?b HTTP/1.1\r\n")


async def test_public_ports(kit: Ports) -> None:
    kit.answers(HELLO)
    for public, status in ((True, 200), ([PORT, 9000], 200), ([9000], 401), ([], 401), (False, 401)):
        kit.box, _ = await kit.make(public_ports=public)
        assert (await kit.plain())[0] == status, public


async def test_sandboxes_that_are_gone(kit: Ports) -> None:
    kit.answers(HELLO)
    kit.box, kit.token = await kit.make(public_ports=True)
    is_error(await kit.plain(host=kit.host(9000)), 502, "port_closed", "port is not open")
    await kit.server.edge.delete(kit.box)
    is_error(await kit.plain(), 502, "sandbox_ended", "was not found")
    kit.box = ID_OF_NOBODY
    is_error(await kit.plain(), 502, "sandbox_not_found", "was not found")


async def test_what_is_told_of_ports(kit: Ports) -> None:
    _, _, answer = await kit.server.raw("GET", f"/v1/sandboxes/{kit.box}/ports")
    port = kit.server.url.rpartition(":")[2]
    assert json.loads(answer) == {"domain": f"localhost:{port}", "token": kit.token, "public": False}
    async with kit.server.client() as client:
        box = await client.connect(kit.box)
        assert await box.get_host(PORT) == f"{PORT}-{kit.box}.localhost:{port}"
        assert await box.url(PORT) == f"http://{PORT}-{kit.box}.localhost:{port}/"
        assert await box.url(PORT, token=True) == f"http://{PORT}-{kit.box}.localhost:{port}/?dsec_token={kit.token}"
