"""Spool files: output of keyed operations that is no longer in the guest.

Layout: one directory a sandbox; `<op>.out` and `<op>.err` hold the first bytes of the operation's two streams, byte
n of the stream at byte n of the file, so that a file's length is all that has to be known of it, whenever its
writer was killed. What was acknowledged to the guest was written before: a killed edge loses nothing. (A crash of
the machine takes the sandbox along.)
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_NAME = re.compile(r"([1-9][0-9]{0,18})\.(out|err)")
_SUFFIXES = ("out", "err")
_NONE_OPEN = [-1, -1]


class OpSpool:
    """The two files of one operation; opened on demand."""

    __slots__ = ("_directory", "_fds", "_made", "_op", "sizes")

    def __init__(self, directory: str, op: int, sizes: tuple[int, int] = (0, 0)) -> None:
        self._directory = directory
        self._op = op
        self._fds = [-1, -1]
        self._made = [sizes[0] > 0, sizes[1] > 0]
        self.sizes = [*sizes]
        """Bytes kept of stdout and of stderr."""

    def _path(self, stream: int) -> str:
        return f"{self._directory}/{self._op}.{_SUFFIXES[stream]}"

    def _fd(self, stream: int) -> int:
        if self._fds[stream] < 0:
            self._made[stream] = True
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                self._fds[stream] = os.open(self._path(stream), flags, 0o600)
            except FileNotFoundError:
                os.makedirs(self._directory, 0o700, exist_ok=True)  # noqa: PTH103
                self._fds[stream] = os.open(self._path(stream), flags, 0o600)
        return self._fds[stream]

    def append(self, stream: int, data: bytes | memoryview) -> None:
        """Keep more of a stream. Raises OSError; `sizes` is right even then."""
        fd = self._fd(stream)
        view = memoryview(data)
        while view:
            count = os.pwrite(fd, view, self.sizes[stream])
            self.sizes[stream] += count
            view = view[count:]

    def read(self, stream: int, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset` on. Raises OSError."""
        return os.pread(self._fd(stream), min(size, self.sizes[stream] - offset), offset)

    def close(self) -> None:
        """Let go of the descriptors; `read` opens them again."""
        if self._fds == _NONE_OPEN:
            return
        for stream in (0, 1):
            if self._fds[stream] >= 0:
                os.close(self._fds[stream])
                self._fds[stream] = -1

    def remove(self, *, unseen: bool = False) -> None:
        """Close and unlink what this object made or was told of; `unseen`: whatever there is."""
        self.close()
        for stream in (0, 1):
            if self._made[stream] or unseen:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(stream))  # noqa: PTH108


class Spool:
    """A sandbox's spool directory. It is made when it is first needed; removing it in the end is the backend's
    business.
    """

    def __init__(self, directory: str | Path, *, fresh: bool = False) -> None:
        """`fresh`: the sandbox has just been made, nothing can be kept of it."""
        self._directory = str(directory)
        self._fresh = fresh

    def sizes(self) -> dict[int, tuple[int, int]]:
        """What an earlier edge kept: bytes of stdout and stderr for each operation."""
        if self._fresh:
            return {}
        found: dict[int, list[int]] = {}
        try:
            entries = list(os.scandir(self._directory))
        except FileNotFoundError:
            return {}
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match:
                sizes = found.setdefault(int(match[1]), [0, 0])
                sizes[_SUFFIXES.index(match[2])] = entry.stat(follow_symlinks=False).st_size
        return {op: (out, err) for op, (out, err) in found.items()}

    def of(self, op: int, sizes: tuple[int, int] = (0, 0)) -> OpSpool:
        """The files of one operation; makes nothing yet."""
        return OpSpool(self._directory, op, sizes)
