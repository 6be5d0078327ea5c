"""Sandboxes that leave their node for another one: with a snapshot of everything, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from edge_kit import Kit, finish, spec

from dsec.edge import moving
from dsec.edge.client import Principal
from dsec.edge.node import Edge
from dsec.edge.rebuild import chain_of, starts_of
from dsec.errors import Conflict, Unavailable
from dsec.ports import Captured
from dsec.spec.causes import Cause
from dsec.spec.sandbox import ExecSpec
from dsec.spec.snapshots import SnapshotInfo
from dsec.spec.trajectory import RebuildRequest

WHO = Principal("p")


class Streams:
    """Logs that are in the cluster at once."""

    def begin(self, sandbox_id: str, generation: int) -> None:
        pass

    def shipped(self, sandbox_id: str) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Kit(tmp_path).edge() as opened:
        yield opened


async def box_of(edge: Edge) -> str:
    box = (await edge.create(spec(), project="p")).sandbox.id
    await run(edge, box)
    return box


async def run(edge: Edge, box: str) -> None:
    await finish(await edge.exec(box, ExecSpec(argv=["true"])))


def last(edge: Edge, box: str) -> int:
    return chain_of(list(edge.trajectory(box)), box)[-1].seq


def snapshot(edge: Edge, box: str, at: int, removed: int = 0) -> None:
    """One is on record."""
    made = SnapshotInfo(name=f"moved@{at}", layer="blake3:" + "0" * 64, sandbox=box, built_by="p", removed=removed)
    edge.note_snapshot(box, Captured(name="c", upper=Path("/"), id_base=0, seq=at), made)


async def test_none_leaves_without_a_snapshot_of_everything(edge: Edge) -> None:
    box, moves = await box_of(edge), edge.moving()

    async def stays() -> None:
        with pytest.raises(Conflict, match="no snapshot holds all"):
            await moves.hand_over(box, Streams())

    await stays()
    snapshot(edge, box, 0)  # a command ran while it was taken
    await stays()
    snapshot(edge, box, last(edge, box), removed=1)
    await stays()
    snapshot(edge, box, last(edge, box))
    await run(edge, box)
    await stays()
    snapshot(edge, box, last(edge, box))
    await edge.make_directory(box, b"/tmp/d")
    await stays()
    snapshot(edge, box, last(edge, box))
    snapshot(edge, box, 0)  # somebody else's, later
    await moves.hand_over(box, Streams())
    assert edge.get(box).cause is Cause.MOVED


async def test_one_that_left_is_made_from_that_snapshot_or_not_at_all(
    edge: Edge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "SNAPSHOT_S", 0.6)
    box = await box_of(edge)
    snapshot(edge, box, 3)
    await run(edge, box)
    snapshot(edge, box, at := last(edge, box))
    asked = RebuildRequest(sandbox=box)
    lines = list(edge.trajectory(box))
    starts = starts_of(chain_of(lines, box), asked)
    assert [each and each.at for each in starts] == [at, 3, None], "of one that was lost: what can be had"
    await edge.moving().hand_over(box, Streams())
    lines = list(edge.trajectory(box))
    entries = chain_of(lines, box)
    assert [each and each.at for each in starts_of(entries, asked)] == [at]
    assert starts_of(entries, RebuildRequest(sandbox=box, from_start=True)) == [None]
    async with Kit(tmp_path / "other").edge() as other:
        with pytest.raises(Unavailable, match="left its node with can't be had"):
            await other.moving().take_in(asked, WHO, lines, {}, 1, Streams())
        assert other.live() == []
        again = RebuildRequest(sandbox=box, from_start=True)
        assert (await other.moving().take_in(again, WHO, lines, {}, 1, Streams())).sandbox.id == box
