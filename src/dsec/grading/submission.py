"""The allowed part of what an agent changed, read from outside.

The directory is the upper one of the agent's overlay and holds whatever a hostile hand put there: every step goes from
an open directory to a name in it and follows no link. Contents of what is taken go to files of a scratch directory; the
rest is only named. Both are bounded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from dsec.errors import TooLarge
from dsec.plan.submission import Allowed, Place
from dsec.spec.grading import Untaken, Why

MAX_FILES = 5000
MAX_BYTES = 256 << 20
MAX_ENTRIES = 500_000
"""Of the agent's whole diff: what is beyond can't be told."""
MAX_DEPTH = 500
MAX_TOLD = 1000
_OPAQUE = "trusted.overlay.opaque"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_COPY = 1 << 20


class Change(Struct, frozen=True):
    """One step from the pristine tree to the submission; to be done in order."""

    path: bytes
    kind: str
    """`clear` (nothing of it is left), `directory` or `file`."""
    content: Path | None = None
    mode: int = 0o644


class Submission(Struct):
    """What was read."""

    changes: list[Change]
    untaken: list[Untaken]
    untaken_total: int = 0

    def refuse(self, path: bytes, kind: str, why: Why) -> None:
        self.untaken_total += 1
        if len(self.untaken) < MAX_TOLD:
            self.untaken.append(Untaken(path.decode(errors="replace"), kind, why))


def read_submission(upper: Path, allowed: Allowed, scratch: Path) -> Submission:
    """Blocks. Raises `TooLarge`, OSError."""
    return _Reader(allowed, scratch).read(upper)


class _Reader:
    def __init__(self, allowed: Allowed, scratch: Path) -> None:
        self._allowed = allowed
        self._scratch = scratch
        self._found = Submission([], [])
        self._files = self._bytes = self._entries = 0

    def read(self, upper: Path) -> Submission:
        levels = [(os.open(upper, _DIRECTORY), b"", Place.ABOVE)]
        names: list[Iterator[str]] = [iter(_names(levels[0][0]))]
        try:
            while levels:
                fd, path, _ = levels[-1]
                name = next(names[-1], None)
                if name is None:
                    names.pop()
                    os.close(levels.pop()[0])
                    continue
                self._entries += 1
                if self._entries > MAX_ENTRIES or len(levels) > MAX_DEPTH:
                    raise TooLarge(
                        f"the agent's changes are more than {MAX_ENTRIES} entries, or more than {MAX_DEPTH} deep"
                    )
                deeper = self._entry(fd, name, path + b"/" + os.fsencode(name))
                if deeper is not None:
                    levels.append(deeper)
                    names.append(iter(_names(deeper[0])))
        finally:
            for fd, _, _ in levels:
                os.close(fd)
        return self._found

    def _entry(self, parent: int, name: str, path: bytes) -> tuple[int, bytes, Place] | None:
        """Take or tell one entry; returns the directory to go on in."""
        place = self._allowed.place(path)
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        kind = _kind(status)
        if place is Place.INSIDE:
            return self._inside(parent, name, path, status, kind)
        if kind == "directory":
            fd = os.open(name, _DIRECTORY, dir_fd=parent)
            replaced = _opaque(fd)
            if replaced and place is Place.ABOVE:
                self._clear(path)
            if replaced or (place is Place.OUTSIDE and not _names(fd)):
                self._found.refuse(path, kind, Why.OUTSIDE)
            return fd, path, place
        if place is Place.ABOVE:  # it stands where the way to an allowed path was
            self._clear(path)
        self._found.refuse(path, kind, Why.OUTSIDE)
        return None

    def _clear(self, path: bytes) -> None:
        self._found.changes += [Change(each, "clear") for each in self._allowed.below(path)]

    def _inside(
        self, parent: int, name: str, path: bytes, status: os.stat_result, kind: str
    ) -> tuple[int, bytes, Place] | None:
        changes = self._found.changes
        why = self._allowed.refusal(path)
        if why is None and kind in ("symlink", "special"):
            why = Why.LINK if kind == "symlink" else Why.SPECIAL
        if why is not None:
            self._found.refuse(path, kind, why)
            return None
        if kind == "removed":
            changes.append(Change(path, "clear"))
        elif kind == "directory":
            fd = os.open(name, _DIRECTORY, dir_fd=parent)
            if _opaque(fd):
                changes.append(Change(path, "clear"))
            changes.append(Change(path, "directory", mode=0o755))
            return fd, path, Place.INSIDE
        else:
            mode = 0o755 if status.st_mode & 0o111 else 0o644
            changes += [Change(path, "clear"), Change(path, "file", self._copied(parent, name), mode)]
        return None

    def _copied(self, parent: int, name: str) -> Path:
        self._files += 1
        if self._files > MAX_FILES:
            raise TooLarge(f"the agent changed more than {MAX_FILES} files in the allowed paths")
        into = self._scratch / str(self._files)
        with (
            open(os.open(name, _FILE, dir_fd=parent), "rb", buffering=0) as source,
            open(into, "xb", buffering=0) as copy,
        ):
            if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                return into  # replaced while it was read: by then nothing is frozen any more
            while data := source.read(_COPY):
                self._bytes += len(data)
                if self._bytes > MAX_BYTES:
                    raise TooLarge(f"the agent's files in the allowed paths are more than {MAX_BYTES} bytes")
                copy.write(data)
        return into


def _names(fd: int) -> list[str]:
    return sorted(os.listdir(fd), key=os.fsencode)


def _opaque(fd: int) -> bool:
    """Overlayfs's mark for a directory that replaced what was there."""
    try:
        return os.getxattr(fd, _OPAQUE) == b"y"
    except OSError:
        return False


def _kind(status: os.stat_result) -> str:
    mode = status.st_mode
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISLNK(mode):
        return "symlink"
    if stat.S_ISCHR(mode) and status.st_rdev == 0:
        return "removed"
    return "special"
