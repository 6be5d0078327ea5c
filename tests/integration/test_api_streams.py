"""Commands and files over HTTP: frames, clients that vanish or stall, bodies that are cut, bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from api_kit import Served, served, unchunked
from edge_kit import until

from dsec.api import exchange
from dsec.edge.node import Edge
from dsec.errors import Internal
from dsec.wire.exec_stream import MEDIA_TYPE, ClientKind, ServerDecoder, ServerKind, encode


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as server:
        yield server


@pytest.fixture
async def box(server: Served) -> str:
    async with server.client() as client:
        return (await client.create("base")).id


def frames(body: bytes) -> list[tuple[ServerKind, Any]]:
    found: list[tuple[ServerKind, Any]] = []
    for kind, payload in ServerDecoder().feed(body):
        is_json = kind in (ServerKind.STARTED, ServerKind.END, ServerKind.ERROR)
        found.append((kind, json.loads(payload) if is_json else payload))
    return found


async def run(server: Served, box: str, **spec: Any) -> list[tuple[ServerKind, Any]]:
    status, headers, body = await server.raw("POST", f"/v1/sandboxes/{box}/exec", json.dumps(spec).encode())
    assert (status, headers["content-type"]) == (200, MEDIA_TYPE)
    return frames(body)


def head(server: Served, method: str, path: str, *more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {server.key}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


async def test_the_frames_of_a_command(server: Served, box: str) -> None:
    answer = await run(server, box, argv=["sh", "-c", "echo out; echo err >&2; exit 3"], key="k")
    kinds = [kind for kind, _ in answer]
    assert kinds[0] is ServerKind.STARTED
    assert answer[0][1]["key"] == "k"
    assert answer[0][1]["pid"] > 1
    assert kinds[-1] is ServerKind.END
    assert answer[-1][1]["exit_code"] == 3
    assert b"".join(data for kind, data in answer if kind is ServerKind.STDOUT) == b"out\n"
    assert b"".join(data for kind, data in answer if kind is ServerKind.STDERR) == b"err\n"


async def test_a_missing_binary_is_a_result(server: Served, box: str) -> None:
    answer = await run(server, box, argv=["/no/such"])
    assert "pid" not in answer[0][1]
    assert answer[-1][1]["exit_code"] == 127
    assert answer[-1][1]["cause"] == "start_failed"


@pytest.fixture
def long_hold(monkeypatch: pytest.MonkeyPatch) -> int:
    """Milliseconds for which output is held where the caller wants it: no command takes so long, on any host."""
    monkeypatch.setattr("dsec.api.exec.MAX_HOLD_MS", 60_000)
    return 60_000


async def test_a_short_command_is_one_packet(server: Served, box: str, long_hold: int) -> None:
    reader, writer = await server.dial()
    body = json.dumps({"argv": ["echo", "hi"]}).encode()
    path = f"/v1/sandboxes/{box}/exec?hold_ms={long_hold}"
    writer.write(head(server, "POST", path, f"content-length: {len(body)}") + body)
    first = await reader.read(65536)
    fields, _, answer = first.partition(b"\r\n\r\n")
    assert frames(answer)[-1][0] is ServerKind.END
    assert f"content-length: {len(answer)}".encode() in fields.lower()
    writer.close()


async def test_output_comes_while_the_command_runs(server: Served, box: str) -> None:
    async with server.client() as client:
        command = await (await client.connect(box)).commands.start(["cat"], stdin=True)
        pieces = aiter(command)
        for word in (b"one", b"two"):
            await command.write_stdin(word)
            async with asyncio.timeout(60):
                assert (await anext(pieces)).data == word
        await command.close_stdin()
        assert (await command.wait()).exit_code == 0


async def test_a_client_that_vanishes_leaves_the_command_running(server: Served, box: str) -> None:
    reader, writer = await server.dial()
    body = json.dumps({"argv": ["sh", "-c", "echo begun; sleep 0.3; echo done"], "key": "k"}).encode()
    writer.write(head(server, "POST", f"/v1/sandboxes/{box}/exec", f"content-length: {len(body)}") + body)
    received = b""
    while b"begun" not in received:
        received += await reader.read(4096)
    writer.transport.abort()
    status, _, answer = await server.raw("GET", f"/v1/sandboxes/{box}/exec/k?stdout_from=6")
    assert status == 200
    found = frames(answer)
    assert [data for kind, data in found if kind is ServerKind.STDOUT] == [b"done\n"]
    assert found[-1][1]["exit_code"] == 0


async def test_a_vanished_client_is_noticed(server: Served, box: str) -> None:
    """The stream's task ends when its client is gone, though the command writes nothing."""
    reader, writer = await server.dial()
    body = json.dumps({"argv": ["sleep", "60"], "key": "k"}).encode()
    writer.write(head(server, "POST", f"/v1/sandboxes/{box}/exec", f"content-length: {len(body)}") + body)
    await reader.readuntil(b"\r\n\r\n")
    tasks = server.server._server.server_state.tasks  # type: ignore[union-attr]
    await until(lambda: len(tasks) == 1)
    writer.transport.abort()
    await until(lambda: not tasks)
    await server.edge.signal(box, "k", 9, "all")
    execution = await server.edge.attach(box, "k")
    events = [event async for event in execution.events()]
    assert events[-1].cause == "killed"  # type: ignore[union-attr]


