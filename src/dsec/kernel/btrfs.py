"""btrfs by ioctl: subvolumes, and simple quotas that limit each one's bytes.

A subvolume's quota group has its id: 0/<root id>. The kernel removes the groups of deleted subvolumes itself once
they are cleaned (Linux 6.10 and newer); `sweep_qgroups` does it for the others, a bounded number a call. Usage comes
from sysfs, a few microseconds a value. All names are relative to a directory descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path

from dsec.kernel.syscalls import KernelError

GROUPS_GO = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2]) >= (6, 10)
"""Whether the kernel removes quota groups itself."""
MAGIC = 0x9123683E
FIRST_FREE_ID = 256

_MAGIC = 0x94
_WRITE, _READ = 1, 2


def _request(direction: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | _MAGIC << 8 | number


_ARGS = 4096  # struct btrfs_ioctl_vol_args: s64 fd, 4088 bytes of name
_SUBVOL_CREATE = _request(_WRITE, 14, _ARGS)
_SNAP_CREATE = _request(_WRITE, 1, _ARGS)
_SYNC = _request(0, 8, 0)
_SNAP_DESTROY = _request(_WRITE, 15, _ARGS)
_INO_LOOKUP = _request(_READ | _WRITE, 18, _ARGS)
_FS_INFO = _request(_READ, 31, 1024)
_QUOTA_CTL = _request(_READ | _WRITE, 40, 16)
_QGROUP_CREATE = _request(_WRITE, 42, 16)
_QGROUP_LIMIT = _request(_READ, 43, 48)
_QUOTA_DISABLE = 2
_QUOTA_ENABLE_SIMPLE = 4
_LIMIT_MAX_RFER = 1


def _ioctl(fd: int, request: int, data: bytearray, call: str, hints: dict[int, str] | None = None) -> None:
    try:
        fcntl.ioctl(fd, request, data)
    except OSError as error:
        raise KernelError(error.errno or 0, call, hints) from None


def _named(name: str) -> bytearray:
    raw = os.fsencode(name)
    if not 0 < len(raw) < 256 or b"/" in raw:
        raise ValueError(f"not a subvolume's name: {name!r}")
    data = bytearray(_ARGS)
    data[8 : 8 + len(raw)] = raw
    return data


def create_subvolume(dirfd: int, name: str) -> None:
    """Make an empty subvolume (root:root, 0755)."""
    _ioctl(dirfd, _SUBVOL_CREATE, _named(name), f"create subvolume {name}", {errno.ENOSPC: "the volume is full"})


def snapshot_subvolume(source: int, dirfd: int, name: str) -> None:
    """Make a writable snapshot of the subvolume whose top directory is open as `source`, as it is at this moment; what
    is in the page cache is in it."""
    data = _named(name)
    struct.pack_into("<q", data, 0, source)
    _ioctl(dirfd, _SNAP_CREATE, data, f"snapshot a subvolume as {name}", {errno.ENOSPC: "the volume is full"})


def destroy_subvolume(dirfd: int, name: str) -> None:
    """Remove a subvolume with everything in it; its extents are freed in the background."""
    _ioctl(
        dirfd,
        _SNAP_DESTROY,
        _named(name),
        f"destroy subvolume {name}",
        {errno.ENOTEMPTY: "another subvolume is in it", errno.EINVAL: "an ordinary directory"},
    )


def sync(fd: int) -> None:
    """Commit, and have the kernel begin at once to free what was destroyed; else it does within the commit interval."""
    try:
        fcntl.ioctl(fd, _SYNC)
    except OSError as error:
        raise KernelError(error.errno or 0, "sync a btrfs file system") from None


def root_id(fd: int) -> int:
    """The id of the subvolume that the open directory is in: also its quota group's."""
    data = bytearray(_ARGS)
    struct.pack_into("<QQ", data, 0, 0, FIRST_FREE_ID)
    _ioctl(fd, _INO_LOOKUP, data, "look up a subvolume's id", {errno.ENOTTY: "not btrfs"})
    return int(struct.unpack_from("<Q", data, 0)[0])


def fs_uuid(fd: int) -> str:
    """The file system's UUID, as its directory in /sys/fs/btrfs is called."""
    data = bytearray(1024)
    _ioctl(fd, _FS_INFO, data, "read the file system's id", {errno.ENOTTY: "not btrfs"})
    raw = data[16:32].hex()
    return "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))


def enable_simple_quota(fd: int) -> None:
    """Turn simple quotas on (Linux 6.7). What was written before isn't counted. Harmless where they are on."""
    _ioctl(
        fd,
        _QUOTA_CTL,
        bytearray(struct.pack("<QQ", _QUOTA_ENABLE_SIMPLE, 0)),
        "enable simple quotas",
        {errno.EINVAL: "needs Linux 6.7 or newer", errno.ENOTTY: "not btrfs"},
    )


def disable_quota(fd: int) -> None:
    """Turn quotas off, and forget all limits."""
    _ioctl(fd, _QUOTA_CTL, bytearray(struct.pack("<QQ", _QUOTA_DISABLE, 0)), "disable quotas")


def limit(fd: int, max_bytes: int) -> None:
    """Limit the bytes of the subvolume that the open directory is in. Past them writes fail with EDQUOT."""
    data = bytearray(struct.pack("<QQQQQQ", 0, _LIMIT_MAX_RFER, max_bytes, 0, 0, 0))
    _ioctl(fd, _QGROUP_LIMIT, data, f"limit a subvolume to {max_bytes} bytes", {errno.ENOTCONN: "quotas are off"})


def remove_qgroup(fd: int, subvolume_id: int) -> bool:
    """Remove a quota group. False where it must stay for now: its subvolume lives, or isn't cleaned yet."""
    try:
        fcntl.ioctl(fd, _QGROUP_CREATE, bytearray(struct.pack("<QQ", 0, subvolume_id)))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return True
        if error.errno == errno.EBUSY:
            return False
        raise KernelError(error.errno or 0, f"remove quota group 0/{subvolume_id}") from None
    return True


class Quotas:
    """The quota groups of one mounted file system, as sysfs shows them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._dir = Path("/sys/fs/btrfs") / fs_uuid(fd) / "qgroups"

    @property
    def mode(self) -> str:
        """`squota`, `qgroup`, or `off`."""
        try:
            return (self._dir / "mode").read_text().strip()
        except FileNotFoundError:
            return "off"

    def used_bytes(self, subvolume_id: int) -> int:
        """What the subvolume holds, with what is reserved for data that isn't written yet. 0 where there is no such
        group."""
        return self._value(subvolume_id, "referenced") + self._value(subvolume_id, "rsv_data")

    def limit_bytes(self, subvolume_id: int) -> int:
        """The limit that is set, or 0."""
        return self._value(subvolume_id, "max_referenced")

    def _value(self, subvolume_id: int, name: str) -> int:
        try:
            fd = os.open(f"{self._dir}/0_{subvolume_id}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            return int(os.read(fd, 32))
        finally:
            os.close(fd)

    def groups(self) -> set[int]:
        """The subvolume ids that have a quota group."""
        try:
            return {int(name[2:]) for name in os.listdir(self._dir) if name.startswith("0_")}
        except FileNotFoundError:
            return set()

    def sweep(self, live: Iterable[int], most: int = 64) -> int:
        """Remove at most `most` groups whose subvolume isn't in `live`. Returns how many went.

        `live` must hold every subvolume of the file system (old kernels would remove a live one's group).
        """
        stale = sorted(id for id in self.groups().difference(live) if id >= FIRST_FREE_ID)
        return sum(remove_qgroup(self._fd, id) for id in stale[:most])
