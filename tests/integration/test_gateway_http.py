"""The `http:` and `inference:` gateways; what is limited, what is added outside, and what never comes back inside."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from gateway_kit import Front, open_front, serve

from dsec.egress.gateways.config import Endpoint, GatewaysConfig, Upstream
from dsec.errors import InvalidRequest

SECRET = "sk-very-secret-0123456789"


class Echo:
    """Says what it got: the method, path and headers, in the body and in a header; other behaviours by path."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.go_on = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.content.read()
        self.asked.append((request.method, str(request.rel_url), dict(request.headers), body))
        authorization = request.headers.get("Authorization", "none")
        match request.path:
            case "/v1/redirect-here":
                return web.Response(status=302, headers={"Location": f"/v1/moved?seen={authorization}"})
            case "/v1/redirect-away":
                return web.Response(status=302, headers={"Location": "http://127.0.0.1:9/other"})
            case "/v1/unauthorized":
                return web.Response(status=401, text=f"bad key {authorization}")
            case "/v1/gzip":
                return web.Response(body=b"x", headers={"Content-Encoding": "gzip"})
            case "/v1/cut":
                response = web.StreamResponse(headers={"Content-Length": "100"})
                await response.prepare(request)
                await response.write(b"half")
                assert request.transport is not None
                request.transport.abort()
                return response
            case "/v1/chat/completions" | "/v1/stream":
                return await self._stream(request, body)
        answer = {"method": request.method, "path": str(request.rel_url), "headers": dict(request.headers)}
        return web.json_response(
            answer | {"length": len(body)}, headers={"X-Echo": authorization, "Connection": "X-Drop", "X-Drop": "1"}
        )

    async def _stream(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        if request.path.endswith("completions") and not json.loads(body).get("stream"):
            return web.json_response({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"n": 1}\n\n')
        await self.go_on.wait()
        await response.write(b'data: {"usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\ndata: [DONE]\n\n')
        return response


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def front(echo: Echo, tmp_path: Path) -> AsyncIterator[Front]:
    state = tmp_path / "state"
    state.mkdir()
    async with serve(echo.handle) as url:
        host = url.removeprefix("http://")
        secrets = state / "secrets.toml"
        secrets.touch(0o600)
        secrets.write_text(
            f'[key]\nvalue = "{SECRET}"\nhosts = ["{host}"]\n'
            f'[theirs]\nvalue = "{SECRET}"\nhosts = ["{host}"]\nprojects = ["other"]\n'
            '[elsewhere]\nvalue = "another-long-secret"\nhosts = ["api.other.example"]\n'
        )
        bearer = {"Authorization": "Bearer secret:key"}
        config = GatewaysConfig(
            http={"api.example": Upstream(url), "based.example": Upstream(f"{url}/v1")},
            inference={"main": Endpoint(f"{url}/v1", headers=bearer, models=("small", "large"))},
        )
        async with open_front(state, config) as front:
            yield front


async def ask(front: Front, url: str, method: str = "GET", **more: Any) -> tuple[int, dict[str, str], bytes]:
    async with front.ask(method, url, **more) as response:
        return response.status, dict(response.headers), await response.read()


async def test_paths_and_methods_are_limited(front: Front, echo: Echo) -> None:
    front.grant("http:api.example/v1/*", methods=["GET", "POST"])
    for base in ("http://http.dsec/api.example", "http://api.example"):
        status, _, body = await ask(front, f"{base}/v1/things?a=%2F&b=1")
        assert status == 200
        assert json.loads(body)["path"] == "/v1/things?a=%2F&b=1"
        status, _, body = await ask(front, f"{base}/v1/things", "POST", data=b"x" * 3_000_000)
        assert json.loads(body)["length"] == 3_000_000
    asked = len(echo.asked)
    for path in (
        "/v2/x", "/v1", "/v1/../v2/x", "/v1/%2e%2e/v2", "/v1/..%2fv2", "/v1/..;/v2", "/v1/%252e%252e/v2", "/V1/x",
        "//v1/x", "/v1//x", "/v1/a%5c..%5cb", "/v1/%00", "/v1/%ff",
    ):  # fmt: skip
        for base in ("http://http.dsec/api.example", "http://api.example"):
            assert (await ask(front, base + path))[0] in {400, 403}, path
    for method in ("DELETE", "PUT", "OPTIONS", "TRACE"):
        assert (await ask(front, "http://http.dsec/api.example/v1/x", method))[0] in {400, 403, 405}, method
    assert (await ask(front, "http://http.dsec/other.example/v1/x"))[0] == 403
    assert (await ask(front, "http://http.dsec/api.example:81/v1/x"))[0] == 403
    assert len(echo.asked) == asked


async def test_an_upstream_may_have_a_path_and_a_grant_exact_ones(front: Front, echo: Echo) -> None:
    front.grant("http:based.example/models")
    status, _, body = await ask(front, "http://http.dsec/based.example/models")
    assert json.loads(body)["path"] == "/v1/models"
    assert (await ask(front, "http://http.dsec/based.example/models/x"))[0] == 403
    assert status == 200


async def test_misleading_headers_do_not_go_out(front: Front, echo: Echo) -> None:
    front.grant("http:api.example/v1/*", strip=["X-Trace"])
    sent = {
        "X-HTTP-Method-Override": "DELETE",
        "X-Method-Override": "DELETE",
        "X-Original-URL": "/admin",
        "X-Rewrite-URL": "/admin",
        "X-Forwarded-Host": "admin.example",
        "X_Http_Method_Override": "DELETE",
        "Forwarded": "host=admin",
        "Connection": "X-Secret-Hop",
        "X-Secret-Hop": "1",
        "X-Trace": "1",
        "X-Fine": "1",
        "Proxy-Authorization": "Basic x",
        "Upgrade": "h2c",
    }
    _, headers, body = await ask(front, "http://http.dsec/api.example/v1/x", headers=sent)
    got = {name.lower() for name in json.loads(body)["headers"]}
    assert not got & {name.lower() for name in sent if name != "X-Fine"}
    assert "x-fine" in got
    assert "X-Drop" not in headers
    host = json.loads(body)["headers"]["Host"]
    assert host.startswith("127.0.0.1:")


async def test_secrets_are_added_outside_and_never_come_back(front: Front, echo: Echo) -> None:
    front.grant("http:api.example/v1/*", headers={"Authorization": "Bearer secret:key"})
    base = "http://http.dsec/api.example/v1"
    for path in ("echo", "redirect-here", "redirect-away", "unauthorized", "gzip", "nothing"):
        status, headers, body = await ask(
            front, f"{base}/{path}", headers={"Authorization": "mine", "Accept-Encoding": "gzip"}
        )
        assert echo.asked[-1][2]["Authorization"] == f"Bearer {SECRET}"
        assert SECRET not in str(headers) + body.decode("latin-1") + str(front.notes), path
        assert status == {"unauthorized": 502, "gzip": 502, "redirect-here": 302, "redirect-away": 302}.get(path, 200)
        if path == "redirect-here":
            assert headers["Location"].startswith("/api.example/v1/moved")
    assert "*" * len(SECRET) in body.decode()


async def test_a_secret_goes_only_where_it_may(front: Front, echo: Echo) -> None:
    for name in ("elsewhere", "theirs", "nothing"):
        front.grant("http:api.example/v1/*", headers={"Authorization": f"Bearer secret:{name}"})
        status, _, body = await ask(front, "http://http.dsec/api.example/v1/x")
        assert status == 502
        assert name in body.decode()
    front.grant("http:127.0.0.1/v1/*", headers={"Authorization": "Bearer secret:key"})
    assert (await ask(front, "http://http.dsec/127.0.0.1/v1/x"))[0] == 502
    assert echo.asked == []


async def test_others_may_not_read_the_secrets_file(front: Front, tmp_path: Path) -> None:
    front.grant("http:api.example/v1/*", headers={"Authorization": "secret:key"})
    assert (await ask(front, "http://http.dsec/api.example/v1/x"))[0] == 200
    (tmp_path / "state/secrets.toml").chmod(0o644)
    (tmp_path / "state/secrets.toml").write_text("x = 'sk-leaked-0123456789'")
    status, _, body = await ask(front, "http://http.dsec/api.example/v1/x")
    assert status == 502
    assert b"chmod 600" in body
    assert b"leaked" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "169.254.169.254", "10.0.0.1", "[::1]", "2130706433"])
