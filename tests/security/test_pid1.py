"""The guest: pid 1 inside, and the channel that only it holds."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from security_box import Box

pytestmark = pytest.mark.root

USERS = ("root", "alice")
ATTACH, SEIZE, O_RDONLY, O_RDWR, O_PATH = 16, 0x4206, 0, 2, 0o10000000


@pytest.mark.parametrize("user", USERS)
def test_it_cannot_be_traced(box: Box, user: str) -> None:
    assert box.call("ptrace", ATTACH, 1, 0, 0, user=user) == (-1, errno.EPERM)
    assert box.call("ptrace", SEIZE, 1, 0, 0, user=user) == (-1, errno.EPERM)


@pytest.mark.parametrize("user", USERS)
def test_its_memory_is_out_of_reach(box: Box, user: str) -> None:
    pointer = ctypes.sizeof(ctypes.c_void_p)
    vector = f"x:{'00' * pointer}{(16).to_bytes(pointer, 'little').hex()}"
    for name in ("process_vm_readv", "process_vm_writev"):
        result, error = box.call(name, 1, vector, 1, vector, 1, 0, user=user)
        assert (result, error) == (-1, errno.EPERM), name
    for flags in (O_RDONLY, O_RDWR):
        assert box.call("openat", -100, "s:/proc/1/mem", flags, user=user) == (-1, errno.EACCES)


CLOSED = ("fd/3", "fd/4", "fd/5", "fdinfo/4", "exe", "root", "cwd", "environ", "maps", "smaps", "mem", "syscall",
          "stack", "auxv", "personality", "ns/mnt", "task/1/mem")  # fmt: skip


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", CLOSED)
def test_nothing_of_it_can_be_read(box: Box, name: str, user: str) -> None:
    for flags in (O_RDONLY, O_RDWR, O_PATH):
        opened, content, entries = box.calls(
            ["openat", -100, f"s:/proc/1/{name}", flags],
            ["read", "$0", "z:64", 64],
            ["getdents64", "$0", "z:512", 512],
            user=user,
        )
        if flags == O_PATH:
            assert opened[1] in {0, errno.EACCES, errno.EPERM, errno.ENOENT}
        assert content[0] == -1
        assert content[1] in {errno.EACCES, errno.EPERM, errno.EBADF, errno.EISDIR}, content
        assert entries[0] == -1


@pytest.mark.parametrize("user", USERS)
def test_its_directories_lead_nowhere(box: Box, user: str) -> None:
    for name in ("root/etc", "cwd/etc", "fd/5/cgroup.procs", "fd/4/x", "task/1/root/etc"):
        result, error = box.call("openat", -100, f"s:/proc/1/{name}", O_PATH, user=user)
        assert result == -1
        assert error in {errno.EACCES, errno.EPERM, errno.ENOENT}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("number", range(3, 12))
def test_its_descriptors_cannot_be_taken(box: Box, number: int, user: str) -> None:
    """The channel can't be forged, the control socket can't be used, the cgroup can't be left."""
    opened, taken = box.calls(["pidfd_open", 1, 0], ["pidfd_getfd", "$0", number, 0], user=user)
    assert opened[0] >= 0
    assert taken == (-1, errno.EPERM)
    assert box.call("kcmp", 1, 1, 0, number, number, user=user) == (-1, errno.EPERM)


@pytest.mark.parametrize("user", USERS)
def test_commands_inherit_none_of_its_descriptors(box: Box, user: str) -> None:
    for number in range(3, 40):
        assert box.call("fcntl", number, 1, 0, user=user) == (-1, errno.EBADF)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV, signal.SIGCHLD, 40])
def test_it_cannot_be_killed(box: Box, number: int, user: str) -> None:
    box.calls(["kill", 1, int(number)], ["tgkill", 1, 1, int(number)], ["pidfd_open", 1, 0],
              ["pidfd_send_signal", "$2", int(number), 0, 0], user=user)  # fmt: skip
    assert box.alive


def test_killing_everything_leaves_it(make_box: Callable[..., Box]) -> None:
    box = make_box()
    box.call("kill", -1, int(signal.SIGKILL))
    assert box.alive
    assert box.attack("exit", 3).exit == 3


def test_its_process_group_is_not_the_zygotes(make_box: Callable[..., Box]) -> None:
    """kill(0) by a process that never left pid 1's group must not reach siblings of the same host id."""
    a, b = make_box(), make_box()
    groups = {os.getpgid(box.spawned.pid) for box in (a, b)}
    sessions = {os.getsid(box.spawned.pid) for box in (a, b)}
    assert groups == sessions == {a.spawned.pid, b.spawned.pid}


def test_its_program_is_sealed(box: Box) -> None:
    """As CVE-2019-5736: writing the program that pid 1 runs, on the host too."""
    path = f"/proc/{box.spawned.pid}/exe"
    assert "memfd:dsec-guest" in str(Path(path).readlink())
    for flags in (os.O_RDWR, os.O_RDWR | os.O_TRUNC):
        with pytest.raises(OSError, match=r"busy|permitted|denied") as refused:
            os.open(path, flags)
        assert refused.value.errno in {errno.ETXTBSY, errno.EPERM, errno.EACCES}
    fd = os.open(path, os.O_RDONLY)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & 0xF == 0xF  # seal, shrink, grow, write
    finally:
        os.close(fd)
    assert box.call("openat", -100, "s:/proc/1/exe", O_PATH)[0] == -1


def test_it_is_not_dumpable_and_has_few_capabilities(box: Box) -> None:
    text = box.attack("cat", "/proc/1/status").out
    fields = dict(re.findall(r"^(\w+):\s*(.*)$", text, re.MULTILINE))
    allowed = 0xA00405FB
    for name in ("CapPrm", "CapEff", "CapBnd"):
        assert int(fields[name], 16) == allowed, name
    assert int(fields["CapInh"], 16) == int(fields["CapAmb"], 16) == 0
    assert fields["Seccomp"] == "2"
    assert fields["Seccomp_filters"] == "1"


def test_tracing_ones_own_processes_works(box: Box) -> None:
    """strace and gdb are tools of the trade."""
    assert box.attack("trace-child").out == "7\n"


@pytest.mark.parametrize("user", USERS)
def test_a_file_calls_child_is_as_closed_as_pid_1(box: Box, user: str) -> None:
    """It is a copy of the guest that runs as a user of the sandbox: nobody of that user may trace or read it."""
    child = box.begin_upload(f"/tmp/upload-{user}", user)
    try:
        assert box.call("ptrace", SEIZE, child, 0, 0, user=user) == (-1, errno.EPERM)
        for name in ("mem", "exe", "fd/0", "environ", "maps", "root/etc"):
            for flags in (O_RDONLY, O_RDWR):
                opened, content = box.calls(
                    ["openat", -100, f"s:/proc/{child}/{name}", flags], ["read", "$0", "z:64", 64], user=user
                )
                assert (opened[0], content[0]) == (-1, -1), name
                assert opened[1] in {errno.EACCES, errno.EPERM, errno.ENOENT}
        for number in range(8):
            opened, taken = box.calls(["pidfd_open", child, 0], ["pidfd_getfd", "$0", number, 0], user=user)
            assert opened[0] >= 0
            assert taken == (-1, errno.EPERM)
    finally:
        box.end_upload()
    assert box.attack("cat", f"/tmp/upload-{user}").out == "uploaded"
