"""What a machine and its processes use, read from /proc: memory system-wide, CPU time and peak memory of processes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from dsec.kernel.census import instance_of


class Memory(Struct, frozen=True):
    """The machine's memory that is in use and can't be given back by dropping page cache, in KiB."""

    used_kib: int
    """All but free memory and page cache: what processes hold, kernel objects (dentries and inodes too), tmpfs."""
    anonymous_kib: int
    slab_kib: int
    stacks_kib: int
    page_tables_kib: int
    per_cpu_kib: int


def memory() -> Memory:
    """Now, system-wide."""
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0])
    cache = found["Buffers"] + found["Cached"] - found["Shmem"]
    return Memory(
        used_kib=found["MemTotal"] - found["MemFree"] - cache,
        anonymous_kib=found["AnonPages"],
        slab_kib=found["Slab"],
        stacks_kib=found["KernelStack"],
        page_tables_kib=found["PageTables"],
        per_cpu_kib=found.get("Percpu", 0),
    )


async def settled_memory(seconds: float = 2.0, tries: int = 5) -> Memory:
    """Once two looks `seconds` apart differ by less than 1 MiB, or after `tries`: kernel work is deferred."""
    seen = memory()
    for _ in range(tries):
        await asyncio.sleep(seconds)
        now = memory()
        if abs(now.used_kib - seen.used_kib) < 1024:
            return now
        seen = now
    return seen


def cpu_s(pids: Iterable[int]) -> float:
    """CPU time that the processes used so far, children that they waited for not included. Dead ones count nothing.

    From the scheduler's own count, in nanoseconds: /proc/PID/stat counts timer ticks, and who wakes up by a timer is
    found running by the tick far more often than it runs.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


async def cpu_percent(pids: Iterable[int], seconds: float) -> float:
    """CPU time of the processes over the next `seconds`, in per cent of one core."""
    pids = list(pids)
    before, began = cpu_s(pids), time.monotonic()
    await asyncio.sleep(seconds)
    return 100 * (cpu_s(pids) - before) / (time.monotonic() - began)


def reset_peak(pid: int) -> None:
    """Begin to measure a process's peak memory anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_kib(pid: int) -> int:
    """A process's peak resident memory since it began or `reset_peak`; 0 for a dead one."""
    return _status(pid, "VmHWM")


def resident_kib(pid: int) -> int:
    """A process's resident memory now; 0 for a dead one."""
    return _status(pid, "VmRSS")


def descendants(pid: int) -> dict[int, str]:
    """All processes below `pid`, by their command's name."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = (entry / "stat").read_text()
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
            names[int(entry.name)] = stat[stat.index("(") + 1 : stat.rindex(")")]
    found, left = {}, list(children.get(pid, ()))
    while left:
        child = left.pop()
        found[child] = names.get(child, "")
        left += children.get(child, ())
    return found


def zygote_of(state: Path) -> int:
    """The zygote of the server on this state directory. Raises LookupError where none runs."""
    mark = f"/{instance_of(state)}/zygote.sock".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (entry / "comm").read_text() == "dsec-zygote\n" and mark in (entry / "cmdline").read_bytes():
                return int(entry.name)
    raise LookupError(f"no zygote serves {state}")


def _status(pid: int, field: str) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
    return 0
