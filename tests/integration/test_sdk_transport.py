"""How the SDK finds its server, when it tries again, and that nobody has to close it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from api_kit import served

from dsec import AsyncClient
from dsec.errors import (
    AdmissionTimeout,
    DsecError,
    InvalidRequest,
    QuotaExceeded,
    RequestTimeout,
    SandboxLost,
    Unavailable,
)
from dsec.sdk._config import DEFAULT_URL, Endpoint, find_endpoint, write_endpoint


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives these answers in turn, the last one for ever; also the requests that it saw."""
    requests: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        requests.append(head)
        answer = answers[min(len(requests), len(answers)) - 1]
        if answer:
            writer.write(answer)
            await writer.drain()
        else:
            await reader.read()  # say nothing
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()
        await asyncio.sleep(0)


def answer(status: int, body: bytes, *headers: str) -> bytes:
    head = f"HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"".join(f"{header}\r\n".encode() for header in headers) + b"\r\n" + body


def failure(error: DsecError, *headers: str) -> bytes:
    return answer(error.http_status, msgspec.json.encode(error.body()), "content-type: application/json", *headers)


GOOD = answer(200, b'{"live": 3}')


async def test_overload_is_tried_again_after_as_long_as_it_says() -> None:
    busy = failure(Unavailable("starting"), "retry-after: 0.3")
    async with answering(busy, busy, GOOD) as (url, requests), AsyncClient(url) as client:
        began = time.monotonic()
        assert (await client.node())["live"] == 3
        assert time.monotonic() - began >= 0.6
        assert len(requests) == 3


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_proxy_in_between_that_is_down(status: int) -> None:
    async with answering(answer(status, b"<html>sorry"), GOOD) as (url, requests), AsyncClient(url) as client:
        assert (await client.node())["live"] == 3
        assert len(requests) == 2


@pytest.mark.parametrize("error", [SandboxLost("gone"), AdmissionTimeout("full"), QuotaExceeded("too much")])
async def test_what_another_attempt_cannot_help(error: DsecError) -> None:
    async with answering(failure(error), GOOD) as (url, requests), AsyncClient(url) as client:
        with pytest.raises(type(error)):
            await client.node()
        assert len(requests) == 1


async def test_it_gives_up_when_the_time_is_over() -> None:
    async with answering(failure(Unavailable("starting"), "retry-after: 0")) as (url, requests):
        for retry_s in (0.2, 2.0, 20.0):  # a host that stands still may leave time for one
            async with AsyncClient(url, retry_s=retry_s) as client:
                with pytest.raises(Unavailable, match="starting"):
                    await client.node()
            if len(requests) > 2:
                break
            requests.clear()
        assert len(requests) > 2


async def test_who_waits_long_is_told_why_and_once_for_all(caplog: pytest.LogCaptureFixture) -> None:
    full = failure(Unavailable("the server's disk is full"), "retry-after: 4")
    async with answering(full, full, GOOD) as (url, _), AsyncClient(url) as client:
        await asyncio.gather(client.node(), client.node())
    (told,) = [record.getMessage() for record in caplog.records if record.name == "dsec.sdk"]
    assert told.startswith("the server's disk is full; trying again for ")


async def test_a_short_wait_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    busy = failure(Unavailable("starting"), "retry-after: 0.1")
    async with answering(busy, GOOD) as (url, _), AsyncClient(url) as client:
        await client.node()
    assert not [record for record in caplog.records if record.name == "dsec.sdk"]


