"""The guest runs commands: streams, users, errors, limits, whole kills, leftovers. As it ships and with sanitizers,
with a child cgroup per command and without."""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_guest import (
    EXITED,
    PATIENCE_S,
    READ,
    SIGNALED,
    START_FAILED,
    STAT,
    UNIFIED,
    WRITE,
    Guest,
    Op,
    built,
    gone,
    running,
)

from dsec.wire import frames
from dsec.wire.frames import FrameType

pytestmark = pytest.mark.root
STDIN, KILL_LEFTOVERS, MERGE = 1, 2, 4
USER, CWD, EXEC_STAGE = 1, 2, 3
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


# --- streams, exit codes ---


def test_streams_apart_and_exit_code(guest: Guest) -> None:
    op = guest.run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (bytes(op.out), bytes(op.err)) == (b"out\n", b"err\n")
    assert op.end is not None
    assert (op.end.end, op.end.code, op.end.stdout_end, op.end.stderr_end) == (EXITED, 3, 4, 4)
    assert op.end.wall_us > 0
    assert op.end.cpu_us > 0
    assert op.end.max_rss > 100_000
    assert op.started_count == 1


def test_merged_streams(guest: Guest) -> None:
    op = guest.run("sh", "-c", "echo 1; echo 2 >&2; echo 3", flags=MERGE)
    assert (bytes(op.out), bytes(op.err)) == (b"1\n2\n3\n", b"")


def test_killed_by_its_own_signal(guest: Guest) -> None:
    op = guest.run("sh", "-c", "kill -SEGV $$")
    assert op.end is not None
    assert (op.end.end, op.end.code) == (SIGNALED, signal.SIGSEGV)


def test_output_that_is_not_text(guest: Guest) -> None:
    op = guest.run("printf", r"\377\000\376\n")
    assert bytes(op.out) == b"\xff\x00\xfe\n"


def test_stdin_is_empty_unless_asked_for(guest: Guest) -> None:
    op = guest.run("sh", "-c", "cat; readlink /proc/self/fd/0")
    assert bytes(op.out) == b"/dev/null\n"


def test_stdin_echo_of_10_mb(guest: Guest) -> None:
    data = os.urandom(10 << 20)
    op = guest.start(argv=["cat"], flags=STDIN)
    guest.feed(op, data)
    guest.wait(op)
    assert bytes(op.out) == data
    assert op.stdin_acked == len(data)


def test_stdin_that_nobody_reads_is_dropped(guest: Guest) -> None:
    op = guest.start(argv=["sh", "-c", "exec <&-; sleep 0.2; echo done"], flags=STDIN)
    guest.feed(op, bytes(3 << 20), eof=False)
    guest.wait(op)
    assert bytes(op.out) == b"done\n"
    guest.send(FrameType.STDIN, op.id, struct.pack("<Q", 3 << 20) + b"late")
    while op.stdin_acked != (3 << 20) + 4:
        assert guest.step() is not None


def test_output_waits_for_the_window(guest: Guest) -> None:
    op = guest.start(argv=["head", "-c", "1000000", "/dev/zero"])
    while len(op.out) < frames.WINDOW:
        assert guest.step(ack=False) is not None
    with pytest.raises(TimeoutError):
        guest.step(ack=False, patience_s=0.3)
    guest.ack(op)
    guest.wait(op)
    assert bytes(op.out) == bytes(1_000_000)


def test_no_descriptor_of_the_guest_leaks(guest: Guest) -> None:
    op = guest.run("ls", "/proc/self/fd")
    assert bytes(op.out).split() == [b"0", b"1", b"2", b"3"]  # 3: ls reads the directory


def test_signals_are_as_usual(guest: Guest) -> None:
    op = guest.run("sh", "-c", "grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status")
    masks = dict(line.split() for line in op.out.decode().splitlines())
    assert int(masks["SigBlk:"], 16) == 0
    assert int(masks["SigIgn:"], 16) == 0


def test_a_session_of_its_own(guest: Guest) -> None:
    op = guest.run("python3", "-c", "import os; print(os.getsid(0) == os.getpid() == os.getpgid(0))")
    assert bytes(op.out) == b"True\n"


# --- environment, users, directories ---


def test_environment_is_what_was_given_and_defaults(guest: Guest) -> None:
    op = guest.run("env", env=["A=1", "B=", b"C=\xff", "HOME=/elsewhere"])
    assert sorted(bytes(op.out).splitlines()) == [
        b"A=1", b"B=", b"C=\xff", b"HOME=/elsewhere", b"LOGNAME=root",
        b"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", b"USER=root",
    ]  # fmt: skip


