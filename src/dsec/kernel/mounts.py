"""Mounts as objects, and what is mounted.

A `Mount` describes itself and can be carried out; `mounted()` reads /proc/self/mountinfo, so that a restarted server
finds what an earlier one left. Unmounting is tolerant: what isn't mounted is fine, what is busy is detached and goes
when its last user does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from dsec.kernel import loop, syscalls
from dsec.kernel.syscalls import KernelError


class MountInfo(Struct, frozen=True):
    """One line of mountinfo."""

    mount_id: int
    parent_id: int
    device: str
    root: str
    target: Path
    options: frozenset[str]
    fstype: str
    source: str
    super_options: frozenset[str]

    @property
    def idmapped(self) -> bool:
        return "idmapped" in self.options


_ESCAPE = re.compile(rb"\\([0-7]{3})")


def _unescape(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field))


def parse_mountinfo(data: bytes) -> list[MountInfo]:
    """The mounts in the text of a mountinfo file, in their order (a later one on the same target covers the
    earlier)."""
    found = []
    for line in data.splitlines():
        left, _, right = line.partition(b" - ")
        head, tail = left.split(b" "), right.split(b" ")
        found.append(
            MountInfo(
                int(head[0]),
                int(head[1]),
                head[2].decode(),
                _unescape(head[3]),
                Path(_unescape(head[4])),
                frozenset(head[5].decode().split(",")),
                tail[0].decode(),
                _unescape(tail[1]),
                frozenset(os.fsdecode(tail[2]).split(",")) if len(tail) > 2 else frozenset(),
            )
        )
    return found


def mounted(under: str | os.PathLike[str] | None = None) -> list[MountInfo]:
    """What this process sees mounted, at or below `under` if given."""
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_bytes())
    if under is None:
        return mounts
    top = Path(os.path.realpath(under))
    return [entry for entry in mounts if entry.target == top or top in entry.target.parents]


def find_mount(target: str | os.PathLike[str]) -> MountInfo | None:
    """The topmost mount exactly at `target`, or None."""
    top = Path(os.path.realpath(target))
    return next((entry for entry in reversed(mounted()) if entry.target == top), None)


def unmount(target: str | os.PathLike[str]) -> bool:
    """Take away the topmost mount at `target`, detached where it is busy. False where nothing was mounted."""
    try:
        syscalls.umount(target, syscalls.UMOUNT_NOFOLLOW)
    except KernelError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return False
        if error.errno != errno.EBUSY:
            raise
        syscalls.umount(target, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_DETACH)
    return True


def unmount_under(top: str | os.PathLike[str]) -> int:
    """Unmount everything at and below `top`, newest first. Returns how many."""
    entries: Iterable[MountInfo] = reversed(mounted(top))
    return sum(unmount(entry.target) for entry in entries)


class Mount(Protocol):
    """A mount that can be described, then made."""

    target: Path

    def describe(self) -> str: ...
    def mount(self) -> None:
        """Make it; the mount point exists. Raises KernelError."""
        ...


_BACKINGS = Path("/sys/class/bdi")
_counting = threading.Lock()


class ErofsMount(Struct, frozen=True):
    """An EROFS image, file-backed (Linux 6.12 and newer), or by loop devices that free themselves at unmount."""

    image: Path
    target: Path
    direct_io: bool = False
    """Don't cache the image's own pages beside the files' (Linux 6.15); ignored where the kernel doesn't know it."""
    data: Path | None = None
    """The image's extra device."""
    loops: bool = True
    """Loop devices may stand in: not where reads of `data` raise events, which don't reach through them."""
    readahead_kib: int = 0
    """How far the kernel reads ahead and around in its files; 0: its own 128 KiB, with which a large file takes half as
    long again as a plain one of the same disk."""

    def describe(self) -> str:
        return f"erofs {self.image} on {self.target} (read-only)"

    def mount(self) -> None:
        if not self.readahead_kib:
            self._mount_any()
            return
        with _counting:
            before = set(os.listdir(_BACKINGS))
            self._mount_any()
            # Nothing says which one is a mount's: that which came with it, if it came alone.
            fresh = [name for name in os.listdir(_BACKINGS) if name.startswith("erofs-") and name not in before]
        if len(fresh) == 1:
            with contextlib.suppress(OSError):
                (_BACKINGS / fresh[0] / "read_ahead_kb").write_text(str(self.readahead_kib))

    def _mount_any(self) -> None:
        device = [f"device={self.data}"] if self.data else []
        if self.direct_io:
            try:
                self._mount(self.image, "directio", *device)
                return
            except KernelError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTBLK, errno.EOPNOTSUPP):
                    raise
        try:
            self._mount(self.image, *device)
        except KernelError as error:
            if error.errno != errno.ENOTBLK or not self.loops:
                raise
            with contextlib.ExitStack() as loops:
                found = [
                    loops.enter_context(loop.attach(path, readonly=True, direct_io=True)).path
                    for path in (self.image, self.data)
                    if path is not None
                ]
                self._mount(found[0], *(f"device={path}" for path in found[1:]))

    def _mount(self, image: str | Path, *options: str) -> None:
        flags = syscalls.MS_RDONLY | syscalls.MS_NODEV | syscalls.MS_NOATIME
        syscalls.mount(image, self.target, "erofs", flags, ",".join(options))


class TmpfsMount(Struct, frozen=True):
    """A small tmpfs. `devices`: device nodes in it work."""

    target: Path
    size_bytes: int = 1 << 20
    mode: int = 0o755
    devices: bool = False

    def describe(self) -> str:
        return f"tmpfs on {self.target}"

    def mount(self) -> None:
        flags = syscalls.MS_NOSUID | (0 if self.devices else syscalls.MS_NODEV)
        syscalls.mount("dsec", self.target, "tmpfs", flags, f"size={self.size_bytes},mode={self.mode:o}")


class IdmappedClone(Struct, frozen=True):
    """A second view of a mounted tree whose owners are shifted by a user namespace's map."""

    source: Path
    target: Path
    userns_fd: int

    def describe(self) -> str:
        return f"id-mapped clone of {self.source} on {self.target}"

    def mount(self) -> None:
        tree = syscalls.open_tree(self.source, clone=True)
        try:
            syscalls.mount_setattr(tree, syscalls.MOUNT_ATTR_IDMAP, userns_fd=self.userns_fd)
            syscalls.move_mount(tree, self.target)
        finally:
            os.close(tree)
