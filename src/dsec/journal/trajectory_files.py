"""The files of trajectories, for `dsec.journal.trajectory`: walking, writing, syncing, removing them.

Owns nothing. Every function is synchronous; those about many files are for a thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dsec.errors import Internal, Unavailable
from dsec.spec.trajectory import Broken, check, parse, root_of


class Chain:
    """Where one sandbox's log stands."""

    __slots__ = ("hash", "last", "place", "seq", "size")

    def __init__(self, place: str, root: str) -> None:
        self.place = place
        self.seq = 0
        self.hash = root
        self.size = 0
        self.last = ""
        """Type of the last entry."""


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
    return chain


def journal_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        for line in file:
            name, space, rest = line.partition(b" ")
            if not space or not rest.endswith(b"\n") or not name.isalnum():
                return
            yield name.decode("ascii", "replace"), rest


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


def older(root: str, before: float) -> list[Path]:
    found = []
    for shard in os.scandir(root):
        if not shard.is_dir():
            continue
        for place in os.scandir(shard.path):
            with contextlib.suppress(OSError):
                if max(os.stat(f"{place.path}/log").st_mtime, place.stat().st_mtime) < before:  # noqa: PTH116
                    found.append(Path(place.path))
    return found


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
