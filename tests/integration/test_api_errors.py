"""Every failure of the API has one form, and says what is wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_kit import Served, served

from dsec.api.exchange import MAX_JSON_BYTES
from dsec.edge.node import Edge
from dsec.errors import Internal
from dsec.spec.sandbox import SandboxInfo


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as server:
        yield server


async def sandbox(server: Served) -> SandboxInfo:
    async with server.client() as client:
        return (await client.create("base")).info


async def test_a_key_is_needed(server: Served) -> None:
    assert (await server.error("GET", "/v1/node", key=""))[:2] == (401, "unauthenticated")
    assert (await server.error("GET", "/v1/node", key="dsk_wrong"))[:2] == (401, "unauthenticated")
    assert (await server.error("POST", "/v1/sandboxes/x/exec", key="dsk_wrong"))[:2] == (401, "unauthenticated")
    status, headers, _ = await server.raw("GET", "/v1/node", key="")
    assert (status, headers["www-authenticate"]) == (401, "bearer")
    status, _, _ = await server.raw_bytes(
        f"GET /v1/node HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Basic {server.key}\r\n\r\n".encode()
    )
    assert status == 401


async def test_a_revoked_key_is_none(server: Served) -> None:
    async with server.client() as client:
        other = await client.create_key("second")
        keys = {each["label"]: each["id"] for each in await client.list_keys()}
        assert (await server.raw("GET", "/v1/node", key=other))[0] == 200
        await client.revoke_key(keys["second"])
        assert (await server.raw("GET", "/v1/node", key=other))[0] == 401
    elsewhere = await server.edge.create_key("elsewhere", "theirs")
    theirs = server.edge.list_keys("elsewhere")[0].id
    assert (await server.error("DELETE", f"/v1/keys/{theirs}"))[:2] == (404, "not_found")
    assert (await server.raw("GET", "/v1/node", key=elsewhere))[0] == 200


async def test_other_projects_see_nothing(server: Served) -> None:
    info = await sandbox(server)
    elsewhere = await server.edge.create_key("elsewhere")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/exec"), ("GET", "/files?path=/x"), ("GET", "/usage")):
        answer = await server.error(method, f"/v1/sandboxes/{info.id}{path}", key=elsewhere)
        assert answer[:2] == (404, "sandbox_not_found"), path
    assert json.loads((await server.raw("GET", "/v1/sandboxes", key=elsewhere))[2]) == {"sandboxes": []}
    batch = await server.raw("POST", "/v1/sandboxes:delete", json.dumps({"ids": [info.id]}).encode(), key=elsewhere)
    assert json.loads(batch[2])["results"][0]["error"]["code"] == "sandbox_not_found"
    assert server.edge.get(info.id).state == "running"


async def test_a_sandbox_token_reaches_its_sandbox_alone(server: Served) -> None:
    info, other = await sandbox(server), await sandbox(server)
    token = info.token or ""
    assert token
    assert (await server.raw("GET", f"/v1/sandboxes/{info.id}", key=token))[0] == 200
    run = await server.raw("POST", f"/v1/sandboxes/{info.id}/exec", b'{"argv":["true"]}', key=token)
    assert run[0] == 200
    denied = (403, "permission_denied")
    assert (await server.error("GET", f"/v1/sandboxes/{other.id}", key=token))[:2] == denied
    assert (await server.error("POST", f"/v1/sandboxes/{other.id}/exec", key=token))[:2] == denied
    assert (await server.error("GET", "/v1/sandboxes", key=token))[:2] == denied
    assert (await server.error("POST", "/v1/sandboxes", b'{"environment":"base"}', key=token))[:2] == denied
    assert (await server.error("POST", "/v1/sandboxes:batch", b"{}", key=token))[:2] == denied
    assert (await server.error("POST", "/v1/keys", b"{}", key=token))[:2] == denied
    renewal = await server.error("POST", f"/v1/sandboxes/{info.id}/renew", b'{"ttl_s": 9}', key=token)
    assert renewal[:2] == denied
    ending = await server.error("DELETE", f"/v1/sandboxes/{info.id}?cause=platform_killed", key=token)
    assert ending[:2] == denied
    assert (await server.raw("DELETE", f"/v1/sandboxes/{info.id}", key=token))[0] == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v2/x"),
        ("GET", "/v1/nothing"),
        ("GET", "/v1/sandboxes:nothing"),
        ("GET", "/v1/sandboxes/{id}/nothing"),
        ("GET", "/v1/sandboxes/{id}/files/nothing"),
        ("POST", "/v1/sandboxes/{id}/exec/key/nothing"),
        ("GET", "/v1/named/only-one"),
    ],
)
async def test_unknown_paths(server: Served, method: str, path: str) -> None:
    info = await sandbox(server)
    assert (await server.error(method, path.replace("{id}", info.id)))[:2] == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/v1/sandboxes"),
        ("PATCH", "/v1/sandboxes/{id}"),
        ("PUT", "/v1/sandboxes/{id}/exec"),
        ("PUT", "/v1/sandboxes/{id}/exec/key"),
        ("GET", "/v1/sandboxes/{id}/exec/key/signal"),
        ("POST", "/v1/sandboxes/{id}/files"),
        ("DELETE", "/v1/sandboxes/{id}/files/stat"),
        ("GET", "/v1/sandboxes:batch"),
        ("GET", "/v1/sandboxes:delete"),
        ("POST", "/v1/named/run/name"),
        ("POST", "/openapi.json"),
        ("POST", "/healthz"),
    ],
)
async def test_other_methods(server: Served, method: str, path: str) -> None:
    info = await sandbox(server)
    assert (await server.error(method, path.replace("{id}", info.id)))[:2] == (405, "method_not_allowed")


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/sandboxes", {"environment": "base", "cpus": "many"}, "cpus"),
        ("/v1/sandboxes", {"environment": "base", "cpus": -1}, "cpus"),
        ("/v1/sandboxes", {"environment": "base", "memory": 1}, "memory"),
        ("/v1/sandboxes", {"environment": "no spaces"}, "environment"),
        ("/v1/sandboxes", {}, "environment"),
        ("/v1/sandboxes?deadline_s=-1", {"environment": "base"}, "deadline_s"),
        (
            "/v1/sandboxes:batch",
            {"specs": [{"environment": "base"}, {"environment": "base", "pids": 0}]},
            "specs[1].pids",
        ),
        ("/v1/sandboxes:batch", {"spec": {"environment": "base"}}, "count"),
        ("/v1/sandboxes:batch", {"specs": []}, "specs"),
        ("/v1/sandboxes:batch?deadline_s=x", {"specs": []}, "deadline_s"),
        ("/v1/sandboxes:batch?dead_line=1", {"specs": []}, "dead_line"),
        ("/v1/sandboxes:delete", {"ids": "all"}, "ids"),
        ("/v1/sandboxes:delete?cause=boredom", {"ids": []}, "cause"),
        ("/v1/sandboxes/{id}/exec", {"argv": []}, "argv"),
        ("/v1/sandboxes/{id}/exec", {"argv": "true"}, "argv"),
        ("/v1/sandboxes/{id}/exec", {"argv": ["true"], "timeout": 3}, "timeout"),
        ("/v1/sandboxes/{id}/exec", {"argv": ["a\0b"]}, "NUL"),
        ("/v1/sandboxes/{id}/exec/k/signal", {"scope": "everyone"}, "scope"),
        ("/v1/sandboxes/{id}/exec:release", {"keys": [1]}, "keys"),
        ("/v1/sandboxes/{id}/renew", {"ttl_s": 0}, "ttl_s"),
        ("/v1/sandboxes/{id}/files/mkdir", {}, "path"),
        ("/v1/sandboxes/{id}/files/mkdir?path=/x&mode=9", {}, "mode"),
        ("/v1/sandboxes/{id}/files/mkdir?path=/x&path=/y", {}, "path"),
        ("/v1/sandboxes/{id}/files/mkdir?path=/x%00y", {}, "path"),
        ("/v1/sandboxes/{id}/files/mkdir?path=/x&parents=perhaps", {}, "parents"),
        ("/v1/sandboxes/{id}/files/mkdir?path=/x&user=%ff", {}, "user"),
    ],
)
async def test_invalid_values_are_named(server: Served, path: str, body: object, names: str) -> None:
    info = await sandbox(server)
    status, code, message = await server.error("POST", path.replace("{id}", info.id), json.dumps(body).encode())
    assert (status, code) == (400, "invalid_request")
    assert names in message


@pytest.mark.parametrize("path", ["/v1/sandboxes", "/v1/sandboxes:batch", "/v1/sandboxes/{id}/exec"])
@pytest.mark.parametrize("body", [b"", b"{", b"[1, 2", b"\xff\xfe", b'{"environment": "\xff"}'])
async def test_what_is_not_json(server: Served, path: str, body: bytes) -> None:
    info = await sandbox(server)
    assert (await server.error("POST", path.replace("{id}", info.id), body))[:2] == (400, "invalid_request")


async def test_bodies_have_a_limit(server: Served) -> None:
    info = await sandbox(server)
    for path in ("/v1/sandboxes", f"/v1/sandboxes/{info.id}/exec"):
        body = b'{"environment": "' + b"x" * MAX_JSON_BYTES + b'"}'
        assert (await server.error("POST", path, body))[:2] == (413, "too_large")


async def test_a_chunked_body_is_counted_too(server: Served) -> None:
    info = await sandbox(server)
    head = f"POST /v1/sandboxes/{info.id}/exec HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"authorization: Bearer {server.key}\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n" % (1 << 20) + bytes(1 << 20) + b"\r\n"
    status, _, answer = await server.raw_bytes(head.encode() + chunk * 5 + b"0\r\n\r\n")
    assert (status, json.loads(answer)["code"]) == (413, "too_large")


async def test_what_is_not_http(server: Served) -> None:
    status, _, answer = await server.raw_bytes(b"hello\r\n\r\n")
    assert (status, json.loads(answer)["code"]) == (400, "invalid_request")
    many = b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(100))
    status, _, answer = await server.raw_bytes(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + many + b"\r\n")
    assert (status, json.loads(answer)["code"]) == (413, "too_large")


async def test_request_ids(server: Served) -> None:
    for path in ("/healthz", "/v1/node", "/v1/named/-/nobody", "/openapi.json", "/nothing"):
        _, headers, _ = await server.raw("GET", path, x_request_id="mine")
        assert headers["x-request-id"] == "mine", path
        first = (await server.raw("GET", path))[1]["x-request-id"]
        assert first != (await server.raw("GET", path))[1]["x-request-id"]


async def test_unknown_environment_and_unbuilt_features(server: Served) -> None:
    assert (await server.error("POST", "/v1/sandboxes", b'{"environment": "nope"}'))[:2] == (
        404,
        "environment_not_found",
    )
    assert (await server.error("POST", "/v1/sandboxes", b'{"environment": "base", "gpus": 1}'))[:2] == (
        422,
        "unsupported",
    )


async def test_an_ended_sandbox_says_why(server: Served) -> None:
    info = await sandbox(server)
    await server.edge.delete(info.id)
    status, _, answer = await server.raw("POST", f"/v1/sandboxes/{info.id}/exec", b'{"argv": ["true"]}')
    assert status == 410
    assert json.loads(answer)["details"]["cause"] == "deleted"


class Broken:
    """An edge with a bug."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def __getattr__(self, name: str) -> object:
        return getattr(self._edge, name)

    def node(self) -> None:
        raise ZeroDivisionError("a secret of the server's")

    async def exec(self, *_: object, **__: object) -> None:
        raise KeyError("a secret of the server's")

    async def renew(self, *_: object) -> None:
        raise KeyError("a secret of the server's")

    def processes(self, _: str) -> None:
        raise KeyError("a secret of the server's")

    async def write_file(self, *_: object, **__: object) -> None:
        raise KeyError("a secret of the server's")

    def usage(self, _: str) -> None:
        raise Internal("the disk is on fire", remedy="Call somebody.")


