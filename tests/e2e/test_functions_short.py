"""Single calls by the short way through the server (`api/quick_calls.py`): they say and end as by the ordinary one."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from calls_kit import client_of
from dsec import Client, FunctionCall, FunctionResult
from server_kit import Server, serving, until

pytestmark = pytest.mark.root
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(debian_module_state: Path) -> Iterator[Server]:
    with serving(debian_module_state) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with client_of(server) as client:
        yield client


def _posted(server: Server, source: str, argument: object, *more: str, bearer: str = "") -> socket.socket:
    """A call as the SDK asks for it; `more`: headers in between."""
    batch = {"function": {"environment": "debian", "source": source, "name": "f"}, "calls": [{"args": [argument]}]}
    body = msgspec.msgpack.encode(batch)
    lines = [
        "POST /v1/functions HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {bearer or server.endpoint().api_key}",
        "Content-Type: application/msgpack",
        *more,
        "X-Request-Id: r1",
        f"Content-Length: {len(body)}",
    ]
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return sock


def _answer(sock: socket.socket) -> tuple[int, FunctionResult | None]:
    with sock, http.client.HTTPResponse(sock) as response:
        response.begin()
        data = response.read()
        result = msgspec.msgpack.decode(data[4:], type=FunctionResult) if response.status == 200 else None
        return response.status, result


def _quick(server: Server) -> int:
    request = urllib.request.Request(
        f"{server.url}/metrics", headers={"Authorization": f"Bearer {server.endpoint().api_key}"}
    )
    with urllib.request.urlopen(request) as answer:
        lines = answer.read().decode().splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("dsec_http_quick_total"))


def _known(client: Client, source: str, argument: object) -> None:
    """The second batch of a source has it compiled, so that later ones can begin at once."""
    for _ in range(2):
        client.function(source, "f").run(FunctionCall(args=[argument]))


def test_the_short_way_says_what_the_ordinary_one_says(client: Client, server: Server) -> None:
    source = "import sys\ndef f(x):\n    print(x)\n    return 10 // x"
    _known(client, source, 1)
    for argument in (5, 0):
        until(lambda argument=argument: _went_short(server, source, argument))
        before = _quick(server)
        _, ordinary = _answer(_posted(server, source, argument, "X-Other: 1"))
        assert _quick(server) == before
        _, short = _answer(_posted(server, source, argument))
        assert ordinary is not None
        assert short is not None
        for name in ("ok", "value", "error", "cause", "stdout", "exit_code"):
            assert getattr(short, name) == getattr(ordinary, name)
    headers = {"Authorization": f"Bearer {server.endpoint().api_key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(f"{server.url}/v1/sandboxes", data=b'{"environment": "debian"}', headers=headers)
    with urllib.request.urlopen(asked) as answer:
        sandbox = json.load(answer)
    assert _answer(_posted(server, source, 5, bearer=sandbox["token"]))[0] == 403
    assert _answer(_posted(server, source, 5, bearer="nobody"))[0] == 401
    client.kill_many([sandbox["id"]])


def _went_short(server: Server, source: str, argument: object) -> bool:
    """Whether a worker was there, so that it could."""
    before = _quick(server)
    _answer(_posted(server, source, argument))
    return _quick(server) == before + 1


def test_going_away_ends_a_call_on_the_short_way(client: Client, server: Server) -> None:
    marker = "86398.25"
    source = "import os\ndef f(n):\n    if n:\n        os.execvp('sleep', ['sleep', n])\n    return 1"
    _known(client, source, "")
    until(lambda: _went_short(server, source, ""))
    sock = _posted(server, source, marker)
    until(lambda: _running(marker) == 1)
    sock.close()
    until(lambda: _running(marker) == 0)
    assert client.function(source, "f").remote("") == 1


def _running(marker: str) -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += marker.encode() in path.read_bytes().split(b"\0")
        except OSError:
            continue
    return found
