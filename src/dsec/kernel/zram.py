"""Compressed swap in memory (zram), made where the host has no swap at all: where paused sandboxes' memory goes.

Invariants: it is on the ledger before it is used, and taken back with `remove`; compressed data never takes more than
`limit_bytes`; swap that somebody else made is never touched. A device that is made is named on the ledger as `zramN`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from dsec.kernel.syscalls import KernelError

SHARE = 0.25
"""Of the host's memory, that compressed data may take."""
RATIO = 3
"""How many times more it seems to hold: beyond what programs' memory compresses to."""
_CONTROL = Path("/sys/class/zram-control")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PREFER = 0x8000 | 100  # before slower swap that comes later

_libc = ctypes.CDLL(None, use_errno=True)
_lock = threading.Lock()


def swaps() -> list[str]:
    """The host's swap devices and files."""
    return [line.split()[0] for line in Path("/proc/swaps").read_text().splitlines()[1:]]


def available() -> bool:
    """Whether this kernel has zram."""
    return Path("/sys/block/zram0").exists() or _CONTROL.exists()


def default_limit() -> int:
    """What compressed swap may take on this host, in bytes."""
    return int(os.sysconf("SC_PHYS_PAGES") * _PAGE * SHARE)


def ensure(record: Callable[[str], None], limit_bytes: int) -> bool:
    """See to it that there is swap; True where it was made now. `record` puts a device's name on the ledger. Blocks for
    some milliseconds. Raises OSError where this host can't."""
    with _lock:
        if limit_bytes <= 0 or swaps():
            return False
        number = _free_device()
        device, block = f"/dev/zram{number}", Path(f"/sys/block/zram{number}")
        record(f"zram{number}")
        with contextlib.suppress(OSError):  # a kernel without lz4 has another one
            (block / "comp_algorithm").write_text("lz4")
        size = limit_bytes * RATIO // _PAGE * _PAGE
        (block / "disksize").write_text(str(size))
        (block / "mem_limit").write_text(str(limit_bytes))
        _make_swap(device, size)
        if _libc.swapon(device.encode(), _PREFER):
            raise KernelError(ctypes.get_errno(), f"swap on {device}")
        return True


def remove(name: str) -> None:
    """Take a device back: what is in it comes back into memory first. Idempotent. Raises OSError."""
    if not name.startswith("zram") or not name[4:].isdigit():
        raise ValueError(name)
    if f"/dev/{name}" in swaps() and _libc.swapoff(f"/dev/{name}".encode()):
        raise KernelError(ctypes.get_errno(), f"swap off /dev/{name}")
    block = Path("/sys/block", name)
    if not block.exists():
        return
    (block / "reset").write_text("1")
    if name != "zram0":  # the module's own, which was there before
        with contextlib.suppress(OSError):
            (_CONTROL / "hot_remove").write_text(name[4:])


def _free_device() -> int:
    """A device that nobody uses."""
    if not available():
        raise OSError(errno.ENODEV, "this kernel has no zram (modprobe zram)")
    with contextlib.suppress(FileNotFoundError):
        if Path("/sys/block/zram0/disksize").read_text().strip() == "0":
            return 0
    return int((_CONTROL / "hot_add").read_text())


def _make_swap(device: str, size: int) -> None:
    """A swap header, as mkswap writes it."""
    header = bytearray(_PAGE)
    struct.pack_into("<III", header, 1024, 1, size // _PAGE - 1, 0)
    header[-10:] = b"SWAPSPACE2"
    with open(device, "r+b", buffering=0) as file:
        file.write(header)
