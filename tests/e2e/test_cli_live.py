"""The command line against a real server: trees through `tar`, hostile ones too, and terminals, driven through one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_kit import Live, Terminal
from server_kit import PATIENCE_S, serving
from trees import state_of

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def live(debian_module_state: Path) -> Iterator[Live]:
    with serving(debian_module_state) as server:
        yield Live(server)


@pytest.fixture
def seats() -> Iterator[list[Terminal]]:
    """Terminals that are closed in the end."""
    taken: list[Terminal] = []
    yield taken
    for each in taken:
        each.close()


def sit(seats: list[Terminal], live: Live, *arguments: str, cols: int = 80, rows: int = 24) -> Terminal:
    seats.append(Terminal(live, *arguments, cols=cols, rows=rows))
    return seats[-1]


# --- cp ---


def test_two_thousand_files_both_ways(live: Live, tmp_path: Path) -> None:
    box = live.sandbox()
    root, dice = tmp_path / "in", random.Random(3)
    for number in range(2000):
        path = root / f"d{number % 40}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dice.randbytes(dice.randrange(8000)))
        path.chmod(dice.choice((0o644, 0o600, 0o755, 0o440)))
        if number % 50 == 0:
            (path.parent / f"l{number}").symlink_to(dice.choice(("../d1/f1", "/etc/passwd", "nowhere/at/all")))
    Path(os.fsdecode(os.fsencode(root) + b"/bytes-\xff\xfe")).write_bytes(b"x")
    long = root / ("long-" + "n" * 180) / ("m" * 200)
    long.parent.mkdir()
    long.write_text("long")
    (root / "d3").chmod(0o700)
    (root / "empty").mkdir()
    before = state_of(root)
    code, out, err = live("cp", str(root), f"{box}:/tree")
    assert (code, out) == (0, ""), err
    code, out, err = live("cp", "--json", f"{box}:/tree", str(tmp_path / "out"))
    assert code == 0, err
    assert json.loads(out)["files"] == 2002
    assert state_of(tmp_path / "out") == before
    listed = live("exec", box, "--", "sh", "-c", "cd /tree && find . | wc -l; ls / | grep part")[1]
    assert listed.split() == [str(len(before) + 1)]


HOSTILE = r"""
import io, os, sys, tarfile
out = tarfile.open(fileobj=sys.stdout.buffer, mode="w|")
def add(name, kind=tarfile.REGTYPE, link="", content=b"pwned", mode=0o6777):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    info.size = len(content) if kind == tarfile.REGTYPE else 0
    out.addfile(info, io.BytesIO(content))
