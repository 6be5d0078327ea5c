"""Programs that outlive the server: those that hold sandboxes. They put themselves in the background once they serve.

Where systemd runs the host each gets a scope of its own, so that a restart of our service doesn't take it (and every
sandbox) down.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path

_SYSTEMD = Path("/run/systemd/system").is_dir()


async def start(argv: Sequence[str], *, unit: str, cwd: str | None = None) -> str:
    """Start one, in a scope named `unit`; returns when it has gone to the background: "", or what it said where it did
    not start. Raises OSError where it can't be executed."""
    if _SYSTEMD:
        argv = ["systemd-run", "--scope", "--quiet", "--collect", f"--unit={unit}", "--property=Delegate=yes", *argv]
    # Not by asyncio: uvloop lets its end of a pipe into the child, which would hold it open for ever.
    done = await asyncio.to_thread(
        subprocess.run,
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
        cwd=cwd,
    )
    return (done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}") if done.returncode else ""
