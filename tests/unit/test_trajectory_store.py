"""Trajectories on disk: the chain, what a killed process and a power loss leave, a full disk."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dsec.errors import Internal, Unavailable
from dsec.journal import trajectory
from dsec.journal.trajectory import TrajectoryStore
from dsec.spec.trajectory import Broken, parse, root_of, verify

A, B = "sandboxaaaa01", "sandboxbbbb02"


def lines(store: TrajectoryStore, sandbox: str) -> list[bytes]:
    return [line for _, line in store.lines(sandbox)]


def log_of(root: Path, sandbox: str) -> Path:
    return root / sandbox[:12] / sandbox / "log"


async def filled(root: Path, count: int = 5, *, boot: str = "one", sync_s: float = 3600.0) -> TrajectoryStore:
    store = TrajectoryStore(root, boot=boot, sync_s=sync_s)
    for sandbox in (A, B):
        store.begin(sandbox)
        store.append(sandbox, 1.0, "create", {"sandbox": sandbox})
        for n in range(count):
            store.append(sandbox, 2.5 + n, "exec", {"argv": ["echo", str(n)], "z": {"b": 1, "a": 2}, "key": "é"})
    return store


# --- the chain ---


async def test_a_chain_is_whole_and_each_edit_is_detected(tmp_path: Path) -> None:
    store = await filled(tmp_path / "t")
    whole = lines(store, A)
    await store.close()
    assert [entry.seq for entry in verify(whole, A)] == list(range(1, 7))
    assert verify(whole)[0].prev == root_of(A)
    with pytest.raises(Broken):
        verify(whole, B)
    for at, line in enumerate(whole):
        entry = msgspec.json.decode(line)
        for field in entry:
            changed = dict(entry)
            value = entry[field]
            changed[field] = {**value, "x": 0} if isinstance(value, dict) else value + (1 if field != "type" else "x") \
                if not isinstance(value, str) else ("0" if value[0] != "0" else "1") + value[1:]  # fmt: skip
            edited = [*whole[:at], msgspec.json.encode(changed) + b"\n", *whole[at + 1 :]]
            with pytest.raises(Broken):
                verify(edited, A)
        for name in entry["data"]:
            changed = {**entry, "data": {key: value for key, value in entry["data"].items() if key != name}}
            with pytest.raises(Broken):
                verify([*whole[:at], msgspec.json.encode(changed) + b"\n", *whole[at + 1 :]], A)
    for at in range(len(whole) - 1):
        with pytest.raises(Broken):
            verify(whole[:at] + whole[at + 1 :], A)  # one taken out
        with pytest.raises(Broken):
            verify([*whole[:at], whole[at + 1], whole[at], *whole[at + 2 :]], A)  # two swapped


async def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    store = await filled(tmp_path / "t", 2)
    data = b"".join(lines(store, A))
    await store.close()
    rng = random.Random(6)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(7)
        try:
            entries = verify(bytes(flipped).splitlines(), A)
        except Broken:
            continue
        assert entries == verify(data.splitlines(), A), at  # white space at most


async def test_a_reader_may_write_json_in_its_own_way(tmp_path: Path) -> None:
    store = await filled(tmp_path / "t")
    whole = lines(store, A)
    await store.close()
    loose = []
    for line in whole:
        entry = msgspec.json.decode(line)
        entry["data"] = dict(reversed(entry["data"].items()))
        loose.append(msgspec.json.format(msgspec.json.encode(dict(reversed(entry.items()))), indent=0))
    assert verify(loose, A) == verify(whole, A)


# --- processes that die ---


async def test_it_goes_on_where_another_stopped(tmp_path: Path) -> None:
    store = await filled(tmp_path / "t")
    again = TrajectoryStore(tmp_path / "t", boot="one")  # the first was killed: it closed nothing
    assert again.append(A, 9.0, "exec", {}) == 7
    assert len(verify(lines(again, A), A)) == 7
    await again.close()
    await store.close()


@pytest.mark.parametrize("seed", range(6))
async def test_a_killed_process_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """However much of it is in the sandboxes' own files, and wherever their last write was torn."""
    rng = random.Random(seed)
    monkeypatch.setattr(trajectory, "HELD_BYTES", rng.choice([0, 1000, 1 << 20]))
    monkeypatch.setattr(trajectory, "HELD_MOST", rng.choice([3000, 1 << 20]))
    store = await filled(tmp_path / "t", 10)
    for n in range(20):
        store.append(rng.choice((A, B)), 50.0, "exec", {"n": n})
    shutil.copytree(tmp_path / "t", tmp_path / "after")
    whole = {sandbox: lines(store, sandbox) for sandbox in (A, B)}
    ends = {sandbox: [end for end, _ in store.lines(sandbox)] for sandbox in (A, B)}
    await store.close()
    for sandbox in (A, B):
        path = log_of(tmp_path / "after", sandbox)
        if path.exists():
            os.truncate(path, rng.randrange(path.stat().st_size + 1))
    again = TrajectoryStore(tmp_path / "after", boot="one")
    for sandbox in (A, B):
        assert lines(again, sandbox) == whole[sandbox]
        assert [end for end, _ in again.lines(sandbox, ends[sandbox][3])] == ends[sandbox][4:]
        assert again.append(sandbox, 60.0, "exec", {}) == len(whole[sandbox]) + 1
        assert [end for end, _ in again.lines(sandbox, ends[sandbox][3])][:-1] == ends[sandbox][4:]
    await again.close()


