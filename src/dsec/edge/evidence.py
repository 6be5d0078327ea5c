"""Who did it: a process of a sandbox, looked at through the host's /proc.

Owns `look`. What it reads is the agent's to choose (names, command lines), so it is bounded and made printable; what it
says of ids and parents is the kernel's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ARGV_BYTES = 512
PARENTS = 6


def look(pid: int, uid_base: int, exe: str | None = None) -> dict[str, Any] | None:
    """The process with the host's number `pid`: `pid` (inside), `exe`, `argv`, `uid` (inside), and `parents`, the
    nearest first, each with `pid` and `exe` (or its name, where it has just ended). None where it is gone. `exe`: what
    its program was, in case it can't be read any more."""
    first = _one(pid)
    if first is None:
        return None
    status, program = first
    parents: list[dict[str, Any]] = []
    above = status["PPid"]
    while len(parents) < PARENTS:
        found = _one(int(above))
        if found is None or len(found[0].get("NSpid", "").split()) < 2:
            break  # the sandbox's first process has none inside
        parents.append({"pid": _inside(found[0]), "exe": found[1] or found[0]["Name"]})
        above = found[0]["PPid"]
    return {
        "pid": _inside(status),
        "exe": program or exe or status["Name"],
        "argv": argv_of(pid),
        "uid": int(status["Uid"].split()[0]) - uid_base,
        "parents": parents,
    }


def exe_of(pid: int) -> str | None:
    """The path of its program as the sandbox names it; None where it has ended."""
    try:
        return shown(os.fsencode(Path(f"/proc/{pid}/exe").readlink()))
    except OSError:
        return None


def argv_of(pid: int) -> list[str]:
    """Its command line, cut to `ARGV_BYTES`; empty where it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(ARGV_BYTES)
    except OSError:
        return []
    return [shown(word) for word in words.rstrip(b"\0").split(b"\0")] if words else []


def shown(raw: bytes) -> str:
    """A name that an agent chose, for an event."""
    return raw[:ARGV_BYTES].decode("utf-8", "replace")


def _one(pid: int) -> tuple[dict[str, str], str | None] | None:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return (status, exe_of(pid)) if "PPid" in status and "Uid" in status else None


def _inside(status: dict[str, str]) -> int:
    return int(status["NSpid"].split()[-1])
