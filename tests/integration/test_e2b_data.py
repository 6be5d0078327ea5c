"""E2B's data plane by hand: who may, bad input, the forms of errors. That its own client works: tests/e2b."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import random
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_kit import Served, served
from e2b_kit import NEW, Box, command, is_error, parsed, rest
from edge_kit import until

from dsec.wire.connect import encode


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as server:
        yield server


@pytest.fixture
async def box(server: Served) -> Box:
    status, answer = await rest(server, "POST", "/v2/sandboxes", NEW)
    assert status == 201
    return Box(server, answer)


async def test_a_sandbox_that_ended(server: Served, box: Box) -> None:
    assert (await rest(server, "DELETE", f"/sandboxes/{box.id}"))[0] == 204
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/connect"), ("POST", "/timeout"), ("GET", "/metrics")):
        assert is_error(await rest(server, method, f"/sandboxes/{box.id}{path}", {"timeout": 5}), 404), path
    for method, path in (("GET", "/health"), ("GET", "/files?path=/x"), ("POST", "/files?path=/x")):
        status, headers, body = await box.raw(method, path)
        assert is_error((status, json.loads(body)), 502), path
        assert "was not found" in json.loads(body)["message"]
        assert headers["should-retry"] == "false"
    for name in ("filesystem.Filesystem/Stat", "process.Process/List"):
        answer = await box.rpc(name, {"path": "/"})
        assert is_error(answer, 502)
        assert "was not found" in answer[1]["message"]
    status, _, body = await box.raw(
        "POST", "/process.Process/Start", encode(b'{"process":{"cmd":"sh"}}'), content_type="application/connect+json"
    )
    assert is_error((status, json.loads(body)), 502)


async def test_the_data_plane_needs_the_sandboxs_token(server: Served, box: Box) -> None:
    other = Box(server, (await rest(server, "POST", "/v2/sandboxes", NEW))[1])
    calls = (
        ("GET", "/health"),
        ("GET", "/files?path=/x"),
        ("POST", "/files?path=/x"),
        ("POST", "/process.Process/List"),
    )
    for method, path in calls:
        for token in ("wrong", f"dst_{box.id}_x", box.token[:-1]):
            assert is_error(parsed(await box.raw(method, path, token=token)), 401), path
        assert is_error(parsed(await box.raw(method, path, x_access_token="")), 401), path
        assert is_error(parsed(await box.raw(method, path, token=other.token)), 403), path
    elsewhere = await server.edge.create_key("elsewhere")
    assert is_error(parsed(await box.raw("GET", "/health", token=elsewhere)), 502)
    assert (await box.raw("GET", "/health", token=server.key))[0] == 204
    assert (await box.raw("GET", "/health"))[0] == 204


async def test_the_token_reaches_the_native_api_of_its_sandbox_alone(server: Served, box: Box) -> None:
    other = (await rest(server, "POST", "/v2/sandboxes", NEW))[1]["sandboxID"]
    assert (await server.raw("GET", f"/v1/sandboxes/{box.id}", key=box.token))[0] == 200
    assert (await server.raw("GET", f"/v1/sandboxes/{other}", key=box.token))[0] == 403
    assert (await server.raw("GET", "/v1/sandboxes", key=box.token))[0] == 403


async def test_the_token_survives_the_server(server: Served, box: Box) -> None:
    await server.restart()
    assert (await box.raw("GET", "/health"))[0] == 204
    assert (await rest(server, "POST", f"/sandboxes/{box.id}/connect", {}))[1]["envdAccessToken"] == box.token


async def test_which_sandbox(box: Box) -> None:
    assert is_error(parsed(await box.raw("GET", "/health", e2b_sandbox_id="")), 400)
    assert is_error(parsed(await box.raw("GET", "/health", e2b_sandbox_port="x")), 400)
    assert is_error(parsed(await box.raw("GET", "/health", e2b_sandbox_port="8080")), 400)
    status, _, _ = await box.server.raw_bytes(
        f"GET /health HTTP/1.1\r\nhost: 49983-{box.id}.example:80\r\nconnection: close\r\n"
        f"x-access-token: {box.token}\r\n\r\n".encode()
    )
    assert status == 204


async def test_files_by_hand(box: Box) -> None:
    assert (await box.raw("POST", "/files?path=/a", b"plain", content_type="application/octet-stream"))[0] == 200
    assert (await box.raw("GET", "/files?path=/a"))[2] == b"plain"
    packed = gzip.compress(b"first ", mtime=0) + gzip.compress(b"second", mtime=0)
    headers = {"content_type": "application/octet-stream", "content_encoding": "gzip"}
    assert (await box.raw("POST", "/files?path=/b", packed, **headers))[0] == 200
    assert (await box.raw("GET", "/files?path=/b"))[2] == b"first second"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"no gzip", {"content_encoding": "gzip"}),
        (gzip.compress(b"x" * 1000, mtime=0)[:-9], {"content_encoding": "gzip"}),
        (zlib.compress(b"x"), {"content_encoding": "deflate"}),
        (b"--B\r\n", {"content_type": "multipart/form-data; boundary=B"}),
        (b"x", {"content_type": "multipart/form-data"}),
        (
            b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\ncut',
            {"content_type": "multipart/form-data; boundary=B"},
        ),
        (
            b'--B\r\nContent-Disposition: form-data; name="x"\r\n\r\nx\r\n--B--\r\n',
            {"content_type": "multipart/form-data; boundary=B"},
        ),
    ],
)
async def test_broken_uploads_leave_nothing(box: Box, body: bytes, headers: dict[str, str]) -> None:
    assert is_error(parsed(await box.raw("POST", "/files?path=/broken", body, **headers)), 400)
    assert is_error(parsed(await box.raw("GET", "/files?path=/broken")), 404)


async def test_bad_file_arguments(box: Box) -> None:
    for path in (
        "/files",
        "/files?path=",
        "/files?path=%00",
        "/files?path=/a&path=/b",
        "/files?path=/a&what=1",
        "/files?path=%ff",
    ):
        assert is_error(parsed(await box.raw("GET", path)), 400), path
    assert is_error(parsed(await box.raw("GET", "/files?path=/a", authorization="Basic !!!")), 400)
    assert is_error(parsed(await box.raw("POST", "/files?path=/a", b"x", x_metadata_a="b")), 501)


async def test_signatures(box: Box) -> None:
    await box.raw("POST", "/files?path=/a", b"plain", content_type="application/octet-stream")

    async def fetch(path: str, what: str, method: str = "GET") -> int:
        digest = hashlib.sha256(what.encode()).digest()
        signature = "v1_" + base64.b64encode(digest).rstrip(b"=").decode().replace("+", "%2B").replace("/", "%2F")
        return (await box.raw(method, f"{path}&signature={signature}", x_access_token=""))[0]

    assert await fetch("/files?path=/a", f"/a:read::{box.token}") == 200
    assert await fetch("/files?path=/a&username=root", f"/a:read:root:{box.token}") == 200
    assert await fetch("/files?path=/a", f"/a:write::{box.token}", "POST") == 200
    assert await fetch("/files?path=/a", f"/a:write::{box.token}") == 401
    assert await fetch("/files?path=/a", f"/b:read::{box.token}") == 401
    assert await fetch("/files?path=/a&username=root", f"/a:read::{box.token}") == 401
    assert await fetch("/files?path=/a&signature_expiration=99999999999", f"/a:read::{box.token}:99999999999") == 200
    assert await fetch("/files?path=/a&signature_expiration=9", f"/a:read::{box.token}:9") == 401
    assert await fetch("/files?path=/a&signature_expiration=x", f"/a:read::{box.token}:x") == 401
    assert await fetch("/files?path=/a&signature_expiration=99999999999", f"/a:read::{box.token}") == 401


@pytest.mark.parametrize(
    ("name", "body", "code"),
    [
        ("filesystem.Filesystem/Stat", b"{", "invalid_argument"),
        ("filesystem.Filesystem/Stat", b"\xff", "invalid_argument"),
        ("filesystem.Filesystem/Stat", b'{"path": 7}', "invalid_argument"),
        ("filesystem.Filesystem/Stat", b'{"path": "/none"}', "not_found"),
        ("filesystem.Filesystem/Stat", b'{"path": "/a\\u0000b"}', "invalid_argument"),
        ("filesystem.Filesystem/ListDir", b'{"path": "/", "depth": -1}', "invalid_argument"),
        ("filesystem.Filesystem/MakeDir", b'{"path": "/tmp"}', "already_exists"),
        ("filesystem.Filesystem/What", b"{}", "unimplemented"),
        ("process.Process/SendSignal", b'{"process": {"pid": 1}, "signal": "SIGNAL_WHAT"}', "invalid_argument"),
        ("process.Process/SendSignal", b'{"process": {"pid": 99999}, "signal": "SIGNAL_SIGKILL"}', "not_found"),
        ("process.Process/SendInput", b'{"process": {"pid": 99999}, "input": {"stdin": "!"}}', "invalid_argument"),
        ("process.Process/SendInput", b'{"process": {}, "input": {}}', "invalid_argument"),
        ("process.Process/Update", b'{"process": {"pid": 99999}, "pty": {"size": {"cols": -1}}}', "invalid_argument"),
        ("filesystem.Filesystem/GetWatcherEvents", b'{"watcherId": "x"}', "not_found"),
    ],
)
async def test_bad_calls(box: Box, name: str, body: bytes, code: str) -> None:
    await box.raw("POST", "/files?path=/tmp/x", b"x", content_type="application/octet-stream")
    status, headers, answer = await box.raw("POST", f"/{name}", body, content_type="application/json")
    assert headers["content-type"] == "application/json"
    assert status >= 400
    assert json.loads(answer)["code"] == code
    assert json.loads(answer)["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_argument"),
        (encode(b"{")[:-1], "invalid_argument"),
        (encode(b"{"), "invalid_argument"),
        (encode(b"{}", 1), "invalid_argument"),
        (encode(b'{"process":{"cmd":"sh"}}') * 2, "invalid_argument"),
        (encode(b'{"process":{}}'), "invalid_argument"),
        (encode(b'{"process":{"cmd":"no-such-program"}}'), "invalid_argument"),
        (encode(b'{"process":{"cmd":"/bin/bash","cwd":"/no/such/place"}}'), "invalid_argument"),
        (b"\0\xff\xff\xff\xff", "invalid_argument"),
    ],
)
async def test_bad_streams(box: Box, body: bytes, code: str) -> None:
    status, messages = await box.stream("process.Process/Start", body)
    assert status == 200
    assert messages[-1]["error"]["code"] == code
    assert messages[-1]["error"]["message"]


async def test_bad_streams_of_input(box: Box) -> None:
    data = encode(b'{"data":{"input":{"stdin":"eA=="}}}')
    assert (await box.stream("process.Process/StreamInput", data))[1][-1]["error"]["code"] == "invalid_argument"
    start = encode(b'{"start":{"process":{"pid":99999}}}')
    assert (await box.stream("process.Process/StreamInput", start + data))[1][-1]["error"]["code"] == "not_found"


async def test_a_command_with_keep_alives(box: Box) -> None:
    body = encode(b'{"process":{"cmd":"sh","args":["-c","echo a; sleep 1.3; echo b"]},"future":{"x":1}}')
    status, messages = await box.stream("process.Process/Start", body, keepalive_ping_interval="1")
    assert status == 200
    kinds = [next(iter(message["event"])) for message in messages[:-1]]
    assert [kind for kind in kinds if kind != "keepalive"] == ["start", "data", "data", "end"]
    assert "keepalive" in kinds
    assert messages[0]["event"]["start"]["pid"] > 0
    assert messages[-2]["event"]["end"] == {"exitCode": 0, "exited": True, "status": "exit status 0"}
    assert messages[-1] == {}


async def test_any_bytes_are_answered(box: Box) -> None:
    """Requests with a few bytes changed: whatever comes back is an answer or an error in its form, never our bug."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    start = json.dumps(
        {"process": {"cmd": "sh", "args": ["-c", "true"], "envs": {"A": "b"}, "cwd": "/"}, "stdin": True}
    )
    form = b'--B\r\nContent-Disposition: form-data; name="file"; filename="/tmp/x"\r\n\r\ncontent\r\n--B--\r\n'
    whole = [
        ("/v2/sandboxes", "application/json", json.dumps(NEW | {"metadata": {"a": "b"}, "envVars": {}}).encode()),
        ("/process.Process/Start", "application/connect+json", encode(start.encode())),
        ("/process.Process/SendSignal", "application/json", b'{"process":{"pid":2},"signal":"SIGNAL_SIGTERM"}'),
        ("/filesystem.Filesystem/ListDir", "application/json", b'{"path":"/tmp","depth":3}'),
        ("/filesystem.Filesystem/Move", "application/json", b'{"source":"/tmp/x","destination":"/tmp/y"}'),
        ("/files", "multipart/form-data; boundary=B", form),
    ]
    for _ in range(300):
        path, media, body = chance.choice(whole)
        changed = bytearray(body)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(changed))
            match chance.randrange(3):
                case 0:
                    changed[at] = chance.randrange(256)
                case 1:
                    del changed[at : at + chance.randint(1, 9)]
                case _:
                    changed[at:at] = chance.randbytes(chance.randint(1, 9))
            changed = changed or bytearray(b"x")
        status, headers, answer = await box.raw(
            "POST", path, bytes(changed), content_type=media, x_api_key=box.server.key
        )
        assert status in (200, 201, 400, 403, 404, 405, 409, 413, 422, 429, 501), (seed, path, changed, answer)
        if headers["content-type"] == "application/json":
            fields = json.loads(answer)
            assert status < 300 or {"code", "message"} <= set(fields), (seed, path, changed)


