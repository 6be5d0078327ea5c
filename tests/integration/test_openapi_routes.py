"""The OpenAPI document has every call that is served, with its methods.

Asked with a method that nothing takes, what is served answers 405 and says what it takes, anything else 404 or 501. So
every word in the source of the API is tried as a path below each path that the document has.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from api_kit import Served, make_api, served

import dsec.api
from dsec.api.app import Api

_WORD = re.compile(r"[a-z][a-z_]+")
_TEXT = re.compile(r"[a-z0-9_/:.{}-]{2,60}")
_RPC = re.compile(r"/(process|filesystem)\.\w+")
_NAME = re.compile(r"\{\w+\}")
_VERSION = re.compile(r"^/v[23](?=/)")
"""E2B's paths are served with and without it."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path, whole=True) as server:
        yield server


def words() -> set[str]:
    """What may be a part of a path."""
    found: set[str] = set()
    for path in Path(dsec.api.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _TEXT.fullmatch(node.value):
                found |= {part for part in re.split("[/:]", node.value) if _WORD.fullmatch(part)}
    return found


async def methods(api: Api, path: str, headers: dict[str, str]) -> set[str] | None:
    """What a path takes; None: it is none."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "TRACE",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "server": ("127.0.0.1", 80),
    }
    await api(scope, receive, send)
    if sent[0]["status"] != 405:
        return None
    allowed = dict(sent[0]["headers"])[b"allow"].decode()
    return set(allowed.lower().split(", "))


async def test_what_is_served_is_described(server: Served, tmp_path: Path) -> None:
    async with server.client() as client:
        box = (await client.create("base", ttl_s=None)).id
    _, _, answer = await server.raw("GET", "/openapi.json")
    described: dict[str, set[str]] = {}
    for path, operations in json.loads(answer)["paths"].items():
        if not _RPC.match(path):
            filled = _NAME.sub("*", path.replace("{sandbox_id}", box))
            described.setdefault(_VERSION.sub("", filled), set()).update(operations)
    named = {path.rpartition("/")[0] for path in described if path.endswith(("/*", f"/{box}"))}
    tops = {"", *(path[: slash.start()] for path in described for slash in re.finditer(r"/|$", path))}
    vocabulary = words()
    tried = {f"{top}/{word}" for top in tops - named for word in vocabulary}
    tried |= {f"{path}:{word}" for path in described if re.fullmatch("/v1/[a-z]+", path) for word in vocabulary}
    tried |= {f"{path}/*" for path in set(described) - named} | set(described)
    headers = {"authorization": f"Bearer {server.key}", "x-api-key": server.key, "e2b-sandbox-id": box}
    api = make_api(tmp_path / "again", server.edge)
    served = {path: taken for path in sorted(tried) if (taken := await methods(api, path.replace("*", "x"), headers))}
    unknown = {
        path: taken
        for path, taken in served.items()
        if described.get(path) != taken
        and all(described[each] != taken for each in described if fnmatchcase(path, each) and "*" in each)
    }
    assert unknown == {}
    assert set(described) - set(served) == set()
    assert len(served) >= len(described) > 50
