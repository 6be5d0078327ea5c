"""Paging the memory of stopped processes out to swap, from outside: process_madvise(MADV_PAGEOUT) by pid.

What is shared with others (pages of files that several processes map) stays. Pages come back by faults.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from dsec.kernel.cgroups import Slot
from dsec.kernel.syscalls import KernelError

_PROCESS_MADVISE = 440  # on every architecture
_MADV_PAGEOUT = 21
_STEP = 16 << 20
"""Bytes of one call: after each the caller may stop it."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SPECIAL = (b"[vdso]", b"[vvar", b"[vsyscall]")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


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


def page_out(pid: int, go_on: Callable[[], bool]) -> None:
    """Page a process out as far as there is room in swap. Nothing where it is gone. Raises KernelError where the kernel
    can't (Linux before 5.10, or without swap support)."""
    try:
        fd = os.pidfd_open(pid)
        text = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return
    try:
        for start, end in _ranges(text):
            for at in range(start, end, _STEP):
                if not go_on():
                    return
                _advise(fd, at, min(_STEP, end - at))
    finally:
        os.close(fd)


def _ranges(maps: bytes) -> Iterable[tuple[int, int]]:
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(_SPECIAL):
            continue
        start, _, end = fields[0].partition(b"-")
        yield int(start, 16), int(end, 16)


def _advise(fd: int, start: int, size: int) -> None:
    piece = _Range(start, size)
    if _libc.syscall(_PROCESS_MADVISE, fd, ctypes.byref(piece), ctypes.c_size_t(1), _MADV_PAGEOUT, 0) >= 0:
        return
    number = ctypes.get_errno()
    if number in (errno.ESRCH, errno.EINVAL, errno.ENOMEM, errno.EFAULT):  # gone; locked or special; unmapped
        return
    raise KernelError(number, "page a process out", {errno.ENOSYS: "needs Linux 5.10 or newer"})
