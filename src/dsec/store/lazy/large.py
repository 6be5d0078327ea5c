"""Large files of a layer that is filled on demand, read whole by a thread of ours once somebody has begun to.

A program that is read by page faults asks for 64 KiB at a time, the kernel's own size, and waits for an answer each
time, also where the data is there: the 8 MB that Python's start reads are some 130 such questions. Who reads a file
from its beginning to its end asks for more and more at once. So a thread reads ahead of the program, on a processor of
its own, and what the program wants is in the page cache.

Which files were begun is seen from the bits of what is filled. The filler fetches them whole, too (`readahead.py`; a
trace names all of their chunks), so nothing is fetched that it would not have fetched. Only names lead to files:
candidates are the layer's hot files, or, where it names none, what lies where programs and libraries do.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dsec.kernel.fanotify import open_inside
from dsec.store.format import BLOCK, CHUNK_BYTES
from dsec.store.lazy.readahead import FILE_BYTES, SMALL_FILE_BYTES

LARGE_BYTES = 2 * CHUNK_BYTES
"""A smaller file is few questions."""
_SOON_S, _SOON_EVERY_S = 0.5, 0.001
"""Sandboxes that were waiting for a layer begin to read it at once."""
_WATCH_S, _EVERY_S = 10.0, 0.02
PIECE_BYTES = 1 << 20
_MOST = 4096
"""Names that are looked at."""
_PROGRAMS = (
    *("usr/bin", "usr/local/bin", "usr/lib", "usr/lib64", "usr/local/lib", "opt/conda/bin", "opt/conda/lib"),
    *(f"usr/lib/{machine}-linux-gnu" for machine in ("x86_64", "aarch64")),
    *("bin", "lib", "lib64"),
)
_FIEMAP = 0xC020660B
_MAP = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQ32x")
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY


class _Large(NamedTuple):
    name: str
    offset: int
    """In the layer's data."""
    size: int

    def begun(self, bits: mmap.mmap) -> bool:
        """As many of its chunks are there as make the filler fetch all of them."""
        wanted = 1 if self.size <= SMALL_FILE_BYTES else 2
        for at in range(self.offset, self.offset + self.size, CHUNK_BYTES):
            block = at // BLOCK
            wanted -= bits[block >> 3] >> (block & 7) & 1
            if not wanted:
                return True
        return False


def read_begun(image: Path, top: Path, hot: Iterable[str], stopped: Callable[[], bool]) -> int:
    """Read the hot files that others begin to read, for some seconds. `image`: the layer's, with its bits beside;
    `top`: where it is mounted. Blocks, for as long as a read may wait after `stopped`. Returns the bytes read."""
    total, buffer = 0, bytearray(PIECE_BYTES)
    with contextlib.suppress(OSError):  # it was unmounted, or is none of ours
        with open(image.with_name("filled"), "rb") as file:
            bits = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        root = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            named = [name for name in islice(hot, _MOST) if name != "/"] or islice(_programs(root), _MOST)
            looked = (_look(root, name, len(bits) * 8 * BLOCK) for name in named)
            left = list({each.offset: each for each in looked if each is not None}.values())
            began = time.monotonic()
            while left and not stopped() and (passed := time.monotonic() - began) < _WATCH_S:
                for each in [each for each in left if each.begun(bits)]:
                    left.remove(each)
                    total += read_through(root, each.name, buffer, stopped)
                time.sleep(_SOON_EVERY_S if passed < _SOON_S else _EVERY_S)
        finally:
            os.close(root)
            bits.close()
    return total


def _programs(root: int) -> Iterator[str]:
    """Files that are large enough where programs and libraries usually are."""
    for path in _PROGRAMS:
        with contextlib.suppress(OSError):
            fd = open_inside(root, path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        if entry.is_file(follow_symlinks=False) and entry.stat().st_size >= LARGE_BYTES:
                            yield f"{path}/{entry.name}"
            finally:
                os.close(fd)


def _look(root: int, name: str, end: int) -> _Large | None:
    """Where a file's data lies, before `end`, if it is a large one. Whoever made the layer made up the names, and the
    places."""
    try:
        fd = open_inside(root, name, _FLAGS)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or not LARGE_BYTES <= found.st_size <= FILE_BYTES:
            return None
        room = bytearray(_MAP.pack(0, found.st_size, 0, 0, 1, 0) + bytes(_EXTENT.size))
        fcntl.ioctl(fd, _FIEMAP, room)
        extents = _MAP.unpack_from(room)[3]
        _, offset, size = _EXTENT.unpack_from(room, _MAP.size)
    except OSError:
        return None
    finally:
        os.close(fd)
    return _Large(name, offset, size) if extents and found.st_size <= size <= end - offset else None


def read_through(root: int, name: str, buffer: bytearray, stopped: Callable[[], bool]) -> int:
    """Read a file of a layer mounted at `root` into the page cache, if it is one, until `stopped`. What can't be had
    whoever needs it hears of. Returns the bytes read."""
    total = 0
    with contextlib.suppress(OSError):
        fd = open_inside(root, name, _FLAGS)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return 0
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while not stopped() and (got := os.readv(fd, [buffer])):
                total += got
        finally:
            os.close(fd)
    return total
