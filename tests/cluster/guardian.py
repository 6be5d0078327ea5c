"""A process that ends a cluster of a test's when the test was killed: the processes that it was told of, and what edges
made on the host.

It reads lines from stdin, `pid NUMBER` or `state DIRECTORY STORE`, until `done`; the end of stdin before that says that
the test is gone. Processes are held by descriptors, so that no other is hit that got the number since.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


class Guardian:
    """Started by the test."""

    def __init__(self, log: Path) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}:{TESTS / 'cluster'}"},
            )
        self.pid = self._process.pid

    def tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self._process.stdin.flush()

    def done(self) -> None:
        """Nothing is left to be ended."""
        self.tell("done")
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0


def main() -> None:
    """The process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    processes: list[int] = []
    states: list[tuple[Path, Path | None]] = []
    for line in sys.stdin:
        what, _, rest = line.rstrip("\n").partition(" ")
        if what == "done":
            return
        if what == "pid":
            with contextlib.suppress(ProcessLookupError):
                processes.append(os.pidfd_open(int(rest)))
        else:
            state, _, store = rest.partition(" ")
            states.append((Path(state), Path(store) if store else None))
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [])
    from cluster_kit import end_state  # not before it is needed: it takes a second of CPU time

    for state, store in states:
        end_state(state, store)


if __name__ == "__main__":
    main()
