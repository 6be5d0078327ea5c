"""Connections that break anywhere: nothing runs twice, no output is lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_kit import CutProxy, Served, served

from dsec import AsyncClient, AsyncSandbox
from dsec.errors import OutcomeUnknown, Unavailable
from dsec.spec.sandbox import ExecSpec


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as server:
        yield server


class Through:
    """A sandbox that is reached through a proxy which cuts."""

    def __init__(self, proxy: CutProxy, client: AsyncClient, box: AsyncSandbox) -> None:
        self.proxy = proxy
        self.client = client
        self.box = box

    async def fresh(self, *cuts: int) -> None:
        """The next connections let through so many bytes of answers each."""
        await self.client._transport._disconnect()  # the next request makes a connection
        self.proxy.cuts = list(cuts)
        self.proxy.answered = 0


@pytest.fixture
async def through(server: Served) -> AsyncIterator[Through]:
    async with CutProxy(server.url) as proxy, server.client(proxy.url) as client:
        yield Through(proxy, client, await client.create("base"))


def commands_run(server: Served, box: AsyncSandbox) -> int:
    """How many commands the guest has run so far."""
    return server.kit.host.guests[box.id].highest


async def test_a_command_survives_a_cut_at_every_byte_of_its_answer(server: Served, through: Through) -> None:
    command = "echo one; echo two >&2; exit 3"
    await through.fresh()
    plain = await through.box.commands.run(command)
    whole = through.proxy.answered
    assert whole > 200
    for cut in range(whole):
        before = commands_run(server, through.box)
        await through.fresh(cut)
        result = await through.box.commands.run(command)
        assert (result.exit_code, result.stdout, result.stderr) == (3, "one\n", "two\n"), cut
        assert commands_run(server, through.box) == before + 1, cut
    assert plain.exit_code == 3


async def test_a_command_survives_several_cuts_in_a_row(server: Served, through: Through) -> None:
    before = commands_run(server, through.box)
    await through.fresh(0, 30, 250, 260, 270, 300)
    result = await through.box.commands.run("seq 1 20000")
    assert result.stdout_bytes == b"".join(b"%d\n" % n for n in range(1, 20001))
    assert commands_run(server, through.box) == before + 1


async def test_a_stream_goes_on_at_the_byte_where_it_stopped(server: Served, through: Through) -> None:
    await through.fresh(5_000, 20_000, 50_000)
    command = await through.box.commands.start("seq 1 20000; sleep 0.1; seq 20001 30000")
    received = b"".join([piece.data async for piece in command])
    assert received == b"".join(b"%d\n" % n for n in range(1, 30001))
    assert (await command.wait()).exit_code == 0
    assert not through.proxy.cuts


@pytest.mark.parametrize("size", [100, 700_000])
async def test_stdin_is_sent_again_and_taken_once(server: Served, through: Through, size: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    for cuts in ((0,), (100,), (250,), (250 + size // 2, 0, 300)):
        before = commands_run(server, through.box)
        await through.fresh(*cuts)
        result = await through.box.commands.run(["cat"], stdin=data)
        assert result.stdout_bytes == data, cuts
        assert commands_run(server, through.box) == before + 1


async def test_stdin_of_a_handle_is_taken_once(server: Served, through: Through) -> None:
    command = await through.box.commands.start(["cat"], stdin=True)
    sent = b""
    for word in range(20):
        text = b"word %d;" % word
        through.proxy.cuts = [0, 40]
        await command.write_stdin(text)
        sent += text
    await command.close_stdin()
    assert (await command.wait()).stdout_bytes == sent


async def test_creations_are_not_doubled(server: Served, through: Through) -> None:
    for cut in (0, 1, 50, 200):
        live = server.edge.node().live
        await through.fresh(cut)
        await through.client.create("base")
        assert server.edge.node().live == live + 1


async def test_a_batch_goes_on(server: Served, through: Through) -> None:
    await through.fresh()
    first = [item async for item in through.client.create_many("base", count=5)]
    whole = through.proxy.answered
    assert len(first) == 5
    for cut in range(0, whole, 97):
        live = server.edge.node().live
        await through.fresh(cut)
        items = [item async for item in through.client.create_many("base", count=5)]
        assert sorted(item.index for item in items) == [0, 1, 2, 3, 4]
        assert len({item.unwrap().id for item in items}) == 5
        assert server.edge.node().live == live + 5
        await through.client.kill_many(item.unwrap() for item in items)


async def test_commands_of_a_batch_run_once(server: Served, through: Through) -> None:
    boxes = [through.box, *[item.unwrap() async for item in through.client.create_many("base", count=3)]]
    commands = [(box, f"echo {n}; exit {n}") for n, box in enumerate(boxes)]
    await through.fresh()
    async for _ in through.client.run_many(commands):
        pass
    for cut in range(0, through.proxy.answered, 23):
        before = [commands_run(server, box) for box in boxes]
        await through.fresh(cut, cut // 2)
        results = [item async for item in through.client.run_many(commands)]
        assert sorted(item.index for item in results) == [0, 1, 2, 3]
        for item in results:
            assert (item.unwrap().exit_code, item.unwrap().stdout) == (item.index, f"{item.index}\n"), cut
        assert [commands_run(server, box) for box in boxes] == [count + 1 for count in before], cut


async def test_files(server: Served, through: Through) -> None:
    data = bytes(range(256)) * 2000
    for cut in (0, 100, 100_000):
        await through.fresh(cut)
        await through.box.files.write("/f", data)
        await through.fresh(cut)
        assert await through.box.files.read_bytes("/f") == data


async def test_a_stream_of_a_file_says_where_it_broke(server: Served, through: Through) -> None:
    data = bytes(range(256)) * 2000
    await through.box.files.write("/f", data)
    await through.fresh(100_000)
    received = b""

    async def receive() -> None:
        nonlocal received
        async for chunk in through.box.files.read_stream("/f"):
            received += chunk

    with pytest.raises(Unavailable) as caught:
        await receive()
    assert caught.value.details["offset"] == len(received) > 0
    async for chunk in through.box.files.read_stream("/f", offset=len(received)):
        received += chunk
    assert received == data


async def test_what_may_not_be_repeated_is_not(server: Served, through: Through) -> None:
    await through.box.files.write("/log", "a")
    await through.fresh(0)
    with pytest.raises(OutcomeUnknown):
        await through.box.files.write("/log", "b", append=True)
    await through.fresh(0)
    with pytest.raises(OutcomeUnknown):
        await through.box.files.move("/log", "/log2")

    async def parts() -> AsyncIterator[bytes]:
        yield b"x"

    await through.fresh(0)
    with pytest.raises(OutcomeUnknown):
        await through.box.files.write("/other", parts())


async def test_the_server_restarts_under_a_command(server: Served, through: Through) -> None:
    """The edge is replaced, as after a crash; the command and its output are the same."""
    command = await through.box.commands.start("echo one; sleep 0.4; echo two", key="k")
    waiting = asyncio.create_task(command.wait())
    await asyncio.sleep(0.1)
    await server.restart()
    result = await waiting
    assert (result.exit_code, result.stdout) == (0, "one\ntwo\n")
    assert (await through.box.commands.run("echo back")).stdout == "back\n"


RETRY_S = 0.5


async def test_a_stream_that_only_ever_begins_ends_with_an_error(server: Served) -> None:
    async with CutProxy(server.url) as proxy, server.client(proxy.url, retry_s=RETRY_S) as client:
        box = await client.create("base")
        await client._transport._disconnect()
        proxy.answered = 0
        command = await box.commands.start(["sleep", "1000"])
        proxy.cuts = [proxy.answered] * 100_000  # what says that it has started comes each time, and nothing else
        proxy.cut()
        with pytest.raises(Unavailable, match="could not be made again"):
            await command.wait(request_timeout_s=60)
        proxy.cuts = []
        await command.kill()
        assert (await command.wait()).signal == 9


async def test_a_stream_that_stood_for_long_is_made_again_however_quiet_it_was(server: Served) -> None:
    async with CutProxy(server.url) as proxy, server.client(proxy.url, retry_s=RETRY_S) as client:
        box = await client.create("base")
        command = await box.commands.start(["cat"], stdin=True)
        result = asyncio.create_task(command.wait())
        seen: list[str] = []

        async def follow() -> None:
            async for event in box.events(follow=True):
                seen.append(event.type)

        following = asyncio.create_task(follow())
        batch = client.run_many([(box, ExecSpec(argv=["sleep", "1000"], key="k"))])
        ran = asyncio.ensure_future(anext(batch))
        for _ in range(2):
            await asyncio.sleep(2 * RETRY_S)
            proxy.cut()
        await (await box.commands.attach("k")).kill()
        assert (await ran).unwrap().signal == 9
        await command.write_stdin("on")
        await command.close_stdin()
        assert (await result).stdout == "on"
        await box.kill()
        await following
        assert seen[-1] == "ended"
