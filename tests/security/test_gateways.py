"""Programs inside against the gateways: what a permission limits, what is hidden, what is secret, what others get."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from gateway_world import SECRET, World, open_world, works

from dsec import AsyncSandbox

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

TALK = """
import json, socket, sys
answers = []
for name, text in json.loads(sys.stdin.read()):
    s = socket.create_connection((name, 80), 120)
    s.sendall(text.encode("latin-1"))
    got = b""
    try:
        while some := s.recv(65536):
            if not got and "Connection: close" not in text:
                s.shutdown(socket.SHUT_WR)  # what is left of it is answered or not, then the connection ends
            got += some
    except OSError:
        pass
    answers.append(got.decode("latin-1"))
print(json.dumps(answers))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(debian_module_state: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with open_world(debian_module_state, tmp_path_factory.mktemp("outside")) as world:
        yield world


async def talk(box: AsyncSandbox, *requests: tuple[str, str]) -> list[str]:
    """What comes back for bytes that are sent to port 80 of names."""
    result = await box.commands.run(["python3", "-c", TALK], stdin=json.dumps(requests))
    assert result.exit_code == 0, result.stderr
    answers: list[str] = json.loads(result.stdout)
    return answers


def get(path: str, host: str, *headers: str) -> tuple[str, str]:
    """A request to the gateway of `host`."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers, "", ""]
    return host, "\r\n".join(lines)


def status(answer: str) -> int:
    return int(answer.split(" ")[1])


async def test_a_connection_to_one_gateway_is_no_way_to_another(world: World) -> None:
    async with await world.client.create("debian", network={"pypi": True}) as box:
        before = len(world.registry.asked)
        answers = await talk(
            box,
            ("pypi.dsec", get("/left", "npm.dsec")[1]),
            ("pypi.dsec", get("http://npm.dsec/left", "npm.dsec")[1]),
            ("pypi.dsec", get(f"{world.registry.url}/left", "pypi.dsec")[1]),
            ("pypi.dsec", "CONNECT npm.dsec:80 HTTP/1.1\r\nHost: npm.dsec\r\n\r\n"),
            get("/simple/tool/", "pypi.dsec"),
        )
        assert [status(answer) for answer in answers[:3]] == [404, 404, 404]
        assert " 200 " not in answers[3]
        assert status(answers[4]) == 200
        assert len(world.registry.asked) == before


async def test_paths_do_not_lead_out_of_a_permission(world: World) -> None:
    network = {"git:git.example/org/repo": True, "http:api.example/v1/*": True, "apt": {"suites": ["stable"]}}
    tail = "info/refs?service=git-upload-pack"
    async with await world.client.create("debian", network=network) as box:
        asked = len(world.git.asked), len(world.asked), len(world.files.asked)
        answers = await talk(
            box,
            *(
                get(f"/git.example/org/{path}/{tail}", "git.dsec")
                for path in (
                    "other.git",
                    "repo/../other.git",
                    "repo/%2e%2e/other.git",
                    "repo%2f..%2fother.git",
                    "/repo",
                )
            ),
            get("/git.example/org/repo.git/HEAD", "git.dsec"),
            get("/git.example/org/repo.git/info/refs?service=git-receive-pack", "git.dsec"),
            *(
                get(f"/api.example{path}", "http.dsec")
                for path in (
                    "/v2/x",
                    "/v1/../v2",
                    "/v1/%2e%2e/v2",
                    "/v1/..%2fv2",
                    "/v1/..;/v2",
                    "/v1/%252e%252e/v2",
                    "/v1",
                )
            ),
            *(
                get(f"/debian{path}", "mirror.example")
                for path in ("/../x", "/dists/stable/../testing/Release", "/dists/testing/Release", "/%2e%2e/x")
            ),
        )
        assert {status(answer) for answer in answers} <= {400, 403}
        assert (len(world.git.asked), len(world.asked), len(world.files.asked)) == asked
        fine = await talk(
            box, get(f"/git.example/org/repo.git/{tail}", "git.dsec"), get("/api.example/v1/x", "http.dsec")
        )
        assert [status(answer) for answer in fine] == [200, 200]


async def test_requests_and_methods_are_not_smuggled(world: World) -> None:
    async with await world.client.create("debian", network={"http:api.example/v1/*": True}) as box:
        before = len(world.asked)
        second = "GET /api.example/v2/smuggled HTTP/1.1\r\nHost: http.dsec\r\n\r\n"
        begin = "POST /api.example/v1/x HTTP/1.1\r\nHost: http.dsec\r\n"
        await talk(
            box,
            ("http.dsec", f"{begin}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{second}"),
            ("http.dsec", f"{begin}Content-Length: 0\r\nContent-Length: 60\r\n\r\n{second}"),
            ("http.dsec", f"{begin}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{second}"),
            ("http.dsec", f"{begin}X: a\n{second}"),
            ("http.dsec", f"DELETE /api.example/v1/x HTTP/1.1\r\nHost: http.dsec\r\n\r\n{second}"),
        )
        assert len(world.asked) == before
        override = get(
            "/api.example/v1/x",
            "http.dsec",
            "X-HTTP-Method-Override: DELETE",
            "X-Original-URL: /v2",
            "X_Method: DELETE",
        )
        assert status((await talk(box, override))[0]) == 200
        assert not {"x-http-method-override", "x-original-url", "x_method"} & {name.lower() for name in world.asked[-1]}


async def test_hidden_releases_are_out_of_reach(world: World) -> None:
    date = {"before": "2022-12-31"}
    async with await world.client.create("debian", network={"pypi": date, "npm": date}) as box:
        file = "tool-3.0-py3-none-any.whl"
        answers = await talk(
            box,
            get(f"/files/tool/{file}", "pypi.dsec"),
            get(f"/files/tool/{file}.metadata", "pypi.dsec"),
            get(f"/files/Tool/{file}", "pypi.dsec"),
            get(f"/files/base/{file}", "pypi.dsec"),
            get(f"/packages/tool/{file}", "pypi.dsec"),
            get(f"{world.index.url}/packages/tool/{file}", "pypi.dsec"),
            get("/left/-/left-3.0.0.tgz", "npm.dsec"),
            get("/left/3.0.0", "npm.dsec"),
            get("/@scope%2fthing/-/left-3.0.0.tgz", "npm.dsec"),
            get("/left/-/left-3.0.0.tgz?write=true", "npm.dsec"),
        )
        assert {status(answer) for answer in answers} <= {403, 404}
        # The clock inside decides nothing, nor does a cache filled by a sandbox that may have it.
        async with await world.client.create("debian", network={"pypi": True}) as other:
            assert status((await talk(other, get(f"/files/tool/{file}", "pypi.dsec")))[0]) == 200
        assert status((await talk(box, get(f"/files/tool/{file}", "pypi.dsec")))[0]) == 403


async def test_secrets_never_come_inside(world: World) -> None:
    async with await world.client.create("debian", network={"inference:main": True}) as box:
        body = '{"model": "m"}'
        answers = await talk(
            box,
            get("/main/v1/models", "inference.dsec"),
            get("/main/v1/models", "inference.dsec", "Authorization: mine", "Accept-Encoding: gzip"),
            get("/main/v1/models", "inference.dsec", "Range: bytes=0-3", "Connection: Authorization"),
            get("/main/v1/nothing", "inference.dsec"),
            (
                "inference.dsec",
                "POST /main/v1/chat/completions HTTP/1.1\r\nHost: inference.dsec\r\nConnection: close\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}",
            ),
        )
        assert [status(answer) for answer in answers] == [200, 200, 200, 403, 200]
        assert "Bearer *" in answers[0], "the server repeats what it gets: it got the key"
        assert {request["Authorization"] for request in world.asked[-4:]} == {f"Bearer {SECRET}"}
        everything = await works(
            box, "env; cat /proc/*/environ | tr '\\0' '\\n'; grep -rs sk-very /etc /run /tmp || true"
        )
        events = [str(event.data) async for event in box.events()]
        assert SECRET not in "".join([*answers, everything, *events, str(await box.network.get())])


async def test_one_sandbox_does_not_spoil_what_another_gets(world: World) -> None:
    page, file = "/simple/base/", "/files/base/base-0.1-py3-none-any.whl"
    async with (
        await world.client.create("debian", network={"pypi": True}) as one,
        await world.client.create("debian", network={"pypi": True}) as two,
    ):
        await talk(
            one,
            *(
                get(path, "pypi.dsec", *headers)
                for path in (page, file)
                for headers in (
                    ("X-Forwarded-Host: evil.example", "X-Forwarded-Proto: https"),
                    ("Host: evil.example",),
                    ("Range: bytes=0-3", "Accept-Encoding: gzip, br"),
                    ("If-None-Match: *", "Cache-Control: no-cache"),
                    ("Accept: application/vnd.pypi.simple.v1+json", "Authorization: Bearer x", "Cookie: a=b"),
                )
            ),
        )
        answers = await talk(two, get(page, "pypi.dsec"), get(file, "pypi.dsec"))
        assert [status(answer) for answer in answers] == [200, 200]
        assert "evil" not in "".join(answers)
        packed = world.index.files["base"]["base-0.1-py3-none-any.whl"][0]
        assert answers[1].partition("\r\n\r\n")[2].encode("latin-1") == packed
