"""The files of trajectories, for `dsec.journal.trajectory`: walking, writing, syncing, removing them.

Owns nothing. Every function is synchronous; those about many files are for a thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from dsec.errors import Internal, Unavailable
from dsec.spec.trajectory import Broken, check, parse, root_of


class Chain:
    """Where one sandbox's log stands."""

    __slots__ = ("hash", "held", "last", "place", "seq", "size", "written")

    def __init__(self, place: str, root: str) -> None:
        self.place = place
        self.seq = 0
        self.hash = root
        self.size = 0
        self.last = ""
        """Type of the last entry."""
        self.written = 0
        """How much of it is in its own file."""
        self.held: list[bytes] = []
        """The lines after that, which the sync file alone has."""

    def write_held(self) -> None:
        """Write them to its own file. Raises OSError, with nothing written."""
        fd = open_to_write(f"{self.place}/log")
        try:
            self.written = write_all(fd, b"".join(self.held), self.written)
        finally:
            os.close(fd)


def load(place: str, sandbox_id: str, *, after_loss: bool = False) -> Chain:
    """Walk a log. What a process that was killed had written of a line is cut off, after a power loss all from the
    first hole on. Raises `Internal` for anything else that doesn't hold: somebody changed it."""
    chain = Chain(place, root_of(sandbox_id))
    path = Path(place, "log")
    if not path.exists():
        return chain
    with path.open("r+b") as file:
        for line in file:
            torn = not line.endswith(b"\n")
            try:
                if torn:
                    raise Broken(chain.seq + 1, "it isn't whole")
                entry = parse(line)
                check(entry, chain.seq + 1, chain.hash)
            except Broken as error:
                if not torn and not after_loss:
                    raise Internal(
                        f"the trajectory of sandbox {sandbox_id} was changed or damaged: {error}",
                        remedy="`dsec trajectory verify` shows where; the sandbox takes no more operations.",
                    ) from error
                os.ftruncate(file.fileno(), chain.size)
                break
            chain.seq, chain.hash, chain.last = entry.seq, entry.hash, entry.type
            chain.size += len(line)
    chain.written = chain.size
    return chain


def journal_lines(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """The whole lines of a sync file: of which sandbox, at which offset of its log, what. The offset is -1 in a file of
    an earlier version, which wrote to the logs at once."""
    with path.open("rb") as file:
        for line in file:
            name, space, rest = line.partition(b" ")
            at = b"-1"
            if not rest.startswith(b"{"):
                at, space, rest = rest.partition(b" ")
            if not space or not rest.endswith(b"\n") or not name.isalnum() or not at.lstrip(b"-").isdigit():
                return
            yield name.decode("ascii", "replace"), int(at), rest


def finish(files: list[Path], place: Callable[[str], str]) -> None:
    """Write what a process that was killed had not written to the logs themselves. `files` in their order."""
    ends: dict[str, int] = {}
    for path in files:
        for name, at, line in journal_lines(path):
            log = f"{place(name)}/log"
            end = ends.get(name)
            if end is None:
                try:
                    end = os.stat(log).st_size  # noqa: PTH116
                except FileNotFoundError:
                    end = 0
                ends[name] = end
            if at < 0 or not end - len(line) < at <= end:
                continue  # it is there (or the log was removed meanwhile, or an earlier version wrote it there)
            fd = open_to_write(log)
            try:
                ends[name] = write_all(fd, line, at)
            finally:
                os.close(fd)


def open_to_write(path: str, flags: int = 0) -> int:
    """A file of a sandbox, made if it is missing, its directories too. Raises OSError."""
    flags |= os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        place, _, _ = path.rpartition("/")
        try:
            os.mkdir(place, 0o700)  # noqa: PTH102
        except FileNotFoundError:
            os.makedirs(place, 0o700)  # noqa: PTH103
        return os.open(path, flags, 0o600)


def write_all(fd: int, data: bytes, offset: int) -> int:
    """Write at an offset; the new end. A disk that takes a part only gets it back."""
    try:
        done = os.pwrite(fd, data, offset)
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, offset)
        raise
    return offset + len(data)


def sync_files(fd: int, paths: list[str]) -> None:
    sync_paths(paths)
    os.fdatasync(fd)


def sync_paths(paths: list[str]) -> None:
    """Those that are gone, are gone."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def written(root: str) -> Iterator[tuple[Path, float]]:
    """Every log's directory, and when it was last written."""
    for shard in os.scandir(root):
        if not shard.is_dir():
            continue
        for place in os.scandir(shard.path):
            with contextlib.suppress(OSError):
                at = max(os.stat(f"{place.path}/log").st_mtime, place.stat().st_mtime)  # noqa: PTH116
                yield Path(place.path), at


def older(root: str, before: float) -> list[Path]:
    return [place for place, at in written(root) if at < before]


def remove_file(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108


def remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def refused(error: OSError) -> Unavailable:
    return Unavailable(
        f"the trajectory log can't be written: {error.strerror or error}",
        remedy="Look at the free space and health of the state directory's disk.",
        log="trajectory",
    )
