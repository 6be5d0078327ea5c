"""Cgroup slots and their pool on the host's real hierarchies."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from dsec.kernel import syscalls
from dsec.kernel.cgroup_pool import CgroupPool
from dsec.kernel.cgroups import CgroupRoot, Shape, Slot, forget_moves
from dsec.kernel.syscalls import KernelError
from dsec.ports import Usage

pytestmark = pytest.mark.root
MIB = 1 << 20
SHAPE = Shape(64 * MIB, 1.0, 32)
OTHER = Shape(128 * MIB, 0.5, 16)


@pytest.fixture
def root() -> Iterator[CgroupRoot]:
    root = CgroupRoot.detect(f"dsec-test-{os.getpid()}")
    root.prepare()
    yield root
    for name in root.names():
        assert Slot(root, name).remove()
    root.remove()
    assert not any(parent.exists() for parent in root.parents())


def descriptors() -> int:
    """Open ones of slots' files."""
    return sum("/dsec-test-" in os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir())


@pytest.fixture
def pool(root: CgroupRoot) -> Iterator[CgroupPool]:
    before = descriptors()
    pool = CgroupPool(root, spare=4, refill=2)
    pool.open()
    yield pool
    pool.close()
    assert descriptors() == before
    assert root.names() == []
    root.prepare()


class Reaper:
    """Reaps whatever ends below this process, as a zygote does: orphans come here too."""

    ended: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        self.ended.clear()
        self._stop = threading.Event()
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    self.ended[found[0]] = os.waitstatus_to_exitcode(found[1])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(autouse=True)
def reaper() -> Iterator[Reaper]:
    reaper = Reaper()
    yield reaper
    reaper.close()


class Inside:
    """A shell that runs a script in a slot from its very first command."""

    def __init__(self, slot: Slot, script: str) -> None:
        read, write = os.pipe()
        actions = [
            (os.POSIX_SPAWN_DUP2, read, 0),
            *((os.POSIX_SPAWN_OPEN, n, "/dev/null", os.O_WRONLY, 0) for n in (1, 2)),
        ]
        self.pid = os.posix_spawn("/bin/sh", ["sh", "-c", f"read go; {script}"], os.environ, file_actions=actions)
        slot.attach(self.pid)
        os.write(write, b"go\n")
        os.close(read)
        os.close(write)

    @property
    def running(self) -> bool:
        return self.pid not in Reaper.ended

    def wait(self) -> int:
        eventually(lambda: not self.running)
        return Reaper.ended[self.pid]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def made(root: CgroupRoot, name: str = "s0", shape: Shape = SHAPE, uid: int = 300_000) -> Slot:
    slot = Slot(root, name)
    slot.make(shape)
    slot.assign("owner", uid)
    return slot


def test_a_host_without_the_controllers_is_refused(root: CgroupRoot) -> None:
    assert root.version in ("v2", "hybrid")
    assert all(parent.is_dir() for parent in root.parents())
    assert root.names() == []
    assert root.name_of_pid(os.getpid()) is None
    assert root.name_of_pid(2**22 + 1) is None


def test_memory_beyond_the_limit_is_ended_and_counted(root: CgroupRoot) -> None:
    slot = made(root)
    inside = Inside(slot, "exec python3 -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'")
    assert inside.wait() == -9
    usage = slot.usage(disk_bytes=5, disk_limit_bytes=6)
    assert usage.oom_kills >= 1
    assert usage.memory_peak_bytes >= 60 * MIB
    assert usage.cpu_us > 0
    assert (usage.disk_bytes, usage.disk_limit_bytes) == (5, 6)


def test_processes_beyond_the_limit_are_refused_and_counted(root: CgroupRoot) -> None:
    slot = made(root, shape=Shape(64 * MIB, 1.0, 4))
    inside = Inside(slot, "for i in 1 2 3 4 5 6 7 8; do sleep 60 & done; wait")
    eventually(lambda: slot.usage().pids_refused >= 1)
    assert slot.usage().pids <= 4
    slot.kill()
    inside.wait()


def test_cpu_beyond_the_limit_is_throttled_and_counted(root: CgroupRoot) -> None:
    slot = made(root, shape=Shape(64 * MIB, 0.1, 8))
    inside = Inside(slot, "while :; do :; done")
    eventually(lambda: slot.usage().throttled_us > 0)
    slot.kill()
    assert inside.wait() == -9
    assert slot.usage().cpu_us > 0