async def test_what_is_held_for_the_own_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory, "HELD_MOST", 5000)
    store = TrajectoryStore(tmp_path / "t", boot="one")
    for n in range(100):
        store.begin(f"sandbox{n:05}")
        store.append(f"sandbox{n:05}", 1.0, "create", {"n": n})
        assert store._held <= 5000
    assert [len(lines(store, f"sandbox{n:05}")) for n in range(100)] == [1] * 100
    await store.close()
    assert store._held == 0


async def test_an_own_file_that_cannot_be_written_is_made_later(tmp_path: Path) -> None:
    store = await filled(tmp_path / "t")
    whole, place = lines(store, A), log_of(tmp_path / "t", A).parent.parent
    place.write_text("in the way")
    store.forget(A)
    assert lines(store, A) == whole
    place.unlink()
    await store.close()
    assert log_of(tmp_path / "t", A).read_bytes() == b"".join(whole)


@pytest.mark.parametrize("left", [1, 30, 120])
async def test_a_line_that_was_torn_by_a_kill_is_cut_off(tmp_path: Path, left: int) -> None:
    store = await filled(tmp_path / "t")
    last = lines(store, A)[-1]
    await store.close()
    with log_of(tmp_path / "t", A).open("ab") as file:
        file.write(last[:left])
    again = TrajectoryStore(tmp_path / "t", boot="one")
    assert again.append(A, 9.0, "exec", {}) == 7
    assert len(verify(lines(again, A), A)) == 7
    await again.close()


@pytest.mark.parametrize("which", [0, 3, 5])
async def test_a_log_that_somebody_changed_takes_no_more(tmp_path: Path, which: int) -> None:
    store = await filled(tmp_path / "t")
    whole = lines(store, A)
    await store.close()
    whole[which] = whole[which].replace(b'"time":', b'"time":1', 1)
    log_of(tmp_path / "t", A).write_bytes(b"".join(whole))
    again = TrajectoryStore(tmp_path / "t", boot="one")
    with pytest.raises(Internal, match="changed or damaged"):
        again.append(A, 9.0, "exec", {})
    assert log_of(tmp_path / "t", A).read_bytes() == b"".join(whole)  # the evidence stays
    assert again.append(B, 9.0, "exec", {}) == 7
    await again.close()


# --- power loss ---