def test_path_is_the_childs(guest: Guest, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho mine\n")
    tool.chmod(0o755)
    assert bytes(guest.run("tool", env=[f"PATH=/nowhere:{tmp_path}"]).out) == b"mine\n"


def test_user_by_name_with_groups_and_home(guest: Guest) -> None:
    entry = pwd.getpwnam("games")
    op = guest.run("sh", "-c", "id -u; id -g; id -G; echo $HOME $USER; echo x > /dev/stdout", user="games")
    groups = " ".join(map(str, os.getgrouplist("games", entry.pw_gid)))
    expected = f"{entry.pw_uid}\n{entry.pw_gid}\n{groups}\n{entry.pw_dir} games\nx\n"
    assert op.out.decode() == expected, op.err


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("12345", b"12345 12345"), ("12345:23456", b"12345 23456"), ("games:tty", b"5 5"), ("0", b"0 0")],
)
def test_user_by_number(guest: Guest, spec: str, expected: bytes) -> None:
    op = guest.run("sh", "-c", "echo $(id -u) $(id -g)", user=spec)
    assert bytes(op.out).strip() == expected


def test_a_user_that_is_not_root_has_no_capabilities(guest: Guest) -> None:
    op = guest.run("grep", "-E", "^Cap(Prm|Eff|Amb)", "/proc/self/status", user="12345")
    assert {line.split()[1] for line in bytes(op.out).splitlines()} == {b"0" * 16}


def test_working_directory(guest: Guest, tmp_path: Path) -> None:
    assert bytes(guest.run("pwd", cwd=str(tmp_path)).out) == f"{tmp_path}\n".encode()
    assert bytes(guest.run("pwd").out) == b"/\n"


def test_open_files_limit(guest: Guest) -> None:
    op = guest.run("sh", "-c", "ulimit -n; ulimit -Hn", nofile=77)
    assert bytes(op.out) == b"77\n77\n"


# --- starts that fail ---


def failed(op: Op) -> tuple[int, int]:
    assert op.end is not None
    assert op.end.end == START_FAILED
    assert op.started_count == 0
    return op.end.stage, op.end.code


def test_starts_that_fail_say_where_and_why(guest: Guest, tmp_path: Path) -> None:
    plain, script, bad = tmp_path / "plain", tmp_path / "script", tmp_path / "bad"
    plain.write_text("x")
    script.write_text("echo no interpreter line\n")
    script.chmod(0o755)
    bad.write_text("#!/no/such/interpreter\n")
    bad.chmod(0o755)
    assert failed(guest.run("no-such-command")) == (EXEC_STAGE, errno.ENOENT)
    assert failed(guest.run("/no/such/command")) == (EXEC_STAGE, errno.ENOENT)
    assert failed(guest.run(str(plain))) == (EXEC_STAGE, errno.EACCES)
    assert failed(guest.run("plain", env=[f"PATH={tmp_path}:/usr/bin"])) == (EXEC_STAGE, errno.EACCES)
    assert failed(guest.run(str(script))) == (EXEC_STAGE, errno.ENOEXEC)
    assert failed(guest.run("script", env=[f"PATH={tmp_path}"])) == (EXEC_STAGE, errno.ENOEXEC)
    assert failed(guest.run(str(bad))) == (EXEC_STAGE, errno.ENOENT)
    assert failed(guest.run(str(tmp_path))) == (EXEC_STAGE, errno.EACCES)
    assert failed(guest.run("true", cwd="/no/such")) == (CWD, errno.ENOENT)
    assert failed(guest.run("true", cwd=str(plain))) == (CWD, errno.ENOTDIR)
    assert failed(guest.run("true", user="nobody-knows")) == (USER, errno.ENOENT)
    assert failed(guest.run("true", user="root:nobody-knows")) == (USER, errno.ENOENT)
    assert failed(guest.run("true", user=":0")) == (USER, errno.EINVAL)
    if guest.cgroup:
        assert guest.cgroup.empties()


def test_huge_argv_and_env(guest: Guest) -> None:
    argument = "x" * 100_000
    op = guest.run(
        "sh", "-c", "echo ${#1} ${#9}; env | wc -c", "sh", *[argument] * 9, env=[f"V{i}={argument}" for i in range(3)]
    )
    assert bytes(op.out).split()[:2] == [b"100000", b"100000"]
    assert int(bytes(op.out).split()[2]) > 300_000
    too_much = guest.run("true", *["x" * 100_000] * 35)
    assert failed(too_much) == (EXEC_STAGE, errno.E2BIG)
    one_too_long = guest.run("true", "x" * 200_000)
    assert failed(one_too_long) == (EXEC_STAGE, errno.E2BIG)
    many = guest.run("true", *["a"] * 100_000)
    assert many.end is not None
    assert many.end.end == EXITED


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, errno.EINVAL),
        ({"argv": [""]}, errno.EINVAL),
        ({"argv": ["a\0b"]}, errno.EINVAL),
        ({"argv": ["true"], "env": ["no-equals"]}, errno.EINVAL),
        ({"argv": ["true"], "env": ["=x"]}, errno.EINVAL),
        ({"argv": ["true"], "cwd": ["/", "/tmp"]}, errno.EINVAL),
        ({"argv": ["true"], "user": ""}, errno.EINVAL),
        ({"argv": ["true"], "flags": 1 << 20}, errno.EINVAL),
        ({"argv": ["true"], "key": b"k" * 129}, errno.EINVAL),
        ({"argv": ["true"], "timeout_ms": b"four"}, errno.EPROTO),
        ({"argv": ["true"], "pid": 1}, errno.EPROTO),
        ({"kind": 99}, errno.EINVAL),
        ({"kind": 10}, errno.EOPNOTSUPP),  # a way out: it would have turned the net namespace around, the host's here
    ],
)
def test_bad_requests_are_refused(guest: Guest, fields: dict[str, object], code: int) -> None:
    op = guest.wait(guest.start(**{"kind": 0, **fields}))  # type: ignore[arg-type]
    assert op.refused is not None
    assert op.refused[0] == code
    assert op.refused[1]
    guest.ops.clear()
    assert guest.run("true", op=op.id).end is not None, "a refused number can be used"


