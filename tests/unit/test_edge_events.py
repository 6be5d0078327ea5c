"""Event logs of sandboxes: what is in them, that they outlive the sandbox and the edge, that they are bounded."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from edge_kit import Kit, finish, spec, until

from dsec.edge import events as events_module
from dsec.edge.config import EdgeConfig, SystemClock
from dsec.edge.context import REQUEST_ID
from dsec.edge.events import Events
from dsec.errors import CreateFailed, SandboxNotFound
from dsec.journal.event_store import EventStore
from dsec.spec.events import EventType, SandboxEvent
from dsec.spec.sandbox import ExecSpec


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


async def data(*parts: bytes) -> Any:
    for part in parts:
        yield part


def types(events: list[SandboxEvent]) -> list[str]:
    return [event.type for event in events]


async def test_a_life_is_written_down(kit: Kit) -> None:
    async with kit.edge() as edge:
        box = (await edge.create(spec(), project="p")).sandbox.id
        await finish(await edge.exec(box, ExecSpec(argv=["sh", "-c", "printf 12345; exit 3"], key="k")))
        await finish(await edge.exec(box, ExecSpec(argv=["sleep", "60"], command_timeout_s=0.05)))
        await edge.write_file(box, b"/a\xff", data(b"abc", b"de"))
        await edge.move_file(box, b"/a\xff", b"/b")
        await edge.remove_file(box, b"/b")
        await edge.renew(box, 100.0)
        await edge.delete(box, message="enough")
        events = edge.events(box)
        assert types(events) == [
            "created",
            "command_started",
            "first_exec",
            "command_ended",
            "command_started",
            "limit",
            "command_ended",
            "file_written",
            "file_moved",
            "file_removed",
            "renewed",
            "ending",
            "ended",
        ]
        assert [event.seq for event in events] == list(range(1, 14))
        assert [event.time for event in events] == sorted(event.time for event in events)
        by_type = {event.type: event.data for event in reversed(events)}
        created = by_type["created"]
        assert created["environment"] == "base"
        assert created["create_ms"] >= created["phases"]["record_ms"] > 0
        assert by_type["command_started"]["argv0"] == "sh"
        assert by_type["command_ended"]["exit_code"] == 3
        assert (by_type["command_ended"]["command"], by_type["command_ended"]["stdout_bytes"]) == ("k", 5)
        assert by_type["first_exec"]["since_running_ms"] >= by_type["first_exec"]["exec_ms"] > 0
        assert by_type["limit"]["limit"] == "command_timeout"
        assert by_type["file_written"] == {"path": "/a\ufffd", "bytes": 5}
        assert by_type["ending"] == {"cause": "deleted", "infra": False, "message": "enough"}
        assert edge.events(box, after=12) == events[12:]


async def test_it_is_there_after_the_end_and_the_edge(kit: Kit) -> None:
    async with kit.edge(keep=True) as edge:
        gone = (await edge.create(spec(), project="p")).sandbox.id
        await edge.delete(gone)
        box = (await edge.create(spec(), project="p")).sandbox.id
        await finish(await edge.exec(box, ExecSpec(argv=["true"], key="k")))
    async with kit.edge() as edge:
        assert types(edge.events(gone)) == ["created", "ending", "ended"]
        assert types(edge.events(box)) == ["created", "command_started", "first_exec", "command_ended", "adopted"]
        assert [event.seq for event in edge.events(box)] == [1, 2, 3, 4, 5], "closed in order: nothing is missing"
        with pytest.raises(SandboxNotFound):
            edge.events("0" * 24)


async def test_after_a_crash_a_gap_says_that_events_may_be_lost(kit: Kit) -> None:
    edge = await kit.open()
    box = (await edge.create(spec(), project="p")).sandbox.id
    edge._events._save_due()
    await finish(await edge.exec(box, ExecSpec(argv=["true"], key="k")))
    await edge._tasks.close()  # what is left of an edge that was killed: nothing is told anything
    edge._events._timer.cancel()  # type: ignore[union-attr]
    await edge._journal.close()
    edge._state.close()
    async with kit.edge() as second:
        events = second.events(box)
        assert types(events) == ["created", "adopted"]
        assert events[1].seq > events_module.LOST_MOST


async def test_each_event_names_the_request_that_asked_for_it(kit: Kit) -> None:
    """Also where another request, or none, let it happen."""
    kit.config = EdgeConfig(max_starting=1, max_ending=1)
    kit.host.create_delay_s = 0.02
    async with kit.edge() as edge:

        async def create(number: int) -> str:
            REQUEST_ID.set(f"make-{number}")
            return (await edge.create(spec(), project="p")).sandbox.id

        boxes = await asyncio.gather(*(asyncio.ensure_future(create(number)) for number in range(4)))
        for number, box in enumerate(boxes):
            assert edge.events(box)[0].data["request_id"] == f"make-{number}"

        async def delete(box: str) -> None:
            REQUEST_ID.set(f"end-{box}")
            await edge.delete(box)

        kit.host.kill_guest(boxes[0])
        await asyncio.gather(*(asyncio.ensure_future(delete(box)) for box in boxes[1:]))
        for box in boxes[1:]:
            assert edge.events(box)[-2].data["request_id"] == f"end-{box}"
        await until(lambda: boxes[0] not in edge._lives.sandboxes)
        assert edge.events(boxes[0])[-2].type == "ending"
        assert "request_id" not in edge.events(boxes[0])[-2].data, "nobody asked for it"


async def test_a_creation_that_failed(kit: Kit) -> None:
    kit.host.fail_next_create("mount")
    async with kit.edge() as edge:
        with pytest.raises(CreateFailed):
            await edge.create(spec(name="n"), project="p")
        await until(lambda: not edge._lives.sandboxes)
        box = (await edge.list_sandboxes("p", states=["ended"])).sandboxes[0].id  # type: ignore[list-item]
        assert types(edge.events(box)) == ["ending", "ended"]
        assert edge.events(box)[0].data["cause"] == "create_failed"
        assert edge.events(box)[0].data["infra"] is True


async def test_who_follows_sees_each_event_once(kit: Kit) -> None:
    async with kit.edge() as edge:
        box = (await edge.create(spec(), project="p")).sandbox.id
        seen: list[list[SandboxEvent]] = [[], []]

        async def follow(into: list[SandboxEvent], after: int) -> None:
            async for event in edge.follow_events(box, after):
                into.append(event)

        readers = [asyncio.ensure_future(follow(seen[0], 0)), asyncio.ensure_future(follow(seen[1], 3))]
        for number in range(20):
            await finish(await edge.exec(box, ExecSpec(argv=["true"], key=f"{number}")))
            if number % 7 == 0:
                edge._events._save_due()
        await edge.delete(box)
        await asyncio.wait_for(asyncio.gather(*readers), 120)
        assert [event.seq for event in seen[0]] == list(range(1, len(seen[0]) + 1))
        assert seen[0][-1].type == "ended"
        assert seen[1] == seen[0][3:]
        again = [event async for event in edge.follow_events(box)]
        assert again == seen[0], "of an ended sandbox it ends at once"


async def test_who_follows_is_let_go_when_the_edge_closes(kit: Kit) -> None:
    async with kit.edge(keep=True) as edge:
        box = (await edge.create(spec(), project="p")).sandbox.id
        follower = edge.follow_events(box)
        assert (await anext(follower)).type == "created"
        waiting = asyncio.ensure_future(anext(follower, None))
        await asyncio.sleep(0.01)
    assert await asyncio.wait_for(waiting, 120) is None


async def test_a_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "KEPT", 40)
    monkeypatch.setattr(events_module, "SAVE_AT", 16)
    store = EventStore(tmp_path / "events.db")
    events = Events(store, SystemClock())
    for number in range(1000):
        events.add("a", EventType.RENEWED, {"n": number})
    assert len(events._logs["a"].unsaved) < 16
    kept = events.read("a")
    assert [event.seq for event in kept] == list(range(961, 1001))
    assert kept[-1].data == {"n": 999}
    assert len(store.load("a")) <= 3 * 40
    events.close()
    events.close()


async def test_old_ones_are_pruned_and_live_ones_kept(tmp_path: Path) -> None:
    events = Events(EventStore(tmp_path / "events.db"), SystemClock())
    for each in ("live", "dead"):
        events.add(each, EventType.CREATED, {})
    events.end("dead", {})
    events._save_due()
    events.prune(before=0.0)
    assert len(events.read("dead")) == 2
    events.prune(before=4e9)
    assert events.read("dead") == []
    assert len(events.read("live")) == 1
    events.close()


def test_a_damaged_file_is_begun_afresh(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    path.write_bytes(b"no database" * 1000)
    store = EventStore(path)
    store.save([("a", [SandboxEvent(1, 2.0, "created")])])
    assert store.load("a") == [SandboxEvent(1, 2.0, "created")]
    store.close()
    store.close()


async def test_a_disk_that_refuses_costs_events_only(tmp_path: Path) -> None:
    store = EventStore(tmp_path / "events.db")
    events = Events(store, SystemClock())
    store._connection.close()
    for _ in itertools.repeat(None, 3 * events_module.SAVE_AT):
        events.add("a", EventType.RENEWED, {})
    assert len(events._logs["a"].unsaved) <= 2 * events_module.SAVE_AT
    events.close()