def test_kill_ends_what_was_forked_twice_and_what_is_frozen(root: CgroupRoot) -> None:
    slot = made(root)
    inside = Inside(slot, "(setsid sh -c 'sleep 300 & sleep 300' &) ; exec sleep 300")
    eventually(lambda: slot.usage().pids >= 4)
    assert root.name_of_pid(inside.pid) == "s0"
    slot.freeze()
    eventually(lambda: "frozen 1" in Path(slot.v2, "cgroup.events").read_text())
    slot.kill()
    assert inside.wait() == -9
    eventually(lambda: not slot.populated)


def test_a_cleaned_slot_shows_nothing_of_its_past(root: CgroupRoot) -> None:
    slot = made(root)
    inside = Inside(
        slot, "head -c 30000000 /dev/zero | tail >/dev/null; (for i in $(seq 99); do sleep 300 & done); exec sleep 300"
    )
    eventually(lambda: slot.usage().pids_refused >= 1)
    Path(f"{slot.v2}/c1/deeper").mkdir(parents=True)
    os.setxattr(slot.v2, "user.left", b"behind")
    Path(f"{slot.v2}/c1/deeper/cgroup.procs").write_text(str(inside.pid))
    assert root.name_of_pid(inside.pid) == "s0"
    slot.freeze()
    assert slot.clean()
    inside.wait()
    usage = slot.usage()
    assert usage == Usage(memory_bytes=usage.memory_bytes, memory_peak_bytes=usage.memory_peak_bytes)
    assert usage.memory_peak_bytes < 8 * MIB, "kernel memory of ended tasks drains a little later"
    assert [entry for entry in Path(slot.v2).iterdir() if entry.is_dir()] == []
    assert os.listxattr(slot.v2) == ["trusted.dsec"]
    assert "frozen 0" in Path(slot.v2, "cgroup.events").read_text()
    slot.close()


def test_page_cache_stays_for_the_next_one_but_is_not_its_usage(root: CgroupRoot, tmp_path: Path) -> None:
    file = tmp_path / "shared"
    file.write_bytes(b"x" * (2 * MIB))
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    slot = made(root)
    assert Inside(slot, f"cat {file} > /dev/null").wait() == 0
    before = slot.usage().memory_bytes
    assert before >= 2 * MIB
    assert slot.clean()
    assert slot.usage().memory_bytes < MIB
    assert slot.usage().memory_peak_bytes < MIB
    assert Inside(slot, "python3 -c 'bytearray(20 << 20)'").wait() == 0
    assert slot.usage().memory_peak_bytes >= 20 * MIB
    slot.reshape(Shape(16 * MIB, 1.0, 32))
    assert Inside(slot, f"cat {file} > /dev/null; head -c 3000000 {file} > {file}2").wait() == 0
    assert slot.clean()
    slot.close()


def test_the_guest_gets_the_groups_of_its_slot_and_no_limits(root: CgroupRoot) -> None:
    slot = made(root, uid=300_000)
    top = Path(slot.v2)
    owned = {path.name for path in (top, *top.iterdir()) if path.stat().st_uid == 300_000}
    assert owned == {"s0", "cgroup.procs", "cgroup.threads"}
    for path in slot.v1:
        assert Path(path).stat().st_uid == 0
    slot.assign("next", 400_000)
    assert (top / "cgroup.procs").stat().st_uid == 400_000


def test_a_slot_tells_a_restarted_server_what_it_was(root: CgroupRoot) -> None:
    slot = made(root)
    inside = Inside(slot, "for i in $(seq 99); do sleep 300 & done; wait")
    eventually(lambda: slot.usage().pids_refused >= 1)
    slot.kill()
    inside.wait()
    assert slot.clean()
    slot.assign("me", 300_000)
    again = Slot(root, "s0")
    assert again.load()
    assert again.note is not None
    assert (again.note.owner, again.note.shape) == ("me", SHAPE)
    assert again.usage().pids_refused == 0, "the baseline survived"
    again.close()
    assert not Slot(root, "s1").load()


def test_a_slot_can_be_reshaped_down_and_up(root: CgroupRoot) -> None:
    slot = made(root, shape=OTHER)
    for shape in (SHAPE, Shape(256 * MIB, 2.5, 100), SHAPE):
        slot.reshape(shape)
        assert slot.note is not None
        assert slot.note.shape == shape
    limits = [Path(path, "pids.max") for path in (*slot.v1, slot.v2)]
    assert [path.read_text() for path in limits if path.exists()] == ["32\n"]


def test_an_idle_slot_is_weighed_again_for_the_next_one(root: CgroupRoot) -> None:
    slot = made(root)
    switch = Path(slot._dirs["cpu"]) / "cpu.idle"
    for _ in range(2):
        slot.set_idle()
        assert switch.read_text() == "1\n"
    assert slot.note is not None
    assert slot.note.shape != SHAPE
    slot.reshape(SHAPE)
    assert switch.read_text() == "0\n"
    slot.reshape(Shape(SHAPE.memory_bytes, 2.0, SHAPE.pids, idle=True))
    assert switch.read_text() == "1\n"
    assert slot.remove()


