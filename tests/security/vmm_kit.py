"""What can be seen of a process that is to be confined: its user, its namespaces, its root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NAMESPACES = ("pid", "mnt", "net", "ipc", "uts", "cgroup")


def check_root(root: Path) -> None:
    """What a monitor sees of files and processes."""
    assert {path.name for path in root.iterdir()} <= {"usr", "lib", "lib64", "bin", "dev", "proc"}
    assert {path.name for path in (root / "dev").iterdir()} <= {"null", "zero", "urandom", "kvm"}
    assert not (root / "usr/bin/sh").exists()
    with pytest.raises(OSError, match="Read-only"):
        (root / "left").write_text("")
    assert (root / "proc/1/comm").read_text().startswith("qemu")
    assert {int(path.name) for path in (root / "proc").iterdir() if path.name.isdigit()} == {1}


def fields(pid: int) -> list[tuple[str, str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]


def namespaces(who: int | str) -> dict[str, str]:
    return {name: os.readlink(f"/proc/{who}/ns/{name}") for name in NAMESPACES}  # noqa: PTH115
