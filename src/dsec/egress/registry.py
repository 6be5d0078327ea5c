"""The operator's files about the network, `network.toml` and `network.d/*.toml` in the state directory.

Owns its form; docs/NETWORK.md describes it. Invariant: a file with a mistake stops the server with a sentence that says
where, rather than granting something else than was meant.
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dsec.egress.meters import Limits
from dsec.errors import InvalidRequest
from dsec.plan.permissions import BUILT_IN, Definition, check_definition
from dsec.spec.network import KeyPolicy, host_name, permission

FILE_NAME = "network.toml"
DIRECTORY = "network.d"
"""Further files, in the order of their names: what they say of one thing replaces what was said before."""


class NetworkFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What it may hold."""

    permissions: dict[str, Definition] = {}
    """By name; a built-in one may be given other options, limits or upstreams."""
    limits: Limits = Limits()
    hosts: dict[str, list[str]] = {}
    """Addresses of names, before the host's resolver is asked."""
    keys: KeyPolicy = KeyPolicy()
    """For API keys that were made without a policy of their own."""

    @property
    def definitions(self) -> Mapping[str, Definition]:
        """The built-in permissions and these."""
        return {**BUILT_IN, **self.permissions}


def read_network(state: Path) -> NetworkFile:
    """The files of a state directory, or the defaults. Raises `InvalidRequest`."""
    path, merged = state / FILE_NAME, dict[str, dict[str, Any]]()
    try:
        for path in (state / FILE_NAME, *sorted((state / DIRECTORY).glob("*.toml"))):
            if path.exists():
                for table, content in tomllib.loads(path.read_text()).items():
                    merged.setdefault(table, {}).update(content)
                found = msgspec.convert(merged, NetworkFile)
        found = msgspec.convert(merged, NetworkFile)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError, ValueError) as error:
        raise _wrong(path, str(error)) from error
    for name, definition in found.permissions.items():
        try:
            if permission(name).text != name or ":" in name:
                raise ValueError("a permission's name is lower-case letters, digits and hyphens")
        except ValueError as error:
            raise _wrong(path, f"permissions.{name}: {error}") from None
        why = check_definition(name, definition)
        if why is not None:
            raise _wrong(path, f"permissions.{name}: {why}")
    try:
        for host, addresses in found.hosts.items():
            if host_name(host) != host:
                raise ValueError(f"{host!r} is written {host_name(host)!r}")
            for address in addresses:
                ipaddress.ip_address(address)
    except ValueError as error:
        raise _wrong(path, f"hosts: {error}") from None
    return found


def _wrong(path: Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {why}", remedy="docs/NETWORK.md says what it may hold.")
