"""schemathesis finds nothing: each call of the OpenAPI document, and each of its arguments and fields, with what its
type allows and what it doesn't, without and with a wrong key, by other methods; the answers as they are described.

Over the fake backend here, so that there are thousands; `tests/e2e/test_openapi_live.py` has real sandboxes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_kit import Served, served
from openapi_kit import Target, attack


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path, whole=True) as server:
        yield server


async def target_of(server: Served) -> Target:
    async with server.client() as client:
        box, doomed = [(await client.create("base", ttl_s=None)).id for _ in range(2)]
    before = {key.id for key in server.edge.list_keys("project")}
    await server.edge.create_key("project", "spare")
    (spare,) = {key.id for key in server.edge.list_keys("project")} - before
    return Target(server.url, server.key, box, doomed, spare)


async def test_schemathesis_finds_nothing(server: Served, tmp_path: Path) -> None:
    target = await target_of(server)
    text = await asyncio.to_thread(attack, target, tmp_path, "--phases", "examples,coverage")
    _, _, answer = await server.raw("GET", "/openapi.json")
    calls = sum(len(operations) for operations in json.loads(answer)["paths"].values())
    assert f"Tested: {calls}" in text
    assert server.edge.get(target.box).state == "running"


E2B_BOX = {"e2b_sandbox_id": "{box}"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "headers"),
    [
        ("GET", f"/v1/sandboxes/{{box}}/events?after={1 << 63}", b"", 400, {}),
        ("GET", "/v1/sandboxes/{box}/files?path=/etc/passwd&offset=99999999999999999999", b"", 400, {}),
        ("POST", "/v1/sandboxes/{box}/exec?hold_ms=-1", b'{"argv": ["true"]}', 400, {}),
        ("POST", "/v1/sandboxes/{box}/exec/k/stdin?offset=-1", b"", 400, {}),
        ("POST", "/v1/sandboxes", b'{"environment": "base", "no_new_privs": 0}', 400, {}),
        ("POST", "/v1/sandboxes", b'{"environment": "base", "pids": "9"}', 400, {}),
        ("POST", "/v1/sandboxes/{box}/renew", b'{"ttl_s": "60"}', 400, {}),
        ("GET", "/v2/sandboxes?state=", b"", 400, {}),
        ("GET", "/v2/sandboxes?startedAfter=", b"", 400, {}),
        ("GET", "/health", b"", 400, {**E2B_BOX, "e2b_sandbox_port": ""}),
        ("POST", "/process.Process/SendSignal", b'{"process": {"pid": "1"}}', 400, E2B_BOX),
        ("POST", "/files?path=/a&signature_expiration=x", b"", 400, E2B_BOX),
        ("POST", "/swerex/{box}/read_file", b'{"path": "/etc/passwd", "encoding": "a\\u0000"}', 511, {}),
        ("POST", "/swerex/{box}/read_file", b'{"path": "/etc/passwd", "encoding": "\\ud800"}', 511, {}),
    ],
)
async def test_what_it_found_once(
    server: Served, *, method: str, path: str, body: bytes, status: int, headers: dict[str, str]
) -> None:
    async with server.client() as client:
        sandbox = await client.create("base")
        box = sandbox.id
        await sandbox.commands.start(["cat"], key="k", stdin=True)
    named = {name: value.format(box=box) for name, value in headers.items()}
    named |= {"x_api_key": server.key, "x_access_token": server.key, "content_type": "application/json"}
    assert (await server.raw(method, path.format(box=box), body, **named))[0] == status


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("OPTIONS", "/v1/keys", "GET, POST"),
        ("TRACE", "/v1/node", "GET"),
        ("PATCH", "/v1/sandboxes/x", "DELETE, GET"),
        ("POST", "/readyz", "GET"),
        ("PUT", "/v2/sandboxes", "GET, POST"),
        ("GET", "/process.Process/List", "POST"),
        ("PUT", "/files", "GET, POST"),
    ],
)
async def test_another_method_is_answered_with_those_that_there_are(
    server: Served, method: str, path: str, allowed: str
) -> None:
    if "/x" in path:
        async with server.client() as client:
            path = path.replace("/x", f"/{(await client.create('base')).id}")
    status, headers, answer = await server.raw(method, path, x_api_key=server.key)
    assert (status, headers["allow"]) == (405, allowed.lower())
    assert json.loads(answer)["message"]
