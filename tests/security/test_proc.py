"""What /proc and /sys show and allow."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from security_box import Box, Nursery

pytestmark = pytest.mark.root

REFUSED = {errno.EPERM, errno.EACCES, errno.EROFS, errno.EIO}
SECRET = ("kcore", "kmsg", "kpagecount", "kpageflags", "kpagecgroup", "kallsyms", "keys", "timer_list", "vmallocinfo",
          "slabinfo", "iomem", "ioports", "cmdline", "diskstats", "interrupts")  # fmt: skip


@pytest.mark.parametrize("user", ["root", "alice"])
@pytest.mark.parametrize("name", SECRET)
def test_kernel_files_are_masked(box: Box, name: str, user: str) -> None:
    """Empty where the host lets others read it; where it lets only its root, inside root is refused."""
    result = box.attack("cat", f"/proc/{name}", user=user)
    assert result.out == ""
    if Path(f"/proc/{name}").exists():
        assert result.exit == 0 or result.err == f"{errno.EACCES}\n"
    else:
        assert result.err == f"{errno.ENOENT}\n"


@pytest.mark.parametrize("user", ["root", "alice"])
def test_reading_all_of_proc_and_sys_does_no_harm(box: Box, user: str) -> None:
    """`grep -r /` by accident: it ends, and host and sandbox live."""
    for directory in ("/proc", "/sys", "/dev/shm"):
        result = box.attack("walk", directory, user=user)
        assert result.exit == 0, (directory, result)
    files, _, _ = map(int, box.attack("walk", "/proc").out.split())
    assert files > 100
    assert box.alive


@pytest.mark.parametrize(
    "name",
    [
        "kernel/core_pattern", "kernel/hostname", "kernel/modprobe", "kernel/sysrq", "kernel/panic", "kernel/pid_max",
        "vm/drop_caches", "vm/overcommit_memory", "fs/file-max", "net/ipv4/ip_forward", "net/ipv4/ping_group_range",
        "net/core/somaxconn", "kernel/shmmax", "kernel/randomize_va_space", "user/max_user_namespaces",
    ],
)  # fmt: skip
def test_sysctls_are_read_only(box: Box, name: str) -> None:
    path = Path("/proc/sys") / name
    before = path.read_text() if os.access(path, os.R_OK) and path.stat().st_mode & 0o400 else None
    [(result, error)] = box.attack("put", f"/proc/sys/{name}", "1").calls()
    assert result == -1
    assert error in REFUSED | {errno.ENOENT}
    assert before is None or path.read_text() == before


@pytest.mark.parametrize("name", ["sysrq-trigger", "kmsg", "mtrr", "scsi/scsi", "acpi/wakeup", "irq/1/smp_affinity"])
def test_switches_of_the_kernel_are_out_of_reach(box: Box, name: str) -> None:
    [(result, error)] = box.attack("put", f"/proc/{name}", "h").calls()
    assert result == -1
    assert error in REFUSED | {errno.ENOENT}


def test_sys_is_generated(box: Box) -> None:
    assert box.attack("cat", "/sys/devices/generated").out == "generated\n"
    for name in ("kernel/mm", "class/net", "fs/cgroup", "firmware", "module", "power"):
        assert box.call("openat", -100, f"s:/sys/{name}", 0) == (-1, errno.ENOENT)
    assert box.call("openat", -100, "s:/sys/devices/x", 0o101, 0o644) == (-1, errno.EROFS)


@pytest.mark.parametrize("name", ["meminfo", "cpuinfo", "stat", "loadavg", "uptime"])
def test_views_stand_for_the_hosts_files(box: Box, name: str) -> None:
    assert box.attack("cat", f"/proc/{name}").out == f"generated {name}\n"
    [(result, error)] = box.attack("put", f"/proc/{name}", "forged").calls()
    assert result == -1
    assert error in REFUSED


def test_the_host_does_not_show(box: Box, nursery: Nursery) -> None:
    """Not its processes, cgroups, command line, name, environment; its kernel version does, as in uname(2)."""
    text = "".join(
        box.attack("cat", f"/proc/{name}").out
        for name in ("self/cgroup", "self/status", "self/mountinfo", "1/status", "1/cmdline", "net/unix", "net/tcp",
                     "self/environ", "cmdline", "swaps", "partitions", "locks")
    )  # fmt: skip
    for secret in (socket.gethostname(), str(os.getpid()), "dsec-zygote", box.slot.name, "/sys/fs/cgroup"):
        assert secret not in text.split("lowerdir")[0], secret
    cgroups = {line.split(":")[2] for line in box.attack("cat", "/proc/self/cgroup").out.splitlines()}
    assert all(".." not in path for path in cgroups), "the cgroup namespace begins at the sandbox's own group"
    pids = [int(name) for name in box.attack("cat", "/proc/self/stat").out.split()[:1]]
    assert max(pids) < 10_000
    mounts = box.attack("cat", "/proc/self/mountinfo").out.splitlines()
    assert all(str(nursery.root) not in line for line in mounts if "overlay" not in line)


def test_its_network_is_a_loopback_and_nothing_else(box: Box) -> None:
    lines = box.attack("cat", "/proc/net/dev").out.splitlines()[2:]
    assert [line.split(":")[0].strip() for line in lines] == ["lo"]
    assert box.attack("cat", "/proc/net/route").out.count("\n") <= 1


def test_low_ports_are_open_inside(box: Box) -> None:
    address = "x:" + (2).to_bytes(2, "little").hex() + (80).to_bytes(2, "big").hex() + "7f000001" + "00" * 8
    opened, bound = box.calls(["socket", 2, 1, 0], ["bind", "$0", address, 16], user="alice")
    assert opened[0] >= 0
    assert bound == (0, 0)


def test_abstract_sockets_of_the_host_are_not_there(box: Box) -> None:
    name = f"dsec-attack-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen(1)
        assert box.attack("abstract", name).calls() == [(-1, errno.ECONNREFUSED)]


def test_the_oom_score_has_a_floor(make_box: Callable[..., Box]) -> None:
    """Below the sandbox's own value only where the zygote itself may not set one (without CAP_SYS_RESOURCE); never
    below the host's default."""
    box = make_box(oom_score_adj=500)
    assert int(box.attack("cat", "/proc/self/oom_score_adj").out) >= 500
    assert box.attack("put", "/proc/self/oom_score_adj", "-1").calls() == [(-1, errno.EACCES)]
    assert box.attack("put", "/proc/self/oom_score_adj", "-1000").calls() == [(-1, errno.EACCES)]
