"""A sandbox with a network: what it can't change, take, see or reach."""

from __future__ import annotations

import errno as E
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from security_box import Box, Nursery

from dsec.backends.container.network import NetworkSockets

pytestmark = pytest.mark.root

PORT = 61053
EDGE = "192.0.2.1"


def sockaddr(address: str, port: int) -> str:
    return "x:" + (struct.pack("<H", 2) + struct.pack(">H", port) + socket.inet_aton(address) + bytes(8)).hex()


class Served:
    """A box and what reaches its edge."""

    def __init__(self, nursery: Nursery, box: Box) -> None:
        self.nursery = nursery
        self.box = box
        self.seen: list[tuple[str, int]] = []
        self.network: NetworkSockets | None = None

    def serve(self) -> None:
        self.nursery.wait(self._serve())

    async def _serve(self) -> None:
        sockets = await self.nursery.client.network(self.box.sandbox)
        self.network = NetworkSockets(self.box.sandbox, sockets, self._connected, lambda packet: packet[::-1])
        self.network.start()

    def _connected(self, connection: socket.socket, address: str, port: int) -> None:
        self.seen.append((address, port))
        connection.send(b"served")
        connection.close()

    def stop(self, *, refuse: bool = False) -> None:
        async def stop() -> None:
            if self.network is not None:
                self.network.stop(refuse=refuse)

        self.nursery.wait(stop())

    def read_from(self, address: str, port: int) -> list[tuple[int, int]]:
        """socket, connect, read."""
        return self.box.calls(
            ["socket", 2, 1, 0], ["connect", "$0", sockaddr(address, port), 16], ["read", "$0", "z:16", 16]
        )


@pytest.fixture
def serve(nursery: Nursery, make_box: Callable[..., Box]) -> Iterator[Callable[[], Served]]:
    made: list[Served] = []

    def serve() -> Served:
        made.append(Served(nursery, make_box(network=True)))
        made[-1].serve()
        return made[-1]

    yield serve
    for one in made:
        one.stop()


def refused(calls: list[tuple[int, int]]) -> bool:
    return calls[1] == (-1, E.ECONNREFUSED)


def test_it_works(serve: Callable[[], Served]) -> None:
    one = serve()
    assert one.read_from("198.18.0.5", 443)[1:] == [(0, 0), (6, 0)]
    assert one.seen == [("198.18.0.5", 443)]


def test_routes_and_rules_cannot_be_changed(serve: Callable[[], Served]) -> None:
    one = serve()
    # RTM_DELROUTE of the route that makes all addresses local; RTM_NEWROUTE, RTM_NEWRULE
    route = struct.pack("<BBBBBBBBI", 2, 0, 0, 0, 255, 4, 254, 2, 0)
    rule = struct.pack("<BBBBBBBBI", 2, 0, 0, 0, 254, 0, 0, 1, 0)
    for kind, body in ((25, route), (24, route), (32, rule)):
        request = struct.pack("<IHHII", 16 + len(body), kind, 0x405, 1, 0) + body
        sent = one.box.calls(["socket", 16, 3, 0], ["write", "$0", f"x:{request.hex()}", len(request)])
        assert sent[1][0] == len(request)
    assert one.read_from("198.18.0.5", 443)[2] == (6, 0)


def test_netfilter_cannot_be_talked_to(serve: Callable[[], Served]) -> None:
    """The zygote's own sockets are told apart by a secret; a guess, or none, is refused."""
    box = serve().box
    for high in (0, 1, 1 << 31, (1 << 32) - 1):
        assert box.call("socket", 16 | high << 32, 3 | high << 32, 12) == (-1, E.EPROTONOSUPPORT)


@pytest.mark.parametrize("state", ["before", "served", "ended"])
def test_the_edges_ports_cannot_be_taken(nursery: Nursery, make_box: Callable[..., Box], state: str) -> None:
    one = Served(nursery, make_box(network=True))
    if state != "before":
        one.serve()
    if state == "ended":
        one.stop(refuse=True)
    try:
        for kind in (1, 2):
            for address in ("0.0.0.0", EDGE):
                for options in ((), (2,), (15,), (2, 15)):
                    results = one.box.calls(
                        ["socket", 2, kind, 0],
                        *(["setsockopt", "$0", 1, option, "x:01000000", 4] for option in options),
                        ["bind", "$0", sockaddr(address, PORT), 16],
                    )
                    assert results[-1] == (-1, E.EADDRINUSE), (kind, address, options)
        one.stop()
        one.serve()
        assert one.read_from("198.18.0.5", 443)[2] == (6, 0)
    finally:
        one.stop()


