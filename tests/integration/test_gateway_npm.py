"""The `npm` gateway, with npm itself and a registry that speaks its protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_kit import Front, open_front, run, serve
from upstream_kit import MIDDLE, NEW, OLD, Registry

from dsec.egress.gateways.config import GatewaysConfig, Upstream
from dsec.errors import InvalidRequest

SHORT = "application/vnd.npm.install-v1+json"


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    registry = Registry()
    async with serve(registry.handle) as registry.url:
        registry.add("left", "1.0.0", OLD)
        registry.add("left", "1.2.0-beta.1", OLD)
        registry.add("left", "1.10.0", MIDDLE)
        registry.add("left", "2.0.0", NEW)
        registry.add("@scope/thing", "0.1.0", OLD, requires={"left": "*"})
        registry.add("@scope/thing", "0.2.0", NEW, requires={"left": "*"})
        yield registry


@pytest.fixture
async def front(registry: Registry, tmp_path: Path) -> AsyncIterator[Front]:
    config = GatewaysConfig(npm=Upstream(registry.url), index_ttl_s=0)
    async with open_front(tmp_path / "state", config) as front:
        yield front


async def test_npm_installs_what_there_was_at_a_date(front: Front, tmp_path: Path) -> None:
    front.grant("npm", before="2023-01-01")
    project = tmp_path / "project"
    project.mkdir()
    (project / "package.json").write_text("{}")
    own = {f"npm_config_{each}config": str(tmp_path / each) for each in ("user", "global")}
    environment = {**front.environment(), **own}
    code, output = await run("npm", "install", "@scope/thing", environment=environment, cwd=project)
    assert code == 0, output
    lock = json.loads((project / "package-lock.json").read_text())
    found = {name.removeprefix("node_modules/"): each for name, each in lock["packages"].items() if name}
    assert {name: each["version"] for name, each in found.items()} == {"@scope/thing": "0.1.0", "left": "1.10.0"}
    assert all(each["integrity"].startswith("sha512-") for each in found.values())
    assert any(note.get("package") == "left" and note["status"] == 200 for note in front.notes)


async def test_a_date_hides_versions_and_moves_tags(front: Front, registry: Registry) -> None:
    front.grant("npm", before="2023-01-01")
    for headers in ({}, {"Accept": SHORT}):
        _, body = await front.get("http://npm.dsec/left", **headers)
        document = json.loads(body)
        assert set(document["versions"]) == {"1.0.0", "1.2.0-beta.1", "1.10.0"}
        assert document["dist-tags"] == {"latest": "1.10.0"}
        assert b"2.0.0" not in body
        assert NEW.encode() not in body
        assert registry.url.encode() not in body
    assert (await front.get("http://npm.dsec/left/-/left-2.0.0.tgz"))[0] == 403
    assert (await front.get("http://npm.dsec/left/2.0.0"))[0] == 403
    status, body = await front.get("http://npm.dsec/left/latest")
    assert json.loads(body)["version"] == "1.10.0"
    assert (await front.get("http://npm.dsec/left/-/left-1.10.0.tgz"))[0] == 200
    assert status == 200


async def test_packages_and_versions_are_denied_and_allowed(front: Front) -> None:
    front.grant("npm", deny=["left@>=1.10.0", "@scope/*"])
    _, body = await front.get("http://npm.dsec/left")
    assert set(json.loads(body)["versions"]) == {"1.0.0", "1.2.0-beta.1"}
    assert json.loads(body)["dist-tags"]["latest"] == "1.0.0"
    assert (await front.get("http://npm.dsec/left/-/left-1.10.0.tgz"))[0] == 403
    assert (await front.get("http://npm.dsec/@scope%2fthing"))[0] == 403
    front.grant("npm", allow=["@scope/thing"])
    assert (await front.get("http://npm.dsec/left"))[0] == 403
    for spelling in ("@scope%2fthing", "@scope%2Fthing", "@scope/thing", "%40scope/thing"):
        assert (await front.get(f"http://npm.dsec/{spelling}"))[0] == 200, spelling


async def test_a_registry_is_for_reading_packages(front: Front, registry: Registry) -> None:
    front.grant("npm")
    for method, path in (
        ("PUT", "/left"),
        ("DELETE", "/left/-rev/1"),
        ("POST", "/-/npm/v1/security/advisories/bulk"),
        ("PUT", "/-/user/org.couchdb.user:me"),
        ("GET", "/-/v1/search?text=left"),
        ("GET", "/-/whoami"),
    ):
        async with front.ask(method, f"http://npm.dsec{path}") as response:
            assert response.status == 403, path
            assert b"permission npm" in await response.read()
    assert registry.asked == []
    for path in ("/left/..%2f-/x", "/../left", "/@scope%2f..%2fleft", "/left/-/../../x.tgz"):
        assert (await front.get(f"http://npm.dsec{path}"))[0] in {400, 403, 404}, path
    assert registry.asked == []


async def test_options_that_are_wrong_are_refused(front: Front) -> None:
    for options in ({"before": "x"}, {"deny": ["left@latest"]}, {"pins": {}}):
        with pytest.raises(InvalidRequest, match="npm"):
            front.grant("npm", **options)