async def test_attaching_to_nothing(server: Served, box: str) -> None:
    assert (await server.error("GET", f"/v1/sandboxes/{box}/exec/nobody"))[:2] == (404, "not_found")
    answer = await server.error("GET", f"/v1/sandboxes/{box}/exec/nobody?stdout_from=-1")
    assert answer[:2] == (400, "invalid_request")


async def test_the_same_key_runs_once(server: Served, box: str) -> None:
    first = await run(server, box, argv=["sh", "-c", "echo $$"], key="a/b c")
    again = await run(server, box, argv=["sh", "-c", "echo $$"], key="a/b c")
    assert again[0][1]["attached"]
    assert [data for kind, data in first if kind is ServerKind.STDOUT] == [
        data for kind, data in again if kind is ServerKind.STDOUT
    ]
    other = json.dumps({"argv": ["true"], "key": "a/b c"}).encode()
    assert (await server.error("POST", f"/v1/sandboxes/{box}/exec", other))[:2] == (409, "conflict")
    assert (await server.raw("GET", f"/v1/sandboxes/{box}/exec/a%2Fb%20c"))[0] == 200
    assert (await server.raw("DELETE", f"/v1/sandboxes/{box}/exec/a%2Fb%20c"))[0] == 204
    assert (await server.raw("DELETE", f"/v1/sandboxes/{box}/exec/a%2Fb%20c"))[0] == 204
    recorded = await run(server, box, argv=["sh", "-c", "echo $$"], key="a/b c")  # also after its release
    assert recorded[0][1]["attached"]
    assert recorded[1:] == again[1:]


async def test_results_are_released_by_a_later_request(server: Served, box: str) -> None:
    for key in ("one", "two", "three"):
        await run(server, box, argv=["true"], key=key)
    body = json.dumps({"argv": ["true"], "key": "four"}).encode()
    await server.raw("POST", f"/v1/sandboxes/{box}/exec", body, x_dsec_release="one,nobody")
    assert kept(server, box) == 3
    await server.raw("POST", f"/v1/sandboxes/{box}/exec:release", b'{"keys": ["two", "three", "nobody"]}')
    assert kept(server, box) == 1
    for key in ("one", "two", "three", "four"):
        assert (await server.raw("GET", f"/v1/sandboxes/{box}/exec/{key}"))[0] == 200  # results are on record


def kept(server: Served, box: str) -> int:
    """Commands that the edge and the guest hold on to."""
    return len(server.edge._lives.sandboxes[box].commands or {})


async def test_stdin_in_frames(server: Served, box: str) -> None:
    spec = json.dumps({"argv": ["cat"], "stdin": True, "key": "k"}).encode()
    body = encode(ClientKind.SPEC, spec) + encode(ClientKind.STDIN, b"hello ") + encode(ClientKind.STDIN, b"there")
    body += encode(ClientKind.STDIN_END)
    for _ in range(2):  # the second is a repetition: it adds nothing
        status, _, answer = await server.raw("POST", f"/v1/sandboxes/{box}/exec", body, content_type=MEDIA_TYPE)
        assert status == 200
        assert b"".join(data for kind, data in frames(answer) if kind is ServerKind.STDOUT) == b"hello there"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        encode(ClientKind.STDIN, b"first"),
        encode(ClientKind.SPEC, b"{"),
        encode(ClientKind.SPEC, b"{}"),
        b"\x09\x00\x00\x00\x00",
        b"\x00\xff\xff\xff\xff",
    ],
)
async def test_bad_frames(server: Served, box: str, body: bytes) -> None:
    answer = await server.error("POST", f"/v1/sandboxes/{box}/exec", body, content_type=MEDIA_TYPE)
    assert answer[:2] == (400, "invalid_request")


