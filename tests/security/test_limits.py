"""Limits: a sandbox that takes all it can gets its share, and neither host nor siblings notice."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from security_box import MIB, Box, Nursery

from dsec.kernel import sysctl

pytestmark = pytest.mark.root


def test_processes_are_bounded(make_box: Callable[..., Box]) -> None:
    box = make_box(pids=40)
    count, error = map(int, box.attack("forks", 1000).out.split())
    assert 20 < count < 40
    assert error == errno.EAGAIN
    assert box.slot.usage().pids_refused > 0
    assert box.alive


def test_a_fork_bomb_is_confined_and_ended_whole(make_box: Callable[..., Box]) -> None:
    bomb, sibling = make_box(pids=40), make_box()
    result = bomb.attack("bomb", timeout_s=2)
    assert result.end.kind.name == "TIMEOUT"
    assert bomb.alive
    assert sibling.attack("exit", 5).exit == 5
    deadline = time.monotonic() + 120
    while bomb.slot.usage().pids > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert bomb.slot.usage().pids == 1, "the guest alone is left"


def test_memory_is_bounded_and_the_guest_survives(make_box: Callable[..., Box]) -> None:
    box, sibling = make_box(memory_bytes=64 * MIB), make_box()
    assert box.attack("eat", 512).exit == -9
    assert box.slot.usage().oom_kills >= 1
    assert box.alive
    assert sibling.attack("eat", 32).out == "ate all\n"


def test_many_small_eaters_do_not_take_the_guest(make_box: Callable[..., Box]) -> None:
    box = make_box(memory_bytes=32 * MIB, pids=400)
    box.attack("nibble", 300)
    assert box.alive
    assert box.attack("exit", 0).exit == 0


def test_no_core_dump_leaves_the_sandbox(make_box: Callable[..., Box]) -> None:
    """The host's core_pattern may pipe into a helper that runs as the host's root."""
    box = make_box()
    for user in ("root", "alice"):
        result = box.attack("dump", user=user, cwd="/tmp")
        assert result.exit == -6
        assert result.out == "-1\n", "the hard limit cannot be raised"
    assert not list(box.upper.rglob("core*"))
    assert box.attack("put", "/proc/sys/kernel/core_pattern", "|/bin/attack").calls()[0][0] == -1


@pytest.mark.parametrize(("resource", "name"), [(4, "CORE"), (7, "NOFILE"), (8, "MEMLOCK"), (12, "MSGQUEUE")])
def test_hard_limits_cannot_be_raised(box: Box, resource: int, name: str) -> None:
    infinite = "x:" + "ff" * 16
    assert box.call("prlimit64", 0, resource, infinite, 0) == (-1, errno.EPERM), name
    assert box.call("prlimit64", 1, resource, infinite, 0) == (-1, errno.EPERM), name


def test_inotify_instances_are_the_sandboxes_own(make_box: Callable[..., Box]) -> None:
    """The host counts them per user id, and sandboxes of a project share ids: a quota of each keeps them apart."""
    greedy, sibling = make_box(), make_box()
    count, error = map(int, greedy.attack("exhaust", "inotify", 2000).out.split())
    assert error == errno.EMFILE
    assert count <= 128
    count, _ = map(int, sibling.attack("exhaust", "inotify", 8).out.split())
    assert count == 8


def test_pipe_buffers_run_out_softly(make_box: Callable[..., Box]) -> None:
    """Pipe pages are counted per user id, host-wide; at the soft limit pipes get smaller, for siblings too."""
    greedy, sibling = make_box(), make_box()
    count, error = map(int, greedy.attack("exhaust", "pipes", 2000).out.split())
    assert count > 0
    assert error in {0, errno.EPERM, errno.EMFILE}
    assert sibling.attack("exhaust", "pipes", 1).exit == 0
    assert sibling.calls(["pipe2", "z:8", 0])[0][0] == 0


def test_the_host_is_asked_for_what_shared_ids_need() -> None:
    """Quotas of the kernel that are counted per user id have to be raised on the host; see docs/THREATS.md."""
    wanted = {setting.name for setting in sysctl.WANTED}
    assert {"fs.inotify.max_user_instances", "fs.inotify.max_user_watches", "fs.pipe-user-pages-soft"} <= wanted


@pytest.mark.parametrize("kind", ["cpu", "memory", "pids", "unified"])
def test_its_cgroups_cannot_be_left(box: Box, kind: str) -> None:
    """No cgroup file system is there, none can be mounted, and the guest's descriptor can't be taken (test_pid1)."""
    for path in ("/sys/fs/cgroup", f"/sys/fs/cgroup/{kind}", "/proc/1/fd/5"):
        assert box.call("openat", -100, f"s:{path}/cgroup.procs", 1)[0] == -1
    groups = Path(f"/proc/{box.spawned.pid}/cgroup").read_text()
    assert groups.count(f"/{box.slot.name}") == 1 + len(box.slot.v1)


def test_ending_a_sandbox_ends_all_of_it(nursery: Nursery) -> None:
    box = nursery.make(pids=100)
    box.attack("call", "getuid")
    request = box.run("/bin/attack", "forks", "50", timeout_s=90)
    assert request.exit == 0
    box.close()
    assert not Path(box.slot.v2).exists()
    assert not Path(f"/proc/{box.spawned.pid}").exists()


def test_a_cgroup_is_used_again_after_a_kill(nursery: Nursery) -> None:
    """Linux kills what is cloned into a group that was ever killed; the zygote makes a group of each sandbox's own."""
    box = nursery.make()
    box.slot.kill()
    assert box.wait_end() == 9
    again = nursery.make(slot=box.slot)
    assert again.attack("exit", 4).exit == 4
    again.close()
    box.close()


def test_the_end_of_the_zygote_ends_its_sandboxes(native_programs: Path) -> None:
    """However it ends: nobody could reach them any more."""
    name = f"dsec-security-end-{os.getpid()}"
    nursery = Nursery(Path("/run/dsec") / name, name, native_programs)
    try:
        box = nursery.make()
        os.kill(nursery.zygote.pid, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while box.slot.populated and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not box.slot.populated
    finally:
        nursery.abandon()
