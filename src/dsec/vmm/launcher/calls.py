"""System calls that Python has not. Each raises OSError with what it was for."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 15, 22, 24, 38


def check(result: int, what: str) -> None:
    """Of one through `libc`."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """mount(2)."""

    def encoded(text: str | None) -> bytes | None:
        return None if text is None else text.encode()

    done = libc.mount(encoded(source), encoded(target), encoded(kind), ctypes.c_ulong(flags), encoded(data))
    check(done, f"mount {kind or source} on {target}")


def unshare(flags: int) -> None:
    """unshare(2)."""
    check(libc.unshare(flags), f"unshare {flags:#x}")


def prctl(option: int, value: int) -> None:
    """prctl(2) with one number."""
    check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")
