"""Loop devices: a file as a block device.

A device is attached with autoclear, so that its last close or unmount frees it: nothing is left when dsec dies.
LOOP_CONFIGURE (Linux 5.8) sets file, flags and block size in one step.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

from dsec.kernel.syscalls import KernelError

_LOOP_CLR_FD = 0x4C01
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_LO_READ_ONLY = 1
_LO_AUTOCLEAR = 4
_LO_DIRECT_IO = 16
_CONFIG_SIZE = 304  # struct loop_config: u32 fd, u32 block_size, struct loop_info64 (232 bytes), u64 reserved[8]
_INFO_FLAGS_OFFSET = 8 + 52
_INFO_NAME_OFFSET = 8 + 56
_ATTEMPTS = 64


class LoopDevice:
    """An attached device. Keep it open until it is mounted: it clears itself at the last close."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def close(self) -> None:
        """Let go of it; a mounted device stays until it is unmounted."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> LoopDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach(file: str | os.PathLike[str], *, readonly: bool = False, direct_io: bool = False) -> LoopDevice:
    """Attach `file` to a free loop device. `direct_io`: don't keep its pages in the page cache a second time; where
    the file system under the file can't do that the kernel quietly goes on buffered.

    Raises KernelError where there is no loop driver or no free device.
    """
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise KernelError(
            error.errno or 0, "open /dev/loop-control", {errno.ENOENT: "no loop driver: modprobe loop"}
        ) from None
    backing = os.open(file, (os.O_RDONLY if readonly else os.O_RDWR) | os.O_CLOEXEC)
    try:
        flags = _LO_AUTOCLEAR | (_LO_READ_ONLY if readonly else 0) | (_LO_DIRECT_IO if direct_io else 0)
        config = bytearray(_CONFIG_SIZE)
        struct.pack_into("<II", config, 0, backing, 0)
        struct.pack_into("<I", config, _INFO_FLAGS_OFFSET, flags)
        name = os.fsencode(file)[:63]
        config[_INFO_NAME_OFFSET : _INFO_NAME_OFFSET + len(name)] = name
        for _ in range(_ATTEMPTS):  # another process may take the free device first
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            path = Path(f"/dev/loop{number}")
            fd = _open_device(path, number, readonly)
            try:
                fcntl.ioctl(fd, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:
                    raise KernelError(error.errno or 0, f"attach {file} to {path}") from None
                continue
            return LoopDevice(path, fd)
        raise KernelError(errno.EBUSY, f"attach {file}", {errno.EBUSY: "no loop device stays free"})
    finally:
        os.close(backing)
        os.close(control)


def _open_device(path: Path, number: int, readonly: bool) -> int:
    mode = (os.O_RDONLY if readonly else os.O_RDWR) | os.O_CLOEXEC
    try:
        return os.open(path, mode)
    except FileNotFoundError:  # no udev and a static /dev
        os.mknod(path, 0o060660, os.makedev(7, number))
        return os.open(path, mode)


def backing_file(device: str | os.PathLike[str]) -> Path | None:
    """The file behind an attached device, or None."""
    try:
        return Path(Path(f"/sys/block/{Path(device).name}/loop/backing_file").read_text().strip())
    except OSError:
        return None


def attached(file: str | os.PathLike[str]) -> list[Path]:
    """The devices that `file` is attached to."""
    wanted = os.path.realpath(file)
    found = []
    for entry in Path("/sys/block").glob("loop*"):
        if str(backing_file(entry.name)) == wanted:
            found.append(Path("/dev") / entry.name)
    return found


def detach(device: str | os.PathLike[str]) -> None:
    """Free a device; one that is in use is freed at its last close."""
    fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _LOOP_CLR_FD)
    except OSError as error:
        if error.errno != errno.ENXIO:  # it is free already
            raise KernelError(error.errno or 0, f"detach {device}") from None
    finally:
        os.close(fd)
