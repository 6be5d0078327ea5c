"""The way out of a shield: names and addresses as they are, for the server in it, which decides for its sandboxes.

What its sandboxes may reach is decided inside, by the same code as on a host. Here is what the machine as a whole
reaches, whoever took it over: names and public addresses; private ones only where the operator's file gives them to a
name, or names them; the servers of the node's cluster, at addresses that stand for them (`STAND_IN`). Never this host's
loopback, link-local addresses or a metadata service.

Owns its connections: bounded by the machine's network (`vmm/network.py`), ended by `close`. Invariant: only an address
that was checked is connected to.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import ipaddress
import logging
import socket
import struct
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from ipaddress import IPv4Address
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from dsec.egress import dns
from dsec.egress.registry import NetworkFile
from dsec.egress.resolver import Resolver
from dsec.errors import Unsupported
from dsec.plan.addresses import plain, public, reachable

STAND_IN = IPv4Address("198.18.0.2")
"""Of the first server of the cluster; the others' follow it."""
MOST_QUERIES = 256
MOST_PRIVATE = 4096
CONNECT_S = 10.0
_PIECE = 64 << 10
_NATS_PORT = 4222
_RESET = struct.pack("ii", 1, 0)

log = logging.getLogger(__name__)


class Servers(Struct, frozen=True, kw_only=True):
    """Those of the node's cluster, and how the machine gets to them. Made by `servers_of`."""

    urls: list[str] = []
    """Inside."""
    stands: dict[IPv4Address, tuple[str, int]] = {}
    """Host and port outside, by the address that stands for them."""
    names: list[str] = []
    """Those that may lead to private addresses: whose certificates are asked for these."""
    addresses: list[tuple[IPv4Address, int]] = []
    """That may be connected to as they are."""


class Outlet:
    """For one event loop; for one machine after the other."""

    def __init__(self, network: NetworkFile, servers: Servers | None = None) -> None:
        """`network`: the operator's file. `servers`: the cluster's."""
        self._resolver = Resolver(fixed=network.hosts)
        self._servers = servers or Servers()
        definitions = network.permissions.values()
        self._private_names = [host for each in definitions if each.private for host in each.hosts]
        self._private_names += self._servers.names
        self._blocks = [ipaddress.ip_network(text, strict=False) for each in definitions for text in each.addresses]
        given = [text for name, texts in network.hosts.items() if self._may_be_private(name) for text in texts]
        self._blocks += [ipaddress.ip_network(text) for text in given]  # the server inside asks nobody for these
        self._private: OrderedDict[IPv4Address, None] = OrderedDict()
        """Private addresses that a name led to which may."""
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def query(self, message: bytes) -> asyncio.Future[bytes] | None:
        """The answer to a DNS query, when it is there; None: there are too many, or it is none."""
        names: list[str] = []

        def note(name: str) -> IPv4Address | None:
            names.append(name)
            return None

        at_once = dns.answer(message, note, lambda _: None)
        if at_once is None or self._waiting >= MOST_QUERIES:
            return None
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        if not names:
            answer.set_result(at_once)
            return answer
        self._waiting += 1
        self._spawn(self._look_up(message, names[0], answer))
        return answer

    async def _look_up(self, message: bytes, name: str, answer: asyncio.Future[bytes]) -> None:
        try:
            found = [IPv4Address(text) for text in await self._resolver.resolve(name) if ":" not in text]
        finally:
            self._waiting -= 1
        if self._may_be_private(name):
            for address in found:
                self._private[address] = None
                self._private.move_to_end(address)
            while len(self._private) > MOST_PRIVATE:
                self._private.popitem(last=False)
        said = dns.answer(message, lambda _: found[0] if found else None, lambda _: None)
        if said is not None and not answer.done():
            answer.set_result(said)

    def _may_be_private(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._private_names)

    def connected(self, sock: socket.socket, address: str, port: int) -> None:
        """A connection of a program's in the machine."""
        where = IPv4Address(address)
        server = self._servers.stands.get(where)
        if server is not None and server[1] == port:
            self._spawn(self._join(sock, *server))
        elif (where, port) in self._servers.addresses or self._allowed(where):
            self._spawn(self._join(sock, address, port))
        else:
            log.info("the shield was refused a connection to %s:%d", address, port)
            _reset(sock)

    def _allowed(self, address: IPv4Address) -> bool:
        clear = plain(address)
        if public(clear):
            return True
        named = address in self._private or any(address in block for block in self._blocks)
        return named and reachable(clear) and not clear.is_loopback

    async def _join(self, inside: socket.socket, host: str, port: int) -> None:
        outside: socket.socket | None = None
        try:
            outside = await _connect(host, port)
            await _splice(inside, outside)
        except* (OSError, TimeoutError) as errors:
            log.debug("a connection of the shield's to %s:%d: %s", host, port, errors.exceptions[0])
            _reset(inside)
        finally:
            inside.close()
            if outside is not None:
                outside.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cut everything. Idempotent."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._resolver.close()


async def _connect(host: str, port: int) -> socket.socket:
    """Raises OSError, TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
        return sock


async def _splice(one: socket.socket, other: socket.socket) -> None:
    """Both ways, until both have ended. Raises OSError."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_pump(one, other))
        group.create_task(_pump(other, one))


async def _pump(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, _PIECE):
        await loop.sock_sendall(target, data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


def servers_of(urls: Sequence[str]) -> Servers:
    """How the servers of a cluster are reached from a shield. Raises `Unsupported` for one that can't be."""
    inside: list[str] = []
    stands: dict[IPv4Address, tuple[str, int]] = {}
    names: list[str] = []
    addresses: list[tuple[IPv4Address, int]] = []
    for url in urls:
        scheme, _, rest = url.partition("://")
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname or "", parts.port or _NATS_PORT
        if scheme != "tls":
            stand = STAND_IN + len(stands)
            stands[stand] = (host, port)
            inside.append(f"{scheme}://{stand}:{port}")
            continue
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            names.append(host.lower())
        else:
            if not isinstance(address, IPv4Address) or address.is_loopback:
                raise Unsupported(
                    f"{url} can't be reached by TLS from a machine of its own",
                    remedy="Name the server by its name, or an IPv4 address that isn't loopback.",
                )
            addresses.append((address, port))
        inside.append(url)
    return Servers(urls=inside, stands=stands, names=names, addresses=addresses)
