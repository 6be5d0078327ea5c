"""Layers over HTTP, over real stores of layers: who may do what, what is refused."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from api_kit import CutProxy, Served, served
from image_kit import TinyImage, tar

from dsec.api.layers import OPERATOR
from dsec.errors import Unavailable
from dsec.store.image import host_platform


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


async def test_only_the_nodes_own_project_says_where_it_fetches_packages_from(server: Served) -> None:
    asked = {"name": "a@1", "packages": ["tree"], "on": "nowhere"}
    body = json.dumps(asked | {"mirror": "http://mirror.example/debian"}).encode()
    assert (await server.error("POST", "/v1/layers:packages", body))[:2] == (403, "permission_denied")
    operator = await server.edge.create_key(OPERATOR, "operator")
    assert (await server.raw("POST", "/v1/layers:packages", body, key=operator))[0] == 404  # there is no nowhere
    status, code, _ = await server.error("POST", "/v1/layers:packages", json.dumps(asked | {"name": "a"}).encode())
    assert (status, code) == (400, "invalid_request")


async def test_an_upload_names_its_readers(server: Served) -> None:
    await server.raw("POST", "/v1/layers:upload?name=tools@1&reader=a&reader=b", tree())
    for project, seen in (("a", 200), ("b", 200), ("c", 404)):
        key = await server.edge.create_key(project, "reader")
        assert (await server.raw("GET", "/v1/layers/tools@1", key=key))[0] == seen
    status, code, _ = await server.error("POST", "/v1/layers:upload?name=tools@2&name=tools@3", tree())
    assert (status, code) == (400, "invalid_request")


async def test_an_export_that_is_cut_leaves_no_file(server: Served, tmp_path: Path) -> None:
    await server.raw("POST", "/v1/layers:upload?name=tools@1", tree())
    async with CutProxy(server.url) as proxy:
        proxy.cuts = [3000]
        async with server.client(proxy.url) as client:
            with pytest.raises(Unavailable, match="cut"):
                await client.catalog.export("tools@1", tmp_path / "out.tar")
            assert not (tmp_path / "out.tar").exists()
            assert await client.catalog.export("tools@1", tmp_path / "out.tar") > 5000


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


def dockerfile(text: str) -> bytes:
    return tar(("Dockerfile", text.encode()))


def everything(name: str, environment: str) -> list[tuple[str, str, bytes]]:
    """All that can be asked for with a layer and an environment: method, path, body."""
    body = msgspec.json.encode
    build = "/v1/builds?options=" + quote('{"name":"mine"}')
    return [
        ("GET", f"/v1/layers/{name}", b""),
        ("DELETE", f"/v1/layers/{name}", b""),
        ("POST", f"/v1/layers/{name}/verify", b""),
        ("GET", f"/v1/layers/{name}/export", b""),
        ("POST", "/v1/layers:merge", body({"layers": [name, name], "name": "mine@1"})),
        ("POST", "/v1/environments", body({"name": "mine", "layers": [name]})),
        ("POST", "/v1/environments", body({"name": "mine", "layers": [f"env:{environment}"]})),
        ("GET", f"/v1/environments/{environment}", b""),
        ("DELETE", f"/v1/environments/{environment}", b""),
        ("POST", "/v1/layers:packages", body({"name": "mine@1", "packages": ["tree"], "on": environment})),
        ("POST", build, dockerfile(f"FROM {name}")),
        ("POST", build, dockerfile(f"FROM {environment}")),
        ("POST", build, dockerfile(f"FROM scratch\nCOPY --from={name} / /")),
        ("POST", build, dockerfile(f"FROM scratch\nRUN --mount=from={environment},target=/x ls")),
    ]


async def test_a_hidden_layer_does_not_exist_for_others(server: Served) -> None:
    """Whatever they ask, by its name, its environment's, its digest: the answer is that of one that never was."""
    _, _, answer = await server.raw("POST", "/v1/layers:upload?name=grader@1&reader=friend", tree())
    layer = json.loads(answer.splitlines()[-1])["result"]["layer"]
    made = {"name": "graders", "layers": ["grader@1"], "readers": ["friend"]}
    assert (await server.raw("POST", "/v1/environments", msgspec.json.encode(made)))[0] == 201
    spy, friend = [await server.edge.create_key(project, "k") for project in ("spy", "friend")]
    for word in (layer, "grader@1"):
        assert word.encode() in (await server.raw("GET", "/v1/layers", key=friend))[2]
        assert word.encode() not in (await server.raw("GET", "/v1/layers", key=spy))[2]
        assert (await server.raw("GET", f"/v1/layers/{word}", key=friend))[0] == 200
    for hidden, absent in (("grader@1", "absent@1"), (layer, "0" * 64)):
        pairs = zip(everything(hidden, "graders"), everything(absent, "absents"), strict=True)
        for (method, path, body), (_, other, more) in pairs:
            status, _, answer = await server.raw(method, path, body, key=spy)
            assert b"error" in answer or status >= 400, path
            as_absent = answer.replace(hidden.encode(), absent.encode()).replace(b"graders", b"absents")
            assert (status, as_absent) == (await server.raw(method, other, more, key=spy))[::2], path
    assert (await server.raw("GET", "/v1/layers/grader@1"))[0] == 200


async def test_who_knows_what_an_image_of_others_consists_of_does_not_have_it(server: Served, tmp_path: Path) -> None:
    """An import of layers that are here already, by another, who doesn't show them."""
    image = TinyImage(tar(("secret", b"s" * 5000)), architecture=host_platform().architecture)

    def archive(top: Path) -> bytes:
        image.write_layout(top)
        with io.BytesIO() as data:
            with tarfile.open(fileobj=data, mode="w") as packed:
                packed.add(top, ".")
            return data.getvalue()

    whole = archive(tmp_path / "whole")
    assert b'"result"' in (await server.raw("POST", "/v1/layers:upload?form=image&name=mine", whole))[2]
    for layer in image.layers:
        del image.blobs[layer["digest"]]
    words = archive(tmp_path / "words")
    spy = await server.edge.create_key("spy", "k")
    answer = (await server.raw("POST", "/v1/layers:upload?form=image&name=theirs", words, key=spy))[2]
    assert json.loads(answer.splitlines()[-1])["error"]["code"] == "not_found"
    again = (await server.raw("POST", "/v1/layers:upload?form=image&name=again", words))[2]
    assert b'"result"' in again, "whoever brought it need not bring it twice"
