"""The guest's terminals: size, resize, signals by what is typed, job control, the end of input, no byte lost at the
end, hang-up. As it ships and with sanitizers."""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_guest import EXITED, KILLED, OUTPUT_LIMIT, SIGNALED, START_FAILED, Guest, Op, built, gone, running

from dsec.wire.frames import FrameType, Tag

pytestmark = pytest.mark.root
KILL_LEFTOVERS, PTY = 2, 8
TERMINAL_STAGE = 8
MODES = [
    pytest.param(("static", True), id="static"),
    pytest.param(("static", False), id="static-no-cgroup"),
    pytest.param(("sanitized", True), id="sanitized"),
]


@pytest.fixture(params=MODES)
def guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    variant, cgroup = request.param
    with running(built(variant), cgroup=cgroup) as found:
        yield found


def begin(guest: Guest, *argv: str, **fields: object) -> Op:
    return guest.start(argv=list(argv), flags=fields.pop("flags", PTY), **fields)


def shell(guest: Guest, script: str, **fields: object) -> Op:
    return begin(guest, "sh", "-c", script, **fields)


def type_in(guest: Guest, op: Op, data: bytes, at: int = 0, *, eof: bool = False) -> int:
    guest.feed(op, data, start=at, eof=eof)
    return at + len(data)


def resize(guest: Guest, op: Op, cols: int, rows: int) -> None:
    guest.send(FrameType.RESIZE, op.id, struct.pack("<HH", cols, rows))


def text(op: Op) -> str:
    return bytes(op.out).decode().replace("\r\n", "\n")


def ended(op: Op) -> tuple[int, int]:
    assert op.end is not None, op
    return op.end.end, op.end.code


def test_a_terminal_and_everything_on_one_stream(guest: Guest) -> None:
    script = (
        "tty >/dev/null && test -t 0 -a -t 1 -a -t 2 && echo out; echo err >&2; echo $TERM; ps -o pid=,sid=,tty= -p $$"
    )
    op = guest.wait(shell(guest, script, env=["PATH=/usr/bin:/bin"]))
    lines = text(op).split("\n")
    assert lines[:3] == ["out", "err", "xterm-256color"]
    pid, session, tty = lines[3].split()
    assert pid == session
    assert tty.startswith("pts/")
    assert (ended(op), bytes(op.err)) == ((EXITED, 0), b"")


def test_term_is_the_callers_where_it_says_one(guest: Guest) -> None:
    assert text(guest.wait(shell(guest, "echo $TERM", env=["PATH=/usr/bin:/bin", "TERM=dumb"]))) == "dumb\n"


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        (None, "24 80"),
        (0, "24 80"),
        (120 << 16 | 40, "40 120"),
        (0 << 16 | 40, "40 80"),
        (65535 << 16 | 65535, "4096 4096"),
        (1 << 16 | 1, "1 1"),
    ],
)
def test_size(guest: Guest, asked: int | None, size: str) -> None:
    fields = {} if asked is None else {"pty_size": asked}
    assert text(guest.wait(shell(guest, "stty size", **fields))) == size + "\n"


def test_resize_signals_the_foreground(guest: Guest) -> None:
    op = shell(guest, "trap 'stty size' WINCH; echo ready; while ! read line; do :; done; echo $line")
    guest.until(op, b"ready")
    resize(guest, op, 100, 50)
    guest.until(op, b"50 100")
    resize(guest, op, 0, 0)  # as it is: no signal
    resize(guest, op, 0, 60)
    guest.until(op, b"60 100")
    resize(guest, op, 65535, 65535)
    guest.until(op, b"4096 4096")
    type_in(guest, op, b"done\n")
    guest.wait(op)
    assert text(op).count("100") == 2


def test_resize_without_a_terminal(guest: Guest) -> None:
    op = guest.start(argv=["sleep", "60"])
    guest.ping()
    resize(guest, op, 80, 24)
    while op.refused is None:
        guest.step()
    assert op.refused[0] == errno.ENOTTY
    guest.release(op)
    done = guest.wait(shell(guest, "true"))
    resize(guest, done, 80, 24)
    while done.refused is None:
        guest.step()
    assert done.refused[0] == errno.ESRCH


