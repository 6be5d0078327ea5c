"""Guests that die, lie or don't listen: the edge keeps its memory bounded and says what is unknown."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from channel_kit import Bench, collect, command, until

from dsec.channel import KEEP_BYTES, SocketChannel, Spool
from dsec.edge.config import SystemClock
from dsec.errors import OutcomeUnknown
from dsec.spec.operations import Chunk, OpEnd
from dsec.testing import seqpacket_pair
from dsec.wire.frames import MAX_FRAME, PROTOCOL_VERSION, Frame, FrameType, decode, decode_all, encode
from dsec.wire.messages import OpState, encode_opstate


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    found = Bench(tmp_path)
    yield found
    await found.close()


async def test_a_dead_guest_makes_unfinished_outcomes_unknown_and_leaves_results(bench: Bench) -> None:
    channel = await bench.edge()
    done = await channel.start(command("echo", "hi", key=b"done"))
    await collect(done)
    running = await channel.start(command("sh", "-c", "echo part; sleep 100", key=b"running"))
    got: list[Chunk | OpEnd] = []

    async def read() -> None:
        async for item in running.read():
            got.append(item)

    reader = asyncio.create_task(read())
    await until(lambda: bool(got))
    ping = asyncio.create_task(channel.ping())
    bench.guest.die()
    with pytest.raises(OutcomeUnknown):
        await reader
    assert got == [Chunk(False, 0, b"part\n")]
    await asyncio.gather(ping, return_exceptions=True)
    assert (await collect(done))[0] == b"hi\n"
    assert bench.eofs == 1
    assert await running.started() is not None
    for attempt in (channel.start(command("true")), channel.ping(), running.write(b"x"), running.signal(9)):
        with pytest.raises(OutcomeUnknown):
            await attempt


async def test_a_guest_that_is_gone_at_once_fails_the_opening(bench: Bench) -> None:
    ours, theirs = seqpacket_pair()
    theirs.close()
    with pytest.raises(OutcomeUnknown):
        await SocketChannel.open(ours, clock=SystemClock())


class Puppet:
    """A guest's end that says exactly what the test wants."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    async def say(self, *packets: bytes) -> None:
        for packet in packets:
            await asyncio.get_running_loop().sock_sendall(self.sock, packet)

    async def hear(self) -> Frame:
        return decode(await asyncio.get_running_loop().sock_recv(self.sock, MAX_FRAME))

    async def greet(self, *states: tuple[int, OpState]) -> None:
        hello = await self.hear()
        incarnation = struct.unpack("<HHIQ", hello.payload)[3]
        highest = max((op for op, _ in states), default=0)
        payload = struct.pack("<HHIQQ", PROTOCOL_VERSION, 0, len(states), incarnation, highest)
        await self.say(encode(FrameType.WELCOME, 0, payload))
        for op, state in states:
            await self.say(encode(FrameType.OPSTATE, op, encode_opstate(state)))
        await self.say(encode(FrameType.SYNCED))


async def puppet() -> tuple[Puppet, SocketChannel, list[str]]:
    ours, theirs = seqpacket_pair()
    guest, broken = Puppet(theirs), list[str]()
    greeting = asyncio.create_task(guest.greet())
    channel = await SocketChannel.open(ours, clock=SystemClock(), on_broken=broken.append)
    await greeting
    return guest, channel, broken


@pytest.mark.parametrize(
    "packet",
    [
        b"noise",
        encode(FrameType.SYNCED),
        encode(FrameType.OUT, 99, bytes(9)),
        encode(FrameType.HELLO, 0, bytes(16)),
        bytes(MAX_FRAME + 1),
    ],
)
async def test_a_hostile_guest_is_cut_off_with_a_reason(packet: bytes) -> None:
    guest, channel, broken = await puppet()
    operation = await channel.start(command("true"))
    await guest.say(packet)
    with pytest.raises(OutcomeUnknown):
        await collect(operation)
    assert len(broken) == 1
    assert await asyncio.get_running_loop().sock_recv(guest.sock, MAX_FRAME)  # the START
    assert await asyncio.get_running_loop().sock_recv(guest.sock, MAX_FRAME) == b""
    guest.sock.close()


async def test_output_in_single_bytes_is_kept_compactly() -> None:
    guest, channel, broken = await puppet()
    operation = await channel.start(command("x"))
    await guest.say(encode(FrameType.STARTED, 1, struct.pack("<II", 9, 0)))
    for at in range(20_000):
        await guest.say(encode(FrameType.OUT, 1, struct.pack("<Q", at) + b"y"))
    await until(lambda: operation._streams[0].end == 20_000)
    assert operation._streams[0].buffer.__sizeof__() < 64 << 10
    assert broken == []
    await channel.close()
    guest.sock.close()


async def test_a_guest_that_makes_us_answer_but_never_reads_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.channel.socket._QUEUE_MAX", 1 << 16)
    ours, theirs = seqpacket_pair()
    guest, broken = Puppet(theirs), list[str]()
    greeting = asyncio.create_task(guest.greet())
    channel = await SocketChannel.open(ours, clock=SystemClock(), spool=Spool(tmp_path), on_broken=broken.append)
    await greeting
    await channel.start(command("x", key=b"k"))
    await guest.say(encode(FrameType.STARTED, 1, struct.pack("<II", 9, 0)))
    await guest.say(encode(FrameType.OUT, 1, bytes(8 + KEEP_BYTES)))
    with suppress(ConnectionError):
        for at in range(KEEP_BYTES, KEEP_BYTES + 100_000):
            await guest.say(encode(FrameType.OUT, 1, struct.pack("<Q", at) + b"y"))
            if broken:
                break
    assert broken == ["it makes us answer but doesn't read"]
    guest.sock.close()


async def test_a_release_leaves_with_the_next_start_or_soon() -> None:
    guest, channel, broken = await puppet()
    first, second = await channel.start(command("x")), await channel.start(command("y"))
    assert [(await guest.hear()).op for _ in range(2)] == [1, 2]
    await first.release()
    await channel.start(command("z"))
    packet = await asyncio.get_running_loop().sock_recv(guest.sock, MAX_FRAME)
    assert [(frame.type, frame.op) for frame in decode_all(packet)] == [(FrameType.RELEASE, 1), (FrameType.START, 3)]
    await second.release()
    assert (await guest.hear()).type is FrameType.RELEASE, "nothing follows it"
    assert broken == []
    await channel.close()
    guest.sock.close()


async def test_a_stream_socket_works_too() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    guest = Puppet(theirs)
    greeting = asyncio.create_task(guest.greet())
    channel = await SocketChannel.open(ours, clock=SystemClock())
    await greeting
    operation = await channel.start(command("x"))
    said = encode(FrameType.STARTED, 1, struct.pack("<II", 9, 0)) + encode(FrameType.OUT, 1, bytes(8) + b"hello")
    for at in range(0, len(said), 7):
        await guest.say(said[at : at + 7])
        await asyncio.sleep(0)
    reader = operation.read()
    assert await anext(reader) == Chunk(False, 0, b"hello")
    await reader.aclose()
    await channel.close()
    theirs.close()


async def test_a_spool_that_is_full_fails_the_command_and_only_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = await bench.edge()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dsec.channel.spool.os.pwrite", full)
    operation = await channel.start(command("seq", "1", "100000", key=b"k"))
    with pytest.raises(Exception, match="cannot be kept"):
        await collect(operation)
    monkeypatch.undo()
    assert (await collect(await channel.start(command("echo", "hi"))))[0] == b"hi\n"
    assert bench.broken == []
