"""Programs that outlive the server: those that hold sandboxes, and what these read from.

A restart of a service or of a pod ends whatever is in its cgroup. So where systemd runs the host each of them gets a
scope of its own there. A server in a container that sees the host's processes (deploy/helm) enters the host's mount
namespace for that, where the state and run directories must have the same paths; what it starts so must be a static
program in one of these. What isn't ends with the container.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path

_SYSTEMD = Path("/run/systemd/system")
_FROM_POD = Path("/proc/1/root/run/systemd/system")
_ENTER = ["nsenter", "--target", "1", "--mount", "--"]


def outliving(argv: Sequence[str], *, unit: str, static: bool = True) -> list[str]:
    """The command that executes `argv` where it outlives the server; descriptors and pipes pass through. `unit`: its
    name for people, made unique. `static`: it needs no file but those of the state and run directories."""
    pod = not _SYSTEMD.is_dir() and os.access(_FROM_POD, os.F_OK)  # pid 1 of a stranger can't be looked into
    if (pod and not static) or not (pod or _SYSTEMD.is_dir()):
        return [*argv]
    name = f"--unit={unit}-{secrets.token_hex(3)}"
    scope = ["systemd-run", "--scope", "--quiet", "--collect", name, "--property=Delegate=yes", "--", *argv]
    return [*_ENTER, *scope] if pod else scope


async def start(argv: Sequence[str], *, unit: str, cwd: str | None = None, static: bool = True) -> str:
    """Start one that puts itself in the background once it serves, and return then: "", or what it said where it did
    not start. Raises OSError where it can't be executed."""
    # Not by asyncio: uvloop lets its end of a pipe into the child, which would hold it open for ever.
    done = await asyncio.to_thread(
        subprocess.run,
        outliving(argv, unit=unit, static=static),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
        cwd=cwd,
    )
    return (done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}") if done.returncode else ""
