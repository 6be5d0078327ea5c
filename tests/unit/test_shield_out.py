"""What a shield's machine reaches, whoever took it over."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from dsec.backends.microvm.shield_out import STAND_IN, Outlet, servers_of
from dsec.egress.registry import NetworkFile
from dsec.egress.resolver import Resolver
from dsec.errors import Unsupported
from dsec.plan.permissions import Definition

NETWORK = NetworkFile(
    permissions={
        "db": Definition(hosts=["db.test", "*.db.test"], private=True),
        "blocks": Definition(addresses=["10.9.0.0/16"]),
        "open": Definition(hosts=["open.test"]),
    },
    hosts={"db.test": ["10.1.2.3"], "loop.db.test": ["127.0.0.1"], "meta.db.test": ["169.254.169.254"]}
    | {"open.test": ["10.1.2.4"], "public.test": ["93.184.216.34", "2606:2800::1"], "six.test": ["2606:2800::1"]},
)


@pytest.fixture
async def outlet() -> AsyncIterator[Outlet]:
    found = Outlet(NETWORK, servers_of(["nats://127.0.0.1:4222"]))

    async def lookup(name: str) -> list[str]:
        return ["10.1.2.5"] if name == "looked-up.db.test" else []

    found._resolver = Resolver(lookup, NETWORK.hosts)
    yield found
    await found.close()


def query(name: str) -> bytes:
    labels = b"".join(bytes((len(label),)) + label.encode() for label in name.split("."))
    return struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", 1, 1)


async def address_of(outlet: Outlet, name: str) -> str | None:
    answer = outlet.query(query(name))
    assert answer is not None
    said = await answer
    return socket.inet_ntoa(said[-4:]) if said[7] else None


async def test_names_have_their_own_addresses(outlet: Outlet) -> None:
    assert await address_of(outlet, "public.test") == "93.184.216.34"
    assert await address_of(outlet, "six.test") is None  # IPv4 alone
    assert outlet.query(b"\0" * 3) is None


@pytest.mark.parametrize(
    ("address", "after", "allowed"),
    [
        ("93.184.216.34", "", True),
        ("10.9.1.1", "", True),  # the operator names the block
        ("10.1.2.3", "", True),  # and this address of a name
        ("10.1.2.4", "open.test", False),  # this name may not lead there
        ("10.1.2.5", "", False),
        ("10.1.2.5", "looked-up.db.test", True),  # a name that may did
        ("127.0.0.1", "loop.db.test", False),
        ("169.254.169.254", "meta.db.test", False),
        ("192.168.1.1", "", False),
        ("198.18.0.9", "", False),
        ("224.0.0.1", "", False),
        ("0.0.0.0", "", False),
    ],
)
async def test_which_addresses(outlet: Outlet, address: str, after: str, allowed: bool) -> None:
    if after:
        await address_of(outlet, after)
    tried: list[tuple[str, int]] = []

    async def join(inside: socket.socket, host: str, port: int) -> None:
        tried.append((host, port))
        inside.close()

    outlet._join = join  # type: ignore[method-assign]
    ours, theirs = socket.socketpair()
    with ours:
        outlet.connected(theirs, address, 5432)
        await asyncio.sleep(0)
        assert (tried == [(address, 5432)]) is allowed
        assert ours.recv(1) == b""


async def test_the_clusters_servers_are_at_addresses_that_stand_for_them() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        servers = servers_of([f"nats://127.0.0.1:{port}", "tls://nats.test:4222"])
        assert servers.urls == [f"nats://{STAND_IN}:{port}", "tls://nats.test:4222"]
        outlet = Outlet(NetworkFile(), servers)
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        outlet.connected(theirs, str(STAND_IN), port)
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b"hello"
        writer.close()
        other, refused = socket.socketpair()
        with other:
            outlet.connected(refused, str(STAND_IN), port + 1)
            assert other.recv(1) == b""
        await outlet.close()
    with pytest.raises(Unsupported, match="TLS"):
        servers_of(["tls://127.0.0.1:4222"])