async def test_hosts_of_a_policy_need_public_addresses(front: Front, host: str) -> None:
    try:
        front.grant(f"http:{host}/*")
    except InvalidRequest:
        return
    status, _, body = await ask(front, f"http://http.dsec/{host}/x")
    assert status == 502, body


async def test_answers_stream_and_a_cut_one_is_cut(front: Front, echo: Echo) -> None:
    front.grant("http:api.example/v1/*", headers={"X-Key": "secret:key"})
    async with front.ask("GET", "http://http.dsec/api.example/v1/stream") as response:
        assert await response.content.readany() == b'data: {"n": 1}\n\n'
        echo.go_on.set()
        assert (await response.read()).endswith(b"[DONE]\n\n")
    with pytest.raises(Exception, match=r"payload|reset|disconnected|closed"):
        await ask(front, "http://http.dsec/api.example/v1/cut")


@pytest.mark.parametrize(
    "request_text",
    [
        "POST /api.example/v1/x HTTP/1.1\r\nHost: http.dsec\r\nContent-Length: 4\r\n"
        "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        "GET /api.example/v2/smuggled HTTP/1.1\r\nHost: http.dsec\r\n\r\n",
        "GET /api.example/v1/x HTTP/1.1\r\nHost: http.dsec\r\nX: a\nGET /v2/smuggled HTTP/1.1\r\n\r\n",
        "POST /api.example/v1/x HTTP/1.1\r\nHost: http.dsec\r\nContent-Length: 0\r\nContent-Length: 60\r\n\r\n"
        "GET /api.example/v2/smuggled HTTP/1.1\r\nHost: http.dsec\r\n\r\n",
        "GET /api.example/v1/x\r\n\r\nGET /v2/smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET http://http.dsec/api.example/v2/smuggled HTTP/1.1\r\nHost: http.dsec\r\nConnection: close\r\n\r\n",
        "GET /api.example/v2/smuggled HTTP/1.1\r\nHost: api.example\r\nConnection: close\r\n\r\n",
        "GET /api.example/v1/../v2/smuggled HTTP/1.1\r\nHost: http.dsec\r\nConnection: close\r\n\r\n",
        "GET /api.example/v1/x%0d%0aX:%20smuggled HTTP/1.1\r\nHost: http.dsec\r\nConnection: close\r\n\r\n",
    ],
)
async def test_nothing_is_smuggled(front: Front, echo: Echo, request_text: str) -> None:
    front.grant("http:api.example/v1/*", methods=["GET", "POST"])
    with contextlib.suppress(TimeoutError):  # a connection that is kept for the next request
        await asyncio.wait_for(front.raw(request_text.encode()), 0.5)
    assert not any("smuggled" in path or "smuggled" in str(headers) for _, path, headers, _ in echo.asked)


