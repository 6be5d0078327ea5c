"""Services: sandboxes that belong together, what they run, and who of them reaches whom. Pure.

Owns the form of a service and the order of a start. Invariants: a service links only to services of its own group, at
ports that are named; a group whose links form a circle has no order, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from dsec.errors import InvalidRequest
from dsec.spec.network import host_name
from dsec.spec.sandbox import Port, SandboxSpec, Seconds

GROUP_LABEL = "dsec.group"
HEALTH_LABEL = "dsec.health"
"""How it is checked, as JSON, so that any client can."""


class Health(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a service is ready: its port takes connections, or a command inside ends with 0; with both, both."""

    command: list[str] | str | None = None
    """argv; a str for the shell."""
    port: Port | None = None
    interval_s: Seconds = 1.0
    """Between two checks."""
    timeout_s: Seconds = 5.0
    """Of one check."""
    retries: Annotated[int, Meta(ge=1, le=100_000)] = 30
    """So many checks may fail before the service has failed."""


class Service(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One sandbox of a group. Others of the group reach it by its name in the group."""

    spec: SandboxSpec | str
    """Without `run` and `name`; a str: an environment's name."""
    command: list[str] | str | None = None
    """Runs in the background for as long as the sandbox lives; its output goes to `/tmp/service.log` inside."""
    ports: list[Port] = []
    """Those that a link to it by its name alone leads to."""
    links: list[str] = []
    """Services that it reaches, each at its `ports`, or `NAME:PORT`. They are ready before its command starts."""
    health: Health | None = None
    """None: it is ready when its command has been started."""


def in_order(services: Mapping[str, Service]) -> list[str]:
    """Names, each after those that it links to. Raises `InvalidRequest`."""
    if not services:
        raise InvalidRequest("a group has at least one service")
    graph: dict[str, list[str]] = {}
    for name, service in services.items():
        try:
            same = host_name(name) == name
        except ValueError:
            same = False
        if not same:
            raise InvalidRequest(f"{name[:80]!r} can't be a service's name: lower-case letters, digits, '-' and '.'")
        graph[name] = [link for link, _ in _links(name, service, services)]
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise InvalidRequest(f"links form a circle: {' -> '.join(reversed(error.args[1]))}") from None


def sandbox_of(group: str, name: str, services: Mapping[str, Service]) -> SandboxSpec:
    """The spec of a service's sandbox. Raises `InvalidRequest`."""
    service = services[name]
    spec = SandboxSpec(environment=service.spec) if isinstance(service.spec, str) else service.spec
    if spec.run is not None or spec.name is not None:
        raise InvalidRequest(f"service {name!r}: run and name are the group's to say")
    labels = spec.labels | {GROUP_LABEL: group}
    if service.health is not None:
        labels[HEALTH_LABEL] = msgspec.json.encode(service.health).decode()
    links = {f"sandbox:{link}:{port}": True for link, port in _links(name, service, services)}
    network = {**(spec.network or {}), **links}
    return replace(spec, run=group, name=name, labels=labels, network=network or None)


def services_of(content: Mapping[str, Any]) -> dict[str, Service]:
    """What a file says: below `services`, by name, the fields of a `Service` and of its `SandboxSpec` side by side.
    Raises `InvalidRequest`."""
    own = set(Service.__struct_fields__) - {"spec"}
    found = {}
    try:
        wanted = msgspec.convert(content, dict[str, dict[str, dict[str, Any]]])
        if wanted.keys() != {"services"}:
            raise InvalidRequest("the file has one table: services")
        for name, fields in wanted["services"].items():
            mine = {key: value for key, value in fields.items() if key in own}
            spec = {key: value for key, value in fields.items() if key not in own}
            found[name] = msgspec.convert({**mine, "spec": spec}, Service)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"services: {error}") from None
    return found


def health_of(spec: SandboxSpec) -> Health | None:
    """How a service is checked, by its sandbox's labels."""
    text = spec.labels.get(HEALTH_LABEL)
    return None if text is None else msgspec.json.decode(text, type=Health)


def _links(name: str, service: Service, services: Mapping[str, Service]) -> list[tuple[str, int]]:
    found = []
    for link in service.links:
        to, colon, number = link.partition(":")
        if to not in services or to == name:
            raise InvalidRequest(f"service {name!r} links to {to[:80]!r}, which is no other service of the group")
        if colon and not (number.isascii() and number.isdigit() and 1 <= int(number[:6]) <= 65535):
            raise InvalidRequest(f"service {name!r}: {link[:80]!r} is not NAME or NAME:PORT")
        ports = [int(number)] if colon else services[to].ports
        if not ports:
            raise InvalidRequest(f"service {name!r} links to {to!r}, which names no ports")
        found += [(to, port) for port in ports]
    return found
