"""Edges that come and go on one fake guest: nothing is lost, nothing runs twice."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from channel_kit import SEQ, Bench, collect, command, until

from dsec.channel import SocketChannel
from dsec.channel import files as file_calls
from dsec.errors import OutcomeUnknown, Unavailable
from dsec.spec.operations import ExecFlag
from dsec.testing import CuttingSocket


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    found = Bench(tmp_path)
    yield found
    await found.close()


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
    operation = await channel.start(command("sh", "-c", "seq 1 100000; cat; echo end", key=b"k", flags=ExecFlag.STDIN))
    await until(lambda: len(bench.spooled()) > 0)
    await channel.close()
    with pytest.raises(Unavailable):
        await collect(operation)
    again = (await bench.edge()).find(b"k")
    assert again is not None
    await again.close_stdin()
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
    inside = bench.guest.operations[operation.op]
    await channel.close()
    await bench.edge()
    await until(lambda: not bench.guest.operations)
    assert inside.finished is not None
    assert inside.finished.stdout_bytes == len(SEQ)


async def test_the_same_key_is_the_same_operation(bench: Bench) -> None:
    channel = await bench.edge()
    first = await channel.start(command("echo", "1", key=b"k"))
    assert await channel.start(command("echo", "2", key=b"k")) is first
