"""The short way of short commands: what it answers is what the ordinary way answers, and whatever doesn't fit goes
there, once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from api_kit import Served, served, unchunked
from edge_kit import spec as sandbox_spec
from edge_kit import until

from dsec import AsyncClient, AsyncSandbox
from dsec.errors import Conflict, DsecError, OutcomeUnknown, SandboxEnded, SandboxNotFound
from dsec.spec.causes import Cause
from dsec.wire.exec_stream import ServerDecoder, ServerKind

END = b"\r\n\r\n"


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


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way is left for what a command does, not for a host that stands still."""
    monkeypatch.setattr("dsec.api.quick.SOON_S", 60.0)


def quick(server: Served) -> int:
    """Commands that were answered by the short way."""
    api: Any = server.server._api
    return int(api.metrics.quick)


def request(server: Served, box: str, *more: str, bearer: str | None = None, **spec: Any) -> bytes:
    """As the SDK says it; `more`: headers in between."""
    body = json.dumps(spec).encode()
    lines = [
        f"POST /v1/sandboxes/{box}/exec?hold_ms=1000 HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {bearer or server.key}",
        "Content-Type: application/json",
        *more,
        "X-Request-Id: r1",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One answer of a connection that stays."""
    head = (await reader.readuntil(END)).decode("latin-1").removesuffix("\r\n\r\n")
    status, *lines = head.split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines)
    if "content-length" in fields:
        return int(status.split()[1]), fields, await reader.readexactly(int(fields["content-length"]))
    return int(status.split()[1]), fields, unchunked(await reader.readuntil(b"0\r\n\r\n"))


def told(body: bytes) -> list[tuple[ServerKind, Any]]:
    """Frames, without what is another in every run."""
    found: list[tuple[ServerKind, Any]] = []
    for kind, payload in ServerDecoder().feed(body):
        if kind in (ServerKind.STDOUT, ServerKind.STDERR):
            found.append((kind, payload))
            continue
        fields = json.loads(payload)
        varies = ("pid", "key", "wall_s", "cpu_s", "max_rss_bytes")
        found.append((kind, {name: value for name, value in fields.items() if name not in varies}))
    return found


@pytest.mark.parametrize(
    "argv",
    [["true"], ["false"], ["sh", "-c", "echo out; echo err >&2; exit 3"], ["no such program"], ["seq", "1", "9000"]],
)
@pytest.mark.usefixtures("patient")
async def test_both_ways_answer_alike(server: Served, box: AsyncSandbox, argv: list[str]) -> None:
    reader, writer = await server.dial()
    writer.write(request(server, box.id, argv=argv, key="k1"))
    status, headers, body = await answer(reader)
    assert quick(server) == 1
    writer.write(request(server, box.id, "X-Other: 1", argv=argv, key="k2"))
    ordinary = await answer(reader)
    assert quick(server) == 1
    writer.close()
    assert (status, told(body)) == (ordinary[0], told(ordinary[2])) == (200, told(body))
    assert headers["x-request-id"] == ordinary[1]["x-request-id"] == "r1"
    assert {name for name, _ in headers.items()} == {name for name, _ in ordinary[1].items()}
    kinds = [entry.type for entry in [each async for each in box.trajectory()]]
    assert kinds == ["create", "exec", "result", "exec", "result"]


@pytest.mark.usefixtures("patient")
async def test_the_sdk_goes_the_short_way(server: Served, client: AsyncClient, box: AsyncSandbox) -> None:
    for _ in range(3):
        assert (await box.commands.run("echo hi")).stdout == "hi\n"
    assert quick(server) == 3
    commands = server.edge._lives.sandboxes[box.id].commands
    assert commands is not None
    assert len(commands) == 1  # each released the one before it
    named = client.run("grpo-7", lease_s=60)
    inside = await named.sandbox("one", sandbox_spec())
    assert (await inside.commands.run("true")).exit_code == 0
    assert quick(server) == 4
    async with server.client() as other:
        await other.run("grpo-7", lease_s=60).open()  # of an epoch later: the former one is fenced off
    with pytest.raises(DsecError):
        await inside.commands.run("true")
    assert quick(server) == 4


@pytest.mark.parametrize("step", [1, 7, 150, 400])
async def test_a_request_in_pieces_goes_the_ordinary_way(server: Served, box: AsyncSandbox, step: int) -> None:
    reader, writer = await server.dial()
    whole = request(server, box.id, argv=["echo", "x" * 400], key="k")
    for at in range(0, len(whole), step):
        writer.write(whole[at : at + step])
        await writer.drain()
        await asyncio.sleep(0)
    status, _, body = await answer(reader)
    writer.close()
    assert (status, told(body)[1]) == (200, (ServerKind.STDOUT, b"x" * 400 + b"\n"))


async def test_a_body_that_looks_like_a_request_is_none(server: Served, box: AsyncSandbox) -> None:
    """Also where the answer has left before the body was there."""
    inner = request(server, box.id, argv=["echo", "smuggled"], key="smuggled")
    for key in (server.key, "wrong"):
        reader, writer = await server.dial()
        head = f"PUT /v1/sandboxes/{box.id}/files?path=/f HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        writer.write(f"{head}Content-Length: {len(inner) + 2}\r\n\r\n".encode())
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(inner)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b"..")
        assert (await answer(reader))[0] == (200 if key == server.key else 401)
        writer.close()
    assert quick(server) == 0
    assert "smuggled" not in str([entry.data async for entry in box.trajectory() if entry.type == "exec"])


async def test_requests_behind_one_another_are_answered_in_order(server: Served, box: AsyncSandbox) -> None:
    reader, writer = await server.dial()
    writer.write(request(server, box.id, argv=["sh", "-c", "sleep 0.1; echo 1"], key="k1"))
    await until(lambda: server.edge.processes(box.id))
    writer.write(request(server, box.id, argv=["echo", "2"], key="k2"))
    await asyncio.sleep(0.02)
    writer.write(request(server, box.id, argv=["echo", "3"], key="k3") + request(server, box.id, argv=["false"]))
    bodies = [told((await answer(reader))[2]) for _ in range(4)]
    writer.close()
    assert [frames[1][1] for frames in bodies[:3]] == [b"1\n", b"2\n", b"3\n"]
    assert bodies[3][-1][1]["exit_code"] == 1


async def test_a_command_that_takes_long_goes_the_ordinary_way(server: Served, box: AsyncSandbox) -> None:
    before = server.kit.host.guests[box.id].highest
    result = await box.commands.run("echo one; sleep 1.3; echo two")
    assert (result.stdout, result.exit_code) == ("one\ntwo\n", 0)
    assert server.kit.host.guests[box.id].highest == before + 1
    assert quick(server) == 0
    assert not server.edge._lives.sandboxes[box.id].requests


async def test_output_is_not_held_for_longer_than_a_second(server: Served, box: AsyncSandbox) -> None:
    reader, writer = await server.dial()
    writer.write(request(server, box.id, argv=["sh", "-c", "echo now; sleep 600"], key="k"))
    assert b"now" in await reader.readuntil(b"now")
    assert server.edge.processes(box.id), "it runs on"
    writer.close()


async def test_much_output_goes_the_ordinary_way(server: Served, box: AsyncSandbox) -> None:
    result = await box.commands.run(["seq", "1", "100000"])
    assert result.stdout_bytes == b"".join(b"%d\n" % n for n in range(1, 100_001))
    assert quick(server) == 0


async def test_who_vanishes_stops_nothing(server: Served, box: AsyncSandbox) -> None:
    _, writer = await server.dial()
    writer.write(request(server, box.id, argv=["sh", "-c", "sleep 0.3; echo on"], key="k"))
    await until(lambda: server.edge.processes(box.id))
    writer.transport.abort()
    await until(lambda: not server.edge._lives.sandboxes[box.id].requests)
    result = await box.commands.run("sleep 0.3; echo on", key="other")
    assert result.stdout == "on\n"
    attached = await box.commands.attach("k")
    assert (await attached.wait()).stdout == "on\n"


async def test_a_key_runs_once(server: Served, box: AsyncSandbox) -> None:
    both = await asyncio.gather(*(box.commands.run("sleep 0.1; echo x", key="k") for _ in range(2)))
    assert [result.stdout for result in both] == ["x\n", "x\n"]
    assert (await box.commands.run("sleep 0.1; echo x", key="k")).stdout == "x\n"
    with pytest.raises(Conflict):
        await box.commands.run("echo y", key="k")
    assert server.kit.host.guests[box.id].highest == 1


async def test_who_may_not_is_refused_the_ordinary_way(server: Served, client: AsyncClient, box: AsyncSandbox) -> None:
    foreign = await server.edge.create_key("other")
    for bearer, expected in ((foreign, 404), ("dsk_wrong", 401), (server.key, 200)):
        reader, writer = await server.dial()
        writer.write(request(server, box.id, bearer=bearer, argv=["true"], key="k"))
        assert (await answer(reader))[0] == expected
        writer.close()
    with pytest.raises(SandboxNotFound):
        await client.connect("0" * 24)
    await box.kill()
    with pytest.raises(SandboxEnded):
        await box.commands.run("true")


async def test_a_guest_that_dies_under_a_command_is_told_of(server: Served, box: AsyncSandbox) -> None:
    running = asyncio.create_task(box.commands.run("sleep 60"))
    await until(lambda: server.edge.processes(box.id))
    server.kit.host.guests[box.id].die()
    with pytest.raises((OutcomeUnknown, DsecError)) as caught:
        await running
    assert caught.value.infra or caught.value.details.get("cause") == Cause.GUEST_EXITED


async def test_a_server_that_stops_lets_a_command_go_on(server: Served, box: AsyncSandbox) -> None:
    running = asyncio.create_task(box.commands.run("sleep 0.4; echo done"))
    await until(lambda: server.edge.processes(box.id))
    await server.restart()
    assert (await running).stdout == "done\n"
    assert server.kit.host.guests[box.id].highest == 1
