"""How commands end: signals, timeouts, caps, whole kills; and what they leave behind. As it ships and with
sanitizers, with a child cgroup per command and without."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_guest import (
    EXITED,
    KILLED,
    OUTPUT_LIMIT,
    PATIENCE_S,
    SIGNALED,
    TIMEOUT,
    UNIFIED,
    Guest,
    Op,
    alive,
    built,
    gone,
    running,
    wait_for,
)

from dsec.wire.frames import FrameType

pytestmark = pytest.mark.root
KILL_LEFTOVERS = 2
MODES = [
    pytest.param(("static", True, socket.SOCK_SEQPACKET), id="static"),
    pytest.param(("static", False, socket.SOCK_SEQPACKET), id="static-no-cgroup"),
    pytest.param(("static", True, socket.SOCK_STREAM), id="static-stream"),
    pytest.param(("sanitized", True, socket.SOCK_SEQPACKET), id="sanitized"),
]


@pytest.fixture(params=MODES)
def guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    variant, cgroup, kind = request.param
    if cgroup and UNIFIED is None:
        pytest.skip("this host has no cgroup v2 hierarchy")
    with running(built(variant), cgroup=cgroup, kind=kind) as found:
        yield found


# --- signals, timeouts, whole kills ---


def double_fork(pid_file: Path) -> str:
    """A program whose grandchild leaves the session and holds no pipe; it writes its pid."""
    return (
        "import os, time, sys\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        open({str(pid_file)!r}, 'w').write(f'{{os.getpid()}}\\n')\n"
        "        time.sleep(1000)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        f"while not (os.path.exists({str(pid_file)!r}) and open({str(pid_file)!r}).read()): time.sleep(0.01)\n"
        "print('ready', flush=True)\n"
    )


LONGER_AND_LONGER = (3000, 20_000, 120_000)
"""Timeouts in ms, for what a command does before: on a host that stands still the first may be too short."""


def test_signal_to_the_leader_and_to_its_group(guest: Guest) -> None:
    op = guest.start(argv=["sh", "-c", "trap 'echo got; exit 9' TERM; echo ready; while :; do sleep 0.01; done"])
    guest.until(op, b"ready")
    guest.send(FrameType.SIGNAL, op.id, struct.pack("<II", signal.SIGTERM, 0))
    guest.wait(op)
    assert op.end is not None
    assert (op.end.end, op.end.code, bytes(op.out)) == (EXITED, 9, b"ready\ngot\n")

    op = guest.start(argv=["sh", "-c", "sleep 1000 & echo $!; wait"])
    guest.until(op, b"\n")
    guest.send(FrameType.SIGNAL, op.id, struct.pack("<II", signal.SIGTERM, 1))
    guest.wait(op)
    assert op.end is not None
    assert (op.end.end, op.end.code) == (SIGNALED, signal.SIGTERM)
    assert gone(int(op.out))


def test_signals_that_cannot_be(guest: Guest) -> None:
    op = guest.start(argv=["sleep", "1000"])
    while op.pid is None:
        guest.step()
    for number, scope in ((0, 0), (65, 0), (15, 3), (15, 2)):
        op.refused = None
        guest.send(FrameType.SIGNAL, op.id, struct.pack("<II", number, scope))
        guest.ping()
        assert op.refused is not None
        assert op.refused[0] == errno.EINVAL
    op.refused = None
    guest.send(FrameType.SIGNAL, op.id, struct.pack("<II", 9, 2))
    guest.wait(op)
    assert op.end is not None
    assert (op.end.end, op.end.code) == (KILLED, 0)
    guest.send(FrameType.SIGNAL, op.id, struct.pack("<II", 9, 0))
    guest.ping()
    assert op.refused == (errno.ESRCH, b"there is no such process")


def test_timeout_ends_double_forks_too_and_keeps_output(guest: Guest, tmp_path: Path) -> None:
    if guest.cgroup is None:
        pytest.skip("a double fork that left its session is only found by its cgroup")
    for timeout_ms in LONGER_AND_LONGER:
        pid_file = tmp_path / f"pid-{timeout_ms}"
        op = guest.run("python3", "-c", double_fork(pid_file) + "time.sleep(1000)\n", timeout_ms=timeout_ms)
        assert op.end is not None
        assert (op.end.end, op.end.code) == (TIMEOUT, 0)
        if op.out:
            break
    assert bytes(op.out) == b"ready\n"
    assert gone(int(wait_for(pid_file)))
    assert guest.cgroup.children() == []


def test_timeout_of_a_command_that_ignores_sigterm(guest: Guest) -> None:
    script = "trap '' TERM INT HUP; echo here; sleep 1000 & echo $!; while :; do sleep 1; done"
    for timeout_ms in (500, *LONGER_AND_LONGER):
        op = guest.run("sh", "-c", script, timeout_ms=timeout_ms)
        assert op.end is not None
        assert op.end.end == TIMEOUT
        if op.out.count(b"\n") == 2:
            break
    word, pid = bytes(op.out).split()
    assert word == b"here"
    assert gone(int(pid))
    assert op.end.wall_us >= 500_000


def test_a_timeout_that_is_not_reached(guest: Guest) -> None:
    op = guest.run("true", timeout_ms=100_000)
    assert op.end is not None
    assert op.end.end == EXITED


def test_output_cap(guest: Guest) -> None:
    op = guest.run("yes", output_cap=1_000_000)
    assert op.end is not None
    assert (op.end.end, op.end.code, op.end.flags) == (OUTPUT_LIMIT, 0, 1)
    assert bytes(op.out) == b"y\n" * 500_000
    assert op.end.dropped > 0


def test_output_cap_that_is_just_reached_or_missed_by_one(guest: Guest) -> None:
    op = guest.run("printf", "12345", output_cap=5)
    assert op.end is not None
    assert (op.end.end, op.end.flags, op.end.dropped) == (EXITED, 0, 0)
    op = guest.run("sh", "-c", "printf 123; printf 456 >&2", output_cap=5)
    assert op.end is not None
    assert (op.end.end, op.end.flags, op.end.dropped) == (OUTPUT_LIMIT, 1, 1)
    assert len(op.out) + len(op.err) == 5
    op = guest.run("printf", "1", output_cap=0)
    assert op.end is not None
    assert (op.end.end, op.end.dropped) == (OUTPUT_LIMIT, 1)


def test_release_of_a_running_command_ends_it_whole(guest: Guest) -> None:
    op = guest.start(argv=["sh", "-c", "sleep 1000 & echo $!; yes"])
    guest.until(op, b"y\n")
    child, leader = int(bytes(op.out).split()[0]), op.pid
    assert leader is not None
    guest.send(FrameType.RELEASE, op.id)
    guest.ping()
    assert gone(leader)
    assert gone(child)
    guest.ops.clear()
    stale = guest.run("true", op=op.id)
    assert stale.refused is not None
    assert stale.refused[0] == errno.ESTALE


# --- what a command leaves behind ---


def test_background_processes_live_on(guest: Guest, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    code = f"(while [ ! -e {flag} ]; do echo noise; sleep 0.01; done; echo survived > {tmp_path}/result) & echo $!"
    op = guest.run("sh", "-c", code)
    assert op.end is not None
    assert (op.end.end, op.end.code) == (EXITED, 0)
    pid = next(int(word) for word in bytes(op.out).split() if word.isdigit())
    if guest.cgroup:
        assert guest.cgroup.children() == [f"c{op.id}"]
    length = len(op.out)
    time.sleep(0.1)
    guest.ping()
    assert len(op.out) == length, "what is written after the end is dropped"
    guest.release(op)
    guest.ping()
    assert alive(pid), "release of an ended command doesn't touch what it left"
    flag.touch()
    assert wait_for(tmp_path / "result") == "survived\n", "it didn't get SIGPIPE"
    assert gone(pid)
    assert guest.cgroup is None or guest.cgroup.empties()


WHERE = "grep ^0:: /proc/self/cgroup"


def group_of(op: Op) -> str:
    """The cgroup that a command said it is in."""
    return bytes(op.out).split(b"\n")[0].decode().rpartition("/")[2]


def test_a_cgroup_is_used_again_only_when_it_is_empty_and_was_never_killed(guest: Guest) -> None:
    if guest.cgroup is None:
        pytest.skip("no v2 hierarchy")
    guest.run("true")
    assert guest.cgroup.children() == [], "one command alone leaves nothing"
    deadline = time.monotonic() + PATIENCE_S
    last, kept = "none", "one"
    while kept != last:  # it is kept for a moment only: on a busy machine it is gone
        assert time.monotonic() < deadline
        last, kept = kept, group_of(guest.run("sh", "-c", WHERE))
    busy = guest.run("sh", "-c", f"{WHERE}; while [ $((i += 1)) -lt 100000 ]; do :; done")
    idle = guest.run("true")
    assert busy.end is not None
    assert idle.end is not None
    assert 0 < idle.end.cpu_us < busy.end.cpu_us, "CPU time of earlier commands isn't counted again"
    left = guest.run("sh", "-c", f"{WHERE}; sleep 1000 >&- 2>&- & echo $!")
    assert group_of(guest.run("sh", "-c", WHERE)) != group_of(left), "something lives in it"
    killed = guest.start(argv=["sh", "-c", f"{WHERE}; sleep 1000"])
    guest.until(killed, b"\n")
    guest.send(FrameType.RELEASE, killed.id)
    guest.ping()
    assert group_of(guest.run("sh", "-c", WHERE)) != group_of(killed)
    pid = int(bytes(left.out).split()[-1])
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert guest.cgroup.empties()


def test_a_noisy_background_process_neither_holds_the_end_nor_the_guest(guest: Guest) -> None:
    op = guest.run("sh", "-c", "yes & echo $! >&2")
    assert op.end is not None
    assert op.end.end == EXITED
    pid = int(op.err)
    assert bytes(guest.run("echo", "hi").out) == b"hi\n"
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)


def test_leftovers_are_ended_on_request(guest: Guest, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    if guest.cgroup:
        op = guest.run("python3", "-c", double_fork(pid_file), flags=KILL_LEFTOVERS)
        assert gone(int(wait_for(pid_file)))
        assert guest.cgroup.children() == []
    else:
        op = guest.run("sh", "-c", "sleep 1000 & echo $!", flags=KILL_LEFTOVERS)
        assert gone(int(op.out))
    assert op.end is not None
    assert (op.end.end, op.end.code) == (EXITED, 0)


def test_output_of_the_dying_is_delivered(guest: Guest) -> None:
    """All that was in the pipe when the leader ended, though others hold it."""
    op = guest.run("sh", "-c", "sleep 1000 & head -c 60000 /dev/zero; kill -KILL $$")
    assert op.end is not None
    assert (op.end.end, op.end.code) == (SIGNALED, 9)
    assert bytes(op.out) == bytes(60000)


def test_orphans_are_reaped(guest: Guest) -> None:
    op = guest.run("sh", "-c", "(sleep 0.05 & echo $!); exit 0")
    assert gone(int(op.out))
    deadline = time.monotonic() + PATIENCE_S
    while alive(int(op.out)):
        assert time.monotonic() < deadline, "a zombie"
        time.sleep(0.01)


def test_cpu_time_of_children_counts(guest: Guest) -> None:
    burn = "import time\nt = time.process_time()\nwhile time.process_time() - t < 0.3: pass"
    op = guest.run("sh", "-c", f'python3 -c "{burn}"; true')
    assert op.end is not None
    assert op.end.cpu_us >= 300_000


def test_fairness(guest: Guest) -> None:
    """A command that floods its stream doesn't keep others from being heard."""
    flood = guest.start(argv=["yes"])
    guest.until(flood, b"y\n")
    for _ in range(5):
        assert bytes(guest.run("echo", "hi").out) == b"hi\n"
    guest.release(flood)


