"""System calls, mounts, id maps and loop devices on the real kernel."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.kernel import idmap, loop, mounts, syscalls
from dsec.kernel.syscalls import KernelError

MOUNTINFO = rb"""22 27 0:21 / /proc rw,relatime - proc proc rw
43 27 0:39 /sub /with\040space\134x rw,noatime,idmapped shared:1 master:2 - erofs /a\011b ro,user_xattr
44 43 0:40 / /with\040space\134x rw - tmpfs none rw"""


def test_mountinfo_is_parsed_with_its_escapes() -> None:
    first, second, third = mounts.parse_mountinfo(MOUNTINFO)
    assert (first.mount_id, first.parent_id, first.device, first.fstype) == (22, 27, "0:21", "proc")
    assert second.target == Path("/with space\\x") == third.target
    assert (second.root, second.source) == ("/sub", "/a\tb")
    assert second.idmapped
    assert not first.idmapped
    assert second.super_options == {"ro", "user_xattr"}


def test_our_own_mounts_hold_the_root() -> None:
    assert any(entry.target == Path("/") for entry in mounts.mounted())
    root = mounts.find_mount("/")
    assert root is not None
    assert root.target == Path("/")


def test_an_error_says_what_was_tried_and_the_likely_cause(tmp_path: Path) -> None:
    with pytest.raises(KernelError) as caught:
        syscalls.mount("none", tmp_path, "no-such-fs")
    assert caught.value.errno in (errno.ENODEV, errno.EPERM)
    assert str(tmp_path) in str(caught.value)
    assert "no-such-fs" in str(caught.value)


def children() -> set[int]:
    """Our child processes, zombies included."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    mounts.unmount_under(tmp_path)


def erofs_image(place: Path, owner: int = 0) -> Path:
    tree = place / "tree"
    (tree / "dir").mkdir(parents=True)
    (tree / "dir" / "file").write_bytes(b"content")
    os.chown(tree / "dir" / "file", owner, owner)
    image = place / "layer.erofs"
    subprocess.run(["mkfs.erofs", "--quiet", image, tree], check=True, capture_output=True)
    return image


@pytest.mark.root
@pytest.mark.parametrize("direct_io", [False, True])
def test_erofs_is_mounted_and_unmounted_leaving_no_loop_device(place: Path, direct_io: bool) -> None:
    target = place / "at"
    target.mkdir()
    image = erofs_image(place)
    mount = mounts.ErofsMount(image, target, direct_io=direct_io)
    assert str(target) in mount.describe()
    mount.mount()
    assert (target / "dir" / "file").read_bytes() == b"content"
    entry = mounts.find_mount(target)
    assert entry is not None
    assert entry.fstype == "erofs"
    with pytest.raises(OSError, match="Read-only"):
        (target / "new").touch()
    assert mounts.unmount(target)
    assert mounts.find_mount(target) is None
    assert loop.attached(image) == []
    assert not mounts.unmount(target), "unmounting what isn't mounted is fine"
    assert not mounts.unmount(place / "absent")


@pytest.mark.root
def test_a_corrupt_image_is_an_error_that_names_it(place: Path) -> None:
    image = place / "bad.erofs"
    image.write_bytes(b"\0" * 8192)
    (place / "at").mkdir()
    with pytest.raises(KernelError, match=r"bad\.erofs"):
        mounts.ErofsMount(image, place / "at").mount()
    assert mounts.mounted(place) == []


@pytest.mark.root
def test_a_busy_mount_is_detached(place: Path) -> None:
    target = place / "at"
    target.mkdir()
    mounts.TmpfsMount(target).mount()
    (target / "f").write_bytes(b"x")
    with open(target / "f", "rb") as held:
        assert mounts.unmount(target)
        assert mounts.find_mount(target) is None
        assert held.read() == b"x"


@pytest.mark.root
def test_unmount_under_takes_stacked_and_nested_mounts(place: Path) -> None:
    outer = place / "a"
    outer.mkdir()
    mounts.TmpfsMount(outer).mount()
    mounts.TmpfsMount(outer).mount()
    (outer / "b").mkdir()
    mounts.TmpfsMount(outer / "b", devices=True).mount()
    assert len(mounts.mounted(place)) == 3
    assert mounts.unmount_under(place) == 3
    assert mounts.mounted(place) == []


@pytest.mark.root
def test_an_idmapped_clone_shifts_owners_and_leaves_no_process(place: Path) -> None:
    layer, clone = place / "layer", place / "clone"
    layer.mkdir()
    clone.mkdir()
    mounts.ErofsMount(erofs_image(place, owner=7), layer).mount()
    before = children()
    idmap.place_clone(layer, clone, 500_000, 65_536)
    stat = (clone / "dir" / "file").stat()
    assert (stat.st_uid, stat.st_gid) == (500_007, 500_007)
    assert (clone / "dir").stat().st_uid == 500_000
    assert (layer / "dir" / "file").stat().st_uid == 7
    entry = mounts.find_mount(clone)
    assert entry is not None
    assert entry.idmapped
    assert children() == before


@pytest.mark.root
def test_a_userns_is_made_in_a_process_with_threads() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        fds = [idmap.make_userns(100_000 + 65_536 * n, 65_536) for n in range(20)]
        assert len({os.fstat(fd).st_ino for fd in fds}) == 20
        for fd in fds:
            os.close(fd)
    finally:
        stop.set()
        thread.join()


@pytest.mark.root
def test_a_bad_map_is_an_error_and_leaves_no_child() -> None:
    before = children()
    with pytest.raises(OSError, match="Invalid argument"):
        idmap.make_userns(100_000, 0)
    assert children() == before


@pytest.mark.root
def test_a_loop_device_frees_itself_at_its_last_close(place: Path) -> None:
    file = place / "disk"
    file.write_bytes(b"hello".ljust(1 << 20, b"\0"))
    with loop.attach(file) as device:
        assert loop.attached(file) == [device.path]
        assert loop.backing_file(device.path) == file
        assert device.path.read_bytes()[:5] == b"hello"
    assert loop.attached(file) == []
    held = loop.attach(file, readonly=True, direct_io=True)
    try:
        loop.detach(held.path)
    finally:
        held.close()
    assert loop.attached(file) == []


@pytest.mark.root
def test_fsopen_makes_a_detached_mount_that_can_be_placed(place: Path) -> None:
    target = place / "at"
    target.mkdir()
    context = syscalls.fsopen("tmpfs")
    try:
        syscalls.fsconfig_string(context, "size", "65536")
        syscalls.fsconfig_create(context)
        tree = syscalls.fsmount(context, syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOEXEC)
    finally:
        os.close(context)
    syscalls.move_mount(tree, target)
    os.close(tree)
    entry = mounts.find_mount(target)
    assert entry is not None
    assert {"nodev", "noexec"} <= entry.options


@pytest.mark.root
def test_the_kernel_explains_a_refused_option() -> None:
    context = syscalls.fsopen("tmpfs")
    try:
        with pytest.raises(KernelError, match=r"mode=banana.*[Bb]ad value|mode=banana"):
            syscalls.fsconfig_string(context, "mode", "banana")
    finally:
        os.close(context)
