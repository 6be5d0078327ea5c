"""What a group's services may say, and the order in which they start."""

from __future__ import annotations

import pytest

from dsec.errors import InvalidRequest
from dsec.spec.groups import Health, Service, health_of, in_order, sandbox_of, services_of
from dsec.spec.sandbox import SandboxSpec


def test_order_and_permissions() -> None:
    services = {
        "web": Service(spec="base", links=["app", "db:5433"]),
        "app": Service(spec=SandboxSpec(environment="base", network={"pypi": True}), links=["db"], ports=[80]),
        "db": Service(spec="base", ports=[5432, 5433], health=Health(port=5432)),
    }
    assert in_order(services) == ["db", "app", "web"]
    web, app, db = (sandbox_of("g", each, services) for each in services)
    assert web.network == {"sandbox:app:80": True, "sandbox:db:5433": True}
    assert app.network == {"pypi": True, "sandbox:db:5432": True, "sandbox:db:5433": True}
    assert db.network is None
    assert {(spec.run, spec.labels["dsec.group"]) for spec in (web, app, db)} == {("g", "g")}
    assert [spec.name for spec in (web, app, db)] == list(services)
    assert health_of(db) == Health(port=5432)
    assert health_of(app) is None


@pytest.mark.parametrize(
    ("services", "what"),
    [
        ({}, "at least one"),
        ({"Db": Service(spec="b")}, "'Db'"),
        ({"db": Service(spec="b", links=["other"])}, "'other'"),
        ({"db": Service(spec="b", links=["db:1"])}, "'db'"),
        ({"db": Service(spec="b"), "a": Service(spec="b", links=["db"])}, "no ports"),
        ({"db": Service(spec="b"), "a": Service(spec="b", links=["db:0"])}, "NAME:PORT"),
        ({"a": Service(spec="b", links=["b:1"]), "b": Service(spec="b", links=["a:1"])}, "a circle"),
    ],
)
def test_what_cannot_be(services: dict[str, Service], what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        in_order(services)


def test_a_service_does_not_name_its_sandbox() -> None:
    services = {"db": Service(spec=SandboxSpec(environment="base", name="x"))}
    with pytest.raises(InvalidRequest, match="the group's"):
        sandbox_of("g", "db", services)


def test_files() -> None:
    db = {"environment": "base", "cpus": 2, "command": "serve", "health": {"port": 1}}
    found = services_of({"services": {"db": db}})
    spec = SandboxSpec(environment="base", cpus=2)
    assert found == {"db": Service(spec=spec, command="serve", health=Health(port=1))}
    for content in (
        {},
        {"services": {}, "x": {}},
        {"services": {"db": {"environment": "b", "helth": 1}}},
        {"services": 1},
    ):
        with pytest.raises(InvalidRequest):
            services_of(content)
