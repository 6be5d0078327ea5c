"""Out of the sandbox by namespaces and mounts."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from security_box import Box

pytestmark = pytest.mark.root

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME = (
    0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80,
)  # fmt: skip
REFUSED = {errno.EPERM, errno.ENOSPC, errno.EACCES, errno.EINVAL}
USERS = ("root", "alice")


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("flag", [NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME])
def test_no_nested_namespaces(box: Box, user: str, flag: int) -> None:
    assert box.call("unshare", flag, user=user) == (-1, errno.EPERM)
    # CLONE_NEWTIME can't be asked of clone(2): there it is part of the exit signal
    if flag != NEWTIME:
        assert box.call("clone", flag | 17, 0, 0, 0, 0, user=user) == (-1, errno.EPERM)
    result, error = box.call("clone3", f"x:{flag.to_bytes(8, 'little').hex()}{'00' * 56}", 64, user=user)
    assert result == -1
    assert error in {errno.EPERM, errno.ENOSPC}


@pytest.mark.parametrize("user", USERS)
def test_a_user_namespace_with_everything_is_refused(box: Box, user: str) -> None:
    """clone3 hides its flags from seccomp: the limit of the namespace refuses it."""
    flags = NEWUSER | NEWNS | NEWPID | NEWNET
    result, error = box.call("clone3", f"x:{flags.to_bytes(8, 'little').hex()}{'00' * 56}", 64, user=user)
    assert (result, error) == (-1, errno.ENOSPC)


def test_the_limits_of_namespaces_cannot_be_raised(box: Box) -> None:
    for name in ("max_user_namespaces", "max_mnt_namespaces", "max_inotify_instances"):
        [(result, error)] = box.attack("put", f"/proc/sys/user/{name}", "1000").calls()
        assert result == -1
        assert error in {errno.EACCES, errno.EROFS}
    assert box.attack("cat", "/proc/sys/user/max_user_namespaces").out == "0\n"


@pytest.mark.parametrize("kind", ["mnt", "user", "pid", "net", "ipc", "uts", "cgroup"])
def test_entering_namespaces(box: Box, kind: str) -> None:
    """Its own ones are the only ones it can name: even those give nothing, and pid 1's can't be opened."""
    opened, entered = box.calls(["openat", -100, f"s:/proc/self/ns/{kind}", 0], ["setns", "$0", 0])
    assert opened[0] >= 0
    assert entered[0] == -1
    assert entered[1] in {errno.EPERM, errno.EINVAL}
    assert box.call("openat", -100, f"s:/proc/1/ns/{kind}", 0) == (-1, errno.EACCES)


@pytest.mark.parametrize(
    "fs", ["tmpfs", "proc", "sysfs", "cgroup2", "devpts", "mqueue", "overlay", "bpf", "devtmpfs", "erofs"]
)
def test_no_new_mounts(box: Box, fs: str) -> None:
    assert box.call("mount", "s:none", "s:/tmp", f"s:{fs}", 0, 0) == (-1, errno.EPERM)
    assert box.call("fsopen", f"s:{fs}", 0) == (-1, errno.EPERM)


def test_no_bind_move_or_remount(box: Box) -> None:
    bind, move, remount, readonly, private, rec = 0x1000, 0x2000, 0x20, 1, 1 << 18, 0x4000
    for source, target, flags in (
        ("/tmp", "/proc/sys", bind), ("/proc", "/tmp", bind), ("/", "/tmp", bind | rec), ("/proc/sys", "/tmp", move),
        ("none", "/proc/sys", remount | bind), ("none", "/", remount), ("none", "/", remount | bind | readonly),
        ("none", "/", private | rec), ("none", "/dev", remount | bind),
    ):  # fmt: skip
        result, error = box.call("mount", f"s:{source}", f"s:{target}", 0, flags, 0)
        assert (result, error) == (-1, errno.EPERM), (source, target, flags)
    assert box.call("open_tree", -100, "s:/", 1) == (-1, errno.EPERM)
    assert box.call("move_mount", -100, "s:/proc/sys", -100, "s:/tmp", 0) == (-1, errno.EPERM)
    assert box.call("mount_setattr", -100, "s:/", 0, f"x:{'00' * 8}01{'00' * 7}{'00' * 16}", 32) == (-1, errno.EPERM)
    result, error = box.call("open_tree_attr", -100, "s:/", 1, f"x:{'00' * 32}", 32)
    assert result == -1
    assert error in {errno.EPERM, errno.ENOSYS}


@pytest.mark.parametrize(
    "mount", ["/proc/kallsyms", "/proc/sys", "/proc/keys", "/proc/bus", "/proc/meminfo", "/proc", "/sys", "/dev", "/"]
)
@pytest.mark.parametrize("flags", [0, 2, 8], ids=["plain", "detach", "nofollow"])
def test_no_unmasking(box: Box, mount: str, flags: int) -> None:
    result, error = box.call("umount2", f"s:{mount}", flags)
    assert result == -1
    assert error in {errno.EPERM, errno.EINVAL}


def test_pivot_root_is_refused(box: Box) -> None:
    assert box.call("pivot_root", "s:/", "s:/tmp") == (-1, errno.EPERM)


def test_chroot_does_not_lead_out(make_box: Callable[..., Box]) -> None:
    """chroot is allowed (package builds use it); climbing out of one ends at the sandbox's own root."""
    box = make_box()
    result = box.attack("climb")
    assert result.exit == 0, result
    own = box.attack("call", "getuid")  # the root that the climb ended at runs our program still
    assert own.exit == 0


def test_the_host_name_is_its_own(make_box: Callable[..., Box], box: Box) -> None:
    host = Path("/proc/sys/kernel/hostname").read_text()
    named = make_box(hostname="agent-7")
    assert named.attack("cat", "/proc/sys/kernel/hostname").out == "agent-7\n"
    assert box.attack("cat", "/proc/sys/kernel/hostname").out == f"{box.sandbox}\n"
    assert box.attack("cat", "/proc/sys/kernel/domainname").out.strip() in {"", "(none)"}
    assert box.call("sethostname", "s:other", 5) == (-1, errno.EPERM)
    assert box.call("setdomainname", "s:other", 5) == (-1, errno.EPERM)
    assert Path("/proc/sys/kernel/hostname").read_text() == host


def test_one_sandbox_does_not_see_the_other(make_box: Callable[..., Box]) -> None:
    a, b = make_box(), make_box()
    opened = a.calls(["openat", -100, "s:/tmp/marker", 0o102, 0o600])
    assert opened[0][0] >= 0
    assert a.attack("cat", "/tmp/marker").exit == 0
    assert b.attack("cat", "/tmp/marker").err == f"{errno.ENOENT}\n"
    mounts = b.attack("cat", "/proc/self/mountinfo").out
    assert a.sandbox not in mounts
    pids = {name for name in b.attack("cat", "/proc/self/status").out.splitlines() if name.startswith("NSpid")}
    assert len(pids) == 1
    assert len(next(iter(pids)).split()) == 2, "only the innermost pid namespace shows"
