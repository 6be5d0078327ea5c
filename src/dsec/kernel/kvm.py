"""Whether this host's KVM is fit to run machines, found out by running one: a loop of a few instructions.

That /dev/kvm can be opened says little. A host that imitates virtualisation itself may answer every call, and take
hundreds of nanoseconds for each instruction, or never come back. So the loop runs in a child with a time limit, and is
timed.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import subprocess
import sys
import time
from typing import NamedTuple

LOOPS = 20_000
MOST_NS = 20.0
"""For each turn of the loop (two instructions); the slowest CPU that virtualises by itself takes about one."""
_TIMEOUT_S = 1.0

_CREATE_VM, _CREATE_VCPU, _VCPU_MMAP_SIZE, _RUN = 0xAE01, 0xAE41, 0xAE04, 0xAE80
_GET_SREGS, _SET_SREGS, _SET_REGS, _SET_MEMORY = 0x8138AE83, 0x4138AE84, 0x4090AE82, 0x4020AE46
_EXIT_HLT = 5
_CODE = b"\x66\xb9" + struct.pack("<I", LOOPS) + b"\x66\x49\x75\xfc\xf4"
"""In real mode: mov ecx, LOOPS; dec ecx; jnz -4; hlt."""


class Fitness(NamedTuple):
    """What was found."""

    fit: bool
    detail: str


def probe() -> Fitness:
    """Takes some tens of milliseconds where KVM is fit, a second at most. Leaves nothing."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Fitness(False, "there is no /dev/kvm that can be opened")
    command = [sys.executable, "-I", "-S", __file__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Fitness(False, f"/dev/kvm is there, but a loop of {LOOPS:,} turns did not end")
    try:
        per_turn = float(done.stdout)
    except ValueError:
        words = done.stderr.strip().splitlines()
        return Fitness(False, f"/dev/kvm is there, but runs no machine: {words[-1] if words else 'it was killed'}")
    detail = f"{per_turn:.1f} ns for each turn of a loop"
    return Fitness(per_turn <= MOST_NS, detail if per_turn <= MOST_NS else f"{detail}: this KVM is imitated")


def _measure() -> float:
    """Nanoseconds for each turn."""
    kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    vm = fcntl.ioctl(kvm, _CREATE_VM, 0)
    memory = mmap.mmap(-1, 4096, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    memory[: len(_CODE)] = _CODE
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fcntl.ioctl(vm, _SET_MEMORY, struct.pack("<IIQQQ", 0, 0, 0x1000, 4096, address))
    vcpu = fcntl.ioctl(vm, _CREATE_VCPU, 0)
    run = mmap.mmap(vcpu, fcntl.ioctl(kvm, _VCPU_MMAP_SIZE, 0), flags=mmap.MAP_SHARED)
    sregs = bytearray(fcntl.ioctl(vcpu, _GET_SREGS, bytes(0x138)))
    struct.pack_into("<Q", sregs, 0, 0)  # cs.base
    struct.pack_into("<H", sregs, 12, 0)  # cs.selector
    fcntl.ioctl(vcpu, _SET_SREGS, bytes(sregs))
    fcntl.ioctl(vcpu, _SET_REGS, struct.pack("<18Q", *[0] * 16, 0x1000, 2))  # rip, rflags
    begun = time.perf_counter_ns()
    fcntl.ioctl(vcpu, _RUN, 0)
    took = time.perf_counter_ns() - begun
    reason = struct.unpack_from("<I", run, 8)[0]
    if reason != _EXIT_HLT:
        raise OSError(f"it left for the reason {reason}")
    return took / LOOPS


if __name__ == "__main__":
    sys.stdout.write(str(_measure()))
