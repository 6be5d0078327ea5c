"""The socket channel against the real guest: one protocol, and an edge killed at any frame loses nothing."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from native_guest import UNIFIED, Guest, built

from dsec.channel import GuestOperation, SocketChannel, Spool
from dsec.channel import files as file_calls
from dsec.channel.movable import MovableChannel
from dsec.edge.config import SystemClock
from dsec.errors import FileError, FileMissing, PermissionDenied, Unavailable
from dsec.spec.operations import EndKind, ExecFlag, OpEnd, OpRequest, Stage
from dsec.testing import CuttingSocket

pytestmark = pytest.mark.root
SEQ = b"".join(b"%d\n" % n for n in range(1, 60_001))


class Bench:
    """A real guest and the edges that come and go; the first takes the channel that the guest was born with."""

    def __init__(self, directory: Path) -> None:
        self.guest = Guest(built("static"), cgroup=UNIFIED is not None)
        self.spool = Spool(directory / "spool")
        self.channel: SocketChannel | None = None
        self.broken: list[str] = []
        self.fresh = True

    async def edge(self, wrap: Callable[[socket.socket], socket.socket] = lambda sock: sock) -> SocketChannel:
        if self.channel is not None:
            await self.channel.close()
        if not self.fresh:
            self.guest.attach()
        self.fresh = False
        sock = wrap(self.guest.channel)
        async with asyncio.timeout(120):
            self.channel = await SocketChannel.open(
                sock, clock=SystemClock(), spool=self.spool, on_broken=self.broken.append
            )
        return self.channel

    async def close(self) -> None:
        if self.channel is not None:
            await self.channel.close()
        self.guest.close()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    found = Bench(tmp_path)
    yield found
    await found.close()
    assert found.broken == []


def command(*argv: str, **more: object) -> OpRequest:
    return OpRequest(argv=tuple(word.encode() for word in argv), env=(b"PATH=/usr/bin:/bin",), **more)  # type: ignore[arg-type]


async def collect(operation: GuestOperation) -> tuple[bytes, bytes, OpEnd]:
    got = (bytearray(), bytearray())
    async for item in operation.read():
        if isinstance(item, OpEnd):
            return bytes(got[0]), bytes(got[1]), item
        assert item.offset == len(got[item.stderr]), "a gap or a repetition"
        got[item.stderr].extend(item.data)
    raise AssertionError("no end")


async def test_a_command_has_its_streams_and_its_end(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("sh", "-c", r"printf '\377'; echo err >&2; exit 7"))
    out, err, end = await collect(operation)
    assert (out, err, end.kind, end.code) == (b"\xff", b"err\n", EndKind.EXITED, 7)
    assert operation.pid
    assert end.wall_us > 0
    await operation.release()
    assert await channel.ping() > 0


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
async def test_a_stream_that_is_cut_again_and_again_goes_on_with_the_same_operations(kind: socket.SocketKind) -> None:
    """As a machine's whose copies break its port: readers and writers notice nothing, and what was said into the cut
    comes again."""
    guest = Guest(built("static"), cgroup=UNIFIED is not None, kind=kind)
    broken: list[str] = []
    channel = await MovableChannel.open(guest.channel, clock=SystemClock(), on_broken=broken.append)
    try:
        data = os.urandom(3_000_000)
        echo = await channel.start(command("cat", flags=ExecFlag.STDIN, key=b"echo"))
        counts = await channel.start(command("seq", "1", "60000"))
        over = await channel.start(command("sh", "-c", "echo over; exit 3"))
        assert (await collect(over))[2].code == 3

        async def feed() -> None:
            for at in range(0, len(data), 100_000):
                await echo.write(data[at : at + 100_000])
                await asyncio.sleep(0.005)
            while cuts <= 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await echo.close_stdin()

        cuts = 0
        feeding, echoed, counted = (asyncio.ensure_future(each) for each in (feed(), collect(echo), collect(counts)))
        while not feeding.done():
            await channel.settle()
            asking = asyncio.ensure_future(channel.start(command("true")))  # waits
            await asyncio.sleep(0.002)  # the guest goes on saying things, into the cut
            channel.part()
            guest.attach()
            async with asyncio.timeout(120):
                await channel.renew(guest.channel)
            started = await asking
            assert (await collect(started))[2].code == 0
            await started.release()
            cuts += 1
        assert cuts > 3
        assert (await echoed)[0] == data
        assert (await counted)[0] == SEQ
        assert (over.end is not None, await channel.ping() > 0) == (True, True)
        assert channel.find(b"echo") is echo
        for each in (echo, counts, over):
            await each.release()
        await channel.ping()
        assert channel.session.live == 0
    finally:
        await channel.close()
        guest.close()
    assert broken == []


async def test_starts_that_fail_say_where(bench: Bench) -> None:
    channel = await bench.edge()
    for request, stage in (
        (command("no-such-program"), Stage.EXEC),
        (command("true", user=b"no-such-user"), Stage.USER),
        (command("true", cwd=b"/no/such/directory"), Stage.CWD),
    ):
        end = (await collect(await channel.start(request)))[2]
        assert (end.kind, end.stage, end.code) == (EndKind.START_FAILED, stage, 2)


async def test_a_long_command_line_travels(bench: Bench) -> None:
    channel = await bench.edge()
    words = ["x" * 100_000] * 8
    out, _, end = await collect(await channel.start(command("printf", "%s", *words)))
    assert (len(out), end.code) == (800_000, 0)


async def test_stdin_of_any_size_comes_back(bench: Bench) -> None:
    channel = await bench.edge()
    data = os.urandom(2_000_000)
    operation = await channel.start(command("cat", flags=ExecFlag.STDIN))

    async def feed() -> None:
        await operation.write(data)
        await operation.close_stdin()

    _, (out, _, _) = await asyncio.gather(feed(), collect(operation))
    assert out == data
    assert operation.stdin_offset == len(data)


async def test_file_calls(bench: Bench, tmp_path: Path) -> None:
    channel = await bench.edge()
    where = str(tmp_path / "a" / "b\udcff")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 100_000

    assert await file_calls.write_file(channel, where, chunks(), parents=True, mode=0o640) == 3_000_000
    info = await file_calls.stat(channel, where)
    assert (info.size, info.mode, info.type) == (3_000_000, 0o640, "file")
    parts = [part async for part in file_calls.read_file(channel, where, offset=2_999_999)]
    assert b"".join(parts) == b"x"
    assert [entry.name for entry in await file_calls.list_dir(channel, str(tmp_path), depth=2)] == ["a", "a/b\udcff"]
    await file_calls.move(channel, where, str(tmp_path / "c"))
    with pytest.raises(FileMissing):
        await file_calls.stat(channel, where)
    with pytest.raises(FileError):
        await file_calls.remove(channel, str(tmp_path))
    await file_calls.remove(channel, str(tmp_path / "a"), recursive=True)
    with pytest.raises(PermissionDenied):
        await anext(file_calls.read_file(channel, "/proc/self/environ"))


async def story(channel: SocketChannel) -> None:
    """A command that talks in both directions, by key: attaches where it exists, sends what is missing of stdin."""
    data = bytes(range(256)) * 1000
    operation = channel.find(b"story")
    if operation is None:
        script = "echo begin >&2; cat; seq 1 60000; exit 3"
        operation = await channel.start(command("sh", "-c", script, key=b"story", flags=ExecFlag.STDIN))

    async def feed() -> None:
        at = operation.stdin_offset
        await operation.write(data[at:], at)
        await operation.close_stdin()

    _, (out, err, end) = await asyncio.gather(feed(), collect(operation))
    assert (err, end.kind, end.code) == (b"begin\n", EndKind.EXITED, 3)
    assert out == data + SEQ


@pytest.mark.parametrize("way", ["sends", "receives"])
async def test_an_edge_killed_at_every_frame_boundary_loses_and_repeats_nothing(tmp_path: Path, way: str) -> None:
    """Kill after 0, 1, 2... frames, until a run needs no more."""
    for frames in range(400):
        bench = Bench(tmp_path / f"{frames}")
        cuts: list[CuttingSocket] = []

        def wrap(sock: socket.socket, limit: int = frames, cuts: list[CuttingSocket] = cuts) -> socket.socket:
            cuts.append(CuttingSocket(sock, **{way: limit}))
            return cuts[-1]

        async def first(bench: Bench = bench, wrap: Callable[[socket.socket], socket.socket] = wrap) -> None:
            await story(await bench.edge(wrap))

        attempt = asyncio.create_task(first())
        async with asyncio.timeout(120):
            while not cuts:  # noqa: ASYNC110 - made in the task's first step
                await asyncio.sleep(0)
            cut = asyncio.create_task(cuts[0].cut.wait())
            await asyncio.wait([attempt, cut], return_when=asyncio.FIRST_COMPLETED)
        whole = attempt.done()
        for task in (attempt, cut):
            task.cancel()
            with suppress(asyncio.CancelledError, Unavailable):
                await task
        try:
            channel = await bench.edge()
            async with asyncio.timeout(120):
                await story(channel)
        finally:
            if bench.broken:
                await bench.close()
        assert bench.broken == []
        assert channel.find(b"story") is not None
        assert [operation.op for operation in channel.operations()] == [1], "it ran twice"
        await bench.close()
        if whole:
            assert frames > 8
            return
    raise AssertionError("more frames than expected")


async def test_a_hundred_megabytes_come_in_bounded_memory(
    bench: Bench, record_testsuite_property: Callable[[str, object], None]
) -> None:
    channel = await bench.edge()
    size = 100_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for key in (None, b"k"):
        operation = await channel.start(command("head", "-c", str(size), "/dev/zero", key=key))
        began, count = time.monotonic(), 0
        async for item in operation.read():
            count += 0 if isinstance(item, OpEnd) else len(item.data)
        rate = size / 1e6 / (time.monotonic() - began)
        record_testsuite_property("spooled_mb_per_s" if key else "mb_per_s", round(rate))
        assert count == size
        await operation.release()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 32 << 10


async def test_the_cost_of_a_command(bench: Bench, record_testsuite_property: Callable[[str, object], None]) -> None:
    """Recorded in the report (--junit-xml); asserted is only that all of them worked."""
    channel = await bench.edge()
    count, gate = 500, asyncio.Semaphore(16)

    async def one(number: int) -> None:
        async with gate:
            operation = await channel.start(command("true", key=b"%d" % number))
            _, _, end = await collect(operation)
            assert end.code == 0
            await operation.release()

    began, used = time.monotonic(), time.process_time()
    await asyncio.gather(*(one(number) for number in range(count)))
    cpu_us = (time.process_time() - used) / count * 1e6
    record_testsuite_property("channel_cpu_us_per_command", round(cpu_us))
    record_testsuite_property("commands_per_s", round(count / (time.monotonic() - began)))
    assert channel.operations() == []
