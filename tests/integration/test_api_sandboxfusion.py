"""Who may ask SandboxFusion's calls, and what they refuse: over the fake backend."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_kit import Served, served

from dsec.api.sandboxfusion import FusionConfig

RUN = json.dumps({"code": "print(3)", "language": "python"}).encode()
TEST = {"input": {"stdin": "1"}, "output": {"stdout": "1"}}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path, whole=True) as server:
        yield server


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"dsec:{password}".encode()).decode()


async def ask(
    server: Served, path: str, body: bytes = RUN, *, method: str = "POST", **headers: str
) -> tuple[int, object]:
    status, found, answer = await server.raw(method, path, body, key="", **headers)
    assert found["content-type"].startswith("application/json")
    return status, json.loads(answer)


async def test_ping_needs_no_key(server: Served) -> None:
    for path in ("/v1/ping", "/sandboxfusion/base/v1/ping"):
        assert await ask(server, path, b"", method="GET") == (200, "pong")


async def test_a_key_comes_in_any_of_three_ways(server: Served) -> None:
    for headers in (
        {"authorization": f"Bearer {server.key}"},
        {"authorization": basic(server.key)},
        {"x_api_key": server.key},
    ):
        status, answer = await ask(server, "/list_datasets", b"", method="GET", **headers)
        assert (status, answer) == (200, ["CommonOJ"])


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Basic !"},
        {"authorization": "Bearer nobody"},
        {"authorization": basic("nobody")},
        {"authorization": basic("")},
        {"x_api_key": "nobody"},
        {"authorization": "Digest x"},
    ],
)
async def test_without_one_nothing_is_run(server: Served, headers: dict[str, str]) -> None:
    for path in ("/run_code", "/submit", "/sandboxfusion/base/run_code"):
        status, answer = await ask(server, path, **headers)
        assert status == 401
        assert isinstance(answer, dict)
        assert answer["code"] == "unauthenticated"
        assert answer["detail"]


async def test_a_sandbox_token_is_no_key(server: Served) -> None:
    async with server.client() as client:
        token = (await client.create("base")).info.token
    assert token is not None
    assert (await ask(server, "/run_code", authorization=f"Bearer {token}"))[0] == 403


def test_who_may_come_without_a_key() -> None:
    none = FusionConfig()
    local = FusionConfig(keyless_project="train")
    wide = FusionConfig(keyless_project="train", keyless_from=("10.1.0.0/16", "fd00::/8"))
    wide.check()
    here = {"host": "localhost:8080", "forwarded": False}
    assert none.keyless("127.0.0.1", **here) is None
    for address, project in (("127.0.0.1", "train"), ("::1", "train"), ("::ffff:127.0.0.1", "train")):
        assert local.keyless(address, **here) == project
        for host in ("127.0.0.1:8080", "[::1]:8080", "10.1.2.3", "box.localhost", "LOCALHOST"):
            assert local.keyless(address, host, forwarded=False) == project
        assert local.keyless(address, "localhost", forwarded=True) is None  # a proxy here asks for anybody
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8080", "", "["):
            assert local.keyless(address, host, forwarded=False) is None  # a page whose name leads here
    for address in ("10.1.2.3", "192.0.2.1", "fe80::1%eth0", "", "localhost"):
        assert local.keyless(address, **here) is None
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::7"):
        assert wide.keyless(address, "box", forwarded=False) == "train"
    assert wide.keyless("127.0.0.1", **here) is None
    with pytest.raises(ValueError, match="anywhere"):
        FusionConfig(keyless_from=("anywhere",)).check()


async def test_a_missing_toolchain_is_no_verdict(server: Served) -> None:
    body = json.dumps({"code": "print(3)", "language": "rust"}).encode()
    status, answer = await ask(server, "/sandboxfusion/base/run_code", body, authorization=basic(server.key))
    assert status == 200
    assert isinstance(answer, dict)
    assert answer["status"] == "SandboxError"
    assert "has no rustc" in answer["message"]
    assert answer["run_result"] is None


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"language": "cobol"}, 400),
        ({"language": 7}, 422),
        ({"code": None}, 422),
        ({"run_timeout": 0}, 422),
        ({"run_timeout": 1e9}, 422),
        ({"run_timeout": "x"}, 422),
        ({"memory_limit_MB": -2}, 422),
        ({"code": "\ud800"}, 422),
        ({"files": {"a": "not base64!"}}, 400),
        ({"files": {"a\0b": ""}}, 400),
        ({"files": {"/usr/bin/python3": "YQ=="}}, 400),
        ({"files": {"../etc/passwd": "YQ=="}}, 400),
        ({"fetch_files": ["/etc/shadow"]}, 400),
        ({"fetch_files": ["."]}, 400),
        ({"fetch_files": ["\0"]}, 400),
        ({"files": {"": "YQ=="}}, 422),
    ],
)
async def test_bad_requests_are_told(server: Served, fields: dict[str, object], status: int) -> None:
    body = json.dumps({"code": "print(3)", "language": "python", **fields}).encode()
    found, answer = await ask(server, "/run_code", body, authorization=basic(server.key))
    assert found == status, answer
    assert isinstance(answer, dict)
    assert answer["detail"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"code": "\xff", "language": "python"}', b"null"])
async def test_bodies_that_are_none(server: Served, body: bytes) -> None:
    assert (await ask(server, "/run_code", body, authorization=basic(server.key)))[0] == 422


@pytest.mark.parametrize(
    ("dataset", "config", "status"),
    [
        ("HumanEval", {"language": "python"}, 400),
        ("CommonOJ", {"language": "python"}, 400),
        ("CommonOJ", {"provided_data": {"test": [TEST]}}, 400),
        ("CommonOJ", {"language": "python", "provided_data": {"test": []}}, 400),
        ("CommonOJ", {"language": "python", "provided_data": {"test": [{"input": {}, "output": {}}]}}, 400),
        ("CommonOJ", {"language": "python", "provided_data": {"test": "[1"}}, 400),
        ("CommonOJ", {"language": "python", "provided_data": [{"id": 2, "test": [TEST]}]}, 404),
        (
            "x",
            {
                "language": "python",
                "dataset_type": "CommonOJDataset",
                "provided_data": {"test": [TEST]},
                "custom_extract_logic": "import os",
            },
            400,
        ),
    ],
)
async def test_problems_that_are_not_there(
    server: Served, dataset: str, config: dict[str, object], status: int
) -> None:
    body = json.dumps({"dataset": dataset, "id": 1, "completion": "```python\nx\n```", "config": config}).encode()
    found, answer = await ask(server, "/submit", body, authorization=basic(server.key))
    assert found == status, answer


async def test_problems_that_came_along(server: Served) -> None:
    rows = [{"id": n, "content": f"problem {n}", "labels": '{"a": 1}', "test": [TEST]} for n in range(3)]
    config = {"language": "cpp", "provided_data": rows}
    asked = {"dataset": "CommonOJ", "config": config, "offset": 1, "limit": 1}
    headers = {"authorization": basic(server.key)}
    status, prompts = await ask(server, "/get_prompts", json.dumps(asked).encode(), **headers)
    assert status == 200
    assert isinstance(prompts, list)
    assert [each["id"] for each in prompts] == [1]
    assert prompts[0]["prompt"].startswith("problem 1\n")
    assert prompts[0]["labels"] == {"a": 1}
    assert await ask(server, "/list_ids", json.dumps({**asked, "offset": 0}).encode(), **headers) == (200, [0])
    status, prompt = await ask(server, "/get_prompt_by_id", json.dumps({**asked, "id": 2}).encode(), **headers)
    assert isinstance(prompt, dict)
    assert (status, prompt["id"]) == (200, 2)
    assert await ask(server, "/get_metrics", json.dumps(asked).encode(), **headers) == (200, {})
    status, answer = await ask(server, "/get_metrics_function", json.dumps(asked).encode(), **headers)
    assert (status, answer) == (200, {"function": None})


async def test_notebooks_are_refused(server: Served) -> None:
    status, answer = await ask(server, "/run_jupyter", b'{"cells": ["1"]}', authorization=basic(server.key))
    assert status == 501
    assert isinstance(answer, dict)
    assert "notebooks" in answer["detail"]
