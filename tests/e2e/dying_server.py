"""`dsec serve` that kills itself by SIGKILL at one of its crossings: before or after each packet to or from a guest,
each write to a trajectory, each transaction of the records. Crossings count while the file DSEC_TEST_COUNTS is there,
into which their number goes; it dies at number DSEC_TEST_DIES_AT (0: never).
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from dsec.channel.socket import SocketChannel
from dsec.cli.main import main
from dsec.journal import trajectory, trajectory_files
from dsec.journal.writer import Writer

COUNTS, DIES_AT = os.environ["DSEC_TEST_COUNTS"], int(os.environ["DSEC_TEST_DIES_AT"])
_numbers = itertools.count(1)


def cross() -> None:
    if not os.path.exists(COUNTS):  # noqa: PTH110
        return
    number = next(_numbers)
    with open(COUNTS, "r+b", buffering=0) as file:
        file.write(b"%10d" % number)
    if number == DIES_AT:
        os.kill(os.getpid(), signal.SIGKILL)


def crossing(function: Callable[..., Any]) -> Callable[..., Any]:
    def crossed(*args: Any, **options: Any) -> Any:
        cross()
        try:
            return function(*args, **options)
        finally:
            cross()

    return crossed


class Counted:
    """The module `os`, whose writes are crossings."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        return crossing(found) if name in ("write", "pwrite", "writev", "pwritev", "fdatasync", "rename") else found


SocketChannel._send = crossing(SocketChannel._send)  # type: ignore[method-assign]
SocketChannel._take = crossing(SocketChannel._take)  # type: ignore[method-assign]
Writer._transact = crossing(Writer._transact)  # type: ignore[method-assign]
trajectory.os = trajectory_files.os = Counted()  # type: ignore[attr-defined, assignment]

if __name__ == "__main__":
    sys.exit(main())
