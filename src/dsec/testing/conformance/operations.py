"""Operations: keys, readers, releases."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

import pytest

from dsec.errors import DsecError, InvalidRequest
from dsec.spec.operations import ExecFlag
from dsec.testing.conformance.kit import Factory, Feature, Sandboxes, collect, needs, ok, request, run, until

SEQ = b"".join(b"%d\n" % number for number in range(1, 100_001))


class TestOperations:
    """`ports.Operation` and `ports.GuestChannel`."""

    async def test_a_key_finds_a_running_command_and_its_result(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        operation = await channel.start(request("cat", key=b"k", flags=ExecFlag.STDIN))
        assert channel.find(b"k") is operation
        assert operation.key == b"k"
        await operation.write(b"once\n")
        await operation.close_stdin()
        assert ok(await collect(operation)) == b"once\n"
        again = channel.find(b"k")
        assert again is not None
        assert ok(await collect(again)) == b"once\n"
        assert again.end is not None

    async def test_a_key_never_runs_twice(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        first = await channel.start(request("echo", "1", key=b"k"))
        second = await channel.start(request("echo", "2", key=b"k"))
        assert second.op == first.op
        assert ok(await collect(second)) == b"1\n"

    async def test_a_released_key_is_free(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        for word in ("1", "2"):
            operation = await channel.start(request("echo", word, key=b"k"))
            assert ok(await collect(operation)) == word.encode() + b"\n"
            await operation.release()
            await operation.release()
            assert channel.find(b"k") is None
        assert list(channel.operations()) == []

    async def test_many_readers_each_from_where_it_likes(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        operation = await channel.start(request("seq", "1", "100000", key=b"k"))
        starts = [0, 0, 1, 65_536, 300_000, len(SEQ)]
        outcomes = await asyncio.gather(*(collect(operation, start) for start in starts))
        assert [ok(outcome) for outcome in outcomes] == [SEQ[start:] for start in starts]
        assert ok(await collect(operation)) == SEQ

    @pytest.mark.parametrize("key", [None, b"k"])
    async def test_a_command_goes_on_when_its_reader_goes_away(self, sandboxes: Sandboxes, key: bytes | None) -> None:
        channel = (await sandboxes.one()).channel
        operation = await channel.start(request("seq", "1", "100000", key=key))
        async with aclosing(operation.read()) as reader:
            await anext(reader)
        await until(lambda: operation.end is not None)
        assert operation.end is not None
        assert operation.end.stdout_bytes == len(SEQ)
        if key is not None:
            assert ok(await collect(operation)) == SEQ

    async def test_a_reader_that_is_cancelled_disturbs_nobody(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        operation = await channel.start(request("cat", key=b"k", flags=ExecFlag.STDIN))
        tasks = [asyncio.create_task(collect(operation)) for _ in range(3)]
        await operation.write(b"a")
        tasks[0].cancel()
        with suppress(asyncio.CancelledError):
            await tasks[0]
        await operation.write(b"b")
        await operation.close_stdin()
        assert [ok(outcome) for outcome in await asyncio.gather(*tasks[1:])] == [b"ab", b"ab"]

    async def test_stdin_offsets(self, sandboxes: Sandboxes, factory: Factory) -> None:
        needs(factory, Feature.STDIN_OFFSETS)
        channel = (await sandboxes.one()).channel
        operation = await channel.start(request("cat", flags=ExecFlag.STDIN))
        assert operation.stdin_offset == 0
        assert await operation.write(b"abcd", 0) == 4
        assert await operation.write(b"cdef", 2) == 6
        with pytest.raises(InvalidRequest):
            await operation.write(b"x", 7)
        await operation.close_stdin()
        assert ok(await collect(operation)) == b"abcdef"
        assert await operation.write(b"late", 100) == 6, "dropped, and so may what came before it have been"

    async def test_started(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        operation = await channel.start(request("sleep", "1000"))
        pid = await operation.started()
        assert pid is not None
        assert pid == operation.pid
        failed = await channel.start(request("no-such-program"))
        assert await failed.started() is None
        await operation.release()

    async def test_a_released_operation_has_no_output(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        operation = await channel.start(request("echo", "hi", key=b"k"))
        await collect(operation)
        await operation.release()
        with pytest.raises(DsecError):
            await collect(operation)

    @pytest.mark.parametrize(("signal", "scope"), [(0, 0), (99, 0), (15, 2), (15, 7)])
    async def test_signals_that_cannot_be(self, sandboxes: Sandboxes, signal: int, scope: int) -> None:
        channel = (await sandboxes.one()).channel
        operation = await channel.start(request("sleep", "1000"))
        with pytest.raises(InvalidRequest):
            await operation.signal(signal, scope)

    async def test_ping(self, sandboxes: Sandboxes) -> None:
        channel = (await sandboxes.one()).channel
        assert await channel.ping() >= 0
        assert ok(await run(channel, "echo", "still")) == b"still\n"