add("./good", content=b"good")
add("../outside")
add("TMP/absolute")
add("./up", tarfile.SYMTYPE, "..")
add("./up/outside")
add("./abs", tarfile.SYMTYPE, "TMP")
add("./abs/outside")
add("./abs", tarfile.DIRTYPE)
add("./victim", tarfile.LNKTYPE, "../victim")
add("./link", tarfile.SYMTYPE, "TMP/victim")
add("./link")
add("./device", tarfile.CHRTYPE)
add("./last", content=b"last")
out.close()
"""


def test_a_sandbox_that_lies_in_its_archive(live: Live, tmp_path: Path) -> None:
    """Its `tar` is replaced by one that tries every way out."""
    box = live.sandbox()
    (tmp_path / "victim").write_text("untouched")
    program = tmp_path / "tar"
    program.write_text("#!/usr/bin/env python3\n" + HOSTILE.replace("TMP", str(tmp_path)))
    program.chmod(0o755)
    assert live("cp", "-q", str(program), f"{box}:/usr/local/sbin/tar")[0] == 0
    if live("exec", box, "--", "python3", "--version")[0] != 0:
        pytest.skip("the environment has no Python")
    assert live("exec", box, "--", "mkdir", "/source")[0] == 0
    code, _, err = live("cp", f"{box}:/source", str(tmp_path / "target"))
    assert code == 4, err
    assert "Traceback" not in err
    assert (tmp_path / "victim").read_text() == "untouched"
    assert {path.name for path in tmp_path.iterdir()} == {"victim", "tar", "target"}
    assert (tmp_path / "target" / "good").read_text() == "good"
    assert (tmp_path / "target" / "last").read_text() == "last"
    assert (tmp_path / "target" / "link").read_text() == "pwned", "the link was replaced, not followed"
    assert not any(path.lstat().st_mode & 0o6000 for path in (tmp_path / "target").iterdir())


def test_a_tree_full_of_links_out(live: Live, tmp_path: Path) -> None:
    box = live.sandbox()
    script = "mkdir -p /t/d; cd /t; ln -s / root; ln -s ../.. up; ln -s /etc/shadow s; mkfifo p; ln -s .. d/up; echo >f"
    assert live("exec", box, "--", "sh", "-c", script)[0] == 0
    code, _, err = live("cp", f"{box}:/t", str(tmp_path / "t"))
    assert code == 4, "a pipe was left out"
    assert "left out" in err
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == ["d", "f", "root", "s", "up"]
    assert (tmp_path / "t" / "root").readlink() == Path("/")
    assert (tmp_path / "t" / "d" / "up").is_symlink()


def test_no_room_inside(live: Live, tmp_path: Path) -> None:
    box = live.sandbox("--disk", "16M")
    (tmp_path / "in").mkdir()
    for number in range(30):
        (tmp_path / "in" / f"f{number}").write_bytes(os.urandom(1 << 20))
    code, _, err = live("cp", str(tmp_path / "in"), f"{box}:/tree")
    assert code == 4
    assert "tar in the sandbox" in err
    assert "Traceback" not in err


# --- terminals ---


def test_a_shell_is_a_terminal(live: Live, seats: list[Terminal]) -> None:
    box = live.sandbox()
    seat = sit(seats, live, "shell", box, cols=101, rows=31)
    seat.until(rb"[#$] ")
    assert seat.is_raw()
    seat.type(b"tty; stty size; echo $((40 + 2)) $TERM\r")
    seat.until(rb"/dev/pts/\d+\r\n31 101\r\n42 xterm")
    seat.resize(120, 40)
    seat.process.send_signal(signal.SIGWINCH)
    seat.type(b"until stty size | grep '40 120'; do sleep 0.05; done\r")
    seat.until(rb"40 120\r\n")
    seat.type(b"sh -c 'echo be\"gun\"; exec cat'\r")
    seat.until(rb"begun\r\n")
    seat.type(b"\x03")
    seat.until(rb"\^C")
    seat.type(b"echo after $?\r")
    seat.until(rb"after 130\r\n")
    seat.type(b"exit 7\r")
    assert seat.wait() == 7


def test_a_shell_of_an_environment_ends_its_sandbox(live: Live, seats: list[Terminal]) -> None:
    before = live("ls")[1]
    seat = sit(seats, live, "shell", "debian", "sh", "-c", "stty -echo; echo ready; read x; echo got $x; seq 20000")
    seat.until(rb"ready\r\n")
    seat.type(b"it\r")
    seat.until(rb"got it\r\n")
    seat.until(rb"\n19999\r\n20000\r\n")
    assert seat.wait() == 0
    assert live("ls")[1] == before


def test_run_and_exec_on_a_terminal(live: Live, seats: list[Terminal]) -> None:
    box = live.sandbox()
    before = live("ls")[1]
    seat = sit(seats, live, "run", "-it", "-e", "A=b", "debian", "--", "sh", "-c", "tty; echo $A; read x; exit $x")
    seat.until(rb"/dev/pts/\d+\r\nb\r\n")
    seat.type(b"5\r")
    assert seat.wait() == 5
    assert live("ls")[1] == before, "it ends with its command"
    seat = sit(seats, live, "exec", "-t", box, "--", "sh", "-c", "tty; exit 6")
    seat.until(rb"/dev/pts/\d+")
    assert seat.wait() == 6
    assert live("run", "-it", "debian", "--", "true")[0] == 2, "where there is none"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("background", [False, True], ids=["", "as a script's job"])
def test_a_signal_ends_what_ctrl_c_ends(live: Live, number: signal.Signals, background: bool) -> None:
    """`timeout 60 dsec run ...` left its sandbox for hours."""
    box = live.sandbox()
    before = live("ls")[1]

    def begin() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what `nohup` ignores stays ignored
        if background:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    for verb in ["run", "debian"], ["exec", box]:
        process = subprocess.Popen(
            live.command(*verb, "--", "sh", "-c", "echo ready; exec sleep 300"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=live.environment,
            preexec_fn=begin,  # noqa: PLW1509 (one thread)
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(number)
            assert process.wait(60) == 128 + number
    assert live("ls")[1] == before
    assert json.loads(live("inspect", box)[1])[0]["commands"] == []


def test_letting_go_and_coming_back(live: Live, seats: list[Terminal]) -> None:
    box = live.sandbox()
    seat = sit(seats, live, "shell", box)
    seat.until(rb"[#$] ")
    seat.type(b"export KEPT=yes\r")
    seat.until(rb"[#$] $")
    seat.type(b"\x10\x11")
    key = seat.until(rb"dsec attach \w+ (shell-\w+)")[1].decode()
    assert seat.wait() == 0
    assert key in live("logs", box)[1]
    again = sit(seats, live, "attach", box, key)
    again.until(rb"KEPT=yes")
    again.type(b"echo kept=$KEPT; exit 3\r")
    again.until(rb"kept=yes")
    assert again.wait() == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_gives_the_terminal_back(live: Live, seats: list[Terminal], number: signal.Signals) -> None:
    box = live.sandbox()
    seat = sit(seats, live, "shell", box)
    seat.until(rb"[#$] ")
    assert seat.is_raw()
    seat.process.send_signal(number)
    assert seat.wait() == 128 + number
    deadline = time.monotonic() + PATIENCE_S
    while json.loads(live("inspect", box)[1])[0]["commands"]:
        assert time.monotonic() < deadline, "its shell is still there"


def test_a_sandbox_that_ends_under_a_shell(live: Live, seats: list[Terminal]) -> None:
    box = live.sandbox()
    seat = sit(seats, live, "shell", box)
    seat.until(rb"[#$] ")
    assert live("kill", box)[0] == 0
    seat.until(rb"\[sandbox_ended\]")
    assert seat.wait() == 2


def test_a_shell_needs_a_terminal(live: Live) -> None:
    code, _, err = live("shell", "debian")
    assert code == 2
    assert "dsec exec" in err


# --- ports ---


SERVER = """
import socket
server = socket.socket()
server.bind(("127.0.0.1", 8080))
server.listen()
print("up", flush=True)
while True:
    connection, _ = server.accept()
    got = b""
    while data := connection.recv(65536):
        got += data
    connection.sendall(got.upper() + b"%d" % len(got))
    connection.close()
