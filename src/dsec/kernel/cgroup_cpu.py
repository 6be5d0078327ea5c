"""A cgroup's share of the CPUs, in both versions of the controller; and how any of a cgroup's files is written."""

from __future__ import annotations

import errno
import os

from dsec.kernel.syscalls import KernelError

PERIOD_US = 100_000


def write(path: str, value: str) -> None:
    """Raises `KernelError`."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)
    except OSError as error:
        hints = {
            errno.EBUSY: "memory in use is above the new limit, or processes are in the way",
            errno.EOPNOTSUPP: "the cgroup is of a type that can't do that",
        }
        raise KernelError(error.errno or 0, f"write {value!r} to {path}", hints) from None


def set_share(directory: str, cpus: float, *, v1: bool, idle: bool) -> None:
    """At most so many, and a weight in proportion; `idle`: what nobody else wants of them (since Linux 5.15; before
    it, the least weight). Raises `KernelError`."""
    switch = f"{directory}/cpu.idle"
    has_switch = os.path.exists(switch)
    if has_switch:  # while it is set there is no weight to set
        write(switch, "0")
    quota = max(1000, int(cpus * PERIOD_US))
    weight = 0.0 if idle else cpus
    if v1:
        write(f"{directory}/cpu.cfs_period_us", str(PERIOD_US))
        write(f"{directory}/cpu.cfs_quota_us", str(quota))
        write(f"{directory}/cpu.shares", str(min(262_144, max(2, int(1024 * weight)))))
    else:
        write(f"{directory}/cpu.max", f"{quota} {PERIOD_US}")
        write(f"{directory}/cpu.weight", str(min(10_000, max(1, int(100 * weight)))))
    if has_switch and idle:
        write(switch, "1")