async def test_a_bug_is_ours_and_tells_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served(tmp_path, Broken) as server:
        info = await sandbox(server)
        for method, path in (("GET", "/v1/node"), ("POST", f"/v1/sandboxes/{info.id}/exec")):
            status, _, answer = await server.raw(method, path, b'{"argv": ["true"]}', x_request_id="r-17")
            body = json.loads(answer)
            assert (status, body["code"], body["infra"]) == (500, "internal", True)
            assert "secret" not in answer.decode()
            assert "r-17" in body["remedy"]
        assert "a secret" in caplog.text
        status, code, message = await server.error("GET", f"/v1/sandboxes/{info.id}/usage")
        assert (status, code, message) == (500, "internal", "the disk is on fire")


async def test_a_bug_has_the_form_of_the_family(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served(tmp_path, Broken) as server:
        box = (await sandbox(server)).id
        named = {"e2b_sandbox_id": box, "x_access_token": server.key, "x_api_key": server.key}

        async def asked(path: str, body: bytes, media: str = "application/json") -> tuple[int, bytes]:
            status, _, answer = await server.raw("POST", path, body, content_type=media, x_request_id="r-18", **named)
            assert b"r-18" in answer
            assert b"secret" not in answer
            return status, answer

        status, answer = await asked(f"/sandboxes/{box}/timeout", b'{"timeout": 9}')
        body = json.loads(answer)
        assert (status, body["code"]) == (500, 500)
        status, answer = await asked("/process.Process/List", b"{}")
        body = json.loads(answer)
        assert (status, body["code"]) == (500, "internal")
        start = b'{"process": {"cmd": "true"}}'
        envelope = b"\0" + len(start).to_bytes(4, "big") + start
        status, answer = await asked("/process.Process/Start", envelope, "application/connect+json")
        assert (status, answer[0]) == (200, 2)
        assert json.loads(answer[5:])["error"]["code"] == "internal"
        status, answer = await asked("/files?path=/a", b"x", "application/octet-stream")
        assert (status, json.loads(answer)["code"]) == (500, 500)
        status, answer = await asked(f"/swerex/{box}/execute", b'{"command": "true"}')
        told = json.loads(answer)["swerexception"]
        assert (status, told["extra_info"]["code"], told["extra_info"]["infra"]) == (511, "internal", True)
    assert [record.exc_info is not None for record in caplog.records if record.name == "dsec.api"] == [True] * 5


async def test_a_path_that_is_not_ascii(server: Served) -> None:
    status, _, answer = await server.raw_bytes(b"GET /v1/\xff\xfe HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (status, json.loads(answer)["code"]) == (400, "invalid_request")
