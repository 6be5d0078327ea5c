"""The socket channel against the fake guest: reading, releasing, retention, stdin."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path

import pytest
from channel_kit import BIG, SEQ, Bench, collect, command, until

from dsec.channel import KEEP_BYTES, RETAIN_COUNT, RETAIN_S
from dsec.errors import InvalidRequest, NotFound
from dsec.spec.operations import EndKind, ExecFlag
from dsec.testing import FakeClock
from dsec.wire.frames import WINDOW


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    found = Bench(tmp_path)
    yield found
    await found.close()


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
    await until(lambda: len(bench.guest.operations[operation.op].streams[0].held) == 0)
    assert (bench.spool / f"{operation.op}.out").read_bytes() == SEQ
    for _ in range(2):
        assert (await collect(operation))[0] == SEQ


async def test_many_readers_from_anywhere(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("seq", "1", "100000", key=b"k"))
    starts = [0, 1, 65536, 65537, len(SEQ) - 1, len(SEQ)]
    results = await asyncio.gather(*(collect(operation, start) for start in starts))
    assert [out for out, _, _ in results] == [SEQ[start:] for start in starts]


class Clumsy:
    """Looks on, and fails at whatever it is told."""

    def output(self, stderr: bool, offset: int, data: bytes) -> None:
        raise ZeroDivisionError

    def stdin(self, data: memoryview) -> None:
        raise ZeroDivisionError

    def failed(self) -> None:
        raise ZeroDivisionError

    def ended(self) -> None:
        raise ZeroDivisionError


async def test_a_bug_of_who_looks_on_keeps_no_reader_waiting(bench: Bench) -> None:
    channel = await bench.edge()
    operation = await channel.start(command("sh", "-c", "echo hi; echo there >&2", key=b"k"))
    operation.watch(Clumsy())
    async with asyncio.timeout(30):
        out, err, end = await collect(operation)
        assert (out, err, end.kind) == (b"hi\n", b"there\n", EndKind.EXITED)
        assert (await collect(await channel.start(command("echo", "on"))))[0] == b"on\n"


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
        await until(lambda: inside.streams[0].end > WINDOW)  # what the reader has taken made room for as much
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
    for _ in range(RETAIN_COUNT + 8):
        await collect(await channel.start(command("true")))
    await until(lambda: len(channel.operations()) <= RETAIN_COUNT)


async def test_ended_operations_with_a_key_are_kept_until_they_are_released(tmp_path: Path) -> None:
    clock = FakeClock()
    bench = Bench(tmp_path, clock)
    channel = await bench.edge()
    for index in range(2 * RETAIN_COUNT):
        await collect(await channel.start(command("true", key=b"%d" % index)))
    await clock.advance(10 * RETAIN_S)
    for index in range(2 * RETAIN_COUNT):
        assert channel.find(b"%d" % index) is not None
    await bench.close()


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
    await collect(await channel.start(command("true")))
    await until(lambda: clock.sleepers == 1)
    await clock.advance(RETAIN_S - 1)
    assert len(channel.operations()) == 1
    await clock.advance(1)
    assert not channel.operations()
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
    assert open_files() == before + 3  # the pair, and the one that watches all channels
