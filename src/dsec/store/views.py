"""What a sandbox sees of the machine: a shared /dev, and generated files for /proc and /sys that show its own size.

`<run>/dev` is one small tmpfs for all sandboxes. `<run>/views/<shape>/` holds `proc/NAME` (bound over /proc/NAME) and
`sys/` (bound over /sys) for one (cpus, memory); all sandboxes of a shape share it, read-only. A view is made on first
use and stays while a sandbox uses it; the number of unused ones is bounded.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import stat
from collections import Counter
from pathlib import Path

from dsec.kernel import mounts
from dsec.kernel.cgroup_cpu import PERIOD_US
from dsec.kernel.mounts import TmpfsMount

UNUSED_VIEWS = 32
KIB = 1024

_NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
    "shm": "/run/shm",
}


def make_dev(run_dir: Path) -> Path:
    """The shared /dev tree at `<run>/dev`. Idempotent. Raises KernelError where device nodes can't be made here."""
    top = run_dir / "dev"
    top.mkdir(parents=True, exist_ok=True)
    if mounts.find_mount(top) is None:
        TmpfsMount(top, size_bytes=64 * KIB, devices=True).mount()
    for name, (major, minor) in _NODES.items():
        with contextlib.suppress(FileExistsError):
            os.mknod(top / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        (top / name).chmod(0o666)
    for name, target in _LINKS.items():
        with contextlib.suppress(FileExistsError):
            (top / name).symlink_to(target)
    (top / "pts").mkdir(exist_ok=True)
    return top


def remove_dev(run_dir: Path) -> None:
    """Unmount it. Idempotent; running sandboxes keep theirs."""
    mounts.unmount_under(run_dir / "dev")


def visible_cpus(cpus: float, host_cpus: int) -> int:
    """How many CPUs a sandbox with this limit sees."""
    return min(host_cpus, max(1, math.ceil(cpus)))


class CpuPicker:
    """Spreads sandboxes over this process's CPUs: each gets the least used ones."""

    def __init__(self, cpus: list[int] | None = None) -> None:
        self.cpus = sorted(cpus if cpus is not None else os.sched_getaffinity(0))
        self._load = dict.fromkeys(self.cpus, 0.0)

    def pick(self, cpus: float) -> tuple[int, ...]:
        """The CPUs for a sandbox that may use `cpus` of them; give them back with `release`."""
        count = visible_cpus(cpus, len(self.cpus))
        chosen = tuple(sorted(sorted(self.cpus, key=lambda cpu: (self._load[cpu], cpu))[:count]))
        self.adopt(chosen, cpus)
        return chosen

    def adopt(self, chosen: tuple[int, ...], cpus: float) -> None:
        """Count a sandbox that is there already."""
        for cpu in chosen:
            if cpu in self._load:
                self._load[cpu] += cpus / len(chosen)

    def release(self, chosen: tuple[int, ...], cpus: float) -> None:
        """The sandbox is gone."""
        self.adopt(chosen, -cpus)


class Views:
    """The generated views below a run directory."""

    def __init__(self, run_dir: Path, host_cpus: int | None = None) -> None:
        self.root = run_dir / "views"
        self.root.mkdir(parents=True, exist_ok=True)
        self._host_cpus = host_cpus or len(os.sched_getaffinity(0))
        self._users: Counter[str] = Counter()
        self._made = {path.name for path in self.root.iterdir() if not path.name.endswith(".new")}

    def acquire(self, cpus: float, memory_bytes: int) -> Path:
        """The view for a sandbox of this size; a millisecond or so when it is the first of its shape."""
        name = self._name(cpus, memory_bytes)
        self._users[name] += 1
        path = self.root / name
        if name not in self._made:
            self._drop_unused()
            fresh = self.root / f"{name}.new"
            shutil.rmtree(fresh, ignore_errors=True)
            for relative, text in render(cpus, memory_bytes, self._host_cpus).items():
                file = fresh / relative
                file.parent.mkdir(parents=True, exist_ok=True)
                if text is None:
                    file.mkdir(exist_ok=True)
                else:
                    file.write_text(text)
                    file.chmod(0o444)
            fresh.rename(path)
            self._made.add(name)
        return path

    def release(self, cpus: float, memory_bytes: int) -> None:
        """A sandbox that acquired it is gone."""
        name = self._name(cpus, memory_bytes)
        self._users[name] -= 1
        if self._users[name] <= 0:
            del self._users[name]

    @staticmethod
    def _name(cpus: float, memory_bytes: int) -> str:
        return f"{cpus:g}-{memory_bytes}"

    def _drop_unused(self) -> None:
        unused = sorted(self._made - self._users.keys())
        for name in unused[: max(0, len(unused) - UNUSED_VIEWS + 1)]:
            shutil.rmtree(self.root / name)
            self._made.discard(name)

    def remove(self) -> None:
        """Remove all views."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._made.clear()


def render(cpus: float, memory_bytes: int, host_cpus: int) -> dict[str, str | None]:
    """The files of a view, by path: None is an empty directory. Reads the host's cpuinfo and boot time."""
    count = visible_cpus(cpus, host_cpus)
    return _proc(count, memory_bytes) | _sys(count, cpus, memory_bytes)


def _proc(count: int, memory_bytes: int) -> dict[str, str | None]:
    boot = re.search(r"^btime \d+$", Path("/proc/stat").read_text(), re.MULTILINE)
    cpu = "0 0 0 0 0 0 0 0 0 0"
    lines = [
        f"cpu  {cpu}",
        *(f"cpu{n} {cpu}" for n in range(count)),
        "intr 0",
        "ctxt 0",
        boot[0] if boot else "btime 0",
    ]
    lines += ["processes 1", "procs_running 1", "procs_blocked 0", "softirq 0 0 0 0 0 0 0 0 0 0 0"]
    return {
        "proc/cpuinfo": _cpuinfo(count),
        "proc/meminfo": _meminfo(memory_bytes),
        "proc/stat": "\n".join(lines) + "\n",
        "proc/loadavg": "0.00 0.00 0.00 1/1 1\n",
        "proc/diskstats": "",
        "proc/partitions": "major minor  #blocks  name\n\n",
        "proc/swaps": "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n",
    }


_NUMBERED = {"processor", "core id", "apicid", "initial apicid"}


def _cpuinfo(count: int) -> str:
    """The host's first block, once a CPU: all CPUs look alike, and their numbers are the sandbox's."""
    blocks = Path("/proc/cpuinfo").read_text().strip().split("\n\n")
    made = []
    for n in range(count):
        lines = []
        for line in blocks[0].splitlines():
            label = line.partition(":")[0]
            if label.strip() in _NUMBERED:
                lines.append(f"{label}: {n}")
            else:
                lines.append(f"{label}: {count}" if label.strip() in ("siblings", "cpu cores") else line)
        made.append("\n".join(lines) + "\n\n")
    return "".join(made)


_MEMINFO = (
    "MemTotal",
    "MemFree",
    "MemAvailable",
    "Buffers",
    "Cached",
    "SwapCached",
    "Active",
    "Inactive",
    "Active(anon)",
    "Inactive(anon)",
    "Active(file)",
    "Inactive(file)",
    "Unevictable",
    "Mlocked",
    "SwapTotal",
    "SwapFree",
    "Dirty",
    "Writeback",
    "AnonPages",
    "Mapped",
    "Shmem",
    "KReclaimable",
    "Slab",
    "SReclaimable",
    "SUnreclaim",
    "KernelStack",
    "PageTables",
    "CommitLimit",
    "Committed_AS",
    "VmallocTotal",
    "VmallocUsed",
    "Percpu",
    "AnonHugePages",
    "Hugepagesize",
)


def _meminfo(memory_bytes: int) -> str:
    total = memory_bytes // KIB
    fields = {"MemTotal": total, "MemFree": total, "MemAvailable": total, "CommitLimit": total, "Hugepagesize": 2048}
    return "".join(f"{name + ':':<15} {fields.get(name, 0):>8} kB\n" for name in _MEMINFO)


def _sys(count: int, cpus: float, memory_bytes: int) -> dict[str, str | None]:
    span = "0" if count == 1 else f"0-{count - 1}"
    mask = _mask(count)
    files: dict[str, str | None] = {}
    cpu = "sys/devices/system/cpu"
    for name in ("online", "possible", "present"):
        files[f"{cpu}/{name}"] = f"{span}\n"
    files |= {f"{cpu}/offline": "\n", f"{cpu}/isolated": "\n", f"{cpu}/kernel_max": f"{max(0, count - 1)}\n"}
    for n in range(count):
        topology = f"{cpu}/cpu{n}/topology"
        files |= {
            f"{topology}/core_id": f"{n}\n",
            f"{topology}/physical_package_id": "0\n",
            f"{topology}/thread_siblings_list": f"{n}\n",
            f"{topology}/core_siblings_list": f"{span}\n",
        }
    node = "sys/devices/system/node"
    for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
        files[f"{node}/{name}"] = "0\n"
    meminfo = "".join(f"Node 0 {line}\n" for line in _meminfo(memory_bytes).splitlines()[:2])
    files |= {
        f"{node}/node0/cpulist": f"{span}\n",
        f"{node}/node0/cpumap": f"{mask}\n",
        f"{node}/node0/distance": "10\n",
        f"{node}/node0/meminfo": meminfo,
    }
    page = "sys/kernel/mm/transparent_hugepage"
    for name in ("enabled", "defrag", "hpage_pmd_size"):
        with contextlib.suppress(OSError):
            files[f"{page}/{name}"] = Path(f"/{page}/{name}").read_text()
    # What programs look at that know they may be in a container; no cgroup file system is mounted there.
    files |= {
        "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
        "sys/fs/cgroup/cpu.max": f"{max(1000, int(cpus * PERIOD_US))} {PERIOD_US}\n",
        "sys/fs/cgroup/memory.max": f"{memory_bytes}\n",
        "sys/block": None,
        "sys/bus": None,
        "sys/class/net": None,
        "sys/firmware": None,
        "sys/module": None,
    }
    return files


def _mask(count: int) -> str:
    words = []
    while count > 0:
        words.append(f"{(1 << min(32, count)) - 1:08x}")
        count -= 32
    return ",".join(reversed(words))
