"""The edge's end of a sandbox's network on plain sockets: bounds of a turn, running out of descriptors, odd packets."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable, Iterator

import pytest

from dsec.backends.container.network import ACCEPTS_A_TURN, MAX_QUERY, QUERIES_A_TURN, NetworkSockets


class Plain:
    """A listener, a UDP socket, and their clients, all on loopback."""

    def __init__(self) -> None:
        self.tcp = socket.socket()
        self.tcp.bind(("127.0.0.1", 0))
        self.tcp.setblocking(False)
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.udp.setblocking(False)
        self.tcp_address, self.udp_address = self.tcp.getsockname(), self.udp.getsockname()
        self.accepted: list[socket.socket] = []
        self.asked: list[bytes] = []
        self.clients = [socket.socket() for _ in range(ACCEPTS_A_TURN * 2)]
        self.asker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.asker.connect(self.udp_address)
        self.asker.settimeout(120)

    def serve(self) -> NetworkSockets:
        network = NetworkSockets("s1", (self.tcp, self.udp), self._connected, self._query)
        network.start()
        return network

    def _connected(self, connection: socket.socket, address: str, port: int) -> None:
        assert (address, port) == self.tcp_address
        self.accepted.append(connection)

    def _query(self, packet: bytes) -> bytes | None:
        self.asked.append(packet)
        return packet.upper() if packet != b"quiet" else None

    def connect_all(self) -> None:
        for client in self.clients:
            client.connect(self.tcp_address)

    def close(self) -> None:
        for sock in (*self.accepted, *self.clients, self.tcp, self.udp, self.asker):
            sock.close()


@pytest.fixture
def plain() -> Iterator[Plain]:
    plain = Plain()
    yield plain
    plain.close()


async def until(what: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 120
    while not what():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0)


async def test_a_turn_of_the_loop_takes_a_bounded_number(plain: Plain) -> None:
    network = plain.serve()
    plain.connect_all()
    for _ in range(QUERIES_A_TURN * 2):
        plain.asker.send(b"x")
    await until(lambda: bool(plain.accepted))
    assert len(plain.accepted) <= ACCEPTS_A_TURN
    assert len(plain.asked) <= QUERIES_A_TURN
    await until(lambda: len(plain.accepted) == len(plain.clients))
    network.stop()


async def test_out_of_descriptors_they_wait(plain: Plain, caplog: pytest.LogCaptureFixture) -> None:
    network = plain.serve()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(fd) for fd in os.listdir("/proc/self/fd"))  # noqa: PTH208
    plain.connect_all()
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        while True:
            try:
                held.append(os.dup(0))
            except OSError:
                break
        await until(lambda: "its connections wait" in caplog.text)
        assert plain.accepted == []
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await until(lambda: len(plain.accepted) == len(plain.clients))
    network.stop()


async def test_queries_that_are_too_long_or_get_no_answer(plain: Plain) -> None:
    network = plain.serve()
    for packet in (b"x" * (MAX_QUERY + 1), b"quiet", b"", b"who"):
        plain.asker.send(packet)
    assert await asyncio.to_thread(plain.asker.recv, 100) == b""
    assert await asyncio.to_thread(plain.asker.recv, 100) == b"WHO"
    assert plain.asked == [b"quiet", b"", b"who"]
    network.stop()


async def test_stopping_twice_and_from_a_callback(plain: Plain) -> None:
    network = plain.serve()
    stopped = asyncio.Event()

    def stop(connection: socket.socket, address: str, port: int) -> None:
        connection.close()
        network.stop(refuse=True)
        network.stop()
        stopped.set()

    network.set_callbacks(stop, lambda packet: None)
    plain.connect_all()
    await stopped.wait()
    assert plain.tcp.fileno() == plain.udp.fileno() == -1
    with socket.socket() as late, pytest.raises(ConnectionRefusedError):
        late.connect(plain.tcp_address)