async def test_bad_frames_after_the_start_end_stdin(server: Served, box: str) -> None:
    spec = json.dumps({"argv": ["cat"], "stdin": True}).encode()
    body = encode(ClientKind.SPEC, spec) + encode(ClientKind.STDIN, b"x") + b"\x09\x00\x00\x00\x00"
    status, _, answer = await server.raw("POST", f"/v1/sandboxes/{box}/exec", body, content_type=MEDIA_TYPE)
    assert status in (200, 400)
    if status == 200:
        assert frames(answer)[-1][0] is ServerKind.END


async def test_stdin_by_itself_is_taken_once(server: Served, box: str) -> None:
    reader, writer = await server.dial()
    body = json.dumps({"argv": ["cat"], "stdin": True, "key": "k"}).encode()
    writer.write(head(server, "POST", f"/v1/sandboxes/{box}/exec", f"content-length: {len(body)}") + body)
    await reader.readuntil(b"\r\n\r\n")
    path = f"/v1/sandboxes/{box}/exec/k/stdin"
    assert json.loads((await server.raw("POST", f"{path}?offset=0", b"abc"))[2]) == {"offset": 3}
    assert json.loads((await server.raw("POST", f"{path}?offset=0", b"abc"))[2]) == {"offset": 3}
    assert json.loads((await server.raw("POST", f"{path}?offset=1", b"bcde"))[2]) == {"offset": 5}
    assert (await server.error("POST", f"{path}?offset=9", b"x"))[:2] == (400, "invalid_request")
    assert json.loads((await server.raw("POST", path, b"f"))[2]) == {"offset": 6}
    assert json.loads((await server.raw("POST", f"{path}?eof=true"))[2]) == {"offset": 6}
    rest = unchunked(await reader.readuntil(b"0\r\n\r\n"))
    writer.close()
    assert b"".join(data for kind, data in frames(rest) if kind is ServerKind.STDOUT) == b"abcdef"


async def test_signals(server: Served, box: str) -> None:
    reader, writer = await server.dial()
    body = json.dumps({"argv": ["sleep", "60"], "key": "k"}).encode()
    writer.write(head(server, "POST", f"/v1/sandboxes/{box}/exec", f"content-length: {len(body)}") + body)
    await reader.readuntil(b"\r\n\r\n")
    path = f"/v1/sandboxes/{box}/exec/k/signal"
    assert (await server.error("POST", path, b'{"signal": 15, "scope": "all"}'))[:2] == (400, "invalid_request")
    assert (await server.raw("POST", path, b'{"signal": 9, "scope": "all"}'))[0] == 204
    answer = frames(unchunked(await reader.readuntil(b"0\r\n\r\n")))
    writer.close()
    assert answer[-1][1]["cause"] == "killed"
    assert (await server.raw("POST", path, b'{"signal": 9, "scope": "all"}'))[0] == 204


async def test_the_sandbox_ends_under_a_command(server: Served, box: str) -> None:
    reader, writer = await server.dial()
    body = json.dumps({"argv": ["sleep", "60"], "key": "k"}).encode()
    writer.write(head(server, "POST", f"/v1/sandboxes/{box}/exec", f"content-length: {len(body)}") + body)
    await reader.readuntil(b"\r\n\r\n")
    await server.edge.delete(box)
    answer = frames(unchunked(await reader.readuntil(b"0\r\n\r\n")))
    writer.close()
    assert answer[-1][0] is ServerKind.ERROR
    assert answer[-1][1]["code"] == "sandbox_ended"