def test_typed_signals_reach_the_foreground_group(guest: Guest) -> None:
    op = shell(guest, "trap 'echo caught; exit 5' INT; echo ready; sleep 1000 & wait")
    guest.until(op, b"ready")
    type_in(guest, op, b"\x03")
    guest.wait(op)
    assert ended(op) == (EXITED, 5)
    assert "caught" in text(op)
    op = begin(guest, "sleep", "1000")
    while op.pid is None:
        guest.step()
    type_in(guest, op, b"\x03")
    assert ended(guest.wait(op)) == (SIGNALED, signal.SIGINT)
    op = begin(guest, "sleep", "1000")
    type_in(guest, op, b"\x1c")
    assert ended(guest.wait(op)) == (SIGNALED, signal.SIGQUIT)


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")
def test_an_interactive_shell_with_job_control(guest: Guest) -> None:
    op = begin(guest, "bash", "--norc", "-i", env=["PATH=/usr/bin:/bin", "PS1=prompt> ", "HOME=/"])
    guest.until(op, b"prompt> ")
    at = type_in(guest, op, b"sh -c 'echo run\"\"ning; exec sleep 1000'\n")
    guest.until(op, b"running")
    at = type_in(guest, op, b"\x1a", at)  # ^Z
    guest.until(op, b"Stopped")
    ended_job = b"kill -KILL %1; while jobs -s | grep -q .; do sleep 0.02; done"  # `exit` minds a stopped job
    at = type_in(guest, op, ended_job + b"; echo ju''st\n", at)
    guest.until(op, b"just")
    type_in(guest, op, b"exit 7\n", at)
    assert ended(guest.wait(op)) == (EXITED, 7)
    assert b"no job control" not in op.out


def test_echo_and_the_end_of_input(guest: Guest) -> None:
    op = begin(guest, "cat")
    type_in(guest, op, b"whole line\nhalf", eof=True)
    guest.wait(op)
    assert ended(op) == (EXITED, 0)
    assert text(op).replace("\x04", "").replace("^D", "").replace("\b", "") == "whole line\nhalfwhole line\nhalf"
    op = begin(guest, "cat")
    type_in(guest, op, b"", eof=True)
    assert ended(guest.wait(op)) == (EXITED, 0)


def test_the_end_of_input_ends_an_interactive_shell(guest: Guest) -> None:
    op = begin(guest, "sh", "-i", env=["PATH=/usr/bin:/bin", "PS1=> "])
    type_in(guest, op, b"echo fi''rst\necho la''st\n", eof=True)
    guest.wait(op)
    assert ended(op) == (EXITED, 0)
    assert "first" in text(op)
    assert "last" in text(op)


@pytest.mark.parametrize("size", [1, 4095, 4096, 65_536, 1_000_000])
def test_no_byte_is_lost_at_the_end(guest: Guest, size: int) -> None:
    for _ in range(10):
        op = guest.wait(shell(guest, f"stty -opost; head -c {size} /dev/zero | tr '\\0' x; printf end"))
        assert len(op.out) == size + 3
        assert bytes(op.out[-4:]) == b"xend"
        assert ended(op) == (EXITED, 0)
        assert op.end is not None
        assert op.end.stdout_end == size + 3
        guest.release(op)


def test_all_that_is_typed_arrives(guest: Guest) -> None:
    op = shell(guest, "stty raw -echo; echo ready; head -c 300000 | md5sum")
    guest.until(op, b"ready")
    type_in(guest, op, bytes(range(256)) * 1200)
    guest.wait(op)
    assert ended(op) == (EXITED, 0)
    assert hashlib.md5((bytes(range(256)) * 1200)[:300_000]).hexdigest() in text(op)


def test_the_terminal_is_hung_up_with_its_leader(guest: Guest, tmp_path: Path) -> None:
    note = tmp_path / "note"
    mark = tmp_path / "mark"
    loop = f"echo > {mark}; while echo x; do sleep 0.01; done 2>/dev/null; echo hung up > {note}"
    script = f"trap '' HUP; (echo $BASHPID; {loop}) & until test -e {mark}; do sleep 0.01; done"
    op = guest.wait(begin(guest, "bash", "-c", script, flags=PTY))
    assert ended(op) == (EXITED, 0)
    pid = int(re.match(r"\d+", text(op))[0])  # type: ignore[index]
    assert gone(pid), "it writes into a terminal that nobody reads"
    assert note.read_text() == "hung up\n"