async def test_a_command_is_reached_by_its_pid_after_a_restart_of_the_server(box: Box) -> None:
    execution = await box.server.edge.exec(box.id, command("sleep", "600"))
    pid = await execution.started()
    await box.server.restart()
    assert (await box.rpc("process.Process/List", {}))[1] == {
        "processes": [{"pid": pid, "config": {"cmd": "", "args": []}}]
    }
    reading = asyncio.create_task(
        box.stream("process.Process/Connect", encode(json.dumps({"process": {"pid": pid}}).encode()))
    )
    commands = box.server.edge._lives.sandboxes[box.id].commands
    assert commands is not None
    await until(lambda: any(each.reads for each in commands.values()))
    kill = {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}
    assert await box.rpc("process.Process/SendSignal", kill) == (200, {})
    _, messages = await reading
    assert messages[0] == {"event": {"start": {"pid": pid}}}
    assert messages[-2]["event"]["end"]["exitCode"] == 137
    assert (await box.rpc("process.Process/SendSignal", kill))[1]["code"] == "not_found"


@pytest.mark.parametrize("value", ["x", "0", "-1", "99999999999"])
async def test_bad_timeouts(box: Box, value: str) -> None:
    body = encode(b'{"process":{"cmd":"sh"}}')
    _, messages = await box.stream("process.Process/Start", body, connect_timeout_ms=value)
    assert messages[-1]["error"]["code"] == "invalid_argument"


async def test_connecting_ends_at_its_timeout_and_the_command_goes_on(box: Box) -> None:
    body = encode(b'{"process":{"cmd":"sh","args":["-c","sleep 1; true"]}}')
    execution = await box.server.edge.exec(box.id, command("sleep", "600"))
    pid = await execution.started()
    body = encode(json.dumps({"process": {"pid": pid}}).encode())
    _, messages = await box.stream("process.Process/Connect", body, connect_timeout_ms="300")
    assert messages[0] == {"event": {"start": {"pid": pid}}}
    assert messages[-1]["error"]["code"] == "deadline_exceeded"
    assert pid in [process.pid for process in box.server.edge.processes(box.id)]
