"""What a probe of the host is: a function that tries one feature in a scratch directory and takes it away again.

It returns a line about what it found, or raises `Missing` (what is wrong, and what to do) or an OSError. Probes are
listed in the order in which their modules are imported.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path


class Missing(Exception):
    """A feature isn't there."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.remedy = remedy


Probe = Callable[[Path], str]
PROBES: list[tuple[str, bool, Probe]] = []
"""Name, whether the server needs it to start, function."""
FEATURES: set[str] = set()
"""Names of those that tell hosts apart, and take next to nothing (`features.py`)."""


def probe(name: str, *, needed: bool = False, feature: bool = False) -> Callable[[Probe], Probe]:
    """Put a function on the list."""

    def add(function: Probe) -> Probe:
        if feature:
            FEATURES.add(name)
        PROBES.append((name, needed, function))
        return function

    return add


def kernel_version() -> tuple[int, int]:
    """Major and minor number of the running kernel."""
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def program(name: str) -> str | None:
    """Where a program is, the administrator's directories included."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def need_program(name: str, package: str) -> str:
    """The same; raises `Missing` where it isn't installed."""
    path = program(name)
    if path is None:
        raise Missing(f"{name} is not installed", f"apt-get install {package}")
    return path