# --- inference ---

CHAT = "http://inference.dsec/main/v1/chat/completions"


async def test_an_endpoint_is_reached_without_a_key_inside(front: Front, echo: Echo) -> None:
    front.grant("inference:main")
    environment = front.of("inference").environment(front.grants)
    assert environment["OPENAI_BASE_URL"] + "/chat/completions" == CHAT
    key = {"Authorization": f"Bearer {environment['OPENAI_API_KEY']}", "X-Api-Key": "mine"}
    status, _, body = await ask(front, CHAT, "POST", data=json.dumps({"model": "small"}), headers=key)
    assert (status, json.loads(body)["usage"]["prompt_tokens"]) == (200, 7)
    _, path, headers, _ = echo.asked[-1]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {SECRET}"
    assert "X-Api-Key" not in headers
    assert front.notes[-1]["input_tokens"] == 7
    assert front.notes[-1]["output_tokens"] == 5
    assert front.notes[-1]["model"] == "small"
    assert SECRET not in str(front.notes) + str(environment)


async def test_models_and_paths_are_limited(front: Front, echo: Echo) -> None:
    front.grant("inference:main", models=["small"])
    for body in ('{"model": "large"}', '{"model": "other"}', "{}", "[]", "nonsense", '{"model": ["small"]}'):
        assert (await ask(front, CHAT, "POST", data=body))[0] in {400, 403}, body
    for url in (
        "http://inference.dsec/main/v1/files",
        "http://inference.dsec/main/v1/chat/completions/../../files",
        "http://inference.dsec/other/v1/models",
        "http://inference.dsec/main/v2/models",
    ):
        assert (await ask(front, url))[0] in {400, 403}, url
    assert echo.asked == []
    # The last one of two keys is what was checked, and what is sent.
    assert (await ask(front, CHAT, "POST", data='{"model": "large", "model": "small"}'))[0] == 200
    assert echo.asked[-1][3].count(b"model") == 1


async def test_use_is_bounded(front: Front, echo: Echo) -> None:
    echo.go_on.set()
    front.grant("inference:main", tokens=10)
    status, _, body = await ask(front, CHAT, "POST", data='{"model": "small", "stream": true}')
    assert status == 200
    assert json.loads(echo.asked[-1][3])["stream_options"] == {"include_usage": True}
    assert front.notes[-1]["output_tokens"] == 4
    assert (await ask(front, CHAT, "POST", data='{"model": "small"}'))[0] == 200
    status, _, body = await ask(front, CHAT, "POST", data='{"model": "small"}')
    assert status == 429
    assert b"10 tokens" in body
    front.sandbox_id = "two"
    front.grant("inference:main", requests=1)
    assert (await ask(front, CHAT, "POST", data='{"model": "small"}'))[0] == 200
    assert (await ask(front, CHAT, "POST", data='{"model": "small"}'))[0] == 429


async def test_an_endpoint_that_is_not_configured_is_refused(front: Front) -> None:
    with pytest.raises(InvalidRequest, match="no model endpoint"):
        front.grant("inference:other")