"""


def test_a_port_inside_is_a_port_here(live: Live, tmp_path: Path) -> None:
    box = live.sandbox()
    (tmp_path / "server.py").write_text(SERVER)
    assert live("cp", "-q", str(tmp_path / "server.py"), f"{box}:/server.py")[0] == 0
    inside = subprocess.Popen(
        live.command("exec", box, "--", "python3", "/server.py"), stdout=subprocess.PIPE, env=live.environment
    )
    forward = subprocess.Popen(
        live.command("port-forward", box, "0:8080", "0:9"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**live.environment, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert inside.stdout is not None
        assert inside.stdout.readline() == b"up\n"
        assert forward.stdout is not None
        assert forward.stderr is not None
        places = [forward.stdout.readline().split() for _ in range(2)]
        assert [place[1:] for place in places] == [["->", "8080"], ["->", "9"]]
        data = b"some text " * 200_000
        for part in (b"", b"x", data):
            with socket.create_connection(("127.0.0.1", int(places[0][0].rpartition(":")[2]))) as connection:
                connection.sendall(part)
                connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
                assert answer == part.upper() + b"%d" % len(part)
        closed = ("127.0.0.1", int(places[1][0].rpartition(":")[2]))
        with contextlib.suppress(ConnectionResetError), socket.create_connection(closed) as connection:
            assert connection.recv(1) == b""
        assert "[port_closed]" in forward.stderr.readline()
        forward.send_signal(signal.SIGINT)
        assert forward.wait(PATIENCE_S) == 130
        assert "Traceback" not in forward.stderr.read()
    finally:
        for process in (forward, inside):
            process.kill()
            process.communicate()


# --- seeing ---


def test_phases_of_a_creation(live: Live) -> None:
    box = live.sandbox()
    lines = [json.loads(line) for line in live("events", box)[1].splitlines()]
    created = next(line for line in lines if line["type"] == "created")["data"]
    phases = created["phases"]
    assert {"record_ms", "prepare_ms", "spawn_ms", "mount_ms", "clone_ms", "setup_ms", "hello_ms"} == set(phases)
    assert all(value > 0 for value in phases.values())
    assert created["create_ms"] >= phases["spawn_ms"] >= phases["clone_ms"]
    assert next(line for line in lines if line["type"] == "first_exec")["data"]["exec_ms"] > 0


async def test_ready_and_metrics_of_a_real_node(live: Live) -> None:
    import aiohttp

    endpoint = live.server.endpoint()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as session:
        async with session.get(f"{endpoint.url}/readyz") as answer:
            found = await answer.json()
            assert (answer.status, found["ok"]) == (200, True)
            machines = {"microvm", "vm"} if shutil.which("qemu-system-x86_64") else set()
            assert {check["name"] for check in found["checks"]} == {"edge", "volume", "container", *machines}
        async with session.get(f"{endpoint.url}/metrics") as answer:
            text = await answer.text()
    assert 'dsec_create_phase_seconds_count{phase="clone"}' in text
    assert 'dsec_build_info{version="0"' not in text
    assert 'dsec_pool{backend="container",pool="cgroups",kind="spare"}' in text
