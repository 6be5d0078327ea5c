"""Trajectories through the edge: what is in them, and that a key runs once, whatever dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from edge_kit import Kit, finish, spec, until

from dsec.edge.config import EdgeConfig
from dsec.edge.node import Edge
from dsec.errors import Conflict, NotFound, OutcomeUnknown, SandboxEnded, SandboxLost, Unavailable
from dsec.spec.causes import Cause
from dsec.spec.sandbox import ExecSpec, State
from dsec.spec.trajectory import Entry, EntryType, verify


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


@pytest.fixture
async def edge(kit: Kit) -> AsyncIterator[Edge]:
    async with kit.edge() as opened:
        yield opened


@pytest.fixture
async def box(edge: Edge) -> str:
    return (await edge.create(spec(env={"SECRET": "hunter2"}, run="r"), project="p")).sandbox.id


def chain(edge: Edge, box: str) -> list[Entry]:
    return verify(edge.trajectory(box), box)


def of(entries: list[Entry], kind: str) -> list[dict[str, Any]]:
    return [entry.data for entry in entries if entry.type == kind]


@contextmanager
def full_disk(edge: Edge) -> Iterator[None]:
    """Nothing can be written to trajectories meanwhile."""
    fd = edge._trajectories.store._fd
    kept, full = os.dup(fd), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, fd)
    try:
        yield
    finally:
        os.dup2(kept, fd)
        os.close(kept)
        os.close(full)


def directories(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.is_dir()]


async def run(edge: Edge, box: str, *argv: str, **options: Any) -> tuple[bytes, bytes, Any]:
    return await finish(await edge.exec(box, ExecSpec(argv=list(argv), **options)))


async def chunks(*data: bytes) -> AsyncGenerator[bytes, None]:
    for each in data:
        yield each


# --- what is written ---


async def test_a_life_from_create_to_end(edge: Edge, box: str) -> None:
    await run(edge, box, "sh", "-c", "echo out; echo err >&2; exit 3", key="k", cwd="/tmp", env={"TOKEN": "s3cret"})
    await edge.write_file(box, b"/tmp/f", chunks(b"hello ", b"world"), mode=0o600)
    await edge.move_file(box, b"/tmp/f", b"/tmp/g")
    await edge.make_directory(box, b"/tmp/d", parents=True)
    await edge.remove_file(box, b"/tmp/g")
    await edge.renew(box, 60.0)
    await edge.delete(box)
    entries = chain(edge, box)
    assert [entry.type for entry in entries] == [
        "create", "exec", "result", "file_written", "file_moved", "directory_made", "file_removed", "renewed", "end",
    ]  # fmt: skip
    create, exec_, result, written = (entry.data for entry in entries[:4])
    assert (create["sandbox"], create["project"], create["run"], create["environment"]) == (box, "p", "r", "base")
    assert (exec_["argv"][0], exec_["cwd"], exec_["key"], len(exec_["env"])) == ("sh", "/tmp", "k", 64)
    assert (result["exec"], result["status"]["exit_code"], result["status"]["cause"]) == (2, 3, "exited")
    assert result["stdout"] == {"bytes": 4, "text": "out\n"}
    assert result["stderr"] == {"bytes": 4, "text": "err\n"}
    assert (written["path"], written["bytes"], written["mode"]) == ("/tmp/f", 11, 0o600)
    assert written["sha256"] == "b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9"
    assert entries[-1].data == {"cause": "deleted", "infra": False}
    whole = b"".join(edge.trajectory(box))
    assert b"hunter2" not in whole  # values of variables are digests
    assert b"s3cret" not in whole


async def test_output_inline_and_beyond(edge: Edge, box: str) -> None:
    await run(edge, box, "printf", "\\377")
    await run(edge, box, "seq", "1", "5000")
    await run(edge, box, "seq", "1", "400000")
    store = edge._trajectories.store
    binary, long, longer = (data["stdout"] for data in of(chain(edge, box), EntryType.RESULT))
    assert binary == {"bytes": 1, "base64": "/w=="}
    kept = store.blob(box, long["blob"])
    assert kept == b"".join(b"%d\n" % n for n in range(1, 5001))
    assert (long["bytes"], long["sha256"]) == (len(kept), long["blob"])
    assert (longer["bytes"], longer["kept"]) == (2_688_895, 1 << 20)
    assert longer["sha256"] != longer["blob"]
    for line in edge.trajectory(box):
        assert len(line) < 12_000


async def test_a_command_that_nobody_reads_is_on_record(edge: Edge, box: str) -> None:
    await edge.exec(box, ExecSpec(argv=["echo", "unseen"], key="k"))
    await until(lambda: of(chain(edge, box), EntryType.RESULT))
    (result,) = of(chain(edge, box), EntryType.RESULT)
    assert result["stdout"]["text"] == "unseen\n"


async def test_stdin_is_on_record(edge: Edge, box: str) -> None:
    command = await edge.exec(box, ExecSpec(argv=["cat"], stdin=True, key="k"))
    await command.write_stdin(b"hello ", 0)
    await command.write_stdin(b"lo world", 3)
    await command.close_stdin()
    await finish(command)
    (result,) = of(chain(edge, box), EntryType.RESULT)
    assert result["stdin"]["text"] == "hello world"
    await edge.release(box, "k")
    again = await edge.attach(box, "k")
    assert (again.stdin_offset, await again.write_stdin(b"x")) == (11, 11)


async def test_what_could_not_start_and_what_was_cut(edge: Edge, box: str) -> None:
    await run(edge, box, "no-such-program", key="missing")
    sleeper = await edge.exec(box, ExecSpec(argv=["sleep", "50"], key="cut"))
    await sleeper.started()
    await edge.release(box, "cut")
    missing, cut = of(chain(edge, box), EntryType.RESULT)
    assert (missing["status"]["exit_code"], cut["status"]["cause"]) == (127, "killed")
    again = await edge.exec(box, ExecSpec(argv=["sleep", "50"], key="cut"))
    assert (await finish(again))[2].cause is Cause.KILLED


async def test_following_it(edge: Edge, box: str) -> None:
    seen: list[bytes] = []

    async def follow() -> None:
        async for line in edge.follow_trajectory(box, 1):
            seen.append(line)

    reader = asyncio.ensure_future(follow())
    await run(edge, box, "true")
    await until(lambda: len(seen) == 2)
    await edge.delete(box)
    await asyncio.wait_for(reader, 120)
    assert [*edge.trajectory(box)][1:] == seen


async def test_sync_always_waits_for_the_disk(edge: Edge) -> None:
    box = (await edge.create(spec(sync="always"), project="p")).sandbox.id
    await run(edge, box, "true")
    store = edge._trajectories.store
    assert not store._unsynced
    await edge.write_file(box, b"/tmp/f", chunks(b"x"))
    assert not store._unsynced


async def test_it_goes_with_its_record(tmp_path: Path) -> None:
    kit = Kit(tmp_path, config=EdgeConfig(keep_ended_s=0.0, prune_interval_s=0.05))
    async with kit.edge() as edge:
        box = (await edge.create(spec(), project="p")).sandbox.id
        stays = (await edge.create(spec(), project="p")).sandbox.id
        await edge.delete(box)
        place = edge._trajectories.store._place
        await until(lambda: not Path(place(box)).exists())
        assert len(chain(edge, stays)) == 1


# --- keys, after everything ---


async def test_a_key_after_its_sandboxs_end(edge: Edge, box: str) -> None:
    request = ExecSpec(argv=["sh", "-c", "echo $$; exit 5"], key="k")
    first = await finish(await edge.exec(box, request))
    await edge.exec(box, ExecSpec(argv=["sleep", "50"], key="running"))
    await edge.delete(box)
    for _ in range(2):
        assert await finish(await edge.exec(box, request)) == first
        assert await finish(await edge.attach(box, "k")) == first
    with pytest.raises(Conflict) as caught:
        await edge.exec(box, ExecSpec(argv=["true"], key="k"))
    assert caught.value.code == "conflict"
    for key in ("running", "never"):
        with pytest.raises(SandboxEnded):
            await edge.exec(box, ExecSpec(argv=["sleep", "50"], key=key))


async def test_where_the_node_lost_it_nobody_knows(kit: Kit) -> None:
    edge = await kit.open()
    box = (await edge.create(spec(), project="p")).sandbox.id
    done = ExecSpec(argv=["echo", "done"], key="done")
    going = ExecSpec(argv=["sleep", "50"], key="going")
    first = await finish(await edge.exec(box, done))
    await (await edge.exec(box, going)).started()
    await edge.close(keep=True)
    kit.host.kill_guest(box)
    async with kit.edge() as edge:
        await until(lambda: edge.get(box).state is State.ENDED)
        assert await finish(await edge.exec(box, done)) == first
        for call in (edge.exec(box, going), edge.attach(box, "going")):
            with pytest.raises(OutcomeUnknown) as caught:
                await call
            assert caught.value.infra
        with pytest.raises(SandboxLost):
            await edge.exec(box, ExecSpec(argv=["true"], key="never"))
        assert chain(edge, box)[-1].data["infra"] is True


async def test_what_ends_by_its_own_doing_is_not_the_platforms_fault(kit: Kit) -> None:
    """Else who is about to lose makes its kernel panic, and its reward is masked."""
    async with kit.edge() as edge:
        box = (await edge.create(spec(), project="p")).sandbox.id
        going = ExecSpec(argv=["sleep", "50"], key="going")
        await (await edge.exec(box, going)).started()
        kit.host.kill_guest(box)
        await until(lambda: edge.get(box).state is State.ENDED)
        for call in (edge.exec(box, going), edge.attach(box, "going")):
            with pytest.raises(SandboxEnded) as caught:
                await call
            assert not caught.value.infra
            assert caught.value.details["cause"] == "guest_exited"


async def test_big_output_is_the_same_after_its_release(edge: Edge, box: str) -> None:
    request = ExecSpec(argv=["seq", "1", "100000"], key="k")
    first = await finish(await edge.exec(box, request))
    await edge.release(box, "k")
    assert await finish(await edge.exec(box, request)) == first
    assert (await finish(await edge.attach(box, "k"), 500_000))[0] == first[0][500_000:]
    huge = ExecSpec(argv=["seq", "1", "400000"], key="huge")
    whole = await finish(await edge.exec(box, huge))
    await edge.release(box, "huge")
    part, _, status = await finish(await edge.exec(box, huge))
    assert part == whole[0][: 1 << 20]
    assert (status.truncated, status.dropped_bytes) == (True, len(whole[0]) - (1 << 20))


async def test_a_session_may_be_made_again(edge: Edge, box: str) -> None:
    request = ExecSpec(argv=["echo", "x"], key="dsec.session/main")
    await finish(await edge.exec(box, request))
    await edge.release(box, "dsec.session/main")
    with pytest.raises(NotFound):
        await edge.attach(box, "dsec.session/main")
    assert not (await edge.exec(box, request)).attached


# --- faults ---


@pytest.mark.parametrize("moment", ["before", "asked", "running", "ended", "read", "released"])
async def test_an_edge_that_dies_at_any_moment(kit: Kit, moment: str) -> None:
    """The next one runs nothing twice and loses nothing: the same key gives the one result."""
    request = ExecSpec(argv=["sh", "-c", "sleep 0.1; echo $$"], key="k")  # the pid says which run it was
    edge = await kit.open()
    box = (await edge.create(spec(), project="p")).sandbox.id
    pid: int | None = None
    if moment == "before":  # the entry is written, the guest was never asked
        edge._trajectories.begins(box, request, "", "/", b"\0" * 32)
    else:
        command = await edge.exec(box, request)
        if moment != "asked":
            pid = await command.started()
        if moment in ("ended", "read", "released"):
            await until(lambda: of(chain(edge, box), EntryType.RESULT))
        if moment in ("read", "released"):
            await finish(command)
        if moment == "released":
            await edge.release(box, "k")
    await edge.close(keep=True)  # what its end writes is nothing of this sandbox's: tests/e2e kills a real one
    async with kit.edge() as edge:
        first = await finish(await edge.exec(box, request))
        assert first[2].exit_code == 0
        assert pid is None or first[0] == b"%d\n" % pid
        assert await finish(await edge.exec(box, request)) == first
        await edge.release(box, "k")
        assert await finish(await edge.exec(box, request)) == first
        assert len(of(chain(edge, box), EntryType.RESULT)) == 1


async def test_a_command_without_a_key_that_an_earlier_edge_began(kit: Kit) -> None:
    edge = await kit.open()
    box = (await edge.create(spec(), project="p")).sandbox.id
    await (await edge.exec(box, ExecSpec(argv=["sh", "-c", "sleep 0.2; echo late"]))).started()
    await edge.close(keep=True)
    async with kit.edge() as edge:
        await until(lambda: of(chain(edge, box), EntryType.RESULT))
        (result,) = of(chain(edge, box), EntryType.RESULT)
        assert (result["exec"], result["stdout"]["text"]) == (0, "late\n")


async def test_what_cannot_be_written_down_is_not_done(edge: Edge, box: str) -> None:
    await run(edge, box, "true")
    with full_disk(edge), pytest.raises(Unavailable) as caught:
        await edge.exec(box, ExecSpec(argv=["echo"], key="k"))
    assert caught.value.infra
    assert not edge._lives.sandboxes[box].running().channel.operations()
    assert (await run(edge, box, "true", key="k"))[2].exit_code == 0
    assert len(chain(edge, box)) == 5


async def test_a_result_that_cannot_be_written_down_is_not_told_and_not_lost(edge: Edge, box: str) -> None:
    command = await edge.exec(box, ExecSpec(argv=["cat"], stdin=True, key="k"))
    await command.write_stdin(b"kept\n")
    with full_disk(edge):
        await command.close_stdin()
        with pytest.raises(Unavailable):
            await finish(command)
    assert (await finish(await edge.attach(box, "k")))[0] == b"kept\n"
    assert len(of(chain(edge, box), EntryType.RESULT)) == 1


async def test_a_failed_creation_ends_its_log(edge: Edge) -> None:
    with pytest.raises(Exception, match="no environment"):
        await edge.create(spec(environment="missing"), project="p")
    assert not directories(Path(edge._trajectories.store._root))
