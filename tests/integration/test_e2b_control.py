"""E2B's control plane by hand: who may, bad input, the forms of errors. That its own client works: tests/e2b."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_kit import Served, served
from e2b_kit import NEW, Box, is_error, rest

from dsec.api.e2b.config import E2bConfig
from dsec.api.e2b.models import new_sandbox, spec_of
from dsec.api.e2b.network import network_of
from dsec.errors import DsecError
from dsec.spec.network import Network


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as server:
        yield server


@pytest.fixture
async def box(server: Served) -> Box:
    status, answer = await rest(server, "POST", "/v2/sandboxes", NEW)
    assert status == 201
    return Box(server, answer)


async def test_old_and_new_paths(server: Served, box: Box) -> None:
    status, answer = await rest(server, "POST", "/sandboxes", NEW)
    assert (status, answer["templateID"]) == (201, "other")
    assert {"templateID", "sandboxID", "clientID", "envdVersion"} <= set(answer)
    for prefix in ("", "/v2"):
        assert (await rest(server, "POST", f"{prefix}/sandboxes/{box.id}/connect", {}))[1][
            "envdAccessToken"
        ] == box.token
    assert next(item["sandboxID"] for item in (await rest(server, "GET", "/v2/sandboxes?order=asc"))[1]) == box.id


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b'{"templateID": "\xff"}', 400),
        ({}, 400),
        ({"templateID": 7}, 400),
        ({"templateID": ""}, 400),
        ({"templateID": "no such!"}, 400),
        ({"templateID": "missing"}, 404),
        (NEW | {"timeout": 0}, 400),
        (NEW | {"timeout": -1}, 400),
        (NEW | {"timeout": 10**12}, 400),
        (NEW | {"timeout": "x"}, 400),
        (NEW | {"metadata": {"a": 1}}, 400),
        (NEW | {"metadata": {str(n): "" for n in range(65)}}, 400),
        (NEW | {"envVars": {"A=B": "x"}}, 400),
        (NEW | {"envVars": ["A"]}, 400),
        (NEW | {"futureOption": True}, 422),
        (NEW | {"allow_internet_access": True}, 403),
        (NEW | {"network": {"allowOut": ["1.1.1.1"]}}, 403),
        (NEW | {"network": {"allowOut": ["-"]}}, 400),
        (NEW | {"network": {"egressProxy": {"url": "x"}}}, 422),
        (NEW | {"mcp": {"x": {}}}, 422),
        (NEW | {"volumeMounts": [{"name": "a", "path": "/b"}]}, 422),
    ],
)
async def test_bad_creations(server: Served, body: object, status: int) -> None:
    assert is_error(await rest(server, "POST", "/v2/sandboxes", body), status)
    assert server.edge.node().live == 0


@pytest.mark.parametrize(
    "more",
    [
        {"futureOption": None},
        {"autoPause": True, "autoResume": {"enabled": True}, "autoPauseMemory": True},
        {"secure": True},
        {"allow_internet_access": False},
        {"network": {"denyOut": ["0.0.0.0/0"], "allowPublicTraffic": False}},
        {"mcp": None, "volumeMounts": []},
    ],
)
async def test_options_that_are_met(server: Served, more: dict[str, object]) -> None:
    assert (await rest(server, "POST", "/v2/sandboxes", NEW | more))[0] == 201


async def test_what_is_to_come_says_so(server: Served, box: Box) -> None:
    for method, path in (
        ("POST", f"/sandboxes/{box.id}/snapshots"),
        ("GET", "/snapshots"),
        ("POST", "/v3/templates"),
        ("POST", "/v2/templates/x/builds/y"),
        ("GET", "/volumes"),
    ):
        answer = await rest(server, method, path, {})
        assert is_error(answer, 501), path
        assert "not available" in answer[1]["message"]


async def test_a_key_of_the_project_is_needed(server: Served, box: Box) -> None:
    elsewhere = await server.edge.create_key("elsewhere")
    for key in ("wrong", ""):
        assert is_error(await rest(server, "POST", "/v2/sandboxes", NEW, key=key), 401)
        assert is_error(await rest(server, "GET", f"/sandboxes/{box.id}", key=key), 401)
    assert is_error(await rest(server, "POST", "/v2/sandboxes", NEW, key=box.token), 403)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/connect"), ("POST", "/timeout"), ("GET", "/metrics")):
        assert is_error(await rest(server, method, f"/sandboxes/{box.id}{path}", {"timeout": 5}, key=elsewhere), 404)
    assert (await rest(server, "GET", "/v2/sandboxes", key=elsewhere))[1] == []
    assert (await rest(server, "GET", f"/sandboxes/{box.id}"))[0] == 200


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "limit=x",
        "order=up",
        "state=dead",
        "nextToken=%00",
        "nextToken=e30",
        "startedAfter=soon",
        "what=1",
    ],
)
async def test_bad_lists(server: Served, query: str) -> None:
    assert is_error(await rest(server, "GET", f"/v2/sandboxes?{query}"), 400)


async def test_unknown_paths_and_methods(server: Served, box: Box) -> None:
    assert is_error(await rest(server, "GET", f"/sandboxes/{box.id}/what"), 404)
    assert is_error(await rest(server, "GET", "/sandboxes/x/y/z"), 404)
    assert is_error(await rest(server, "PATCH", "/v2/sandboxes"), 405)
    assert is_error(await rest(server, "POST", f"/sandboxes/{box.id}/metrics"), 405)
    status, _, body = await box.raw("DELETE", "/files?path=/x")
    assert is_error((status, json.loads(body)), 405)


async def test_network_rules(server: Served, box: Box) -> None:
    path = f"/sandboxes/{box.id}/network"
    for body, policy in (
        ({"allowOut": ["a.example.com", "*.B.example."], "denyOut": ["0.0.0.0/0"]}, {"a.example.com", "*.b.example"}),
        ({"allowOut": ["c.example"]}, {"c.example"}),
        ({}, set()),
    ):
        assert (await rest(server, "PUT", path, body))[0] == 204
        assert server.edge.network(box.id).policy == {f"host:{name}": True for name in policy}
    assert is_error(await rest(server, "PUT", path, {"allow_internet_access": True}), 403)
    assert is_error(await rest(server, "PUT", path, {"rules": {"a": 1}}), 422)
    assert (await rest(server, "GET", f"/sandboxes/{box.id}"))[1]["allowInternetAccess"] is False


def test_what_rules_mean() -> None:
    default: Network = {"host:d.example": True}
    assert network_of(None, None, default) == default
    assert network_of(False, None, default) == {}
    assert network_of(True, {"denyOut": ["9.9.9.9", "bad.example"]}, {}) == {
        "internet": True,
        "ip:9.9.9.9": False,
        "host:bad.example": False,
    }
    assert network_of(True, {"denyOut": ["0.0.0.0/0"]}, {}) == {}
    assert network_of(None, {"allowOut": ["0.0.0.0/0"]}, {}) == {"internet": True}
    assert network_of(None, {"allowOut": ["10.0.0.0/8", "::1"]}, {}) == {"ip:10.0.0.0/8": True, "ip:::1": True}


def test_templates_by_name_and_tag() -> None:
    config = E2bConfig(templates={"base": "debian", "mine:v2": "special"})
    assert [config.environment(name) for name in ("base", "base:latest", "mine:v2", "mine:v1", "x@1")] == [
        "debian",
        "debian",
        "special",
        "mine:v1",
        "x@1",
    ]


def test_metadata_is_labels_and_variables_are_env() -> None:
    spec = spec_of(
        new_sandbox(b'{"templateID": "x", "timeout": 9, "metadata": {"a": "b"}, "envVars": {"C": "d"}}'),
        E2bConfig(),
        {},
    )
    assert (spec.labels, spec.env, spec.ttl_s, spec.command_timeout_s) == ({"a": "b"}, {"C": "d"}, 9.0, None)
    with pytest.raises(DsecError):
        new_sandbox(b'{"templateID": "x", "metadata": []}')
