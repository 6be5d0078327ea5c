"""How images of registries are named, which registries callers may name, and that no name, redirect or token server
leads past an operator's rules."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dsec.errors import InvalidRequest, NotFound, PermissionDenied
from dsec.store.image import host_platform
from dsec.store.registries import Registries
from dsec.store.registry import docker_credentials, parse_reference


class Site:
    """A server that notes what it is asked, and answers as it is told."""

    def __init__(self, address: str) -> None:
        self.asked: list[tuple[str, str | None]] = []
        """Path and authorization."""
        self.status = 404
        self.headers: dict[str, str] = {}
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append((self.path, self.headers.get("Authorization")))
                self.send_response(site.status)
                for name, value in {**site.headers, "Content-Length": "0"}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer((address, 0), Handler)
        self.port = self.server.server_port
        self.host = f"{address}:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site("127.0.0.1")
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def other() -> Iterator[Site]:
    found = Site("127.0.0.2")
    yield found
    found.server.shutdown()
    found.server.server_close()


async def ask(rules: Registries, image: str, project: str = "p", credentials: str | None = None) -> None:
    """Ask for an image that isn't there."""
    source = rules.source(image, project, credentials)
    try:
        await source.image(host_platform())
    finally:
        await source.close()


async def test_a_private_address_is_refused_until_it_is_named(site: Site) -> None:
    for image in (f"http://{site.host}/app", f"http://localhost:{site.port}/app", "10.0.0.1/app"):
        with pytest.raises(PermissionDenied, match="may not lead to"):
            await ask(Registries(), image)
    with pytest.raises(PermissionDenied, match="may not lead to"):  # of the same host, but of another port
        await ask(Registries(named=("*", "127.0.0.1:1")), f"http://{site.host}/app")
    assert site.asked == []
    for named in (site.host, "127.0.0.1", f"localhost:{site.port}", "*.0.0.1"):
        host = f"localhost:{site.port}" if named.startswith("local") else site.host
        with pytest.raises(NotFound):
            await ask(Registries(named=(named,)), f"http://{host}/app")
    with pytest.raises(NotFound):
        await ask(Registries(default=f"http://{site.host}"), "app")
    with pytest.raises(NotFound):  # this machine's own keys, on this machine
        await ask(Registries(), f"{site.host}/app", "default")
    with pytest.raises(PermissionDenied):
        await ask(Registries(), "192.168.1.1/app", "default")
    assert len(site.asked) == 6


async def test_only_named_ones_where_the_operator_says_so(site: Site) -> None:
    for image in (f"http://{site.host}/app", "registry.example/app"):
        with pytest.raises(PermissionDenied, match="callers may not name the registry"):
            await ask(Registries(named=("registry.test",)), image)
    with pytest.raises(InvalidRequest):
        await ask(Registries(named=("registry.test",)), "app")
    assert site.asked == []


async def test_redirects_and_token_servers_lead_nowhere_else(site: Site, other: Site) -> None:
    rules = Registries(named=("*", site.host))
    site.status, site.headers = 307, {"Location": f"http://{other.host}/stolen"}
    with pytest.raises(PermissionDenied, match="may not lead to"):
        await ask(rules, f"http://{site.host}/app")
    site.status, site.headers = 401, {"WWW-Authenticate": f'Bearer realm="http://{other.host}/token",service="s"'}
    with pytest.raises(PermissionDenied, match="may not lead to"):
        await ask(rules, f"http://{site.host}/app", credentials="user:secret")
    assert len(site.asked) == 2
    assert other.asked == []


async def test_the_servers_docker_login_is_for_projects_that_may(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = base64.b64encode(b"server:login").decode()
    (tmp_path / "config.json").write_text(f'{{"auths": {{"{site.host}": {{"auth": "{login}"}}}}}}')
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    site.status, site.headers = 401, {"WWW-Authenticate": "Basic"}
    image = f"http://{site.host}/app"
    for rules, project in ((Registries(named=(site.host,)), "default"), (_login(site, "a", "b"), "c")):
        with pytest.raises(PermissionDenied):
            await ask(rules, image, project)
    assert [header for _, header in site.asked] == [None, None]
    for rules, project in ((_login(site, "a", "b"), "b"), (_login(site, "*"), "c")):
        with pytest.raises(PermissionDenied):
            await ask(rules, image, project)
        assert site.asked[-1][1] == f"Basic {login}"
    with pytest.raises(PermissionDenied):  # the caller's own come first
        await ask(_login(site, "*"), image, "c", "own:word")
    assert site.asked[-1][1] == f"Basic {base64.b64encode(b'own:word').decode()}"


def _login(site: Site, *projects: str) -> Registries:
    return Registries(named=(site.host,), docker_login=projects)


def test_references() -> None:
    digest = "sha256:" + "a" * 64
    for text, url, name, reference in (
        ("host.example/app", "https://host.example", "app", "latest"),
        ("host.example:5000/team/app:1.0", "https://host.example:5000", "team/app", "1.0"),
        ("localhost/app", "http://localhost", "app", "latest"),
        ("127.0.0.1:5000/app@" + digest, "http://127.0.0.1:5000", "app", digest),
        ("[::1]:5000/app:x@" + digest, "http://[::1]:5000", "app", digest),
        ("http://host/app", "http://host", "app", "latest"),
    ):
        assert parse_reference(text) == (url, name, reference)
    assert parse_reference("team/app:2", "mirror.example/x").name == "x/team/app"
    assert parse_reference("python:3.11-slim", "mirror.example") == (
        "https://mirror.example",
        "python",
        "3.11-slim",
    )
    assert parse_reference("app@" + digest, "http://mirror.example").reference == digest
    for bad in ("app", "app:1", "team/app", "host.example/", "host.example/APP", "host.example/a:b:c", "ftp://host/a",
                "host.example/a@sha256:12", "host.example/../x", "https://u:p@host.example/a", "x" * 2000):  # fmt: skip
        with pytest.raises(InvalidRequest):
            parse_reference(bad)


def test_dockers_own_credentials_are_used(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert docker_credentials("h", path) is None
    for text in ("nonsense", "[]", '{"auths": 5}', '{"auths": {"h": {}}}', '{"auths": {"h": {"auth": "%%"}}}'):
        path.write_text(text)
        assert docker_credentials("h", path) is None
    path.write_text(json.dumps({"auths": {"h:5000": {"auth": base64.b64encode(b"u:p").decode()}}}))
    assert docker_credentials("h:5000", path) == "u:p"
    assert docker_credentials("other", path) is None
