"""The journal: durable in order, one bad write fails alone, clear answers to damage, one server a state directory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from dsec.errors import DsecError, Internal, InvalidRequest, Unavailable
from dsec.journal import state_dir as state_dir_module
from dsec.journal.records import BatchRecord, Journal, KeyRecord, Record
from dsec.journal.state_dir import RESERVE, StateDir
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec, State


def record(number: int, **fields: object) -> Record:
    base = {
        "id": f"{number:024d}",
        "project": "p",
        "state": State.STARTING,
        "spec": SandboxSpec(environment="base", env={"K": "v'\"\n\0ü"}, labels={"a": "b"}),
        "handle": {"cgroup": "pool/1", "uids": [1, 2], "nested": {"x": None}},
        "created_at": 1000.0 + number,
        "token": "ab" * 32,
    }
    return Record(**{**base, **fields})  # type: ignore[arg-type]


async def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "edge.db")
    written = record(
        1, name="task/1", run="r", cause=Cause.TTL, message="m", expires_at=5.5, create_ms=1.25, queue_ms=2.5
    )
    await journal.put(written)
    assert journal.get(written.id) == written
    ended = replace(written, state=State.ENDED, ended_at=9.0, cause=Cause.DELETED)
    await journal.put(ended)
    assert journal.get(written.id) == ended
    assert journal.live() == []
    await journal.close()
    again = Journal(tmp_path / "edge.db")
    assert again.get(written.id) == ended
    assert again.get("nobody") is None
    await again.close()


async def test_many_writes_at_once_are_all_durable_and_the_last_wins(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "edge.db")
    await asyncio.gather(
        *(journal.put(record(n, state=state)) for n in range(300) for state in (State.STARTING, State.RUNNING))
    )
    for n in range(300):
        journal.put_lazily(record(n, state=State.ENDING))
    await journal.put(record(300))  # what was put lazily before is durable with it
    with sqlite3.connect(tmp_path / "edge.db") as other:
        states = dict(other.execute("select state, count(*) from sandboxes group by state"))
    assert states == {"ending": 300, "starting": 1}
    await journal.close()


async def test_what_was_put_lazily_is_written_by_itself_and_at_close(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "edge.db")
    journal.put_lazily(record(1))
    async with asyncio.timeout(120):
        while journal.get(record(1).id) is None:  # noqa: ASYNC110  it is on disk when it is on disk
            await asyncio.sleep(0.005)
    journal.put_lazily(record(2))
    await journal.close()
    again = Journal(tmp_path / "edge.db")
    assert {found.id for found in again.live()} == {record(1).id, record(2).id}
    await again.close()


async def test_a_name_is_unique_among_what_lives_and_fails_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "edge.db")
    await journal.put(record(1, name="n"))
    results = await asyncio.gather(
        journal.put(record(2, name="n")),
        journal.put(record(3, name="n", run="other")),
        journal.put(record(4, name="n", project="other")),
        journal.put(record(5)),
        return_exceptions=True,
    )
    assert isinstance(results[0], Internal)
    assert results[1:] == [None, None, None]
    assert {int(found.id) for found in journal.live()} == {1, 3, 4, 5}
    await journal.put(record(1, name="n", state=State.ENDED, ended_at=1.0))
    await journal.put(record(2, name="n"))
    await journal.close()


async def test_a_record_that_cannot_be_encoded_fails_alone_and_the_writer_lives(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "edge.db")
    results = await asyncio.gather(
        journal.put(record(1, message="\udc80")), journal.put(record(2)), return_exceptions=True
    )
    assert isinstance(results[0], DsecError)
    assert results[1] is None
    await journal.put(record(3))
    await journal.close()


async def test_a_cancelled_waiter_stops_nobody_elses_write(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "edge.db")
    first = asyncio.ensure_future(journal.put(record(1)))
    second = asyncio.ensure_future(journal.put(record(2)))
    first.cancel()
    await second
    assert {int(found.id) for found in journal.live()} == {1, 2}
    await journal.close()


async def test_ended_records_come_in_pages_by_id(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "edge.db")
    await asyncio.gather(
        *(journal.put(record(n, state=State.ENDED, ended_at=1.0, run="a" if n % 2 else "b")) for n in range(10)),
        journal.put(record(90, state=State.RUNNING)),
        journal.put(record(91, state=State.ENDED, ended_at=1.0, project="other")),
    )
    first = await journal.ended("p", run=None, after="", limit=4)
    rest = await journal.ended("p", run=None, after=first[-1].id, limit=100)
    assert [int(found.id) for found in first + rest] == list(range(10))
    odd = await journal.ended("p", run="a", after="", limit=100)
    assert [int(found.id) for found in odd] == [1, 3, 5, 7, 9]
    await journal.close()


async def test_pruning_by_age_and_by_number_spares_the_living(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "edge.db", keep_s=100.0, keep_count=3)
    await asyncio.gather(
        *(journal.put(record(n, state=State.ENDED, ended_at=float(n))) for n in range(1, 11)),
        journal.put(record(20, state=State.RUNNING)),
        journal.put_batch(BatchRecord(project="p", key="old", digest="d", ids=[record(1).id], created_at=1.0)),
        journal.put_batch(BatchRecord(project="p", key="lives", digest="d", ids=[record(20).id], created_at=1.0)),
        journal.put_batch(BatchRecord(project="p", key="young", digest="d", ids=["never"], created_at=90.0)),
    )
    assert await journal.prune(now=105.0) == 7  # ended at 1..4 are too old; of 5..10 the three last are kept
    assert await journal.prune(now=105.0) == 0
    kept = await journal.ended("p", run=None, after="", limit=100)
    assert [found.ended_at for found in kept] == [8.0, 9.0, 10.0]
    assert len(journal.live()) == 1
    assert journal.batch("p", "old") is None
    assert journal.batch("p", "lives") is not None
    assert journal.batch("p", "young") is not None
    await journal.close()


async def test_keys_and_batches_come_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "edge.db")
    key = KeyRecord(hash="h", project="p", label="laptop", created_at=1.0)
    batch = BatchRecord(project="p", key="k", digest="d", ids=["a", "b"], created_at=2.0)
    await asyncio.gather(journal.put_key(key), journal.put_batch(batch))
    await journal.put_key(replace(key, revoked_at=3.0))
    with pytest.raises(Internal):
        await journal.put_batch(replace(batch, ids=["c"]))
    assert journal.batch("p", "k") == batch
    await journal.replace_batch(replace(batch, ids=["a", "c"]))
    await journal.close()
    again = Journal(tmp_path / "edge.db")
    assert again.api_keys() == [replace(key, revoked_at=3.0)]
    assert again.batch("p", "k") == replace(batch, ids=["a", "c"])
    assert again.batch("other", "k") is None
    await again.close()


async def test_after_close_writes_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "edge.db")
    await journal.close()
    with pytest.raises(Unavailable):
        journal.put(record(1))
    await journal.close()


async def test_a_damaged_database_is_named_and_told_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "edge.db"
    path.write_bytes(b"this is no database" * 1000)
    with pytest.raises(Internal, match="damaged") as caught:
        Journal(path)
    assert str(path) in caught.value.message
    assert caught.value.remedy


async def test_pages_that_are_overwritten_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "edge.db"
    journal = Journal(path)
    await asyncio.gather(*(journal.put(record(n)) for n in range(500)))
    await journal.close()
    with path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(os.urandom(20 * 4096))
    with pytest.raises(Internal, match="damaged"):
        Journal(path)


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "edge.db"
    await Journal(path).close()
    connection = sqlite3.connect(path)
    connection.execute("pragma user_version = 99")
    connection.close()
    with pytest.raises(Internal, match="newer version"):
        Journal(path)


async def test_a_full_disk_is_said_and_survived(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "edge.db")
    await journal.put(record(1))
    pages = journal._connection.execute("pragma page_count").fetchone()[0]
    journal._connection.execute(f"pragma max_page_count = {pages}")
    with pytest.raises(Unavailable, match="can't write its records"):
        await asyncio.gather(*(journal.put(record(n, message="x" * 4000)) for n in range(2, 40)))
    journal._connection.execute("pragma max_page_count = 1000000")
    await journal.put(record(50))
    assert journal.get(record(50).id) is not None
    await journal.close()


# --- the state directory ---


def test_sequences_never_repeat_across_crashes_and_closes(tmp_path: Path) -> None:
    seen: list[int] = []
    for turn in range(6):
        state = StateDir(tmp_path / "s")
        seen += [state.take_sequence() for _ in range(1000)]
        if turn % 2:
            state.close()
        else:
            os.close(state._lock)  # died: the reservation is not given back
    assert len(set(seen)) == len(seen)
    assert seen == sorted(seen)


def test_a_reservation_is_extended_before_it_is_used_up(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "s")
    state._next = state._reserved - 1
    last, beyond = state.take_sequence(), state.take_sequence()
    assert beyond == last + 1
    assert json.loads((tmp_path / "s" / "node.json").read_text())["reserved"] > beyond
    assert beyond >= RESERVE
    state.close()


def test_numbers_wrap_at_32_bits(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "s")
    state._next = state._reserved = (1 << 32) - 1
    assert [state.take_sequence(), state.take_sequence()] == [(1 << 32) - 1, 0]
    state.close()


def test_node_facts_stay(tmp_path: Path) -> None:
    first = StateDir(tmp_path / "s", edge=7)
    key = first.key
    first.close()
    with pytest.raises(InvalidRequest, match="edge 7, not of edge 9"):
        StateDir(tmp_path / "s", edge=9)
    again = StateDir(tmp_path / "s")
    assert (again.edge, again.key) == (7, key)
    again.close()
    mode = (tmp_path / "s" / "node.json").stat().st_mode & 0o777
    assert mode == 0o600
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700


def test_a_second_server_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from dsec.journal.state_dir import StateDir\n"
            "state = StateDir(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()",
            str(tmp_path / "s"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(state_dir_module.__file__).parents[2])},
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Unavailable, match=re.escape(f"process id {holder.pid}")):
            StateDir(tmp_path / "s")
    finally:
        holder.kill()
        holder.communicate()
    StateDir(tmp_path / "s").close()  # the kernel let go of a dead holder's lock


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"schema": 1}', '{"schema": 1, "edge": 1, "key": "zz", "reserved": 0}']
)
def test_damaged_node_facts_are_refused_and_the_lock_let_go(tmp_path: Path, content: str) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "node.json").write_text(content)
    for _ in range(2):
        with pytest.raises(Internal, match="damaged"):
            StateDir(tmp_path / "s")


def test_newer_node_facts_are_refused(tmp_path: Path) -> None:
    StateDir(tmp_path / "s").close()
    facts = json.loads((tmp_path / "s" / "node.json").read_text())
    (tmp_path / "s" / "node.json").write_text(json.dumps({**facts, "schema": 2}))
    with pytest.raises(Internal, match="newer version"):
        StateDir(tmp_path / "s")


def test_a_project_keeps_its_number(tmp_path: Path) -> None:
    first = StateDir(tmp_path)
    assert [first.tenant(name) for name in ("a", "b", "a", "c")] == [0, 1, 0, 2]
    first.close()
    second = StateDir(tmp_path)
    assert [second.tenant(name) for name in ("c", "d", "a")] == [2, 3, 0]
    second.close()
