"""What an edge is told: limits and defaults, as values; and the two things of the host that it looks at, behind a
protocol."""

from __future__ import annotations

import os
import time
from asyncio import sleep
from pathlib import Path
from typing import Protocol

from msgspec import Struct


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class EdgeConfig(Struct, frozen=True, kw_only=True):
    """Limits of one node. `docs/SPECIFICATION.md` lists the defaults."""

    max_starting: int = 2 * _cores()
    """Sandboxes that are made at the same time; more only make each other slow."""
    max_ending: int = 4 * _cores()
    """Sandboxes that are taken down at the same time: mass teardown is paced."""
    max_live: int = 20_000
    max_queued: int = 100_000
    max_batch: int = 100_000
    memory_overcommit: float = 64.0
    """Sandboxes may be promised this many times the node's memory: nine in ten are idle."""
    memory_reserve_bytes: int = 256 << 20
    """Nothing starts while less than this is free in reality."""
    disk_reserve_bytes: int = 256 << 20
    deadline_s: float = 60.0
    """How long a creation waits for capacity where the caller doesn't say."""
    create_timeout_s: float = 30.0
    """How long a backend may take for one creation."""
    lost_grace_s: float = 1.0
    """How long a sandbox whose channel broke may take to say why it ended."""
    silence_s: float = 30.0
    """How long a command may run beyond its time limit before its guest is asked for a sign of life, and how long that
    may take."""
    shutdown_timeout_s: float = 60.0
    recheck_s: float = 0.5
    """How often real memory and disk are looked at again while creations wait for them."""
    prune_interval_s: float = 60.0
    max_kept_commands: int = 512
    """Ended commands with a key that one sandbox's guest keeps until they are released; beyond it the oldest are only
    in its trajectory."""
    keep_ended_s: float = 86400.0
    """Records, events and trajectories of ended sandboxes are kept for so long."""
    lasting_records: bool = False
    """They survive the machine, at the price of waiting for the disk."""
    features: frozenset[str] = frozenset()
    """What the host's kernel and its machines have, by the names that creations ask for."""
    trajectory_output_bytes: int = 1 << 20
    """Of one stream of a command, or of one file that is written, that a trajectory keeps; of the rest it has size and
    digest."""
    trajectory_blob_bytes: int = 256 << 20
    """What one sandbox's trajectory keeps of outputs and contents that are too long for an entry, all together."""


class Capacity(Protocol):
    """The node's resources as they are now; cheap to ask."""

    def memory_total_bytes(self) -> int: ...
    def memory_free_bytes(self) -> int: ...
    def disk_free_bytes(self) -> int: ...


class HostCapacity:
    """This machine, looked at no more often than every 100 ms."""

    def __init__(self, volume: Path) -> None:
        """`volume`: a directory on the data volume."""
        self._volume = volume
        self._seen_at = float("-inf")
        self._memory_total = self._memory_free = self._disk_free = 0

    def memory_total_bytes(self) -> int:
        self._look()
        return self._memory_total

    def memory_free_bytes(self) -> int:
        self._look()
        return self._memory_free

    def disk_free_bytes(self) -> int:
        self._look()
        return self._disk_free

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._seen_at < 0.1:
            return
        self._seen_at = now
        found = {}
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                name, _, rest = line.partition(":")
                if name in {"MemTotal", "MemAvailable"}:
                    found[name] = int(rest.split()[0]) * 1024
                    if len(found) == 2:
                        break
        self._memory_total = found["MemTotal"]
        self._memory_free = found["MemAvailable"]
        volume = os.statvfs(self._volume)
        self._disk_free = volume.f_bavail * volume.f_frsize


class SystemClock:
    """The real clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await sleep(seconds)
