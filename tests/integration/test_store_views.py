"""The shared /dev and the generated /proc and /sys."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.kernel import mounts
from dsec.store.views import UNUSED_VIEWS, CpuPicker, Views, make_dev, remove_dev, render, visible_cpus

GIB = 1 << 30


@pytest.mark.parametrize(("cpus", "host", "seen"), [(0.1, 8, 1), (1, 8, 1), (1.5, 8, 2), (8, 8, 8), (64, 8, 8)])
def test_a_sandbox_sees_its_cpus_and_never_more_than_the_host_has(cpus: float, host: int, seen: int) -> None:
    assert visible_cpus(cpus, host) == seen


def test_a_view_shows_the_sandbox_and_not_the_host() -> None:
    files = render(2.5, 3 * GIB, host_cpus=64)
    assert str(files["proc/cpuinfo"]).count("processor\t") == 3
    assert f"MemTotal:        {3 * GIB // 1024} kB" in str(files["proc/meminfo"])
    assert "SwapTotal:             0 kB" in str(files["proc/meminfo"])
    assert "cpu2 " in str(files["proc/stat"])
    assert "cpu3 " not in str(files["proc/stat"])
    assert files["sys/devices/system/cpu/online"] == "0-2\n"
    assert files["sys/devices/system/node/node0/cpumap"] == "00000007\n"
    assert files["sys/fs/cgroup/cpu.max"] == "250000 100000\n"
    assert render(40, GIB, 64)["sys/devices/system/node/node0/cpumap"] == "000000ff,ffffffff\n"
    assert render(1, GIB, 64)["sys/devices/system/cpu/online"] == "0\n"


def test_views_are_shared_by_shape_and_bounded(tmp_path: Path) -> None:
    views = Views(tmp_path)
    first = views.acquire(1.0, GIB)
    assert views.acquire(1.0, GIB) == first
    assert stat.S_IMODE((first / "proc/meminfo").stat().st_mode) == 0o444
    for n in range(3 * UNUSED_VIEWS):
        views.acquire(1.0, GIB + n * 4096 + 4096)
        views.release(1.0, GIB + n * 4096 + 4096)
    assert first.exists(), "a view in use stays"
    assert len(list(views.root.iterdir())) <= UNUSED_VIEWS + 2
    again = Views(tmp_path)
    assert again.acquire(1.0, GIB) == first, "a restarted server goes on with it"
    views.remove()
    assert not first.exists()


def test_cpus_are_spread_and_given_back() -> None:
    picker = CpuPicker([2, 3, 5])
    picks = [picker.pick(1.0) for _ in range(6)]
    assert sorted(picks) == [(2,), (2,), (3,), (3,), (5,), (5,)]
    for pick in picks[:3]:
        picker.release(pick, 1.0)
    assert sorted(picker.pick(1.0) for _ in range(3)) == [(2,), (3,), (5,)]
    assert picker.pick(2.0) != picker.pick(1.0)
    assert picker.pick(99) == (2, 3, 5)
    picker.release((7,), 1.0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    mounts.unmount_under(tmp_path)


@pytest.mark.root
def test_dev_has_working_nodes_and_nothing_else(run_dir: Path) -> None:
    top = make_dev(run_dir)
    assert make_dev(run_dir) == top
    assert len(mounts.mounted(run_dir)) == 1
    names = {
        "null",
        "zero",
        "full",
        "random",
        "urandom",
        "tty",
        "fd",
        "stdin",
        "stdout",
        "stderr",
        "ptmx",
        "pts",
        "shm",
    }
    assert set(os.listdir(top)) == names  # noqa: PTH208
    with open(top / "zero", "rb") as zero:
        assert zero.read(4) == b"\0\0\0\0"
    with open(top / "null", "wb") as null:
        null.write(b"gone")
    assert (top / "ptmx").readlink() == Path("pts/ptmx")
    remove_dev(run_dir)
    remove_dev(run_dir)
    assert mounts.mounted(run_dir) == []
