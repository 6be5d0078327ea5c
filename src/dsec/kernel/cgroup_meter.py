"""What one run after another costs in the same cgroups: a few reads of files that stay open.

`Slot.usage` tells all of a sandbox's life; here the counters begin anew with each call, because thousands of calls
follow each other in one slot.
"""

from __future__ import annotations

import os

from dsec.kernel.cgroups import Slot


class Meter:
    """Of one slot. Close it before the slot is given back."""

    def __init__(self, slot: Slot) -> None:
        """Raises OSError."""
        root = slot.root
        memory_v1 = "memory" in root.v1
        memory = f"{root.v1['memory']}/{root.name}/{slot.name}" if memory_v1 else slot.v2
        self._resets = memory_v1
        self._cpu = os.open(f"{slot.v2}/cpu.stat", os.O_RDONLY | os.O_CLOEXEC)
        peak = "memory.max_usage_in_bytes" if memory_v1 else "memory.peak"
        self._peak = os.open(f"{memory}/{peak}", (os.O_RDWR if memory_v1 else os.O_RDONLY) | os.O_CLOEXEC)
        events = "memory.oom_control" if memory_v1 else "memory.events"
        self._events = os.open(f"{memory}/{events}", os.O_RDONLY | os.O_CLOEXEC)
        self._base_cpu_us = self._base_kills = self._base_peak = 0

    def begin(self) -> None:
        """Count from now on."""
        self._base_cpu_us = self._cpu_us()
        self._base_kills = self._kills()
        if self._resets:
            os.pwrite(self._peak, b"0", 0)
        else:
            self._base_peak = int(os.pread(self._peak, 64, 0))

    def cpu_s(self) -> float:
        """Of all processes in it, those that ended too."""
        return (self._cpu_us() - self._base_cpu_us) / 1e6

    def memory_bytes(self) -> int:
        """The most at one moment. Where the kernel can't begin anew: 0, unless it is more than ever before."""
        peak = int(os.pread(self._peak, 64, 0))
        return peak if peak != self._base_peak else 0

    def out_of_memory(self) -> bool:
        """Whether the kernel ended something for the limit."""
        return self._kills() > self._base_kills

    def close(self) -> None:
        """Close its files."""
        for fd in (self._cpu, self._peak, self._events):
            os.close(fd)

    def _cpu_us(self) -> int:
        words = os.pread(self._cpu, 256, 0).split(None, 2)
        return int(words[1])

    def _kills(self) -> int:
        words = os.pread(self._events, 256, 0).split()
        return int(words[words.index(b"oom_kill") + 1])
