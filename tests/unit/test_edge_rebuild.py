"""Sandboxes made again from their trajectories, and what counts as the same output."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest
from edge_kit import Kit, finish, spec, until

from dsec.edge.client import Principal
from dsec.edge.node import Edge
from dsec.errors import Conflict, Internal, SandboxNotFound
from dsec.plan.divergence import differ
from dsec.spec.events import EventType
from dsec.spec.sandbox import ExecSpec, State
from dsec.spec.trajectory import RebuildRequest, Rebuilt

WHO = Principal("p")


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


@pytest.fixture
async def edge(kit: Kit) -> AsyncIterator[Edge]:
    async with kit.edge() as opened:
        yield opened


async def content(*data: bytes) -> AsyncGenerator[bytes, None]:
    for each in data:
        yield each


async def run(edge: Edge, box: str, *argv: str, **options: object) -> tuple[bytes, int]:
    out, _, status = await finish(await edge.exec(box, ExecSpec(argv=list(argv), **options)))  # type: ignore[arg-type]
    return out, status.exit_code


async def rebuild(edge: Edge, box: str, **options: object) -> Rebuilt:
    return await edge.rebuild(RebuildRequest(sandbox=box, **options), WHO)  # type: ignore[arg-type]


async def test_a_lost_sandbox_is_made_again(kit: Kit) -> None:
    edge = await kit.open()
    box = (await edge.create(spec(env={"A": "1"}, name="n", labels={"task": "t"}), project="p")).sandbox.id
    assert await run(edge, box, "sh", "-c", "echo $A; exit 3", env={"A": "2"}, key="first") == (b"2\n", 3)
    await edge.write_file(box, b"/tmp/f", content(b"x" * 20_000, b"y"))
    cat = await edge.exec(box, ExecSpec(argv=["cat"], stdin=True, key="typed"))
    await cat.write_stdin(b"typed in", 0)
    await cat.close_stdin()
    await finish(cat)
    await run(edge, box, "seq", "1", "5000")
    cut = await edge.exec(box, ExecSpec(argv=["sleep", "600"], key="cut"))
    await cut.started()
    await edge.signal(box, "cut", 9)
    await finish(cut)
    await (await edge.exec(box, ExecSpec(argv=["sleep", "600"], key="in flight"))).started()
    await edge.close(keep=True)
    kit.host.kill_guest(box)
    async with kit.edge() as edge:
        await until(lambda: edge.get(box).state is State.ENDED)
        found = await rebuild(edge, box)
        fresh = found.sandbox.id
        assert (found.original, found.differences, found.diverged) == (box, 0, None)
        assert found.not_replayed == ["exec without a result"]
        assert found.sandbox.spec.labels == {"task": "t", "dsec.rebuilt_from": box}
        assert found.sandbox.spec.env == {"A": "1"}
        again = await edge.exec(fresh, ExecSpec(argv=["sh", "-c", "echo $A; exit 3"], env={"A": "2"}, key="first"))
        assert again.attached  # keys have their results there too
        assert (await finish(again))[0] == b"2\n"
        assert not (await edge.exec(fresh, ExecSpec(argv=["sleep", "600"], key="in flight"))).attached


async def test_the_first_difference_is_named(edge: Edge) -> None:
    box = (await edge.create(spec(), project="p")).sandbox.id
    await run(edge, box, "echo", "same")
    await edge.exec(box, ExecSpec(argv=["sleep", "600"], key="takes a pid"))  # and isn't done again: it has no result
    await run(edge, box, "sh", "-c", "echo one; echo $$")
    await run(edge, box, "sh", "-c", "echo $$")
    found = await rebuild(edge, box)
    assert found.diverged is not None
    assert (found.diverged.seq, found.diverged.what) == (5, "stdout")
    assert found.diverged.expected != found.diverged.got
    assert (found.differences, found.replayed) == (2, 3)
    stopped = await rebuild(edge, box, on_divergence="stop")
    assert (stopped.differences, stopped.diverged is not None) == (1, True)
    part = await rebuild(edge, box, upto=3)
    assert (part.differences, part.replayed) == (0, 1)


async def test_content_that_was_too_long_is_said_to_be_missing(edge: Edge) -> None:
    box = (await edge.create(spec(), project="p")).sandbox.id
    await edge.write_file(box, b"/tmp/big", content(bytes(3 << 20)))
    found = await rebuild(edge, box)
    assert found.diverged is not None
    assert (found.diverged.what, found.diverged.expected) == ("not_kept", "3145728 bytes of /tmp/big")


async def test_a_fork_is_not_made_from_its_own_log_alone(edge: Edge) -> None:
    box = (await edge.create(spec(), project="p")).sandbox.id
    edge._events.add(box, EventType.FORKED, {"parent": "parent1"})
    with pytest.raises(Conflict, match="parent1"):
        await rebuild(edge, box)


async def test_nothing_is_made_from_a_log_that_was_changed(edge: Edge) -> None:
    box = (await edge.create(spec(), project="p")).sandbox.id
    await run(edge, box, "echo", "a")
    await edge.delete(box)
    path = Path(edge._trajectories.store._place(box), "log")
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"b"'))  # noqa: ASYNC240
    with pytest.raises((Conflict, Internal)):
        await rebuild(edge, box)
    with pytest.raises(SandboxNotFound):
        await rebuild(edge, "nosuchsandbox")
    assert not edge._lives.sandboxes


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b"started 2026-11-29T22:01:02.123Z", b"started 2026-11-30 01:00:00"),
        (b"Sun Nov 29 22:01:02 UTC 2026", b"Mon Nov 30 01:02:03 UTC 2026"),
        (b"-rw-r--r-- 1 root root 5 Nov 29 22:01 f", b"-rw-r--r-- 1 root root 5 Nov 30 01:02 f"),
        (b"Date: Sun, 29 Nov 2026 22:01:02 GMT", b"Date: Mon, 30 Nov 2026 01:02:03 GMT"),
        (b"3 passed in 0.12s", b"3 passed in 1.5s"),
        (b"real\t0m0.123s", b"real\t0m1.004s"),
        (b"pid 123, PID: 99", b"pid 7, PID: 1234"),
        (b"[1] 123\n", b"[1] 99\n"),
        (b"<object at 0x7f5c2a1b3c40>", b"<object at 0x7f0000000001>"),
        (b"made /tmp/tmp.aB3xYz/x", b"made /tmp/tmp.Q9/x"),
        (b"id 1b4e28ba-2fa1-11d2-883f-0016d3cca427", b"id 00000000-2fa1-11d2-883f-0016d3cca427"),
        (b"at 1764453662.5", b"at 1764459999.25"),
        (b"http://127.0.0.1:40123/", b"http://127.0.0.1:5000/"),
    ],
)
def test_what_does_not_count(was: bytes, now: bytes) -> None:
    assert differ(was, now) is None


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b"3 passed", b"2 passed"),
        (b"1 failed, 2 passed in 0.1s", b"3 passed in 0.1s"),
        (b"version 1.2.3", b"version 1.2.4"),
        (b"exit 1", b"exit 2"),
        (b"/srv/a/f", b"/srv/a/g"),
        (b"x = 0x1f", b"x = 0x2f"),
        (b"1234567", b"1234568"),
        (b"a\nb\n", b"a\n"),
        (b"", b"\n"),
        (b"2026", b"2027"),
    ],
)
def test_what_counts(was: bytes, now: bytes) -> None:
    assert differ(was, now) is not None