def test_the_edges_sockets_cannot_be_reached_as_themselves(serve: Callable[[], Served]) -> None:
    one = serve()
    assert refused(one.read_from("127.0.0.1", PORT))
    assert one.seen == []
    assert one.read_from(EDGE, PORT)[2] == (6, 0), "it is an address like any other"
    assert one.seen == [(EDGE, PORT)]


def test_no_transparent_sockets_no_marks(serve: Callable[[], Served]) -> None:
    box = serve().box
    for level, option in ((0, 19), (1, 36), (0, 32)):  # IP_TRANSPARENT, SO_MARK, IP_XFRM_POLICY
        opened, set_it = box.calls(["socket", 2, 1, 0], ["setsockopt", "$0", level, option, "x:01000000", 4])
        assert opened[0] >= 0
        assert set_it[0] == -1


def test_packets_cannot_be_seen_or_forged(serve: Callable[[], Served]) -> None:
    box = serve().box
    for family, kind, protocol in ((17, 3, 0x0300), (17, 2, 0x0300), (2, 3, 6), (2, 3, 255), (10, 3, 58)):
        result, error = box.call("socket", family, kind, protocol)
        assert result == -1
        assert error in {E.EPERM, E.EAFNOSUPPORT}


def test_the_hosts_services_are_not_there(serve: Callable[[], Served]) -> None:
    one = serve()
    with socket.create_server(("127.0.0.1", 0)) as host:
        host.settimeout(0)
        port = host.getsockname()[1]
        assert refused(one.read_from("127.0.0.1", port))
        assert one.read_from("10.0.0.1", port)[2] == (6, 0), "at any other address it is the edge that answers"
        with pytest.raises(BlockingIOError):
            host.accept()


def test_sandboxes_do_not_meet(serve: Callable[[], Served]) -> None:
    first, second = serve(), serve()
    assert first.read_from("198.18.0.5", 1)[2] == (6, 0)
    assert second.read_from("198.18.0.6", 2)[2] == (6, 0)
    assert (first.seen, second.seen) == ([("198.18.0.5", 1)], [("198.18.0.6", 2)])
    pids = ("self", first.box.spawned.pid, second.box.spawned.pid)
    assert len({Path(f"/proc/{pid}/ns/net").stat().st_ino for pid in pids}) == 3


def test_its_own_listener_on_every_address_hears_nothing_of_the_way_out(serve: Callable[[], Served]) -> None:
    """A program that binds to a foreign address, which is local inside, serves nobody by it."""
    one = serve()
    for address in ("198.18.0.5", "0.0.0.0"):
        results = one.box.calls(
            ["socket", 2, 1, 0],
            ["bind", "$0", sockaddr(address, 443), 16],
            ["listen", "$0", 8],
            ["socket", 2, 1, 0],
            ["connect", "$3", sockaddr("198.18.0.5", 443), 16],
            ["read", "$3", "z:16", 16],
        )
        assert results[-1] == (6, 0), results
    assert one.seen == [("198.18.0.5", 443)] * 2


def test_connections_are_not_tracked(serve: Callable[[], Served]) -> None:
    one = serve()
    many: list[list[str | int]] = []
    for number in range(30):
        many += [["socket", 2, 1, 0], ["connect", f"${2 * number}", sockaddr("198.18.0.5", number + 1), 16]]
    assert [result for result, _ in one.box.calls(*many)[1::2]] == [0] * 30
    table = Path(f"/proc/{one.box.spawned.pid}/net/stat/nf_conntrack")
    assert not table.exists() or int(table.read_text().split("\n")[1].split()[0], 16) == 0


def test_the_zygote_hands_the_sockets_to_the_edge_alone(nursery: Nursery, make_box: Callable[..., Box]) -> None:
    """Nothing inside has a descriptor of them, pid 1 included."""
    box = make_box(network=True)
    inodes = set()

    async def look() -> None:
        for sock in await nursery.client.network(box.sandbox):
            inodes.add(os.fstat(sock.fileno()).st_ino)
            sock.close()

    nursery.wait(look())
    own = {link.stat().st_ino for link in Path(f"/proc/{box.spawned.pid}/fd").iterdir()}
    assert len(inodes) == 2
    assert not inodes & own