async def test_endless_output_waits_for_a_slow_reader(server: Served, box: str) -> None:
    """Nothing between the command and its client grows while the client doesn't read."""
    reader, writer = await server.dial()
    body = json.dumps({"argv": ["yes"], "output_bytes": 1 << 40}).encode()
    writer.write(head(server, "POST", f"/v1/sandboxes/{box}/exec", f"content-length: {len(body)}") + body)
    await reader.readuntil(b"\r\n\r\n")
    transport: Any = writer.transport
    transport.pause_reading()
    guest = server.kit.host.guests[box]

    def written() -> int:
        return sum(operation.streams[0].end for operation in guest.operations.values())

    last = -1
    while (now := written()) != last:
        last = now
        await asyncio.sleep(0.2)
    assert now < 32 << 20
    writer.transport.abort()


async def test_files_both_ways(server: Served, box: str) -> None:
    data = bytes(range(256)) * 4096
    path = f"/v1/sandboxes/{box}/files?path=/a/%ff%2B+b"
    assert (await server.error("PUT", path, data))[:2] == (404, "file_not_found")
    status, _, answer = await server.raw("PUT", path + "&parents=true&mode=600", data)
    assert (status, json.loads(answer)) == (200, {"bytes": len(data)})
    assert (await server.raw("GET", path))[2] == data
    assert (await server.raw("GET", path + "&offset=5&length=7"))[2] == data[5:12]
    assert (await server.raw("GET", path + f"&offset={len(data)}"))[2] == b""
    listing = json.loads((await server.raw("GET", f"/v1/sandboxes/{box}/files/list?path=/a"))[2])["entries"]
    assert [(each["name"], each["name_b64"], each["mode"]) for each in listing] == [("\ufffd+ b", "/ysgYg==", 0o600)]
    assert (await server.error("GET", f"/v1/sandboxes/{box}/files?path=/nothing"))[:2] == (404, "file_not_found")
    assert (await server.error("GET", f"/v1/sandboxes/{box}/files?path=/a"))[:2] == (409, "file_error")
    exclusive = await server.error("PUT", path + "&exclusive=true", b"x")
    assert exclusive[:2] == (409, "file_error")


@pytest.mark.parametrize("framing", ["content-length: 1000000", "transfer-encoding: chunked"])
async def test_a_cut_upload_leaves_the_file_as_it_was(server: Served, box: str, framing: str) -> None:
    path = f"/v1/sandboxes/{box}/files?path=/f"
    await server.raw("PUT", path, b"before")
    _, writer = await server.dial()
    part = bytes(100_000)
    writer.write(head(server, "PUT", path, framing))
    writer.write(b"%x\r\n%b\r\n" % (len(part), part) if "chunked" in framing else part)
    await writer.drain()
    tasks = server.server._server.server_state.tasks  # type: ignore[union-attr]
    await until(lambda: len(tasks) == 1)
    writer.transport.abort()
    await until(lambda: not tasks)
    assert (await server.raw("GET", path))[2] == b"before"
    names = [entry.name for entry in await server.edge.list_files(box, b"/")]
    assert not [name for name in names if "dsec" in name or name.startswith(".")]


