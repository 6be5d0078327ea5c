"""Probes of what layers and the data volume stand on."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from dsec.kernel import btrfs, idmap, loop, mounts, paging, syscalls, zram
from dsec.kernel.mounts import ErofsMount
from dsec.kernel.probes import Missing, need_program, probe
from dsec.kernel.syscalls import KernelError

_libc = ctypes.CDLL(None, use_errno=True)


def _image(place: Path) -> Path:
    (place / "tree").mkdir()
    (place / "tree" / "f").write_bytes(b"x")
    image = place / "image"
    subprocess.run(
        [need_program("mkfs.erofs", "erofs-utils"), "--quiet", image, place / "tree"], check=True, capture_output=True
    )
    return image


@probe("mkfs.erofs", needed=True)
def _mkfs_erofs(_: Path) -> str:
    return need_program("mkfs.erofs", "erofs-utils")


@probe("erofs", needed=True)
def _erofs(place: Path) -> str:
    image, at = _image(place), place / "at"
    at.mkdir()
    ErofsMount(image, at).mount()
    if (at / "f").read_bytes() != b"x":
        raise Missing("an image reads wrong", "Report this kernel.")
    return "by a loop device" if loop.attached(image) else "file-backed"


@probe("erofs file-backed")
def _erofs_file(place: Path) -> str:
    at = place / "at"
    at.mkdir()
    try:
        syscalls.mount(_image(place), at, "erofs", syscalls.MS_RDONLY)
    except KernelError as error:
        raise Missing(error.strerror or "", "Linux 6.12 or newer does without a loop device per layer.") from None
    return "mounted without a loop device"


@probe("lazy layers", feature=True)
def _lazy(place: Path) -> str:
    try:
        return f"by {_fanotify(place)}"
    except Missing:
        try:
            return f"through a FUSE file, slower: {_fuse(place)}"
        except OSError as error:
            why = "Linux 6.14 and newer, or FUSE, fill layers on demand; without, layers are fetched whole."
            raise Missing(error.strerror or "", why) from None


@probe("id-mapped erofs", needed=True)
def _idmapped(place: Path) -> str:
    for name in ("at", "clone"):
        (place / name).mkdir()
    ErofsMount(_image(place), place / "at").mount()
    try:
        idmap.place_clone(place / "at", place / "clone", 100_000, 65_536)
    except KernelError as error:
        raise Missing(error.strerror or "", "Linux 5.19 or newer is needed for id-mapped EROFS.") from None
    if (place / "clone" / "f").stat().st_uid != 100_000:
        raise Missing("owners are not shifted", "Report this kernel.")
    return "owners are shifted"


@probe("overlayfs", needed=True)
def _overlay(place: Path) -> str:
    syscalls.mount("none", place, "tmpfs")
    for name in ("lower", "upper", "work", "at"):
        (place / name).mkdir()
    (place / "lower" / "f").write_bytes(b"x")
    options = f"lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work"
    syscalls.mount("none", place / "at", "overlay", 0, f"{options},volatile")
    (place / "at" / "f").write_bytes(b"y")
    mounts.unmount(place / "at")
    try:
        context = syscalls.fsopen("overlay")
        try:
            syscalls.fsconfig_string(context, "lowerdir+", place / "lower")
        finally:
            os.close(context)
    except KernelError:
        return "volatile; layers in one option (Linux 6.8 takes them one by one)"
    return "volatile, layers one by one"


@probe("loop devices")
def _loop(place: Path) -> str:
    file = place / "f"
    file.write_bytes(b"\0" * 65536)
    with loop.attach(file, direct_io=True) as device:
        direct = Path(f"/sys/block/{device.path.name}/loop/dio").read_text().strip() == "1"
    return "with direct I/O" if direct else "buffered"


@probe("btrfs volume")
def _btrfs(place: Path) -> str:
    mkfs = need_program("mkfs.btrfs", "btrfs-progs")
    file, at = place / "f", place / "at"
    at.mkdir()
    with open(file, "wb") as opened:
        opened.truncate(256 << 20)
    subprocess.run([mkfs, "-q", "-m", "single", file], check=True, capture_output=True)
    with loop.attach(file, direct_io=True) as device:
        syscalls.mount(device.path, at, "btrfs")
    fd = os.open(at, os.O_RDONLY | os.O_DIRECTORY)
    try:
        btrfs.create_subvolume(fd, "a")
        try:
            btrfs.enable_simple_quota(fd)
            inner = os.open(at / "a", os.O_RDONLY | os.O_DIRECTORY)
            try:
                btrfs.limit(inner, 1 << 20)
            finally:
                os.close(inner)
        except KernelError as error:
            raise Missing(
                f"subvolumes, no byte quotas: {error.strerror}",
                "Linux 6.7 or newer limits each sandbox's disk (simple quotas).",
            ) from None
        btrfs.destroy_subvolume(fd, "a")
    finally:
        os.close(fd)
    return "subvolumes with simple quotas"


@probe("fuse", feature=True)
def _fuse(_: Path) -> str:
    os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    return "/dev/fuse opens"


@probe("fanotify pre-content", feature=True)
def _fanotify(place: Path) -> str:
    pre_content, pre_access = 0x8, 0x00100000
    fd = _libc.fanotify_init(pre_content | 1, os.O_RDONLY)
    if fd < 0:
        raise Missing(os.strerror(ctypes.get_errno()), "Linux 6.14 or newer loads layers on demand.")
    try:
        (place / "f").write_bytes(b"x")
        mark = _libc.fanotify_mark
        mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]
        if mark(fd, 1, pre_access, -100, os.fsencode(place / "f")) < 0:
            raise Missing(
                os.strerror(ctypes.get_errno()),
                "Linux 6.14 or newer, on a file system that has it, loads layers on demand.",
            )
    finally:
        os.close(fd)
    return "events before reads"


@probe("swap for paused sandboxes")
def _swap(_: Path) -> str:
    by = "process by process" if paging.can_advise() else "by their memory cgroups, since there is no process_madvise"
    found = zram.swaps()
    if found:
        return f"swap on {', '.join(found)}; paged out {by}"
    if zram.available():
        return f"none yet: the first pause makes compressed swap (zram); paged out {by}"
    raise Missing(
        "the host has no swap and its kernel no zram",
        "modprobe zram; else paused sandboxes give back cached files alone and keep the rest of their memory.",
    )
