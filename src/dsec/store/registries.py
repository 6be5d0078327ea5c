"""Which registries callers may name, and as whom the server asks there: an operator's rules.

Addresses are checked where connections are made, so that names, redirects and token servers lead nowhere else either:
they are public, or of a host that the operator named. (Where the server has an HTTP proxy, that one resolves names, and
only addresses in the reference itself are checked.)
"""

from __future__ import annotations

import ipaddress
import socket
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from msgspec import Struct

from dsec.errors import PermissionDenied
from dsec.plan.addresses import plain, public
from dsec.store.registry import RegistrySource, docker_credentials, parse_reference

ANY = "*"
MACHINE = "default"
"""The project of this machine's own keys: registries on this machine are its own."""


class Registries(Struct, frozen=True, kw_only=True):
    """What an operator says of registries."""

    default: str = ""
    """The one of images that don't name one."""
    named: tuple[str, ...] = (ANY,)
    """`HOST` or `HOST:PORT`, with `*` at the beginning for any: callers may name these, wherever they lie. `*` alone:
    all others, at public addresses."""
    docker_login: tuple[str, ...] = ()
    """Projects for which the server uses its own Docker login; `*`: all."""

    def source(self, image: str, project: str, credentials: str | None = None) -> RegistrySource:
        """To fetch an image, for a project. `credentials`: the caller's own. Raises `InvalidRequest` for a bad
        reference, `PermissionDenied` for a registry that callers may not name."""
        reference = parse_reference(image, self.default or None)
        host = urlsplit(reference.url).netloc
        known = [each for each in (*self.named, urlsplit(self.default).netloc or self.default) if each not in ("", ANY)]
        gate = _Gate(known, loopback=project == MACHINE)
        if ANY not in self.named and not gate.names(host):
            raise PermissionDenied(
                f"callers may not name the registry {host[:200]!r}",
                remedy="DSEC_REGISTRIES says which they may.",
            )
        gate.check(urlsplit(reference.url).hostname or "", urlsplit(reference.url).port)
        if credentials is None and not {ANY, project}.isdisjoint(self.docker_login):
            credentials = docker_credentials(host)
        return RegistrySource(reference, credentials, connector=gate.connector)


class _Gate:
    """The connections of one import."""

    def __init__(self, named: list[str], *, loopback: bool) -> None:
        proxies = [urlsplit(url).netloc or url for kind, url in getproxies().items() if kind != "no"]
        self._named = [_split(each) for each in (*named, *proxies)]
        self._loopback = loopback
        self._resolved: set[tuple[str, int | None]] = set()
        """Addresses and ports of hosts that the operator named."""

    def names(self, host: str) -> bool:
        """Whether `HOST[:PORT]` is one that the operator named."""
        name, port = _split(host)
        return any(fnmatchcase(name, pattern) and wanted in (None, port) for pattern, wanted in self._named)

    def check(self, host: str, port: int | None) -> None:
        """Raise `PermissionDenied` for an address that isn't anybody's. Nothing for a name."""
        try:
            address = plain(ipaddress.ip_address(host))
        except ValueError:
            return
        if public(address) or (host, port) in self._resolved or self.names(_joined(host, port)):
            return
        if not (self._loopback and address.is_loopback):
            raise PermissionDenied(
                f"a registry may not lead to {host}",
                remedy="That is a private address: the operator can name the registry in DSEC_REGISTRIES.",
            )

    def connector(self) -> aiohttp.BaseConnector:
        """Makes only connections that are allowed."""
        return aiohttp.TCPConnector(resolver=_Resolver(self), socket_factory=self._socket)

    def learn(self, host: str, port: int, addresses: list[str]) -> None:
        """A name was resolved."""
        if self.names(_joined(host, port)):
            self._resolved.update((each, port) for each in addresses)

    def _socket(self, info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        self.check(address[0], address[1])
        return socket.socket(family, kind, protocol)


class _Resolver(AbstractResolver):
    def __init__(self, gate: _Gate) -> None:
        self._gate = gate
        self._own = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._own.resolve(host, port, family)
        self._gate.learn(host, port, [each["host"] for each in found])
        return found

    async def close(self) -> None:
        await self._own.close()


def _split(host: str) -> tuple[str, int | None]:
    parts = urlsplit(f"//{host.rpartition('@')[2]}")
    return (parts.hostname or "").rstrip("."), parts.port


def _joined(host: str, port: int | None) -> str:
    return (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
