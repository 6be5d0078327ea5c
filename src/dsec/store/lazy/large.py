"""Large files of a layer that is filled on demand, read whole by a thread of ours while their data comes.

A program that is read by page faults asks for 64 KiB at a time, the kernel's own size, and waits for an answer each
time, also where the data is there: the 8 MB that Python's start reads are some 130 such questions. Who reads a file
from its beginning to its end asks for more and more at once. So a thread reads ahead of the program, on a processor of
its own, and what the program wants is in the page cache.

The filler fetches a file whole that somebody has begun to read (`readahead.py`; a trace names all of its chunks), and
what is there is seen from the bits of what is filled. Nothing else is read but what nearly every program begins with,
the loader and the C library: a read that waits would be taken for a reader's, and something would be fetched ahead of
it. Only names lead to files: candidates are the layer's hot files, or, where it names none, what lies where programs
and libraries do.

The thread is in C (`native/follow/follow.c`): it looks at some hundred names while the sandbox starts, and in Python
would pass the interpreter's lock around for each of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from dsec.kernel.fanotify import open_inside
from dsec.store.format import CHUNK_BYTES
from dsec.store.lazy.readahead import FILE_BYTES

LARGE_BYTES = 2 * CHUNK_BYTES
"""A smaller file is few questions."""
_SOON_MS, _SOON_EVERY_US = 500, 1000
"""Sandboxes that were waiting for a layer begin to read it at once."""
_WATCH_MS, _EVERY_US = 10_000, 20_000
PIECE_BYTES = 1 << 20
_MOST = 4096
"""Names that are looked at."""
_PROGRAMS = (
    *("usr/bin", "usr/local/bin", "usr/lib", "usr/lib64", "usr/local/lib", "opt/conda/bin", "opt/conda/lib"),
    *(f"usr/lib/{machine}-linux-gnu" for machine in ("x86_64", "aarch64")),
    *("bin", "lib", "lib64"),
)
_LOADED, _LOADER = "etc/ld.so.cache", ("ld-linux", "ld-musl", "libc.so", "libc-2.")
"""What nearly every program begins with, which is read whether somebody began or not: the loader, its list of
libraries, and the C library."""
_MOST_AT_ONCE = 4
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
FOLLOW = "follow.so"
"""Lies beside the holder."""


class _Follow(ctypes.Structure):
    """As in `native/follow/follow.c`."""

    _fields_ = (
        ("root", ctypes.c_int),
        ("bits", ctypes.c_int),
        ("names", ctypes.c_char_p),
        ("count", ctypes.c_uint32),
        ("at_once", ctypes.c_uint32),
        ("least", ctypes.c_uint64),
        ("most", ctypes.c_uint64),
        ("soon_ms", ctypes.c_uint32),
        ("soon_every_us", ctypes.c_uint32),
        ("watch_ms", ctypes.c_uint32),
        ("every_us", ctypes.c_uint32),
        ("stop", ctypes.POINTER(ctypes.c_int)),
    )


class Follower:
    """Reads one layer's large files as they come, for some seconds, on a thread of the caller's."""

    def __init__(self, library: Path) -> None:
        """`library`: compiled."""
        self._library = library
        self._stop = ctypes.c_int(0)

    def stop(self) -> None:
        """Have `read` come back, as soon as a read that waits has ended. By any thread."""
        self._stop.value = 1

    def read(self, image: Path, top: Path, hot: Iterable[str]) -> int:
        """`image`: the layer's, with its bits beside; `top`: where it is mounted. Blocks. Returns the bytes read."""
        call = ctypes.CDLL(os.fspath(self._library)).follow
        call.restype = ctypes.c_int64
        with contextlib.suppress(OSError):  # it was unmounted, or is none of ours
            root = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                hot = [name for name in islice(hot, _MOST) if name != "/" and "\0" not in name]
                named = hot or [*islice(_programs(root), _MOST)]
                loaders = (name for name in named if name.rpartition("/")[2].startswith(_LOADER))
                at_once = [_LOADED, *islice(loaders, _MOST_AT_ONCE)]
                names = [os.fsencode(name) for name in (*at_once, *named)]
                with open(image.with_name("filled"), "rb") as bits:
                    follow = _Follow(
                        *(root, bits.fileno(), b"\0".join(names), len(names), len(at_once)),
                        *(LARGE_BYTES, FILE_BYTES),
                        *(_SOON_MS, _SOON_EVERY_US, _WATCH_MS, _EVERY_US, ctypes.pointer(self._stop)),
                    )
                    return int(call(ctypes.byref(follow)))
            finally:
                os.close(root)
        return 0


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
