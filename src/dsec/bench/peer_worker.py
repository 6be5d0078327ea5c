"""Runs the peers' command lines, in a mount namespace of its own where crun finds a cgroup layout that it accepts.

    unshare --mount --propagation private python -m dsec.bench.peer_worker [--hide CGROUP2]

A request a line on stdin, `{"lanes": [argv...], "count": n}`; an answer a line on stdout, `{"seconds", "failures",
"error"}`. Each lane is a thread that starts the next run when its last one ended, with vfork, so that starting costs
next to nothing.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec
from msgspec import Struct


class Job(Struct, frozen=True):
    """Run `count` in all, one at a time on each lane."""

    lanes: tuple[tuple[str, ...], ...]
    count: int


class Outcome(Struct, frozen=True):
    """How long it took, and what went wrong."""

    seconds: float
    failures: int = 0
    error: str = ""


def run(job: Job) -> Outcome:
    """Carry out one job."""
    tickets = itertools.count()
    failures: list[str] = []

    def lane(argv: tuple[str, ...]) -> None:
        while next(tickets) < job.count:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
            )
            if done.returncode != 0:
                failures.append(done.stderr.decode(errors="replace").strip()[-200:] or f"exit {done.returncode}")

    threads = [threading.Thread(target=lane, args=(argv,)) for argv in job.lanes]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Outcome(time.perf_counter() - began, len(failures), failures[0] if failures else "")


class PeerWorker:
    """The worker as its user sees it: a child process in its own mount namespace."""

    def __init__(self) -> None:
        hide = [] if Path("/sys/fs/cgroup/cgroup.controllers").exists() else ["--hide", "/sys/fs/cgroup/unified"]
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", __name__, *hide]
        self.note = f"in a private mount namespace with {hide[1]} unmounted" if hide else ""
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> PeerWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def run(self, job: Job) -> Outcome:
        """One job, waiting for its end. Raises ConnectionError where the worker died."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(msgspec.json.encode(job) + b"\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise ConnectionError("the peers' worker died")
        return msgspec.json.decode(line, type=Outcome)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until they end."""
    for line in requests:
        answers.write(msgspec.json.encode(run(msgspec.json.decode(line, type=Job))) + b"\n")
        answers.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hide"] and os.path.ismount(sys.argv[2]):
        subprocess.run(["umount", sys.argv[2]], check=True)
    serve(sys.stdin.buffer, sys.stdout.buffer)