@pytest.mark.parametrize("seed", range(6))
async def test_what_was_synced_survives_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Pages that were not synced are dropped at random, cut off or zero: what was promised is there."""
    rng = random.Random(seed)
    monkeypatch.setattr(trajectory, "HELD_BYTES", rng.choice([0, 2000]))
    root = tmp_path / "t"
    store = await filled(root, 30)
    await asyncio.wait_for(store.synced(), 120)
    promised = {sandbox: len(lines(store, sandbox)) for sandbox in (A, B)}
    synced = (root / "sync.1").stat().st_size
    for n in range(20):
        store.append(rng.choice((A, B)), 50.0, "exec", {"n": n})
    shutil.copytree(root, tmp_path / "after")
    await store.close()
    after = tmp_path / "after"
    for sandbox in (A, B):
        _lose(log_of(after, sandbox), 0, rng)
    _lose(after / "sync.1", synced, rng)
    again = TrajectoryStore(after, boot="two")
    for sandbox in (A, B):
        found = verify(lines(again, sandbox), sandbox)
        assert promised[sandbox] <= len(found)
        assert again.append(sandbox, 60.0, "exec", {}) == len(found) + 1
    await again.close()
    assert len(verify(log_of(after, A).read_bytes().splitlines(), A)) > promised[A]


def _lose(path: Path, kept: int, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    end = rng.randrange(kept, len(data) + 1)
    if rng.random() < 0.5:
        del data[end:]
    else:
        data[end:] = bytes(len(data) - end)
    if not kept and len(data) > 4096 and rng.random() < 0.5:
        data[:4096] = bytes(4096)  # a later page was written back, an earlier one not
    path.write_bytes(data)


async def test_a_file_that_is_gone_after_a_power_loss_comes_back(tmp_path: Path) -> None:
    store = await filled(tmp_path / "t")
    whole = lines(store, A)
    await store.close()
    shutil.rmtree(log_of(tmp_path / "t", A).parent)
    again = TrajectoryStore(tmp_path / "t", boot="two")
    assert lines(again, A) == whole
    await again.close()


async def test_synced_files_need_no_sync_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory, "ROTATE_BYTES", 2000)
    root = tmp_path / "t"
    store = await filled(root, 20)
    first = {path.name for path in root.glob("sync.*")}
    async with asyncio.timeout(120):
        while {path.name for path in root.glob("sync.*")} & first:
            await store.synced()
            await asyncio.sleep(0.01)
    await store.close()
    again = TrajectoryStore(root, boot="two")
    assert len(verify(lines(again, A), A)) == 21
    await again.close()


async def test_a_sync_file_of_an_earlier_version_makes_no_logs(tmp_path: Path) -> None:
    """It wrote to the logs at once, so that one that isn't there was removed."""
    store = await filled(tmp_path / "t")
    kept = lines(store, A)
    await store.close()
    (tmp_path / "t" / "sync.9").write_bytes(b"".join(b"sandboxcccc03 " + line for line in kept))
    again = TrajectoryStore(tmp_path / "t", boot="one")
    assert lines(again, A) == kept
    assert again.chain("sandboxcccc03") is None
    await again.close()


async def test_a_write_is_on_disk_soon_without_being_asked(tmp_path: Path) -> None:
    store = await filled(tmp_path / "t", sync_s=0.05)
    async with asyncio.timeout(120):
        while store._unsynced or store._syncing is not None:  # noqa: ASYNC110  the store's own business
            await asyncio.sleep(0.005)
    await store.close()


# --- a full disk ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "dsec-test", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def write_on(store: TrajectoryStore) -> None:
    for n in range(1000):
        store.check_room()
        store.append(A, 1.0, "exec", {"argv": ["x" * 3000, n]})


@pytest.mark.root
async def test_a_full_disk_refuses_what_is_new_and_keeps_what_has_happened(small_disk: Path) -> None:
    store = await filled(small_disk / "t")
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        fill(filler)
    before = lines(store, A)
    with pytest.raises(Unavailable) as caught:
        write_on(store)
    assert caught.value.infra
    seq = store.append(A, 2.0, "result", {"output": "y" * 8000}, last_room=True)  # out of the reserve
    assert len(verify(lines(store, A), A)) == seq >= len(before) + 1
    with pytest.raises(Unavailable):
        store.check_room()
    filler.unlink()
    store.check_room()
    assert store.append(A, 3.0, "exec", {}) == seq + 1
    assert len(verify(lines(store, A), A)) == seq + 1
    await store.close()


# --- blobs, upkeep ---


async def test_blobs_are_what_their_names_say(tmp_path: Path) -> None:
    store = await filled(tmp_path / "t")
    data = os.urandom(100_000)
    digest = store.put_blob(A, data)
    assert store.put_blob(A, data) == digest
    assert store.blob(A, digest) == data
    assert store.blob(B, digest) is None
    (log_of(tmp_path / "t", A).parent / digest).write_bytes(b"other")
    assert store.blob(A, digest) is None
    await store.close()


async def test_old_logs_go_unless_they_are_wanted(tmp_path: Path) -> None:
    store = await filled(tmp_path / "t")
    past = 1_000_000.0
    for sandbox in (A, B):
        store.forget(sandbox)
        for path in (log_of(tmp_path / "t", sandbox), log_of(tmp_path / "t", sandbox).parent):
            os.utime(path, (past, past))
    assert await store.prune(past - 1, lambda _: False) == 0
    assert await store.prune(past + 1, B.__eq__) == 1
    assert not log_of(tmp_path / "t", A).exists()
    assert lines(store, A) == []
    assert len(lines(store, B)) == 6
    await store.close()


async def test_ids_are_no_paths(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "t", boot="one")
    for name in ("../../etc/x", "a/b", "", "a" * 65):
        with pytest.raises(ValueError, match="id"):
            store.begin(name)
    await store.close()


def test_what_is_no_entry_is_said_to_be_none() -> None:
    for line in (b"", b"{}", b"nonsense", b'{"seq":"1"}', b"\xff\xfe"):
        with pytest.raises(Broken):
            parse(line)
