"""The data volume on the real kernel: in a file, on a btrfs of the host's, and as plain directories."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.errors import Unavailable
from dsec.kernel import loop, mounts, syscalls
from dsec.kernel.ledger import Ledger
from dsec.store import volume as module
from dsec.store.volume import QUOTA_SLACK, Kind, Volume

pytestmark = pytest.mark.root
MIB = 1 << 20
BASE = 300_000


@pytest.fixture
def dirs(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    state, run = tmp_path / "state", tmp_path / "run"
    state.mkdir()
    run.mkdir()
    yield state, run
    mounts.unmount_under(tmp_path)
    # a mount namespace that another worker makes just now has a copy of the mount, for a moment
    eventually(lambda: loop.attached(state / "volume.btrfs") == [])


def opened(dirs: tuple[Path, Path]) -> Volume:
    return Volume.open(*dirs, size_bytes=512 * MIB)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def fill(path: Path) -> int:
    """Write until the disk is full; returns the bytes written."""
    written = 0
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                written += file.write(b"x" * 65536)
        except OSError as error:
            assert error.errno in (errno.EDQUOT, errno.ENOSPC)  # noqa: PT017
    return written


def test_a_sandbox_has_its_directories_and_its_limit(dirs: tuple[Path, Path]) -> None:
    volume = opened(dirs)
    assert (volume.kind, volume.quota) == (Kind.LOOP, True)
    upper, work = map(Path, volume.make("a", 8 * MIB, BASE))
    assert (upper.stat().st_uid, upper.stat().st_gid, stat.S_IMODE(upper.stat().st_mode)) == (BASE, BASE, 0o755)
    assert work.stat().st_uid == BASE
    assert upper.parent == work.parent == volume.path("a")
    assert volume.list() == {"a"}
    written = fill(upper / "big")
    assert 7 * MIB <= written <= 8 * MIB + QUOTA_SLACK
    assert written <= volume.used_bytes("a") <= 8 * MIB + QUOTA_SLACK
    other, _ = map(Path, volume.make("b", 8 * MIB, BASE))
    (other / "f").write_bytes(b"y" * MIB)
    with pytest.raises(FileExistsError):
        volume.make("a", MIB, BASE)
    volume.remove("a")
    volume.remove("a")
    assert volume.list() == {"b"}
    assert volume.used_bytes("a") == 0
    volume.close(keep=False)
    assert mounts.mounted(dirs[1]) == []


def test_the_smallest_disk_holds_what_it_promises(dirs: tuple[Path, Path]) -> None:
    volume = opened(dirs)
    upper, _ = map(Path, volume.make("tiny", 1 * MIB, BASE))
    (upper / "f").write_bytes(b"x" * MIB)
    volume.close()


def test_a_restarted_server_finds_everything(dirs: tuple[Path, Path]) -> None:
    volume = opened(dirs)
    upper, _ = map(Path, volume.make("a", 8 * MIB, BASE))
    (upper / "f").write_bytes(b"x" * MIB)
    os.sync()
    used = volume.used_bytes("a")
    (volume.spool("a") / "1.stdout").write_bytes(b"kept")
    volume.close(keep=True)
    again = opened(dirs)
    assert len(mounts.mounted(dirs[1])) == 1
    assert again.list() == {"a"}
    assert again.used_bytes("a") == used >= MIB
    assert (again.spool("a") / "1.stdout").read_bytes() == b"kept"
    again.close(keep=True)
    mounts.unmount(again.root)  # a boot
    later = opened(dirs)
    assert later.quota
    assert (later.path("a") / "upper" / "f").stat().st_size == MIB
    later.remove_spool("a")
    later.remove_spool("a")
    assert list((later.root / "spool").iterdir()) == []
    later.close(keep=False)


def test_space_comes_back_and_quota_groups_do_not_pile_up(dirs: tuple[Path, Path]) -> None:
    volume = opened(dirs)
    before = volume.free_bytes()
    for n in range(100):
        upper, _ = map(Path, volume.make(f"s{n}", 8 * MIB, BASE))
        (upper / "f").write_bytes(b"x" * MIB)
    for n in range(100):
        volume.remove(f"s{n}")
    subprocess.run(["btrfs", "filesystem", "sync", volume.root], check=True, capture_output=True)
    subprocess.run(["btrfs", "subvolume", "sync", volume.root], check=True, capture_output=True)
    os.sync()
    assert volume._quotas is not None
    groups = volume._quotas.groups
    eventually(lambda: volume.sweep(10) >= 0 and len(groups()) <= 11)
    eventually(lambda: volume.free_bytes() > before - 40 * MIB)
    volume.close(keep=False)


def test_a_full_disk_is_refused_before_it_hurts(dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    volume = opened(dirs)
    volume.check_space()
    upper, _ = map(Path, volume.make("a", 1 << 40, BASE))
    assert fill(upper / "big") > 1 << 27
    os.sync()
    with pytest.raises(Unavailable, match="full"):
        volume.check_space()
    assert volume.free_bytes() == 0
    volume.remove("a")
    with contextlib.suppress(Unavailable):
        volume.check_space()
    eventually(lambda: volume.free_bytes() > 0)
    volume.close(keep=False)
    monkeypatch.setattr(module, "LEAST_SIZE", 1 << 60)
    (dirs[0] / "volume.btrfs").unlink()
    with pytest.raises(Unavailable, match="MiB are free"):
        Volume.open(*dirs)
    assert not (dirs[0] / "volume.btrfs").exists()


def test_a_state_directory_on_btrfs_is_used_as_it_is(dirs: tuple[Path, Path]) -> None:
    state, run = dirs
    image = state / "host.img"
    with open(image, "wb") as file:
        file.truncate(1 << 30)
    subprocess.run(["mkfs.btrfs", "-q", image], check=True, capture_output=True)
    host = state / "host"
    host.mkdir()
    with loop.attach(image) as device:
        syscalls.mount(device.path, host, "btrfs")
    ledger = Ledger(state / "host.json")
    volume = Volume.open(host, run, ledger)
    assert (volume.kind, volume.quota) == (Kind.BTRFS, True)
    assert [(change.kind, change.what) for change in ledger.changes] == [("quota", str(host / "volume"))]
    upper, _ = map(Path, volume.make("a", 4 * MIB, BASE))
    assert fill(upper / "f") < 6 * MIB
    volume.close(keep=False)
    assert any("quotas" in line for line in ledger.undo())
    assert not ledger.changes
    assert mounts.mounted(run) == []
    mounts.unmount(host)
    eventually(lambda: loop.attached(image) == [])


def test_plain_directories_work_without_a_limit(tmp_path: Path) -> None:
    volume = Volume(tmp_path, Kind.DIRECTORY, tmp_path)
    upper, work = map(Path, volume.make("a", MIB, BASE))
    assert upper.stat().st_uid == BASE
    (upper / "f").write_bytes(b"x" * 3 * MIB)
    (work / "d").mkdir()
    assert volume.used_bytes("a") == 0
    assert not volume.quota
    with pytest.raises(FileExistsError):
        volume.make("a", MIB, BASE)
    volume.remove("a")
    volume.remove("a")
    assert volume.list() == set()
    eventually(lambda: not any((tmp_path / "trash").iterdir()))
    (volume.spool("a") / "f").write_bytes(b"x")
    volume.remove_spool("a")
    assert list((tmp_path / "spool").iterdir()) == []
    volume.make("b", MIB, BASE)
    volume.close(keep=False)
    assert not any((tmp_path / "sandboxes").iterdir())


def test_a_capture_on_a_full_volume_is_whole_or_refused(dirs: tuple[Path, Path]) -> None:
    volume = opened(dirs)
    upper, _ = map(Path, volume.make("a", 1 << 40, BASE))
    (upper / "first").write_bytes(b"1" * MIB)
    fill(upper / "big")
    for number in range(3):
        try:
            volume.capture("a", f"c{number}")
        except Unavailable:
            assert not volume.capture_path(f"c{number}").exists(), "nothing is left of one that failed"
        else:
            kept = volume.capture_path(f"c{number}") / "upper"
            assert (kept / "first").read_bytes() == b"1" * MIB
            assert (kept / "big").stat().st_size == (upper / "big").stat().st_size
            volume.drop_capture(f"c{number}")
    assert not any((volume.root / "captures").iterdir())
    (upper / "big").unlink()
    eventually(lambda: _writes(upper / "again"))
    volume.close(keep=False)


def _writes(path: Path) -> bool:
    try:
        path.write_bytes(b"2" * MIB)
    except OSError:
        return False
    return True


def test_a_full_volume_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    syscalls.mount("none", tmp_path, "tmpfs", 0, "nr_inodes=6")
    try:
        volume = Volume(tmp_path, Kind.DIRECTORY, tmp_path)  # root, sandboxes, spool, trash: room for two more
        with pytest.raises(Unavailable, match="the data volume is full"):
            volume.make("a", MIB, BASE)
        assert volume.list() == set()
        volume.close()
    finally:
        mounts.unmount(tmp_path)


def test_a_corrupt_volume_is_an_error_that_names_it(dirs: tuple[Path, Path]) -> None:
    (dirs[0] / "volume.btrfs").write_bytes(b"\0" * (64 << 20))
    with pytest.raises(Unavailable, match="mount btrfs"):
        opened(dirs)
