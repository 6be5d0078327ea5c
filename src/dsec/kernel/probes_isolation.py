"""Probes of what separates and limits sandboxes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
from pathlib import Path

from dsec.kernel import idmap, syscalls
from dsec.kernel.cgroups import CgroupRoot, Shape, Slot
from dsec.kernel.probes import Missing, probe
from dsec.kernel.syscalls import KernelError

_libc = ctypes.CDLL(None, use_errno=True)


@probe("namespaces", needed=True)
def _namespaces(_: Path) -> str:
    flags = {
        "pid": syscalls.CLONE_NEWPID,
        "mnt": syscalls.CLONE_NEWNS,
        "uts": syscalls.CLONE_NEWUTS,
        "ipc": syscalls.CLONE_NEWIPC,
        "net": syscalls.CLONE_NEWNET,
        "cgroup": syscalls.CLONE_NEWCGROUP,
    }
    pid = os.fork()
    if pid == 0:  # this child must make no Python call that could wait for a thread that it doesn't have
        for bit, flag in enumerate(flags.values()):
            if _libc.unshare(flag) < 0:
                os._exit(bit + 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        name = list(flags)[code - 1]
        raise Missing(
            f"no {name} namespace", f"See /proc/sys/user/max_{name}_namespaces and the kernel's configuration."
        )
    return ", ".join(flags)


@probe("user namespaces", needed=True, feature=True)
def _userns(_: Path) -> str:
    try:
        os.close(idmap.make_userns(100_000, 65_536))
    except KernelError as error:
        raise Missing(
            error.strerror or "",
            "Set user.max_user_namespaces above 0 and, where it exists, kernel.unprivileged_userns_clone=1.",
        ) from None
    return "made and mapped"


@probe("cgroups", needed=True)
def _cgroups(_: Path) -> str:
    root = CgroupRoot.detect(f"dsec-doctor-{os.getpid()}")
    root.prepare()
    slot = Slot(root, "s0")
    try:
        slot.make(Shape(64 << 20, 0.5, 16))
        return f"{root.version}: memory, cpu and pids limits set"
    finally:
        slot.remove()
        root.remove()


@probe("cgroup.kill and freeze", needed=True)
def _kill(_: Path) -> str:
    root = CgroupRoot.detect(f"dsec-doctor-{os.getpid()}")
    root.prepare()
    slot = Slot(root, "s0")
    process = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
    try:
        slot.make(Shape(64 << 20, 0.5, 16))
        slot.attach(process.pid)
        slot.freeze()
        slot.kill()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            raise Missing("a frozen process survived cgroup.kill", "Linux 5.14 or newer is needed.") from None
    finally:
        process.kill()
        process.wait()
        slot.remove()
        root.remove()
    return "a frozen process is ended at once"


@probe("swap accounting", feature=True)
def _swap(_: Path) -> str:
    root = CgroupRoot.detect("dsec-doctor")
    if "memory" in root.v1 and not (root.v1["memory"] / "memory.memsw.limit_in_bytes").exists():
        raise Missing("memory limits don't count swap", "Boot with swapaccount=1.")
    return "swap counts against memory limits"


@probe("seccomp", needed=True)
def _seccomp(_: Path) -> str:
    class Filter(ctypes.Structure):
        _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter)))

    # getpid (by its number at offset 0) answers EPERM; that the number differs elsewhere doesn't matter: any call is
    # refused.
    code = (Filter * 1)(Filter(0x06, 0, 0, 0x7FFF0000))
    program = Program(1, code)
    pid = os.fork()
    if pid == 0:
        ok = (
            _libc.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            and _libc.prctl(22, 2, ctypes.byref(program)) == 0
        )
        os._exit(0 if ok else 1)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise Missing("a filter cannot be loaded", "A kernel with CONFIG_SECCOMP_FILTER is needed.")
    return "a filter was loaded"


def landlock_abi() -> int:
    """The version of landlock's interface; -1 (and errno) without it."""
    return int(_libc.syscall(444, None, 0, 1))


@probe("landlock", feature=True)
def _landlock(_: Path) -> str:
    version = landlock_abi()
    if version < 0:
        raise Missing(
            os.strerror(ctypes.get_errno()), "Boot with landlock in lsm=; without it one layer of defence is missing."
        )
    return f"ABI {version}"


@probe("core scheduling", feature=True)
def _core_scheduling(_: Path) -> str:
    cookie = ctypes.c_uint64()
    try:
        syscalls.prctl(syscalls.PR_SCHED_CORE, syscalls.PR_SCHED_CORE_GET, 0, 0, ctypes.addressof(cookie))
    except KernelError as error:
        raise Missing(
            error.strerror or "",
            "Needs CONFIG_SCHED_CORE and hyper-threads; keeps classes of sandboxes off each other's core.",
        ) from None
    return "available"


@probe("pressure stall information", feature=True)
def _psi(_: Path) -> str:
    try:
        return Path("/proc/pressure/memory").read_text().splitlines()[0]
    except OSError as error:
        raise Missing(
            error.strerror or "off", "Boot with psi=1: idle sandboxes are then reclaimed by pressure."
        ) from None


@probe("zram", feature=True)
def _zram(_: Path) -> str:
    if not Path("/sys/class/zram-control").is_dir():
        raise Missing("no zram driver", "modprobe zram: paused sandboxes go to compressed memory.")
    return "present"


@probe("kvm")
def _kvm(_: Path) -> str:
    fd = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    try:
        version = fcntl.ioctl(fd, 0xAE00)
        os.close(fcntl.ioctl(fd, 0xAE01, 0))
    finally:
        os.close(fd)
    return f"API {version}, makes virtual machines; whether they run well is tried by the VM backend"