def test_release_ends_everything_and_hangs_up(guest: Guest) -> None:
    op = begin(guest, "bash", "-c", "sleep 1000 & echo $!; sleep 1000")
    guest.until(op, b"\n")
    pid = int(op.out)
    leader = op.pid
    assert leader is not None
    guest.release(op)
    assert gone(leader)
    assert gone(pid)
    if guest.cgroup:
        guest.ping()


def test_a_leader_that_lets_go_of_its_terminal_lives_on(guest: Guest) -> None:
    script = "exec </dev/null >/dev/null 2>&1; sleep 0.2; echo back >/dev/tty; sleep 0.1; exit 4"
    op = guest.wait(shell(guest, script))
    assert (text(op), ended(op)) == ("back\n", (EXITED, 4))


def test_other_users_own_their_terminal(guest: Guest) -> None:
    op = guest.wait(shell(guest, "echo $(id -u) $(stat -c %u $(tty)); echo hi > $(tty)", user="65534:65534"))
    assert text(op) == "65534 65534\nhi\n"


def test_the_cap_and_the_timeout_hold(guest: Guest) -> None:
    op = guest.wait(begin(guest, "yes", output_cap=10_000))
    assert (ended(op)[0], len(op.out)) == (OUTPUT_LIMIT, 10_000)
    op = begin(guest, "sleep", "1000")
    guest.ping()
    guest.send(FrameType.SIGNAL, op.id, struct.pack("<II", 9, 2))
    assert ended(guest.wait(op))[0] == KILLED


def test_a_resync_says_that_it_is_a_terminal(guest: Guest) -> None:
    op = shell(guest, "echo before; read line; echo $line", pty_size=100 << 16 | 30)
    guest.until(op, b"before")
    resize(guest, op, 90, 0)
    guest.ping()
    guest.attach()
    guest.hello()
    state = op.states[-1]
    assert struct.unpack("<Q", state[Tag.PTY_SIZE])[0] == 90 << 16 | 30
    assert struct.unpack("<Q", state[Tag.AGE_MS])[0] < 3_600_000
    assert struct.unpack("<Q", state[Tag.PID])[0] == op.pid
    type_in(guest, op, b"after\n")
    guest.wait(op)
    assert text(op) == "before\nafter\nafter\n"


def test_requests_that_make_no_sense(guest: Guest) -> None:
    for fields in (
        {"argv": ["true"], "pty_size": 80 << 16 | 24},
        {"kind": 1, "path": "/etc/passwd", "flags": PTY},
        {"argv": ["true"], "flags": PTY, "pty_size": 1 << 32},
    ):
        op = guest.wait(guest.start(**fields))  # type: ignore[arg-type]
        assert op.refused is not None, fields
        assert op.refused[0] == errno.EINVAL


def test_no_descriptor_is_left(guest: Guest) -> None:
    descriptors = Path(f"/proc/{guest.pid}/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(20):
        op = guest.wait(shell(guest, "sleep 1000 & echo x"))
        guest.release(op)
    failing = guest.wait(begin(guest, "/no/such/program"))
    assert ended(failing) == (START_FAILED, errno.ENOENT)
    guest.ping()
    assert guest.cgroup is None or guest.cgroup.empties()  # their descriptors go with the groups
    assert len(list(descriptors.iterdir())) == before


def test_without_devpts(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "dev" / "pts").mkdir(parents=True)
    shutil.copy(built("static"), root / "guest")
    with running(Path("/guest"), prefix=("/usr/sbin/chroot", str(root))) as guest:
        op = guest.wait(begin(guest, "/guest"))
        assert op.end is not None
        assert (op.end.end, op.end.stage, op.end.code) == (START_FAILED, TERMINAL_STAGE, errno.ENOENT)
        (root / "dev" / "pts" / "ptmx").write_bytes(b"")
        op = guest.wait(begin(guest, "/guest"))
        assert op.end is not None
        assert (op.end.stage, op.end.code) == (TERMINAL_STAGE, errno.ENODEV)


def test_over_a_byte_stream() -> None:
    with running(built("static"), kind=socket.SOCK_STREAM) as guest:
        assert text(guest.wait(shell(guest, "stty size"))) == "24 80\n"
