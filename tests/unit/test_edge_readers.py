"""Several readers of one command, what is kept for those that come late, and the token that can be told again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from edge_kit import Kit, finish, spec

from dsec.edge.commands import RunningCommand
from dsec.edge.node import Edge
from dsec.errors import InvalidRequest, NotFound, SandboxNotFound, Unauthenticated
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import ExecSpec, ExecStatus


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Kit(tmp_path).edge() as opened:
        yield opened


@pytest.fixture
async def box(edge: Edge) -> str:
    return (await edge.create(spec(), project="p")).sandbox.id


async def kept(command: RunningCommand) -> tuple[bytes, ExecStatus | None]:
    """What is still kept of stdout and what comes, and the status."""
    out, status = b"", None
    async for event in command.events(-1, -1):
        if isinstance(event, Chunk):
            out += event.data
        else:
            status = event
    return out, status


async def cat(edge: Edge, box: str) -> tuple[RunningCommand, int]:
    command = await edge.exec(box, ExecSpec(argv=["cat"], stdin=True))
    pid = await command.started()
    assert pid is not None
    return command, pid


async def read(command: RunningCommand, size: int) -> None:
    """Read so much of its stdout, then go away."""
    events = command.events()
    async for event in events:
        assert isinstance(event, Chunk)
        size -= len(event.data)
        if size <= 0:
            break
    await events.aclose()


async def test_each_of_several_readers_sees_the_end(edge: Edge, box: str) -> None:
    first, pid = await cat(edge, box)
    one, two = first.events(), (await edge.attach_pid(box, pid)).events()
    await first.write_stdin(b"both")
    assert isinstance(await anext(one), Chunk)
    assert isinstance(await anext(two), Chunk)
    await first.close_stdin()
    for reader in (one, two):
        (end,) = [event async for event in reader]
        assert isinstance(end, ExecStatus)
        assert end.exit_code == 0
    with pytest.raises(NotFound):
        await edge.attach_pid(box, pid)


async def test_a_late_reader_gets_what_is_kept(edge: Edge, box: str) -> None:
    """Of a command without a key that wrote much: the part that nobody has read; from the start it is gone."""
    command, pid = await cat(edge, box)
    task = asyncio.create_task(command.write_stdin(bytes(300_000)))
    await read(command, 300_000)
    await task
    again = await edge.attach_pid(box, pid)
    with pytest.raises(InvalidRequest, match="is gone"):
        await read(again, 1)
    await again.write_stdin(b"last")
    await again.close_stdin()
    out, status = await kept(again)
    assert out.endswith(b"last")
    assert len(out) < 300_000
    assert status is not None
    assert status.exit_code == 0


async def test_a_late_reader_of_little_output_gets_all_of_it(edge: Edge, box: str) -> None:
    command, pid = await cat(edge, box)
    await command.write_stdin(b"first ")
    await read(command, 6)
    again = await edge.attach_pid(box, pid)
    await again.write_stdin(b"second")
    await again.close_stdin()
    assert (await kept(again))[0] == b"first second"


async def test_a_command_of_an_earlier_edge_is_found_by_its_pid(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    async with kit.edge(keep=True) as edge:
        box = (await edge.create(spec(), project="p")).sandbox.id
        command, pid = await cat(edge, box)
        _, other = await cat(edge, box)
        await command.write_stdin(bytes(100_000))
        await read(command, 100_000)
    async with kit.edge() as edge:
        assert {process.pid for process in edge.processes(box)} == {pid, other}
        again = await edge.attach_pid(box, pid)
        await again.write_stdin(b"on")
        await again.close_stdin()
        out, status = await kept(again)
        assert out.endswith(b"on")
        assert status is not None
        assert status.exit_code == 0
        execution = await edge.attach_pid(box, other)
        await edge.signal(box, execution.key, 9, "all")
        _, status = await kept(execution)
        assert status is not None
        assert status.exit_code == 137
        assert edge.processes(box) == []


async def test_with_a_key_all_is_kept(edge: Edge, box: str) -> None:
    command = await edge.exec(box, ExecSpec(argv=["cat"], stdin=True, key="k"))
    await command.write_stdin(bytes(100_000))
    await command.write_stdin(bytes(200_000))
    await command.close_stdin()
    await finish(command)
    assert len((await kept(await edge.attach(box, "k")))[0]) == 300_000


async def test_the_token_that_can_be_told_again(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    async with kit.edge(keep=True) as edge:
        one, two = [(await edge.create(spec(), project="p")).sandbox.id for _ in range(2)]
        token = edge.access_token(one)
        assert token != edge.access_token(two)
        assert (edge.authenticate(token).sandbox_id, edge.authenticate(token).project) == (one, "p")
        for wrong in (token[:-1], token + "0", token.replace(one, two), f"dst_{one}_~", f"dst_{one}_"):
            with pytest.raises(Unauthenticated):
                edge.authenticate(wrong)
        with pytest.raises(SandboxNotFound):
            edge.access_token("0" * 24)
    assert token.encode() not in (kit.state / "edge.db").read_bytes()
    async with kit.edge() as edge:
        assert edge.access_token(one) == token
        assert edge.authenticate(token).sandbox_id == one