# --- as pid 1 ---


@pytest.mark.parametrize("cgroup", [True, False])
def test_as_pid_1_of_a_namespace(cgroup: bool, tmp_path: Path) -> None:
    """It reaps what isn't its own, and its end is the end of everything, of what left its session too."""
    prefix = ("/usr/bin/unshare", "--pid", "--fork", "--mount-proc")
    with running(built("static"), cgroup=cgroup, prefix=prefix) as guest:
        op = guest.run("sh", "-c", "echo $PPID $$; (sleep 0.05 &); exit 4")
        assert op.end is not None
        assert (op.end.end, op.end.code) == (EXITED, 4)
        assert bytes(op.out).split() == [b"1", str(op.pid).encode()]
        orphan = guest.start(
            argv=["sh", "-c", "setsid sh -c 'sleep 1000 & echo $! >&2' & wait; echo ready; sleep 1000"]
        )
        guest.until(orphan, b"ready")
        inside = Path(f"/proc/{guest.pid}/task/{guest.pid}/children").read_text().split()
        assert len(inside) == 1, "the guest, as the child of unshare"
        deadline = time.monotonic() + PATIENCE_S
        while b"Z" in bytes(guest.run("sh", "-c", "sleep 0.1; ps -A -o stat=; true").out):
            assert time.monotonic() < deadline, "a zombie"
        namespace = Path(f"/proc/{inside[0]}/ns/pid").readlink()
    left = []
    for process in Path("/proc").glob("[0-9]*/ns/pid"):
        try:
            left += [process] if process.readlink() == namespace else []
        except OSError:
            continue
    assert not left