def test_remove_takes_everything_and_may_be_repeated(root: CgroupRoot) -> None:
    slot = made(root)
    inside = Inside(slot, "exec sleep 300")
    Path(f"{slot.v2}/c1").mkdir()
    assert slot.remove()
    assert inside.wait() == -9
    assert root.names() == []
    assert slot.remove()
    assert not slot.clean()


def test_the_pool_hands_a_slot_out_again_after_it_was_emptied(pool: CgroupPool) -> None:
    name = pool.reserve(SHAPE)
    assert name.partition(".")[0] not in pool.root.names(), "reserve makes nothing"
    slot = pool.take(name, SHAPE, "one", 300_000)
    inside = Inside(slot, "exec sleep 300")
    eventually(lambda: pool.counts()["spare"] == 2)
    assert pool.find(name, "one") is slot
    assert pool.find(name, "two") is None
    pool.give_back(slot)
    pool.give_back(slot)
    assert inside.wait() == -9
    assert pool.find(name, "one") is None
    eventually(lambda: pool.counts() == {"spare": 3, "reserved": 0, "dirty": 0, "stuck": 0})
    names = [pool.reserve(SHAPE) for _ in range(6)]
    assert slot.name in {name.partition(".")[0] for name in names}
    assert len({name.partition(".")[0] for name in names}) == 6
    pool.cancel(name)
    pool.give_back(slot)
    assert pool.counts()["reserved"] == 6, "who had the slot before can't touch it"
    for reserved in names:
        pool.cancel(reserved)
        pool.cancel(reserved)
    assert pool.counts()["reserved"] == 0
    with pytest.raises(LookupError):
        pool.take(names[0], SHAPE, "late", 300_000)


def test_the_pool_reshapes_and_is_bounded(pool: CgroupPool) -> None:
    slots = [pool.take(pool.reserve(SHAPE), SHAPE, f"o{n}", 300_000) for n in range(8)]
    for slot in slots:
        pool.give_back(slot)
    eventually(lambda: pool.counts()["dirty"] == 0)
    assert pool.counts()["spare"] <= 4
    eventually(lambda: len(pool.root.names()) <= 4)  # the thread may be removing one that it made too many
    slot = pool.take(pool.reserve(OTHER), OTHER, "other", 300_000)
    assert slot.note is not None
    assert slot.note.shape == OTHER
    pool.give_back(slot)


def test_a_restarted_pool_adopts_what_is_on_record_and_ends_the_rest(root: CgroupRoot) -> None:
    first = CgroupPool(root, spare=2, refill=0)
    first.open()
    names = {owner: first.reserve(SHAPE) for owner in ("kept", "stray", "moved")}
    slots = {owner: first.take(name, SHAPE, owner, 300_000) for owner, name in names.items()}
    processes = {owner: Inside(slot, "exec sleep 300") for owner, slot in slots.items()}
    Path(f"{root.v2}/{root.name}/s77").mkdir()  # half made
    first.close(keep=True)

    second = CgroupPool(root, spare=2, refill=0)
    kept = names["kept"]
    adopted = second.open({kept: "kept", names["moved"]: "someone else", "s5555.1": "never made"})
    assert set(adopted) == {kept}
    assert second.find(kept, "kept") is adopted[kept]
    assert processes["stray"].wait() == -9
    assert processes["moved"].wait() == -9
    assert processes["kept"].running
    assert second.reserve(OTHER).partition(".")[0] not in (slots["kept"].name, "s77")
    eventually(lambda: not Path(f"{root.v2}/{root.name}/s77").exists())
    second.close()
    assert processes["kept"].wait() == -9
    assert root.names() == []
    root.prepare()


def test_a_limit_that_cannot_be_set_is_an_error_and_the_slot_is_not_lost(pool: CgroupPool) -> None:
    bad = Shape(64 * MIB, 1.0, -5)
    with pytest.raises(KernelError, match=r"pids\.max"):
        pool.take(pool.reserve(bad), bad, "x", 300_000)
    pool.cancel(pool.reserve(SHAPE))  # stop making slots of the bad shape
    eventually(lambda: pool.counts()["dirty"] == pool.counts()["stuck"] == 0)
    assert all(Slot(pool.root, name).load() for name in pool.root.names())


@pytest.mark.root
def test_favouring_moves_is_seen_and_taken_back() -> None:
    root = CgroupRoot.detect("dsec-test-moves")
    before = root.favors_moves
    root.favor_moves()
    try:
        assert root.favors_moves
    finally:
        if not before:
            forget_moves(str(root.v2))
    assert root.favors_moves is before
