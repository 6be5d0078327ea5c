"""The client's own HTTP/1.1: answers in any pieces, connections used again only after whole ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from yarl import URL

from dsec.errors import InvalidRequest, Unavailable
from dsec.sdk._config import Endpoint
from dsec.sdk._http import ConnectFailed, Pool
from dsec.sdk._transport import Transport
from free_port import free_port

BODY = bytes(range(256)) * 5
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x;an=extension\r\n%s\r\n" % (len(piece), piece) for piece in (BODY[:1], BODY[1:700], BODY[700:]))
    + b"0\r\nTrailer: nobody wants it\r\n\r\n"
)
WHOLE = {
    "with its length": b"HTTP/1.1 200 OK\r\nX-Request-Id:  r1 \r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
    "chunked": CHUNKED,
    "after an interim one": b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED,
}
PIECES = (1, 2, 3, 7, 1000, 100_000)


class Server:
    """Answers every request with the same bytes, `size` at a time."""

    def __init__(self, answer: bytes, size: int = 100_000, *, ends: bool = False) -> None:
        self.answer, self.size, self.ends = answer, size, ends
        self.connections = 0
        self.sent = 0
        self.began = asyncio.Event()
        self.asked: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
                for at in range(0, len(self.answer), self.size):
                    writer.write(self.answer[at : at + self.size])
                    await writer.drain()
                    self.sent = at + self.size
                    self.began.set()
                    await asyncio.sleep(0)
                if self.ends:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def pool_of(server: Server) -> AsyncIterator[Pool]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    pool = Pool(URL(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"))
    try:
        async with asyncio.timeout(120):
            yield pool
    finally:
        await pool.close()
        listening.close()


@pytest.mark.parametrize("size", PIECES)
@pytest.mark.parametrize("kind", WHOLE)
async def test_an_answer_in_pieces_is_the_same_and_its_connection_is_used_again(kind: str, size: int) -> None:
    server = Server(WHOLE[kind], size)
    async with pool_of(server) as pool:
        for _ in range(3):
            answer = await pool.ask(b"GET / HTTP/1.1\r\n\r\n")
            assert (answer.status, await answer.read(), await answer.read_some()) == (200, BODY, b"")
            assert answer.header("X-REQUEST-ID") == ("r1" if kind == "with its length" else None)
    assert (server.connections, len(server.asked)) == (1, 3)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
    ],
)
async def test_a_connection_that_may_say_more_is_not_used_again(answer: bytes) -> None:
    server = Server(answer)
    async with pool_of(server) as pool:
        for _ in range(2):
            found = await pool.ask(b"GET / HTTP/1.1\r\n\r\n")
            assert await found.read() == b"ok"
    assert server.connections == 2


@pytest.mark.parametrize("size", PIECES)
async def test_an_answer_without_a_length_ends_with_its_connection(size: int) -> None:
    async with pool_of(Server(b"HTTP/1.1 200 OK\r\n\r\n" + BODY, size, ends=True)) as pool:
        assert await (await pool.ask(b"GET / HTTP/1.1\r\n\r\n")).read() == BODY


async def test_an_answer_that_has_no_body_is_at_its_end() -> None:
    server = Server(b"HTTP/1.1 204 No Content\r\n\r\n")
    async with pool_of(server) as pool:
        for _ in range(2):
            answer = await pool.ask(b"GET / HTTP/1.1\r\n\r\n")
            assert (answer.status, answer.at_end, await answer.read()) == (204, True, b"")
    assert server.connections == 1


async def _read(pool: Pool) -> bytes:
    return await (await pool.ask(b"GET / HTTP/1.1\r\n\r\n")).read()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        CHUNKED[:-2],
        CHUNKED[:500],
    ],
)
async def test_an_answer_that_is_cut_is_an_error(answer: bytes) -> None:
    async with pool_of(Server(answer, ends=True)) as pool:
        with pytest.raises(ConnectionError):
            await _read(pool)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\nokokokokok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n+2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nokay\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 70_000,
    ],
)
async def test_what_is_not_http_is_an_error(answer: bytes) -> None:
    async with pool_of(Server(answer)) as pool:
        with pytest.raises(ConnectionError, match="not valid HTTP"):
            await _read(pool)


async def test_a_slow_reader_stops_the_sender() -> None:
    size = 64 << 20
    server = Server(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (size, bytes(size)), 1 << 16)
    async with pool_of(server) as pool:
        answer = await pool.ask(b"GET / HTTP/1.1\r\n\r\n")
        sent = -1
        while sent != server.sent:  # until it waits for us
            sent = server.sent
            await asyncio.sleep(0.2)
        assert sent < size // 2
        assert len(await answer.read()) == size


async def test_a_connection_whose_answer_nobody_waited_for_is_not_used_again() -> None:
    server = Server(WHOLE["chunked"], 1)
    async with pool_of(server) as pool:
        given_up = asyncio.create_task(pool.ask(b"GET / HTTP/1.1\r\n\r\n"))
        await server.began.wait()
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        (await pool.ask(b"GET / HTTP/1.1\r\n\r\n")).close()
        assert await _read(pool) == BODY
    assert server.connections == 3


async def test_where_nobody_listens_nothing_was_sent() -> None:
    with pytest.raises(ConnectFailed):
        await _read(Pool(URL(f"http://127.0.0.1:{free_port()}/")))


@pytest.mark.parametrize("steps", range(12))
async def test_who_connects_while_the_pool_is_closed_keeps_nobody(steps: int) -> None:
    """At whatever step of the event loop that is: a connection that nobody closes any more kept `close` for ever."""
    server = Server(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbegun")
    async with pool_of(server) as pool:
        reading = await pool.ask(b"GET / HTTP/1.1\r\n\r\n")
        assert await reading.read_some() == b"begun"
        connecting = asyncio.create_task(pool.ask(b"GET / HTTP/1.1\r\n\r\n"))
        for _ in range(steps):
            await asyncio.sleep(0)
        await asyncio.gather(pool.close(), pool.close())
        with pytest.raises(ConnectionError):
            await reading.read_some()
        with contextlib.suppress(ConnectionError):  # else it had its answer before
            (await connecting).close()
        with pytest.raises(ConnectFailed, match="closed here"):
            await pool.ask(b"GET / HTTP/1.1\r\n\r\n")
        await pool.close()


async def test_a_redirect_is_no_success_and_is_not_followed() -> None:
    server = Server(b"HTTP/1.1 307 Go\r\nLocation: /else\r\nContent-Length: 0\r\n\r\n")
    async with pool_of(server) as pool:
        transport = Transport(Endpoint(f"http://{pool._name}", "key"))
        url = transport.url("/v1/sandboxes/x")
        try:
            with pytest.raises(Unavailable, match="307"):
                await transport.call("DELETE", url, type(None), replay=False)
            with pytest.raises(Unavailable, match="307"):
                await transport.open("DELETE", url, replay=False)
        finally:
            await transport.close()
    assert len(server.asked) == 2


def test_a_key_cannot_bring_a_header_along() -> None:
    with pytest.raises(InvalidRequest):
        Pool(URL("http://127.0.0.1/")).head("key\r\nX-Evil: 1")
    assert Pool(URL("http://[::1]:8080/")).head("key") == "Host: [::1]:8080\r\nAuthorization: Bearer key\r\n"


@pytest.mark.parametrize("value", ["a\r\nEvil: 1", "a\nEvil: 1", "a\0", "\u00e9"])
async def test_a_header_carries_no_other_header(value: str) -> None:
    transport = Transport(Endpoint("http://127.0.0.1:1", "key"))
    with pytest.raises(InvalidRequest, match="can't be sent"):
        await transport.call("POST", transport.url("/v1/x"), dict, headers={"X-Dsec-Release": value})
    transport.speaks_for = value
    with pytest.raises(InvalidRequest, match="can't be sent"):
        await transport.call("POST", transport.url("/v1/x"), dict)
    await transport.close()
