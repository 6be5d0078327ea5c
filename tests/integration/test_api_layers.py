"""Layers over HTTP, over real stores of layers: who may do what, what is refused."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from api_kit import Served, served

from dsec.api.layers import OPERATOR


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path, whole=True) as server:
        yield server


def tree() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        info = tarfile.TarInfo("a")
        info.size = 5000
        archive.addfile(info, io.BytesIO(b"x" * 5000))
    return data.getvalue()


async def test_only_the_nodes_own_project_collects_garbage(server: Served, tmp_path: Path) -> None:
    status, _, answer = await server.raw("POST", "/v1/layers:upload?name=tools@1", tree())
    layer = json.loads(answer.splitlines()[-1])["result"]["layer"]
    assert (await server.raw("DELETE", "/v1/layers/tools@1"))[0] == 204
    meta = next((tmp_path / "layers").glob(f"**/{layer}/meta.json"))
    meta.write_bytes(msgspec.json.encode(json.loads(meta.read_bytes()) | {"created_at": 0.0}))
    status, code, _ = await server.error("POST", "/v1/layers:gc")
    assert (status, code) == (403, "permission_denied")
    assert meta.exists()
    operator = await server.edge.create_key(OPERATOR, "operator")
    status, _, answer = await server.raw("POST", "/v1/layers:gc", key=operator)
    assert status == 200
    assert json.loads(answer.splitlines()[-1])["result"]["freed_bytes"] > 0
    assert not meta.exists()


async def test_an_upload_names_its_readers(server: Served) -> None:
    await server.raw("POST", "/v1/layers:upload?name=tools@1&reader=a&reader=b", tree())
    for project, seen in (("a", 200), ("b", 200), ("c", 404)):
        key = await server.edge.create_key(project, "reader")
        assert (await server.raw("GET", "/v1/layers/tools@1", key=key))[0] == seen
    status, code, _ = await server.error("POST", "/v1/layers:upload?name=tools@2&name=tools@3", tree())
    assert (status, code) == (400, "invalid_request")


@pytest.mark.parametrize(
    "arguments",
    [
        "name=",
        "name=a@1&tag=",
        "name=a@1&at=tools",
        "name=a@1&kind=x",
        "name=a@1&form=",
        "name=a@1&reader=",
        "form=tree",
    ],
)
async def test_what_an_upload_may_say(server: Served, arguments: str) -> None:
    status, code, _ = await server.error("POST", f"/v1/layers:upload?{arguments}", tree())
    assert (status, code) == (400, "invalid_request")
