"""A program's start, from when the kernel tells of it until its command line can be read.

The kernel tells when the file is opened. The process is the former program's then, with its words, until the new one is
loaded: mostly within a millisecond, but on a busy host, or where the program's data has yet to be fetched, it takes as
long as it likes. The words come a moment after the program. A start that fails leaves the former program there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from msgspec import Struct

from dsec.edge.evidence import argv_of, exe_of
from dsec.spec.tripwires import Rule

FIRST_S = 0.005
"""Until one that is not through is looked at again; then twice as long, and so on."""
LAST_S = 10.0
"""One that isn't through by then has failed."""

Judged = tuple[Rule, Sequence[str]]
"""A rule that means this program, with its patterns of command lines."""


class Start(Struct):
    """One that some rule means."""

    pid: int
    path: str
    file: tuple[int, int]
    """The program's device and number: it may have been renamed since."""
    rules: list[Judged]
    """Those that the command line decides."""
    since: float
    due: float = 0.0
    """When to look again."""

    def words(self) -> list[str] | None:
        """Its command line; empty where the process has ended, None where the program isn't there yet."""
        try:
            found = os.stat(f"/proc/{self.pid}/exe")  # noqa: PTH116
        except OSError:
            return []
        argv = argv_of(self.pid)
        if (found.st_dev, found.st_ino) == self.file or exe_of(self.pid) == self.path:
            return argv or None
        return argv if self._interpreted(argv) else None

    def postpone(self, now: float) -> None:
        """Not through yet."""
        self.due = now + max(FIRST_S, now - self.since)

    def _interpreted(self, argv: list[str]) -> bool:
        """Whether these are the words of an interpreter that was given the file."""
        name = self.path.rpartition("/")[2]
        return any(word.rpartition("/")[2] == name or word.startswith("/dev/fd/") for word in argv[1:])