async def test_a_body_that_stands_still_is_given_up(server: Served, box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_IDLE_S", 0.1)
    monkeypatch.setattr(exchange, "DRAIN_S", 0.1)
    for method, path in (("PUT", "files?path=/f"), ("POST", "exec")):
        reader, writer = await server.dial()
        writer.write(head(server, method, f"/v1/sandboxes/{box}/{path}", "content-length: 100") + b"x")
        answer = await reader.readuntil(b"}")
        assert b" 400 " in answer.partition(b"\r\n")[0]
        assert b"stood still" in answer
        writer.close()


class Slow:
    """An edge that takes an upload only when it is told to."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self.go_on = asyncio.Event()
        self.taken = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._edge, name)

    async def write_file(self, _: str, __: bytes, data: AsyncIterator[bytes], **___: object) -> int:
        async for chunk in data:
            self.taken += len(chunk)
            await self.go_on.wait()
        return self.taken

    async def read_file(self, *_: object, **__: object) -> AsyncIterator[bytes]:
        yield bytes(100_000)
        raise Internal("the disk broke")


async def test_an_upload_waits_for_a_slow_guest(tmp_path: Path) -> None:
    slow: list[Slow] = []

    def make(edge: Edge) -> Slow:
        slow.append(Slow(edge))
        return slow[0]

    async with served(tmp_path, make) as server, server.client() as client:
        box = (await client.create("base")).id
        _, writer = await server.dial()
        writer.write(head(server, "PUT", f"/v1/sandboxes/{box}/files?path=/f", f"content-length: {1 << 30}"))
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 256 << 20:
                writer.write(bytes(1 << 20))
                sent += 1 << 20
                async with asyncio.timeout(1):
                    await writer.drain()
        assert sent < 32 << 20  # what the sockets hold
        assert slow[0].taken <= 1 << 20
        writer.transport.abort()
        slow[0].go_on.set()


async def test_a_download_that_breaks_is_cut(tmp_path: Path) -> None:
    async with served(tmp_path, Slow) as server, server.client() as client:
        box = (await client.create("base")).id
        reader, writer = await server.dial()
        writer.write(head(server, "GET", f"/v1/sandboxes/{box}/files?path=/f"))
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(65536):
                answer += data
        assert b" 200 " in answer.partition(b"\r\n")[0]
        assert not answer.endswith(b"0\r\n\r\n")
        writer.close()


async def test_shutdown_cuts_what_is_open_and_finishes_what_is_short(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.client() as client:
        box = await client.create("base")
        reader, writer = await server.dial()
        body = json.dumps({"argv": ["sleep", "60"], "key": "k"}).encode()
        writer.write(head(server, "POST", f"/v1/sandboxes/{box.id}/exec", f"content-length: {len(body)}") + body)
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(60):
            await server.server.stop()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readuntil(b"0\r\n\r\n")
        assert server.edge.get(box.id).state == "running"
        writer.close()


async def test_openapi_describes_every_call(tmp_path: Path) -> None:
    async with served(tmp_path, whole=True) as server, server.client() as client:
        await describes_every_call(server, (await client.create("base")).id)


async def describes_every_call(server: Served, box: str) -> None:
    status, _, answer = await server.raw("GET", "/openapi.json", key="")
    document = json.loads(answer)
    assert status == 200
    assert document["openapi"].startswith("3.")

    def references(node: Any) -> AsyncIterator[str] | list[str]:
        if isinstance(node, dict):
            here = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return here + [each for value in node.values() for each in references(value)]  # type: ignore[union-attr]
        return [each for value in node for each in references(value)] if isinstance(node, list) else []  # type: ignore[union-attr]

    for reference in set(references(document)):  # type: ignore[arg-type]
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
    for path, operations in document["paths"].items():
        for method in operations:
            concrete = path.replace("{sandbox_id}", box).replace("{run}", "r").replace("{name}", "n")
            concrete = concrete.replace("{key}", "k").replace("{key_id}", "k")
            status, _, answer = await server.raw(method.upper(), concrete)
            assert status != 405, path
            for word in (b"no such path", b"no endpoint", b"no such procedure"):
                assert word not in answer, path
            if method == "delete" and path.endswith("/sandboxes/{sandbox_id}"):
                async with server.client() as client:
                    box = (await client.create("base")).id
    fields = document["components"]["schemas"]["SandboxSpec"]["properties"]
    assert fields["memory_bytes"]["minimum"] == 16 << 20


def is_whole(answer: bytes) -> bool:
    fields, _, body = answer.partition(b"\r\n\r\n")
    _, named, length = fields.partition(b"content-length: ")
    return len(body) == int(length.split()[0]) if named else body.endswith(b"0\r\n\r\n")


async def test_a_caller_who_wants_the_result_alone_gets_one_packet(server: Served, box: str, long_hold: int) -> None:
    body = json.dumps({"argv": ["sh", "-c", "echo a; sleep 0.1; echo b"]}).encode()
    for query, packets in (("", 2), (f"?hold_ms={long_hold}", 1)):
        reader, writer = await server.dial()
        path = f"/v1/sandboxes/{box}/exec{query}"
        writer.write(head(server, "POST", path, f"content-length: {len(body)}") + body)
        found = [await reader.read(65536)]
        while not is_whole(b"".join(found)):
            found.append(await reader.read(65536))
        assert (len(found) > 1) == (packets > 1), query
        writer.close()
    answer = await server.error("POST", f"/v1/sandboxes/{box}/exec?hold_ms=long", body)
    assert answer[:2] == (400, "invalid_request")
