"""The edge's calls that go on: terminals, running commands by pid, watches, connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from edge_kit import Kit, until

from dsec.edge.client import EdgeClient, Execution
from dsec.edge.node import Edge
from dsec.errors import InvalidRequest, NotFound, PortClosed, SandboxEnded
from dsec.spec.causes import Cause
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import ExecSpec, ExecStatus, PtySize, SandboxSpec


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


@pytest.fixture
async def edge(kit: Kit) -> AsyncIterator[Edge]:
    edge = await kit.open()
    yield edge
    await edge.close(keep=False)


async def make(edge: EdgeClient) -> str:
    return (await edge.create(SandboxSpec(environment="base"), project="p")).sandbox.id


async def outcome(execution: Execution) -> tuple[bytes, ExecStatus]:
    out = b""
    async for event in execution.events():
        if isinstance(event, Chunk):
            out += event.data
        else:
            return out, event
    raise AssertionError("no end")


async def test_a_terminal(edge: Edge) -> None:
    box = await make(edge)
    spec = ExecSpec(argv=["sh", "-c", "cat; stty size"], pty=PtySize(cols=100, rows=0))
    execution = await edge.exec(box, spec)
    await execution.started()
    await edge.resize(box, execution.key, 0, 50)
    await execution.write_stdin(b"typed\n")
    await execution.close_stdin()
    out, status = await outcome(execution)
    assert (out, status.exit_code) == (b"typed\r\ntyped\r\n50 100\r\n", 0)
    execution = await edge.exec(box, ExecSpec(argv=["sleep", "600"], pty=PtySize()))
    await execution.write_stdin(b"\x03")
    _, status = await outcome(execution)
    assert (status.exit_code, status.cause) == (130, Cause.SIGNALED)


async def test_resize_is_for_terminals(edge: Edge) -> None:
    box = await make(edge)
    execution = await edge.exec(box, ExecSpec(argv=["sleep", "600"], key="k"))
    with pytest.raises(InvalidRequest):
        await edge.resize(box, "k", 80, 24)
    with pytest.raises(NotFound):
        await edge.resize(box, "other", 80, 24)
    await edge.release(box, execution.key)


async def test_a_key_goes_with_a_terminal_of_any_size(edge: Edge) -> None:
    box = await make(edge)
    spec = ExecSpec(argv=["cat"], pty=PtySize(cols=80, rows=24), key="shell")
    await edge.exec(box, spec)
    again = await edge.exec(box, ExecSpec(argv=["cat"], pty=PtySize(cols=120, rows=40), key="shell"))
    assert again.attached
    with pytest.raises(Exception, match="different"):
        await edge.exec(box, ExecSpec(argv=["cat"], stdin=True, key="shell"))
    await edge.release(box, "shell")


async def test_a_key_starts_one_terminal_for_all_who_ask_at_once(edge: Edge) -> None:
    box = await make(edge)
    spec = ExecSpec(argv=["cat"], pty=PtySize(), key="shell")
    gone = asyncio.ensure_future(edge.exec(box, spec))
    await asyncio.sleep(0)
    gone.cancel()
    first, second = await asyncio.gather(edge.exec(box, spec), edge.exec(box, spec))
    assert await first.started() == await second.started() is not None
    assert len(edge.processes(box)) == 1
    await edge.release(box, "shell")


async def test_running_commands(kit: Kit, edge: Edge) -> None:
    box = await make(edge)
    keyed = await edge.exec(box, ExecSpec(argv=["sleep", "600"], key="keyed"))
    plain = await edge.exec(box, ExecSpec(argv=["cat", "-"], pty=PtySize()))
    ended = await edge.exec(box, ExecSpec(argv=["true"], key="ended"))
    await outcome(ended)
    pids = [await keyed.started(), await plain.started()]
    found = edge.processes(box)
    assert [(each.key, each.pid, each.argv, each.pty) for each in found] == [
        ("keyed", pids[0], ["sleep", "600"], False),
        (plain.key, pids[1], ["cat", "-"], True),
    ]
    now = kit.clock.now()
    assert all(now - 60 < each.started_at <= now for each in found)
    assert pids[1] is not None
    attached = await edge.attach_pid(box, pids[1])
    assert attached.key == plain.key
    await attached.write_stdin(b"x\n")
    await edge.release(box, plain.key)
    with pytest.raises(NotFound):
        await edge.attach_pid(box, pids[1])
    with pytest.raises(NotFound):
        await edge.attach_pid(box, 1)


async def test_commands_are_found_by_pid_after_a_restart(kit: Kit) -> None:
    edge = await kit.open()
    box = await make(edge)
    execution = await edge.exec(box, ExecSpec(argv=["cat"], pty=PtySize(), key="shell"))
    pid = await execution.started()
    await edge.close(keep=True)
    edge = await kit.open()
    (found,) = edge.processes(box)
    assert (found.pid, found.pty, found.argv) == (pid, True, [])
    assert found.key.startswith("~")
    assert pid is not None
    attached = await edge.attach_pid(box, pid)
    assert attached.key == found.key
    await edge.resize(box, attached.key, 90, 30)
    await attached.write_stdin(b"\x04")
    assert (await outcome(attached))[1].exit_code == 0
    assert (await edge.attach(box, "shell")).key == "shell"  # its real name is known again, and it is the same
    await edge.release(box, found.key)
    assert (await outcome(await edge.attach(box, "shell")))[1].exit_code == 0  # its result is on record
    await edge.close(keep=False)


async def test_a_watch_counts_as_use(edge: Edge) -> None:
    box = await make(edge)
    sandbox = edge._lives.sandboxes[box]
    before = sandbox.requests
    watch = await edge.watch(box, b"/tmp", recursive=True)
    assert sandbox.requests == before + 1
    await edge.make_directory(box, b"/tmp/d")
    event = await anext(watch)
    assert (event.kind, event.path, event.directory) == ("create", "d", True)
    await watch.aclose()
    await watch.aclose()
    assert sandbox.requests == before
    with pytest.raises(InvalidRequest):
        await edge.watch(box, b"relative")
    assert sandbox.requests == before


async def test_what_is_held_ends_with_the_sandbox(edge: Edge) -> None:
    box = await make(edge)
    server = await edge.exec(box, ExecSpec(argv=["python3", "-c", "", "80"]))
    await server.started()
    watch = await edge.watch(box, b"/tmp")
    stream = await edge.connect(box, 80)
    waiting = [asyncio.ensure_future(anext(watch)), asyncio.ensure_future(stream.read())]
    await asyncio.sleep(0)
    await edge.delete(box)
    for each in waiting:
        with pytest.raises(SandboxEnded):
            await each
    await watch.aclose()
    await stream.close()
    with pytest.raises(SandboxEnded):
        await edge.connect(box, 80)
    with pytest.raises(SandboxEnded):
        await edge.watch(box, b"/tmp")


async def test_a_connection(kit: Kit, edge: Edge) -> None:
    box = await make(edge)
    with pytest.raises(PortClosed):
        await edge.connect(box, 80)
    server = await edge.exec(box, ExecSpec(argv=["python3", "-c", "", "80"]))
    await until(lambda: 80 in kit.host.guests[box].ports)
    stream = await edge.connect(box, 80)
    await stream.write(b"hello")
    assert await stream.read() == b"hello"
    await stream.close_write()
    assert await stream.read() == b""
    await stream.close()
    await edge.release(box, server.key)


async def test_a_cancelled_watch_leaves_nothing(kit: Kit, edge: Edge) -> None:
    box = await make(edge)
    for steps in range(6):
        opening = asyncio.ensure_future(edge.watch(box, b"/tmp"))
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        if (await asyncio.gather(opening, return_exceptions=True))[0].__class__ is not asyncio.CancelledError:
            await opening.result().aclose()
    guest = kit.host.guests[box]
    await until(lambda: not guest.operations and not guest.fs.listeners)
