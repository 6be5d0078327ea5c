"""The memory that a process has mapped privately, as it is now, copied into another file.

What the process wrote to is pages of its own, and the rest is what the mapped file has. So a copy is two steps: what
can be done while the process runs (`begin`), and its own pages while it stands still (`finish`). `Copy` makes a file
with all of it. `Layer` copies its own pages only, into a file whose holes stand for the mapped one's content, its base;
where the memory is of several files the largest is the base, and what is of the others counts as own. Who is copied may
be hostile: a file that anybody could still write to is no base, and is copied, too. `Written` is for a copy that
somebody else makes.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dsec.kernel.syscalls import KernelError

MOST_RANGES = 512
"""Of what is a process's own, in one layer."""
_PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_STEP = 8 << 20
_PIECE = 1 << 20
_IOV_MAX = 1024
_AREA = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) ...p ([0-9a-f]+) (\S+ [1-9]\d*) .*")
_SCAN = 0xC0606610  # PAGEMAP_SCAN, Linux 6.7
_SCAN_ARGUMENT = struct.Struct("<12Q")
_REGIONS = 2048
_IS_FILE, _IS_THERE = 1 << 2, 1 << 3 | 1 << 4  # present, swapped
_MAP_FILE, _MAP_THERE = 1 << 61, 1 << 62 | 1 << 63

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
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
    file: str
    """Which one it is."""


class _Taken:
    """A copy in the making; blocks, for a thread. Close it."""

    def __init__(self, pid: int, size: int, into: int) -> None:
        """Of the process's memory of `size` bytes, all mapped privately, into an empty file, owned from now on. Raises
        KernelError, OSError."""
        self.fd = into
        self._pid = pid
        self._memory: mmap.mmap | None = None
        try:
            self._areas = _areas(pid, size)
            os.ftruncate(into, size)
            self._memory = mmap.mmap(into, size)
        except BaseException:
            os.close(into)
            raise
        self.private_bytes = 0
        """Copied while the process stood still."""

    def close(self) -> None:
        """The file too. Idempotent."""
        if self.fd >= 0:
            self._unmap()
            os.close(self.fd)
            self.fd = -1

    def _copy_mapped(self, areas: list[Area]) -> None:
        """What their files have."""
        for area in areas:
            file, size = _open_mapped(self._pid, area), area.offset + area.end - area.start
            try:
                if os.fstat(file).st_size < size:
                    raise KernelError(errno.ENXIO, f"read what process {self._pid} has mapped")
                with mmap.mmap(file, size, prot=mmap.PROT_READ) as content:
                    _copy(file, content, self.fd, area.offset)
            finally:
                os.close(file)

    def _own_pages(self) -> list[tuple[int, int]]:
        """Ranges of addresses."""
        return [each for area in self._areas for each in _own_pages(self._pid, area)]

    def _take(self, ranges: list[tuple[int, int]]) -> None:
        """They are now as the process sees them."""
        assert self._memory is not None
        first = ctypes.c_char.from_buffer(self._memory)
        base = ctypes.addressof(first) - (self._areas[0].start - self._areas[0].offset)

        def read(ranges: list[tuple[int, int]]) -> int:
            steps = range(0, len(ranges), _IOV_MAX)
            return sum(self._read(ranges[at : at + _IOV_MAX], base) for at in steps)

        try:
            self.private_bytes += _by_two(read, ranges)
        finally:
            del first

    def _read(self, ranges: list[tuple[int, int]], base: int) -> int:
        theirs, ours, whole = array.array("Q"), array.array("Q"), 0
        for start, end in ranges:
            size = end - start
            theirs.extend((start, size))
            ours.extend((base + start, size))
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