async def test_the_command_line_says_what_it_waits_for() -> None:
    full = failure(Unavailable("the server's disk is full"), "retry-after: 4")
    async with answering(full, answer(200, b'{"environments": []}')) as (url, _):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dsec.cli.main", "env", "ls"),
            env={**os.environ, "DSEC_URL": url, "DSEC_API_KEY": "k"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
    assert re.fullmatch(rb"dsec: the server's disk is full; trying again for \d+ s\n", said)
    assert process.returncode == 0


async def test_a_batch_keeps_its_key_over_attempts() -> None:
    item = b'{"index":0,"error":{"code":"create_failed","message":"x"}}\n'
    busy = failure(Unavailable("starting"), "retry-after: 0")
    async with answering(busy, answer(200, item)) as (url, requests), AsyncClient(url) as client:
        assert [result.index async for result in client.create_many("base", count=1)] == [0]
    lines = [request.split(b"\r\n")[0] for request in requests]
    assert b"key=" in lines[0]
    assert lines[0] == lines[1]


async def test_no_server_there() -> None:
    async with answering(GOOD) as (url, _):
        pass
    async with AsyncClient(url, retry_s=3600) as client, asyncio.timeout(120):  # it doesn't go on trying
        with pytest.raises(Unavailable, match="no server answers") as caught:
            await client.node()
        assert "dsec serve" in caught.value.remedy
        assert caught.value.infra


async def test_something_else_there() -> None:
    async with answering(answer(200, b"<html>hello</html>")) as (url, _), AsyncClient(url) as client:
        with pytest.raises(Unavailable, match="not that of a dsec server"):
            await client.node()


async def test_request_timeout_has_a_name_and_a_class() -> None:
    async with answering(b"") as (url, _), AsyncClient(url) as client:
        with pytest.raises(RequestTimeout, match=r"request_timeout_s=0\.1"):
            await client.node(request_timeout_s=0.1)
        with pytest.raises(RequestTimeout):
            _ = [item async for item in client.create_many("base", count=1, request_timeout_s=0.1)]


async def test_a_closed_client_says_so() -> None:
    async with answering(GOOD) as (url, _):
        client = AsyncClient(url)
        await client.node()
        await client.close()
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await client.node()


def test_an_event_loop_may_come_and_go(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """One client in several loops, closed by nobody: no warning, no connection left."""
    clients: list[AsyncClient] = []

    async def use() -> None:
        async with served(tmp_path) as server:
            if not clients:
                clients.append(server.client())
            clients[0]._transport.endpoint = Endpoint(server.url, server.key)
            assert (await clients[0].node())["live"] == 0

    for _ in range(2):
        asyncio.run(use())
    assert not [str(warning.message) for warning in recwarn if "nclosed" in str(warning.message)]


# --- configuration ---


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DSEC_URL", "DSEC_API_KEY", "DSEC_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("dsec.sdk._config._STATE", tmp_path / "system")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    for name in ("system", "home/.config/dsec", "state"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def test_where_the_server_is_looked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_endpoint() == Endpoint(DEFAULT_URL, "")
    steps: list[tuple[Callable[[], object], Endpoint]] = [
        (lambda: write_endpoint(home / "system", Endpoint("http://s", "ks")), Endpoint("http://s", "ks")),
        (lambda: write_endpoint(home / "home/.config/dsec", Endpoint("http://h", "kh")), Endpoint("http://h", "kh")),
        (lambda: write_endpoint(home / "state", Endpoint("http://t", "kt")), Endpoint("http://h", "kh")),
        (lambda: monkeypatch.setenv("DSEC_STATE", str(home / "state")), Endpoint("http://t", "kt")),
        (lambda: monkeypatch.setenv("DSEC_URL", "http://e/"), Endpoint("http://e", "")),
        (lambda: monkeypatch.setenv("DSEC_API_KEY", "ke"), Endpoint("http://e", "ke")),
    ]
    for step, expected in steps:
        step()
        assert find_endpoint() == expected
    assert find_endpoint("http://a", "ka") == Endpoint("http://a", "ka")
    monkeypatch.delenv("DSEC_API_KEY")
    assert find_endpoint("http://t") == Endpoint("http://t", "kt")  # the file's server: its key goes with it
    assert find_endpoint("http://other").api_key == ""  # a key is never sent to another server


async def test_where_an_address_without_a_server_came_from(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever set `DSEC_STATE` to an empty directory doesn't think of the file of another server."""
    path = write_endpoint(home / "system", Endpoint("http://127.0.0.1:9", "k"))
    monkeypatch.setenv("DSEC_STATE", str(home / "state"))
    async with AsyncClient() as client:
        with pytest.raises(Unavailable, match=re.escape(f"no server answers at http://127.0.0.1:9 (as {path} says): ")):
            await client.node()
    async with AsyncClient("http://127.0.0.1:10", "k") as client:
        with pytest.raises(Unavailable, match=re.escape("no server answers at http://127.0.0.1:10: ")):
            await client.node()


def test_the_file_is_its_owners_alone(home: Path) -> None:
    path = write_endpoint(home / "state", Endpoint("http://t", "kt"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in (home / "state").iterdir()] == ["client.json"]


def test_bad_configuration_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="not a URL"):
        find_endpoint("localhost:7070")
    (home / "system" / "client.json").write_text("{")
    with pytest.raises(InvalidRequest, match="damaged"):
        find_endpoint()


def test_the_client_at_exit_of_a_process_is_quiet() -> None:
    """Nobody closed anything, and the server isn't there: one clear error, no warnings after it."""
    program = """
import asyncio, dsec
async def main():
    try:
        await dsec.AsyncSandbox.create("base", request_timeout_s=20)
    except dsec.errors.Unavailable:
        pass
asyncio.run(main())
try:
    dsec.Sandbox.create("base")
except dsec.errors.Unavailable:
    pass
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program],
        env={"DSEC_URL": "http://127.0.0.1:9", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "nclosed" not in done.stderr
    assert "never retrieved" not in done.stderr


async def test_a_server_that_starts_again_with_another_key(home: Path, tmp_path: Path) -> None:
    """As `dsec serve` does after a crash: the old key ends a moment before the new one is written."""
    async with served(tmp_path / "server") as server:
        write_endpoint(home / "system", Endpoint(server.url, server.key))
        async with AsyncClient() as client:
            box = await client.create("base")
            for key in server.edge.list_keys():
                await server.edge.revoke_key(key.id)

            async def later() -> None:
                await asyncio.sleep(0.2)
                write_endpoint(home / "system", Endpoint(server.url, await server.edge.create_key("project")))

            task = asyncio.create_task(later())
            results = await asyncio.gather(*(box.commands.run(["echo", "hi"]) for _ in range(20)))
            assert [result.stdout for result in results] == ["hi\n"] * 20
            await task
            assert (await box.commands.run(["echo", "hi"])).stdout == "hi\n"
            await box.kill()
