"""What is in a tree of files, to be compared; a store of a test's own."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

State = dict[bytes, tuple[int, int, int, bytes]]


def state_of(root: Path) -> State:
    """All below a directory: type, permissions (of links: none), time in seconds, content or target."""
    found: State = {}
    for directory, names, files in os.walk(os.fsencode(root)):
        for name in [*names, *files]:
            path = directory + b"/" + name
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            content = b""
            if kind == stat.S_IFLNK:
                content = os.readlink(path)  # noqa: PTH115 (bytes)
            elif kind == stat.S_IFREG:
                content = Path(os.fsdecode(path)).read_bytes()
            mode = 0 if kind == stat.S_IFLNK else stat.S_IMODE(status.st_mode)
            found[os.path.relpath(path, os.fsencode(root))] = (kind, mode, int(status.st_mtime), content)
    return found


def link_store(store: Path, into: Path) -> None:
    """A store with names of its own over the same files; without what is being made, where /proc may be mounted."""
    try:
        shutil.copytree(store, into, symlinks=True, copy_function=os.link, ignore=shutil.ignore_patterns("tmp", "lazy"))
    except shutil.Error as error:
        first, *others = error.args[0]
        raise AssertionError(f"{first}, and {len(others)} more") from None  # each with all its text were gigabytes once
