"""The socket channel against the fake guest, and against hostile ones: nothing is lost or comes twice."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from dsec.backends.fake import FakeGuest
from dsec.channel import KEEP_BYTES, RETAIN_COUNT, RETAIN_S, GuestOperation, SocketChannel, Spool
from dsec.channel import files as file_calls
from dsec.edge.config import SystemClock
from dsec.errors import InvalidRequest, NotFound, OutcomeUnknown, Unavailable
from dsec.ports import Clock
from dsec.spec.operations import Chunk, EndKind, ExecFlag, OpEnd, OpRequest
from dsec.testing import CuttingSocket, FakeClock, seqpacket_pair
from dsec.wire.frames import MAX_FRAME, WINDOW, Frame, FrameType, decode, encode
from dsec.wire.messages import OpState, encode_opstate

BIG = 1_000_000
NO_FLAGS = ExecFlag(0)
SEQ = b"".join(b"%d\n" % n for n in range(1, 100_001))


class Bench:
    """A guest, and edges that come and go."""

    def __init__(self, directory: Path, clock: Clock | None = None) -> None:
        self.guest = FakeGuest(hostname=b"h", disk_bytes=1 << 30)
        self.spool = directory / "spool"
        self.clock = clock or SystemClock()
        self.channels: list[SocketChannel] = []
        self.broken: list[str] = []
        self.eofs = 0

    async def edge(self, wrap: Callable[[socket.socket], socket.socket] = lambda sock: sock) -> SocketChannel:
        ours, theirs = seqpacket_pair()
        self.guest.attach(theirs)

        def on_eof() -> None:
            self.eofs += 1

        channel = await SocketChannel.open(
            wrap(ours), clock=self.clock, spool=Spool(self.spool), on_broken=self.broken.append, on_eof=on_eof
        )
        self.channels.append(channel)
        return channel

    def spooled(self) -> list[str]:
        return sorted(path.name for path in self.spool.iterdir()) if self.spool.exists() else []

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()
        self.guest.die()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    found = Bench(tmp_path)
    yield found
    await found.close()


def command(*argv: str, key: bytes | None = None, flags: ExecFlag = NO_FLAGS) -> OpRequest:
    return OpRequest(argv=tuple(word.encode() for word in argv), key=key, flags=flags)


async def collect(operation: GuestOperation, out: int = 0, err: int = 0) -> tuple[bytes, bytes, OpEnd]:
    got = [bytearray(), bytearray()]
    at = [out, err]
    async for item in operation.read(out, err):
        if isinstance(item, OpEnd):
            return bytes(got[0]), bytes(got[1]), item
        assert item.offset == at[item.stderr], "a gap or a repetition"
        at[item.stderr] += len(item.data)
        got[item.stderr] += item.data
    raise AssertionError("no end")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition is somebody else's state
            await asyncio.sleep(0.001)


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, b"k"])
async def test_output_of_any_size_comes_whole(bench: Bench, key: bytes | None) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("seq", "1", "100000", key=key))
    out, err, end = await collect(operation)
    assert (out, err, end.kind, end.code) == (SEQ, b"", EndKind.EXITED, 0)


async def test_small_output_stays_in_the_guest_and_makes_no_file(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("echo", "hi", key=b"k"))
    await collect(operation)
    inside = bench.guest.operations[operation.op]
    assert bytes(inside.streams[0].held) == b"hi\n"
    assert bench.spooled() == []


async def test_large_keyed_output_is_spooled_before_it_leaves_the_guest_without_any_reader(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("seq", "1", "100000", key=b"k"))
    await until(lambda: operation.end is not None)
    assert len(bench.guest.operations[operation.op].streams[0].held) == 0
    assert (bench.spool / f"{operation.op}.out").read_bytes() == SEQ
    for _ in range(2):
        assert (await collect(operation))[0] == SEQ


async def test_many_readers_from_anywhere(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("seq", "1", "100000", key=b"k"))
    starts = [0, 1, 65536, 65537, len(SEQ) - 1, len(SEQ)]
    results = await asyncio.gather(*(collect(operation, start) for start in starts))
    assert [out for out, _, _ in results] == [SEQ[start:] for start in starts]


async def test_both_streams_and_non_utf8(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("sh", "-c", r"printf '\377\000'; printf '\376' >&2"))
    assert (await collect(operation))[:2] == (b"\xff\0", b"\xfe")


async def test_a_slow_reader_of_an_unkeyed_command_stops_it(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("yes"))
    async with aclosing(operation.read()) as reader:
        await anext(reader)
        inside = bench.guest.operations[operation.op]
        await until(lambda: sum(len(stream.held) for stream in inside.streams) > WINDOW - (1 << 16))
        produced = inside.streams[0].end
        for _ in range(50):
            await asyncio.sleep(0)
        assert inside.streams[0].end == produced
        assert bench.spooled() == []
    await operation.release()


async def test_an_unkeyed_command_goes_on_when_its_reader_leaves(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("head", "-c", str(BIG), "/dev/zero"))
    async with aclosing(operation.read()) as reader:
        await anext(reader)
    await until(lambda: operation.end is not None)
    assert operation.end is not None
    assert operation.end.stdout_bytes == BIG
    with pytest.raises(InvalidRequest):
        await collect(operation)


async def test_small_unkeyed_output_can_be_read_again(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("echo", "hi"))
    for _ in range(2):
        assert (await collect(operation))[0] == b"hi\n"


async def test_a_cancelled_reader_takes_nothing_from_the_others(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("sh", "-c", "echo a; sleep 0.05; echo b", key=b"k"))
    first = asyncio.create_task(collect(operation))
    second = asyncio.create_task(collect(operation))
    await asyncio.sleep(0.01)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    assert (await second)[0] == b"a\nb\n"


# --- release and retention --------------------------------------------------------------------------------------------


async def test_release_leaves_nothing(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("seq", "1", "100000", key=b"k"))
    await collect(operation)
    assert bench.spooled() != []
    await operation.release()
    await operation.release()
    assert (channel.find(b"k"), channel.operations(), bench.spooled()) == (None, [], [])
    await until(lambda: not bench.guest.operations)
    with pytest.raises(NotFound):
        await collect(operation)


async def test_release_ends_a_running_one_and_its_reader(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("yes", key=b"k"))
    reader = asyncio.create_task(collect(operation))
    await until(lambda: len(bench.spooled()) > 0)
    await operation.release()
    with pytest.raises(NotFound):
        await reader
    await until(lambda: not bench.guest.operations)
    assert await channel.ping() >= 0
    assert bench.broken == []


async def test_ended_operations_are_kept_by_count(bench: Bench) -> None:
    channel = await bench.edge()
    for index in range(RETAIN_COUNT + 8):
        await collect(await channel.start(command("true", key=b"%d" % index)))
    await until(lambda: len(channel.operations()) <= RETAIN_COUNT)
    assert channel.find(b"0") is None
    assert channel.find(b"%d" % (RETAIN_COUNT + 7)) is not None


async def test_ended_operations_that_nobody_read_are_not_dropped_by_count(bench: Bench) -> None:
    channel = await bench.edge()
    operations = [await channel.start(command("echo", str(index))) for index in range(RETAIN_COUNT + 8)]
    await until(lambda: all(operation.end for operation in operations))
    for index, operation in enumerate(operations):
        assert (await collect(operation))[0] == b"%d\n" % index


async def test_ended_operations_are_kept_for_a_time(tmp_path: Path) -> None:
    clock = FakeClock()
    bench = Bench(tmp_path, clock)
    channel = await bench.edge()
    await collect(await channel.start(command("true", key=b"k")))
    await until(lambda: clock.sleepers == 1)
    await clock.advance(RETAIN_S - 1)
    assert channel.find(b"k") is not None
    await clock.advance(1)
    assert channel.find(b"k") is None
    await until(lambda: not bench.guest.operations)
    await bench.close()


# --- stdin ------------------------------------------------------------------------------------------------------------


async def test_stdin_beyond_the_window_waits_and_comes_whole(bench: Bench) -> None:
    channel = await bench.edge()
    data = os.urandom(3 * WINDOW)
    operation = await channel.start(command("cat", key=b"k", flags=ExecFlag.STDIN))

    async def feed() -> None:
        assert await operation.write(data) == len(data)
        await operation.close_stdin()

    _, (out, _, _) = await asyncio.gather(feed(), collect(operation))
    assert out == data


async def test_stdin_that_was_sent_already_is_dropped_and_gaps_are_refused(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("cat", flags=ExecFlag.STDIN))
    assert await operation.write(b"abc", 0) == 3
    assert await operation.write(b"bcde", 1) == 5
    with pytest.raises(InvalidRequest):
        await operation.write(b"x", 6)
    assert operation.stdin_offset == 5
    await operation.close_stdin()
    assert (await collect(operation))[0] == b"abcde"
    await operation.write(b"too late")


async def test_stdin_for_a_process_that_does_not_read_waits_until_it_is_gone(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("sleep", "100", flags=ExecFlag.STDIN))
    writer = asyncio.create_task(operation.write(bytes(2 * WINDOW)))
    await until(lambda: operation.stdin_offset == WINDOW)
    assert not writer.done()
    await operation.signal(9, 2)
    assert await writer == WINDOW
    assert (await collect(operation))[2].kind is EndKind.KILLED


@pytest.mark.parametrize(("signal", "scope"), [(0, 0), (65, 0), (15, 2), (9, 3)])
async def test_a_signal_that_cannot_be_is_refused(bench: Bench, signal: int, scope: int) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("sleep", "100"))
    with pytest.raises(InvalidRequest):
        await operation.signal(signal, scope)


# --- edges that come and go -------------------------------------------------------------------------------------------


async def story(channel: SocketChannel) -> tuple[bytes, bytes, int]:
    """A command that talks in both directions, by key: attaches where it exists, sends what is missing of stdin."""
    data = bytes(range(256)) * 1200
    operation = channel.find(b"story")
    if operation is None:
        request = command("sh", "-c", "echo begin >&2; cat; exit 3", key=b"story", flags=ExecFlag.STDIN)
        operation = await channel.start(request)

    async def feed() -> None:
        at = operation.stdin_offset
        await operation.write(data[at:], at)
        await operation.close_stdin()

    _, (out, err, end) = await asyncio.gather(feed(), collect(operation))
    assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest()
    return out, err, end.code


@pytest.mark.parametrize("way", ["sends", "receives"])
async def test_an_edge_killed_at_every_frame_boundary_loses_and_repeats_nothing(tmp_path: Path, way: str) -> None:
    """Kill after 0, 1, 2... frames, until a run needs no more."""
    for frames in range(200):
        bench = Bench(tmp_path / f"{way}{frames}")
        cuts: list[CuttingSocket] = []

        def wrap(sock: socket.socket, limit: int = frames, cuts: list[CuttingSocket] = cuts) -> socket.socket:
            cuts.append(CuttingSocket(sock, **{way: limit}))
            return cuts[-1]

        async def first(bench: Bench = bench, wrap: Callable[[socket.socket], socket.socket] = wrap) -> None:
            await story(await bench.edge(wrap))

        attempt = asyncio.create_task(first())

        def over(attempt: asyncio.Task[None] = attempt, cuts: list[CuttingSocket] = cuts) -> bool:
            return attempt.done() or (bool(cuts) and cuts[0].cut.is_set())

        await until(over)
        whole = attempt.done()
        attempt.cancel()
        with suppress(asyncio.CancelledError, Unavailable):
            await attempt
        for channel in bench.channels:
            await channel.close()
        assert bench.broken == []
        started = len(bench.guest.operations)
        out, err, code = await story(await bench.edge())
        assert (err, code, len(out)) == (b"begin\n", 3, 256 * 1200)
        assert bench.guest.highest == 1, "it ran twice"
        assert started <= 1
        assert bench.broken == []
        await bench.close()
        if whole:
            assert frames > 5
            return
    raise AssertionError("more frames than expected")


async def test_a_new_edge_gives_all_output_from_spool_and_guest_together(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("sh", "-c", "seq 1 100000; sleep 0.2; echo end", key=b"k"))
    await until(lambda: len(bench.spooled()) > 0)
    await channel.close()
    with pytest.raises(Unavailable):
        await collect(operation)
    again = (await bench.edge()).find(b"k")
    assert again is not None
    assert (await collect(again))[0] == SEQ + b"end\n"


async def test_an_ended_operation_is_found_with_its_result(bench: Bench) -> None:
    channel = await bench.edge()
    await collect(await channel.start(command("sh", "-c", "echo hi; exit 5", key=b"k")))
    await channel.close()
    again = (await bench.edge()).find(b"k")
    assert again is not None
    out, _, end = await collect(again)
    assert (out, end.code) == (b"hi\n", 5)


async def test_a_new_edge_without_the_spool_says_that_output_is_gone(bench: Bench) -> None:
    channel = await bench.edge()
    await collect(await channel.start(command("seq", "1", "100000", key=b"k")))
    await channel.close()
    for path in bench.spool.iterdir():
        path.unlink()
    again = (await bench.edge()).find(b"k")
    assert again is not None
    with pytest.raises(OutcomeUnknown):
        await collect(again)
    assert (await collect(again, len(SEQ)))[2].code == 0


async def test_a_new_edge_removes_spools_of_nothing_and_ends_half_file_calls(bench: Bench) -> None:
    channel = await bench.edge()
    bench.spool.mkdir()
    (bench.spool / "99.out").write_bytes(b"stale")

    async def stuck() -> AsyncIterator[bytes]:
        yield b"half"
        await asyncio.sleep(100)

    upload = asyncio.create_task(file_calls.write_file(channel, "/tmp/f", stuck()))
    command_left = await channel.start(command("sleep", "100"))
    await until(lambda: len(bench.guest.operations) == 2)
    await channel.close()
    upload.cancel()
    with suppress(asyncio.CancelledError, Unavailable):
        await upload
    await bench.edge()
    await until(lambda: list(bench.guest.operations) == [command_left.op])
    assert bench.spooled() == []


async def test_an_unkeyed_command_of_an_earlier_edge_runs_to_its_end_and_is_forgotten(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("sh", "-c", "sleep 0.05; seq 1 100000"))
    await operation.started()
    await channel.close()
    await bench.edge()
    inside = bench.guest.operations[operation.op]
    await until(lambda: not bench.guest.operations)
    assert inside.finished is not None
    assert inside.finished.stdout_bytes == len(SEQ)


async def test_the_same_key_is_the_same_operation(bench: Bench) -> None:
    channel = await bench.edge()
    first = await channel.start(command("echo", "1", key=b"k"))
    assert await channel.start(command("echo", "2", key=b"k")) is first


# --- the end of the guest ---------------------------------------------------------------------------------------------


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
        payload = struct.pack("<HHIQQ", 1, 0, len(states), incarnation, highest)
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


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_nothing_is_kept_open(bench: Bench) -> None:
    before = open_files()
    channel = await bench.edge()
    for index in range(5):
        operation = await channel.start(command("seq", "1", "100000", key=b"%d" % index))
        await collect(operation)
        await collect(operation)
    assert len(SEQ) > KEEP_BYTES
    assert open_files() == before + 2  # the pair
