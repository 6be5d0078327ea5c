"""Paging the memory of stopped processes out to swap, from outside: process_madvise(MADV_PAGEOUT) by pid, or where the
kernel lacks that, or has no swap, what its memory cgroup can give back by itself.

What is shared with others (pages of files that several processes map) stays, and so does some text of programs
(`Text`). Pages come back by faults; asking for them in advance was tried, and made the first answer later.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from dsec.kernel.cgroups import Slot
from dsec.kernel.syscalls import KernelError

_PROCESS_MADVISE = 440  # on every architecture
_MADV_PAGEOUT = 21
_STEP = 16 << 20
"""Bytes of one call: after each the caller may stop it."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
TEXT_BYTES = 7 << 20
"""Of a sandbox's programs, that stay."""
_AREA = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ (\S+) (\d+) *(.*)")
_SPECIAL = (b"[vdso]", b"[vvar", b"[vsyscall]")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Area(NamedTuple):
    """A part of a process's memory."""

    start: int
    end: int
    written: bool
    """It may be."""
    file: tuple[bytes, int]
    """Device and inode; inode 0: none."""
    name: bytes
    resident: int
    """Bytes."""


class Text:
    """Which unwritten parts of programs stay in memory while a sandbox is paused: of each process its program, then the
    libraries in the order in which they were loaded, until `left` bytes are used up. They are few, others that run the
    same program use the same pages, and without them every answer after a pause begins with reads of a disk."""

    def __init__(self, left: int = TEXT_BYTES) -> None:
        self.left = left
        self._files: dict[tuple[bytes, int], bool] = {}

    def keeps(self, areas: list[Area], program: bytes) -> set[tuple[bytes, int]]:
        """The files whose parts stay in this process."""
        sizes: dict[tuple[bytes, int], int] = {}
        for area in sorted(areas, key=lambda each: (each.name != program, -each.start)):
            if area.file[1] and not area.written:
                sizes[area.file] = sizes.get(area.file, 0) + area.resident
        for file, size in sizes.items():
            if file not in self._files:
                self._files[file] = size <= self.left
                self.left -= size if self._files[file] else 0
        return {file for file in sizes if self._files[file]}


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_size_t), ("size", ctypes.c_size_t))


def pids_in(slot: Slot) -> list[int]:
    """The host's numbers of everything inside a sandbox's cgroups, commands' groups included."""
    found: list[int] = []
    for directory, _, _ in os.walk(slot.v2):
        try:
            found += map(int, Path(directory, "cgroup.procs").read_bytes().split())
        except OSError:  # the group went meanwhile
            continue
    return found


def may_swap(slot: Slot, allowed: bool) -> None:
    """Whether a sandbox's memory may go to swap now. Version 1 counts swap against the one limit and needs no word."""
    path = Path(slot.v2, "memory.swap.max")
    if "memory" not in slot.root.v1 and path.exists():
        path.write_text("max" if allowed else "0")


def resident_bytes(pids: Iterable[int]) -> int:
    """What processes have in memory, shared pages counted once each; 0 for those that are gone."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/statm").read_bytes().split()
        except OSError:
            continue
        total += int(fields[1]) * _PAGE
    return total


def compressed_bytes() -> int:
    """What compressed swap takes on this host."""
    total = 0
    for stat in Path("/sys/block").glob("zram*/mm_stat"):
        try:
            total += int(stat.read_text().split()[2])
        except (OSError, IndexError):
            continue
    return total


def can_swap() -> bool:
    """Whether there is somewhere to put memory."""
    return bool(Path("/proc/swaps").read_text().splitlines()[1:])


def page_out(pid: int, text: Text, go_on: Callable[[], bool]) -> None:
    """Page a process out as far as there is room in swap. Nothing where it is gone. Raises KernelError where the kernel
    can't (Linux before 5.10, or without swap support)."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        areas = list(_areas(Path(f"/proc/{pid}/smaps").read_bytes()))
        kept = text.keeps(areas, os.readlink(f"/proc/{pid}/exe".encode()))
        for area in areas:
            if area.name.startswith(_SPECIAL) or (area.file in kept and not area.written):
                continue
            for at in range(area.start, area.end, _STEP):
                if not go_on():
                    return
                _advise(fd, at, min(_STEP, area.end - at))
    except (FileNotFoundError, ProcessLookupError):
        return
    finally:
        os.close(fd)


def reclaim(slot: Slot, go_on: Callable[[], bool]) -> bool:
    """The same for all of a sandbox at once, as its memory cgroup can: what is used least goes first, cached files
    before all. False where this kernel can't (version 2 before Linux 5.19). Blocks."""
    if "memory" in slot.root.v1:
        return _write(f"{slot.root.v1['memory']}/{slot.root.name}/{slot.name}/memory.force_empty", "0")
    left = _number(f"{slot.v2}/memory.current")
    while left > 0 and go_on():
        if not _write(f"{slot.v2}/memory.reclaim", str(min(left, _STEP))):
            break
        left -= _STEP
    return Path(slot.v2, "memory.reclaim").exists()


def can_advise() -> bool:
    """Whether this kernel pages out by pid."""
    fd = os.pidfd_open(os.getpid())
    try:
        _advise(fd, 0, 0)
    except KernelError:
        return False
    finally:
        os.close(fd)
    return True


def _number(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 0


def _write(path: str, value: str) -> bool:
    """False where the kernel could not do (all of) it."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, value.encode())
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EBUSY, errno.EINTR):
            raise
        return False
    finally:
        os.close(fd)
    return True


def _areas(smaps: bytes) -> Iterable[Area]:
    found = None
    for line in smaps.split(b"\n"):  # nothing else ends a line: names hold what a sandbox likes
        match = _AREA.fullmatch(line)
        if match is not None:
            start, end, mode, device, inode, name = match.groups()
            found = Area(int(start, 16), int(end, 16), b"w" in mode, (device, int(inode)), name, 0)
        elif found is not None and line.startswith(b"Rss:"):
            yield found._replace(resident=int(line.split()[1]) << 10)
            found = None


def _advise(fd: int, start: int, size: int) -> None:
    piece = _Range(start, size)
    if _libc.syscall(_PROCESS_MADVISE, fd, ctypes.byref(piece), ctypes.c_size_t(1), _MADV_PAGEOUT, 0) >= 0:
        return
    number = ctypes.get_errno()
    if number in (errno.ESRCH, errno.EINVAL, errno.ENOMEM, errno.EFAULT):  # gone; locked or special; unmapped
        return
    raise KernelError(number, "page a process out", {errno.ENOSYS: "needs Linux 5.10 or newer"})
