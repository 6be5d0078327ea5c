"""btrfs subvolumes and simple quotas on a small volume of its own."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.kernel import btrfs, loop, mounts, syscalls
from dsec.kernel.syscalls import KernelError

pytestmark = pytest.mark.root
MIB = 1 << 20


@pytest.fixture
def top(tmp_path: Path) -> Iterator[int]:
    image, at = tmp_path / "image", tmp_path / "at"
    at.mkdir()
    with open(image, "wb") as file:
        file.truncate(512 * MIB)
    subprocess.run(["mkfs.btrfs", "-q", "-m", "single", image], check=True, capture_output=True)
    with loop.attach(image) as device:
        syscalls.mount(device.path, at, "btrfs")
    fd = os.open(at, os.O_RDONLY)
    yield fd
    os.close(fd)
    mounts.unmount(at)
    assert loop.attached(image) == []


def opened(top: int, name: str) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=top)


def write(top: int, name: str, size: int) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT, dir_fd=top)
    try:
        left = size
        while left:
            left -= os.write(fd, b"x" * min(left, MIB))
    finally:
        os.close(fd)


def test_a_subvolume_holds_at_most_its_limit(top: int) -> None:
    btrfs.enable_simple_quota(top)
    btrfs.enable_simple_quota(top)
    quotas = btrfs.Quotas(top)
    assert quotas.mode == "squota"
    btrfs.create_subvolume(top, "a")
    btrfs.create_subvolume(top, "b")
    a, b = opened(top, "a"), opened(top, "b")
    try:
        assert btrfs.root_id(a) != btrfs.root_id(b)
        assert btrfs.root_id(a) >= btrfs.FIRST_FREE_ID
        btrfs.limit(a, 8 * MIB)
        assert quotas.limit_bytes(btrfs.root_id(a)) == 8 * MIB
        write(a, "fits", 4 * MIB)
        used = quotas.used_bytes(btrfs.root_id(a))
        assert 4 * MIB <= used < 5 * MIB
        with pytest.raises(OSError, match="quota") as caught:
            write(a, "too-much", 6 * MIB)
        assert caught.value.errno == errno.EDQUOT
        assert quotas.used_bytes(btrfs.root_id(a)) <= 8 * MIB
        write(b, "unlimited", 12 * MIB)
        assert quotas.limit_bytes(btrfs.root_id(b)) == 0
    finally:
        os.close(a)
        os.close(b)


def test_groups_of_destroyed_subvolumes_are_swept_and_live_ones_stay(top: int) -> None:
    btrfs.enable_simple_quota(top)
    quotas = btrfs.Quotas(top)
    ids = {}
    for name in ("live", "dead1", "dead2"):
        btrfs.create_subvolume(top, name)
        fd = opened(top, name)
        ids[name] = btrfs.root_id(fd)
        os.close(fd)
    assert set(ids.values()) <= quotas.groups()
    assert not btrfs.remove_qgroup(top, ids["live"])
    for name in ("dead1", "dead2"):
        btrfs.destroy_subvolume(top, name)
    # the kernel's cleaner has the last word on when they may go: a remount makes it run
    subprocess.run(["btrfs", "filesystem", "sync", f"/proc/self/fd/{top}"], check=True, pass_fds=[top])
    subprocess.run(["btrfs", "subvolume", "sync", f"/proc/self/fd/{top}"], check=True, pass_fds=[top])
    quotas.sweep({ids["live"]}, most=1)
    quotas.sweep({ids["live"]})
    assert quotas.groups() & set(ids.values()) == {ids["live"]}
    assert btrfs.remove_qgroup(top, ids["dead1"]), "removing what is gone is fine"


def test_without_quotas_usage_is_zero_and_a_limit_says_why(top: int) -> None:
    quotas = btrfs.Quotas(top)
    assert quotas.mode == "off"
    assert quotas.used_bytes(5) == 0
    assert quotas.groups() == set()
    with pytest.raises(KernelError, match="quotas are off"):
        btrfs.limit(top, MIB)


def test_errors_name_the_subvolume(top: int) -> None:
    btrfs.create_subvolume(top, "a")
    with pytest.raises(KernelError, match="subvolume a") as caught:
        btrfs.create_subvolume(top, "a")
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(KernelError, match="subvolume absent"):
        btrfs.destroy_subvolume(top, "absent")
    for bad in ("", "a/b", "x" * 300):
        with pytest.raises(ValueError, match="not a subvolume"):
            btrfs.create_subvolume(top, bad)


def test_another_file_system_is_no_btrfs() -> None:
    fd = os.open("/proc", os.O_RDONLY)
    try:
        with pytest.raises(KernelError, match="not btrfs"):
            btrfs.fs_uuid(fd)
    finally:
        os.close(fd)
