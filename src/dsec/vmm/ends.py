"""Why machines end, in words; and how large they are."""

from __future__ import annotations

import os

from dsec.ports import InstanceEnd
from dsec.spec.causes import Cause
from dsec.vmm.launching import Ended

_PANIC = "Kernel panic"
_STEP = 2 << 20


def whole(size: int) -> int:
    """Memory in steps of 2 MiB."""
    return (size + _STEP - 1) // _STEP * _STEP


def stopped(reason: str, console: str) -> InstanceEnd:
    if _PANIC in console or reason == "guest-panicked":
        last = next((line for line in console.splitlines() if _PANIC in line), "").strip()[-300:]
        return InstanceEnd(Cause.GUEST_EXITED, f"the kernel inside panicked: {last}")
    return InstanceEnd(Cause.GUEST_EXITED, f"the machine shut down ({reason})")


def why(end: Ended) -> InstanceEnd:
    """Nothing inside reaches its VMM but through the machine that it imitates."""
    if os.WIFSIGNALED(end.status):
        number = os.WTERMSIG(end.status)
        return InstanceEnd(Cause.PLATFORM_KILLED, f"the virtual machine's monitor was ended by signal {number}")
    said = end.said.strip().splitlines()
    words = f": {said[-1][:300]}" if said else ""
    return InstanceEnd(
        Cause.PLATFORM_KILLED, f"the virtual machine's monitor ended with code {os.WEXITSTATUS(end.status)}{words}"
    )