class Copy(_Taken):
    """All of it, in a file."""

    def __init__(self, pid: int, size: int, into: Path) -> None:
        """A new file. Raises KernelError, OSError."""
        super().__init__(pid, size, os.open(into, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def begin(self) -> None:
        """The mapped files' content, which doesn't change."""
        self._copy_mapped(self._areas)

    def finish(self) -> int:
        """The process's own pages; it stands still. The file, the caller's."""
        self._take(self._own_pages())
        self._unmap()
        found, self.fd = self.fd, -1
        return found


class Layer(_Taken):
    """What differs from a file that the process has mapped."""

    def __init__(self, pid: int, size: int) -> None:
        """A memfd. Raises KernelError, OSError."""
        super().__init__(pid, size, os.memfd_create("own", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        sizes = dict[str, int]()
        for area in self._areas:
            sizes[area.file] = sizes.get(area.file, 0) + area.end - area.start
        largest = max(sizes, key=lambda file: sizes[file])
        self._of_base = [each for each in self._areas if each.file == largest]
        self._others = [(each.start, each.end) for each in self._areas if each.file != largest]
        self._ranges: list[tuple[int, int]] = []
        self._base = -1
        try:
            self._base = _open_mapped(pid, self._of_base[0])
            if not _stays(self._base, size):
                os.close(self._base)
                self._base = -1
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """As in `_Taken`."""
        super().close()
        if self._base >= 0:
            os.close(self._base)
            self._base = -1

    def begin(self) -> None:
        """Find room for what is its own by now: most of the time goes into that."""
        assert self._memory is not None
        if self._base < 0:
            self._copy_mapped(self._of_base)
        self._ranges = _merged([*self._own_pages(), *self._others])
        first = ctypes.c_char.from_buffer(self._memory)
        base, shift = ctypes.addressof(first), self._areas[0].start - self._areas[0].offset

        def make_room(ranges: list[tuple[int, int]]) -> int:
            for start, end in ranges:
                os.posix_fallocate(self.fd, start - shift, end - start)
                # Linux 5.14; it is only for speed, and not mmap's own, which has all other threads wait for it.
                _libc.madvise(base + start - shift, end - start, _MADV_POPULATE_WRITE)
            return 0

        try:
            _by_two(make_room, self._ranges)
        finally:
            del first

    def finish(self) -> None:
        """The process's own pages; it stands still. Wherever the file has data, that is what the process saw."""
        self._take(_merged([*self._own_pages(), *self._ranges]))

    def detach(self) -> tuple[int, int]:
        """The base and the file, the caller's; nothing writes to it any more. Without a base, the file and -1."""
        self._unmap()
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        found = (self._base, self.fd) if self._base >= 0 else (self.fd, -1)
        self._base = self.fd = -1
        return found

    def whole(self) -> tuple[int, int]:
        """Both as one sealed memfd, the caller's, and -1."""
        base, own = self.detach()
        if own < 0:
            return base, own
        try:
            return whole(base, own), -1
        finally:
            os.close(base)
            os.close(own)


class Written:
    """The same where somebody else writes the copy, all of it, into `fd`."""

    def __init__(self, size: int) -> None:
        """A memfd. Raises OSError."""
        self.fd = os.memfd_create("memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)

    @property
    def private_bytes(self) -> int:
        """As of `_Taken`."""
        return os.fstat(self.fd).st_blocks * 512 if self.fd >= 0 else 0

    def close(self) -> None:
        """As in `_Taken`."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def begin(self) -> None:
        """As in `Layer`: there is nothing to do before it stands still, nor then."""

    finish = begin

    def detach(self) -> tuple[int, int]:
        """As in `Layer`."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        found, self.fd = self.fd, -1
        return found, -1

    whole = detach


def whole(base: int, own: int) -> int:
    """Both files as one sealed memfd: the data of `own` over that of `base`. Blocks."""
    found = os.memfd_create("memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(found, size := os.fstat(own).st_size)
        for fd in (base, own):
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as content:
                _copy(fd, content, found, 0)
        fcntl.fcntl(found, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(found)
        raise
    return found


def _by_two(work: Callable[[list[tuple[int, int]]], int], ranges: list[tuple[int, int]]) -> int:
    """The sum of what `work` gives for all of them, done by two threads where they are large: it is the kernel's."""
    pieces = [(at, min(at + _PIECE, end)) for start, end in ranges for at in range(start, end, _PIECE)]
    if sum(end - start for start, end in pieces) < _STEP:
        return work(pieces)
    with ThreadPoolExecutor(1) as other:
        half = other.submit(work, pieces[1::2])
        return work(pieces[::2]) + half.result()


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, with as large gaps filled as it takes for few to be left: each is a mapping for whoever has them."""
    ranges, gap = sorted(ranges), 0
    while True:
        found: list[tuple[int, int]] = []
        for start, end in ranges:
            if found and start - found[-1][1] <= gap:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((start, end))
        if len(found) <= MOST_RANGES:
            return found
        gap = 2 * gap or _PAGE


def _stays(file: int, size: int) -> bool:
    """Whether it is that large, and nobody can write to it or cut it."""
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        return False
    wanted = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK
    return seals & wanted == wanted and os.fstat(file).st_size >= size


def _open_mapped(pid: int, area: Area) -> int:
    return os.open(f"/proc/{pid}/map_files/{area.start:x}-{area.end:x}", os.O_RDONLY | os.O_CLOEXEC)


def _areas(pid: int, size: int) -> list[Area]:
    found: dict[int, list[Area]] = {}  # by where the memory begins
    for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n"):
        match = _AREA.fullmatch(line)
        if match is not None:
            start, end, offset = (int(each, 16) for each in match.groups()[:3])
            area = Area(start, end, offset, match[4].decode())
            if area.offset + area.end - area.start <= size:
                found.setdefault(area.start - area.offset, []).append(area)
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
