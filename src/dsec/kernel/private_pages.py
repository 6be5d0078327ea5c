"""The memory that a process has mapped privately from one file, as it is now, copied into another.

What the process wrote to is pages of its own, and the rest is the file's. So a copy is two steps: the file's content,
which doesn't change, while the process runs (`Copy.begin`), and its own pages while it stands still (`Copy.finish`).
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

from dsec.kernel.syscalls import KernelError

_PAGE = mmap.PAGESIZE
_STEP = 8 << 20
_IOV_MAX = 1024
_AREA = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) ...p ([0-9a-f]+) (\S+ [1-9]\d*) .*")
_SCAN = 0xC0606610  # PAGEMAP_SCAN, Linux 6.7
_SCAN_ARGUMENT = struct.Struct("<12Q")
_REGIONS = 2048
_IS_FILE, _IS_THERE = 1 << 2, 1 << 3 | 1 << 4  # present, swapped
_MAP_FILE, _MAP_THERE = 1 << 61, 1 << 62 | 1 << 63

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
)  # fmt: skip


class Area(NamedTuple):
    """A part of a process's memory that a file is mapped to."""

    start: int
    end: int
    offset: int
    """In the file."""


class Copy:
    """One copy in the making; blocks, for a thread. Close it."""

    def __init__(self, pid: int, size: int, into: Path | None = None) -> None:
        """Of the process's file whose first `size` bytes are all mapped privately, into a new memfd or file. Raises
        KernelError, OSError."""
        self._pid = pid
        self._areas = _areas(pid, size)
        self._sealed = into is None
        if into is None:
            self.fd = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            self.fd = os.open(into, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(self.fd, size)
            self._memory: mmap.mmap | None = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.private_bytes = 0
        """Copied by `finish`."""

    def close(self) -> None:
        """The file too. Idempotent."""
        if self.fd >= 0:
            self._unmap()
            os.close(self.fd)
            self.fd = -1

    def begin(self) -> None:
        """The file's content."""
        for area in self._areas:
            base = os.open(f"/proc/{self._pid}/map_files/{area.start:x}-{area.end:x}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                with mmap.mmap(base, area.offset + area.end - area.start, prot=mmap.PROT_READ) as content:
                    _copy(base, content, self.fd, area.offset)
            finally:
                os.close(base)

    def finish(self) -> int:
        """The process's own pages; it stands still. The file, the caller's; a memfd for good: nothing writes to it any
        more."""
        assert self._memory is not None
        first = ctypes.c_char.from_buffer(self._memory)
        base = ctypes.addressof(first)
        try:
            for area in self._areas:
                pages = _own_pages(self._pid, area)
                for at in range(0, len(pages), _IOV_MAX):
                    self.private_bytes += self._take(area, pages[at : at + _IOV_MAX], base)
        finally:
            del first
        self._unmap()
        if self._sealed:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        found, self.fd = self.fd, -1
        return found

    def _take(self, area: Area, ranges: list[tuple[int, int]], base: int) -> int:
        theirs, ours, whole = array.array("Q"), array.array("Q"), 0
        for start, end in ranges:
            size = end - start
            theirs.extend((start, size))
            ours.extend((base + start - area.start + area.offset, size))
            whole += size
        at, count = ours.buffer_info()[0], len(ranges)
        done = _libc.process_vm_readv(self._pid, at, count, theirs.buffer_info()[0], count, 0)
        if done != whole:
            number = ctypes.get_errno() if done < 0 else errno.EFAULT
            raise KernelError(number, f"read the memory of process {self._pid}")
        return whole

    def _unmap(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _areas(pid: int, size: int) -> list[Area]:
    found: dict[bytes, list[Area]] = {}
    for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n"):
        match = _AREA.fullmatch(line)
        if match is not None:
            area = Area(*(int(each, 16) for each in match.groups()[:3]))
            if area.offset + area.end - area.start <= size:
                found.setdefault(match[4], []).append(area)
    for areas in found.values():
        if sum(area.end - area.start for area in areas) == size:
            return areas
    raise KernelError(errno.ENXIO, f"find the {size} bytes of memory of process {pid}")


def _copy(source: int, content: mmap.mmap, target: int, at: int) -> None:
    """What isn't a hole. Written out of a mapping: half the time of reading into one."""
    with memoryview(content) as memory:
        while at < len(memory):
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole is left
                return
            stop = min(len(memory), os.lseek(source, at, os.SEEK_HOLE))
            while at < stop:
                at += os.pwrite(target, memory[at : min(stop, at + _STEP)], at)


def _own_pages(pid: int, area: Area) -> list[tuple[int, int]]:
    """Ranges of pages that are the process's own, in memory or in swap."""
    fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            return _scanned(fd, area)
        except OSError as error:
            if error.errno != errno.ENOTTY:
                raise
            return _listed(fd, area)
    finally:
        os.close(fd)


def _scanned(fd: int, area: Area) -> list[tuple[int, int]]:
    """By PAGEMAP_SCAN. Raises OSError: ENOTTY where the kernel hasn't got it."""
    regions = array.array("Q", bytes(24 * _REGIONS))
    found: list[tuple[int, int]] = []
    at = area.start
    while at < area.end:
        where = regions.buffer_info()[0]
        argument = bytearray(
            _SCAN_ARGUMENT.pack(96, 0, at, area.end, 0, where, _REGIONS, 0, _IS_FILE, _IS_FILE, _IS_THERE, _IS_THERE)
        )
        count = fcntl.ioctl(fd, _SCAN, argument)
        for i in range(0, 3 * count, 3):
            found.append((regions[i], regions[i + 1]))
        if count < _REGIONS:  # its word on where it ended may then be too low (Linux 6.18)
            break
        at = max(_SCAN_ARGUMENT.unpack(argument)[4], found[-1][1])
    return found


def _listed(fd: int, area: Area) -> list[tuple[int, int]]:
    """Page by page, as older kernels tell."""
    entries = array.array("Q", os.pread(fd, (area.end - area.start) // _PAGE * 8, area.start // _PAGE * 8))
    found: list[tuple[int, int]] = []
    at = area.start
    for own, group in itertools.groupby(not each & _MAP_FILE and bool(each & _MAP_THERE) for each in entries):
        end = at + sum(1 for _ in group) * _PAGE
        if own:
            found.append((at, end))
        at = end
    return found
