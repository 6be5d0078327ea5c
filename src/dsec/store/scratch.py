"""Directories for what is being made in a node's store, on its file system, so that the finished thing is renamed.

Who makes something holds its directory by a lock that ends with the process: so what a killed server left is told from
what another process is making.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec.kernel import mounts

_TRIES = 20
_PAUSE_S = 0.1
log = logging.getLogger(__name__)


class Scratch(tempfile.TemporaryDirectory[str]):
    """One directory, removed when its context ends."""

    def __init__(self, root: Path) -> None:
        with _locked(root, fcntl.LOCK_SH):
            super().__init__(dir=root)
            self._held = _lock(self.name, fcntl.LOCK_SH)

    def cleanup(self) -> None:
        super().cleanup()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


class ScratchRoot:
    """All of a node's store."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "store" / "tmp"

    def make(self) -> Scratch:
        self.path.mkdir(parents=True, exist_ok=True)
        return Scratch(self.path)

    def clear(self) -> None:
        """Remove what nobody is making."""
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            left = []
            with _locked(self.path, fcntl.LOCK_EX):  # none is made meanwhile and not yet locked
                for entry in os.scandir(self.path):
                    with contextlib.suppress(OSError):
                        held.callback(os.close, _lock(entry.path, fcntl.LOCK_EX | fcntl.LOCK_NB))
                        left.append(entry.path)
            for path in left:
                _remove(path)


def _remove(path: str) -> None:
    """A program that the killed server had started may still be writing there, for a moment."""
    for _ in range(_TRIES):
        with contextlib.suppress(OSError):
            mounts.unmount_under(path)
            shutil.rmtree(path)
        if not os.path.lexists(path):
            return
        time.sleep(_PAUSE_S)
    log.warning("left for the next start: %s, into which something still writes", path)


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    descriptor = _lock(directory, how)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(directory: str | Path, how: int) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