def test_a_path_is_needed(guest: Guest) -> None:
    for kind in (READ, WRITE, STAT):
        op = guest.wait(guest.start(kind))
        assert op.refused is not None
        assert op.refused[0] == errno.EINVAL


def test_a_request_of_over_4_mib_is_refused(guest: Guest) -> None:
    op = guest.ops.setdefault(1, Op(1))
    part = bytes(frames.MAX_PAYLOAD)
    for _ in range(70):
        guest.send(FrameType.START, 1, part, frames.Flag.MORE)
    guest.send(FrameType.START, 1, b"")
    guest.wait(op)
    assert op.refused is not None
    assert op.refused[0] == errno.E2BIG
    assert guest.run("true", op=2).end is not None


def test_two_operations_with_one_key(guest: Guest) -> None:
    first = guest.start(argv=["sleep", "100"], key=b"k")
    second = guest.wait(guest.start(argv=["true"], key=b"k"))
    assert second.refused is not None
    assert second.refused[0] == errno.EEXIST
    guest.release(first)
    guest.ping()
    assert guest.run("true", key=b"k").end is not None


def test_a_limit_on_operations(guest: Guest) -> None:
    ops = [guest.start(argv=["/no/such"], user="0") for _ in range(frames.MAX_OPS)]
    for op in ops:
        guest.wait(op)
    refused = guest.run("true")
    assert refused.refused is not None
    assert refused.refused[0] == errno.EAGAIN
    for op in ops:
        guest.release(op)
    assert guest.run("true").end is not None


# --- the guest itself ---


def test_the_guest_cannot_be_dumped_or_traced(tmp_path: Path) -> None:
    """As a user other than root it shows: its files in /proc belong to root all the same."""
    program = tmp_path / "guest"
    shutil.copy(built("static"), program)
    for part in (tmp_path, *tmp_path.parents[:-2]):
        part.chmod(part.stat().st_mode | 0o011)
    prefix = ("/usr/bin/setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")
    with running(program, cgroup=False, prefix=prefix) as guest:
        assert "Uid:\t12345\t" in Path(f"/proc/{guest.pid}/status").read_text()
        assert Path(f"/proc/{guest.pid}/fd").stat().st_uid == 0


def test_the_guest_is_small() -> None:
    """Private memory, without pages of the program itself, which all sandboxes share."""
    with running(built("static")) as guest:
        rollup = Path(f"/proc/{guest.pid}/smaps").read_text().split("\n")
        text = str(built("static"))
        kib, mapped_from_file = 0, False
        for line in rollup:
            if "-" in line.split(" ")[0]:
                mapped_from_file = line.endswith(text) and " r" in line and "w" not in line.split()[1]
            elif line.startswith("Private_Dirty") and not mapped_from_file:
                kib += int(line.split()[1])
        assert 0 < kib <= 150


def test_the_end_of_the_control_socket_ends_everything(guest: Guest) -> None:
    op = guest.start(argv=["sh", "-c", "sleep 1000 & echo $!; sleep 1000"])
    guest.until(op, b"\n")
    guest.control.shutdown(socket.SHUT_RDWR)
    assert gone(int(op.out))
    assert op.pid is not None
    assert gone(op.pid)


def test_memory_is_given_back() -> None:
    with running(built("static")) as guest:
        before = guest.private_kib()
        ops = [guest.start(argv=["head", "-c", "300000", "/dev/zero"]) for _ in range(40)]
        for op in ops:
            guest.wait(op)
        for op in ops:
            guest.release(op)
        guest.ping()
        deadline = time.monotonic() + PATIENCE_S
        while guest.private_kib() > before + 200:
            assert time.monotonic() < deadline, f"{before} KiB before, {guest.private_kib()} after"
            time.sleep(0.05)


def test_many_at_once_have_streams_of_their_own(guest: Guest) -> None:
    ops = [guest.start(argv=["sh", "-c", f"echo {i}; cat; echo {i} >&2"], flags=STDIN) for i in range(60)]
    for i, op in enumerate(ops):
        guest.feed(op, f"in {i}\n".encode())
    for i, op in enumerate(ops):
        guest.wait(op)
        assert (bytes(op.out), bytes(op.err)) == (f"{i}\nin {i}\n".encode(), f"{i}\n".encode())
