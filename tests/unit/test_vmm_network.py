"""A machine's way out against a guest that says what it likes: what reaches the edge, and what doesn't."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from dsec.errors import Unsupported
from dsec.spec.operations import Chunk, EndKind, Kind, OpEnd, OpRequest, Stage
from dsec.vmm import network
from dsec.vmm.network import MachineNetwork
from dsec.vmm.standing import Pace
from dsec.wire.flows import MAX_DATA, MAX_FLOWS, WINDOW, FlowDecoder, FlowKind, encode, encode_credit

ADDRESS = bytes([10, 1, 2, 3, 0x50, 0])


class Guest:
    """The other side of the channel: an operation at a time, whose output a test writes."""

    def __init__(self) -> None:
        self.started = 0
        self.heard = b""
        self.said: asyncio.Queue[bytes | OpEnd] = asyncio.Queue()
        self.hears = asyncio.Event()
        self.hears.set()
        self.released = 0

    async def start(self, request: OpRequest) -> Any:
        assert request.kind is Kind.WAY_OUT
        self.started += 1
        self.heard = b""
        self.said = asyncio.Queue()
        self.say(FlowKind.READY, 0)
        return self

    async def read(self) -> AsyncGenerator[Chunk | OpEnd, None]:
        while True:
            item = await self.said.get()
            yield item if isinstance(item, OpEnd) else Chunk(False, 0, item)

    async def write(self, data: bytes) -> int:
        await self.hears.wait()
        self.heard += data
        return 0

    async def release(self) -> None:
        self.released += 1

    def say(self, kind: int, flow: int, data: bytes = b"") -> None:
        self.said.put_nowait(bytes([kind, 0]) + len(data).to_bytes(2, "little") + flow.to_bytes(4, "little") + data)

    def raw(self, data: bytes) -> None:
        self.said.put_nowait(data)

    def records(self) -> list[tuple[int, int, bytes]]:
        """What it heard."""
        found, at = [], 0
        while at < len(self.heard):
            size = int.from_bytes(self.heard[at + 2 : at + 4], "little")
            flow = int.from_bytes(self.heard[at + 4 : at + 8], "little")
            found.append((self.heard[at], flow, self.heard[at + 8 : at + 8 + size]))
            at += 8 + size
        return found


class Edge:
    """Who serves the connections: keeps them."""

    def __init__(self) -> None:
        self.got: list[tuple[socket.socket, str, int]] = []
        self.queries: list[bytes] = []

    def connected(self, sock: socket.socket, address: str, port: int) -> None:
        self.got.append((sock, address, port))

    def query(self, packet: bytes) -> bytes | None:
        self.queries.append(packet)
        return packet[::-1]

    def close(self) -> None:
        for sock, _, _ in self.got:
            sock.close()


@pytest.fixture
async def guest() -> Guest:
    return Guest()


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    edge = Edge()
    yield edge
    edge.close()


@pytest.fixture
async def way(guest: Guest, edge: Edge, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MachineNetwork]:
    monkeypatch.setattr(network, "TERMS", replace(network.TERMS, pace=Pace(0.0, 0.0, 0.0)))
    made = MachineNetwork("box", guest, edge.connected, edge.query)  # type: ignore[arg-type]
    made.start()
    await made.ready()
    yield made
    made.stop()
    await settled(lambda: guest.released == guest.started)
    assert made.flows == 0


async def settled(condition: Any) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 (of two sides that know no events of ours)
            await asyncio.sleep(0.001)


async def opened(guest: Guest, edge: Edge, flow: int = 1) -> socket.socket:
    guest.say(FlowKind.OPEN, flow, ADDRESS)
    count = len(edge.got)
    await settled(lambda: len(edge.got) > count)
    return edge.got[-1][0]


async def test_a_connection_both_ways_to_its_end(guest: Guest, edge: Edge, way: MachineNetwork) -> None:
    sock = await opened(guest, edge)
    assert edge.got[0][1:] == ("10.1.2.3", 80)
    guest.say(FlowKind.DATA, 1, b"request")
    guest.say(FlowKind.END, 1)
    loop = asyncio.get_running_loop()
    assert await loop.sock_recv(sock, 99) == b"request"
    assert await loop.sock_recv(sock, 99) == b""
    await loop.sock_sendall(sock, b"answer")
    sock.close()
    await settled(lambda: way.flows == 0)
    await settled(lambda: guest.records() == [(FlowKind.DATA, 1, b"answer"), (FlowKind.END, 1, b"")])


async def test_a_reset_is_one_on_the_other_side(guest: Guest, edge: Edge, way: MachineNetwork) -> None:
    sock = await opened(guest, edge)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    await settled(lambda: guest.records() == [(FlowKind.RESET, 1, b"")])
    sock = await opened(guest, edge, 2)
    guest.say(FlowKind.RESET, 2)
    with pytest.raises(ConnectionResetError):
        await asyncio.get_running_loop().sock_recv(sock, 99)
    assert way.flows == 0


async def test_who_does_not_read_is_not_sent_more(guest: Guest, edge: Edge, way: MachineNetwork) -> None:
    sock = await opened(guest, edge)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += sock.send(bytes(65536))
            await asyncio.sleep(0)
    assert sent > WINDOW
    await settled(lambda: sum(len(data) for _, _, data in guest.records()) == WINDOW)
    guest.raw(encode_credit(1, 100))
    await settled(lambda: sum(len(data) for _, _, data in guest.records()) == WINDOW + 100)


async def test_a_reader_that_is_slow_gets_no_credit_for_the_program(
    guest: Guest, edge: Edge, way: MachineNetwork
) -> None:
    sock = await opened(guest, edge)
    sent = WINDOW
    for _ in range(WINDOW // MAX_DATA):
        guest.say(FlowKind.DATA, 1, bytes(MAX_DATA))
    taken = 0
    for _ in range(60):  # what the pair's own buffer takes is credited, and no more
        await asyncio.sleep(0.002)
        credit = sum(int.from_bytes(data, "little") for kind, _, data in guest.records() if kind == FlowKind.CREDIT)
        while sent - credit + MAX_DATA <= WINDOW:
            guest.say(FlowKind.DATA, 1, bytes(MAX_DATA))
            sent += MAX_DATA
    assert sent < 8 * WINDOW
    while taken < sent:
        taken += len(await asyncio.get_running_loop().sock_recv(sock, 1 << 20))
    assert guest.started == 1


@pytest.mark.parametrize(
    "said",
    [
        bytes([9, 0, 0, 0, 1, 0, 0, 0]),
        encode(FlowKind.ANSWER, 1, b"x"),
        encode(FlowKind.DATA, 2, b"x"),
        encode(FlowKind.DATA, 1),
        encode(FlowKind.DATA, 1, bytes(MAX_DATA + 1)),
        encode(FlowKind.OPEN, 1, ADDRESS),
        encode(FlowKind.OPEN, 2, ADDRESS[:4]),
        encode(FlowKind.OPEN, 2, bytes(18)),
        encode(FlowKind.QUERY, 1, bytes(5000)),
        encode(FlowKind.END, 1, b"x"),
        encode(FlowKind.END, 1) + encode(FlowKind.DATA, 1, b"x"),
        encode_credit(1, 1),
        encode_credit(1, 2**32 - 1),
        encode(FlowKind.CREDIT, 1, bytes(4)),
        encode(FlowKind.DATA, 1, bytes(MAX_DATA)) * 40,
        bytes([3, 1, 1, 0, 1, 0, 0, 0, 0]),
        b"\xff" * 100_000,
    ],
)
async def test_what_no_guest_says_ends_its_connections_and_begins_anew(
    guest: Guest, edge: Edge, way: MachineNetwork, said: bytes
) -> None:
    sock = await opened(guest, edge)
    guest.raw(said)
    await settled(lambda: guest.started == 2)
    assert way.flows == 0
    with contextlib.suppress(ConnectionResetError):
        while await asyncio.get_running_loop().sock_recv(sock, 1 << 20):  # what was right still comes
            pass
    assert await opened(guest, edge)


async def test_what_crossed_with_an_end_is_ignored(guest: Guest, edge: Edge, way: MachineNetwork) -> None:
    sock = await opened(guest, edge, 7)
    guest.say(FlowKind.RESET, 7)
    guest.say(FlowKind.DATA, 7, b"late")
    guest.say(FlowKind.CREDIT, 3, bytes([1, 0, 0, 0]))
    guest.say(FlowKind.QUERY, 5, b"who")
    await settled(lambda: guest.records() == [(FlowKind.ANSWER, 5, b"ohw")])
    assert guest.started == 1
    assert sock.fileno() >= 0


async def test_more_connections_than_there_may_be(guest: Guest, edge: Edge, way: MachineNetwork) -> None:
    for flow in range(1, MAX_FLOWS + 101):
        guest.say(FlowKind.OPEN, flow, ADDRESS)
    await settled(lambda: len(guest.records()) == 100)
    assert way.flows == len(edge.got) == MAX_FLOWS
    assert {record[0] for record in guest.records()} == {FlowKind.RESET}


async def test_a_guest_that_asks_and_does_not_hear(guest: Guest, edge: Edge, way: MachineNetwork) -> None:
    guest.hears.clear()
    piece = encode(FlowKind.QUERY, 1, bytes(4000)) * 16
    for _ in range(100):
        guest.raw(piece)
    await asyncio.sleep(0.5)
    assert len(edge.queries) * 4008 < network.QUEUE_HIGH + 2 * len(piece) + MAX_DATA * 5
    guest.hears.set()
    await settled(lambda: len(edge.queries) == 1600)


async def test_a_kernel_that_cannot(edge: Edge) -> None:
    guest = Guest()

    async def start(request: OpRequest) -> Any:
        guest.started += 1
        guest.said.put_nowait(OpEnd(kind=EndKind.START_FAILED, code=95, stage=Stage.WAY_OUT, message="not here"))
        return guest

    guest.start = start  # type: ignore[method-assign]
    made = MachineNetwork("box", guest, edge.connected, edge.query)  # type: ignore[arg-type]
    made.start()
    with pytest.raises(Unsupported, match="nf_tables"):
        await made.ready()
    made.stop()
    assert guest.started == guest.released == 1


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
def test_pieces_of_any_size_are_the_same_records(size: int) -> None:
    whole = encode(FlowKind.OPEN, 1, ADDRESS) + encode(FlowKind.DATA, 1, b"x" * 500) + encode(FlowKind.END, 1)
    decoder = FlowDecoder()
    found = [each for at in range(0, len(whole), size) for each in decoder.feed(whole[at : at + size])]
    assert [each.kind for each in found] == [FlowKind.OPEN, FlowKind.DATA, FlowKind.END]
    assert found[1].data == b"x" * 500
