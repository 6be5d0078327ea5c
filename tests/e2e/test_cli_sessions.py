"""`dsec session` against a real server."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_kit import Live, Terminal
from server_kit import PATIENCE_S, serving

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def live(debian_module_state: Path) -> Iterator[Live]:
    with serving(debian_module_state, on_exit="keep") as server:
        yield Live(server)


@pytest.fixture(scope="module")
def box(live: Live) -> str:
    return live.sandbox()


def test_state_output_and_exit_codes(live: Live, box: str) -> None:
    code, out, _ = live("session", "create", box, "work", "--cwd", "/tmp", "-e", "A=1")
    assert (code, json.loads(out)["name"]) == (0, "work")
    assert live("session", "run", box, "work", "--", "B=2; pwd; echo $A") == (0, "/tmp\n1\n", "")
    assert live("session", "run", box, "work", "--", "echo", "$B;", "(exit 3)") == (3, "2\n", "")
    code, out, _ = live("session", "run", box, "work", "--json", "--", "seq 3")
    assert (code, json.loads(out)["output"]) == (0, "1\n2\n3\n")
    code, out, _ = live("session", "run", box, "work", "--", "seq 300000")
    assert (code, out) == (0, "".join(f"{number}\n" for number in range(1, 300001))), "more than comes with the result"
    code, out, err = live("session", "run", box, "work", "--command-timeout-s", "0.3", "--", "sleep 1000")
    assert (code, err) == (130, "dsec: its time was over: it was stopped\n")
    code, out, _ = live("session", "log", box, "work")
    assert (code, out[:11]) == (0, "/tmp\n1\n2\n1\n")
    assert out[-8:].strip() == "300000"
    (info,) = json.loads(live("session", "ls", box)[1])
    assert (info["name"], info.get("busy")) == ("work", None)
    assert live("session", "run", box, "work", "--", "exit 7")[::2] == (7, "dsec: the session's shell has ended\n")
    assert live("session", "run", box, "work", "--", "true")[0] == 2
    assert live("session", "close", box, "work") == (0, "", "")
    code, out, err = live("session", "close", box, "work")
    assert (code, out) == (2, "")
    assert err.startswith("error: there is no session 'work'")


def test_interrupts_and_what_survives_a_killed_server(live: Live, box: str) -> None:
    assert live("session", "create", box, "a b")[0] == 0
    running = subprocess.Popen(live.command("session", "run", box, "a b", "--", "sleep 1000"), env=live.environment)
    until_busy(live, box)
    live.server.kill()
    live.server.start()
    until_busy(live, box)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    code, out, _ = live("session", "interrupt", box, "a b")
    assert (code, json.loads(out).get("busy")) == (0, None)
    environment = {
        "_DSEC_COMPLETE": "bash_complete",
        "COMP_WORDS": f"dsec session run {box} ",
        "COMP_CWORD": "4",
        "DSEC_COMPLETE_S": "60",
    }
    deadline, shown = time.monotonic() + 60, ""
    while "plain,a b\n" not in shown:  # a busy machine may not answer within a key press
        assert time.monotonic() < deadline, shown
        shown = subprocess.run(
            live.command(), env={**live.environment, **environment}, capture_output=True, text=True, check=False
        ).stdout
    assert live("session", "close", box, "a b")[0] == 0


def until_busy(live: Live, box: str) -> None:
    deadline = time.monotonic() + 60
    while not any(info.get("busy") for info in json.loads(live("session", "ls", box)[1])):
        assert time.monotonic() < deadline


def test_attached_by_a_pipe(live: Live, box: str) -> None:
    assert live("session", "create", box, "pipe")[0] == 0
    code, out, _ = live("session", "attach", box, "pipe", stdin=b"X=5\nsleep 0.3\necho $X\n(exit 4)\n")
    assert (code, out) == (4, "5\n")
    code, out, err = live("session", "attach", box, "pipe", stdin=b"echo bye; exit 6\n")
    assert (code, out.splitlines()[0]) == (6, "bye")
    assert "the session's shell has ended" in err
    assert live("session", "close", box, "pipe")[0] == 0


def test_attached_on_a_terminal(live: Live, box: str) -> None:
    assert live("session", "create", box, "tty")[0] == 0
    with Terminal(live, "session", "attach", box, "tty") as terminal:
        terminal.type(b"read -r x; echo got-$x\na-line\n")  # typed ahead: before anything runs
        terminal.until(rb"got-a-line")
        terminal.type(b"echo be''gun; sleep 1000\n")
        terminal.until(rb"begun")
        terminal.type(b"\x03")
        terminal.type(b"echo st''ill\n")
        terminal.until(rb"still")
        terminal.type(b"\x04")
        assert terminal.process.wait(PATIENCE_S) == 0
    with Terminal(live, "session", "ls", box) as terminal:
        terminal.until(rb"tty +idle")
    assert live("session", "close", box, "tty")[0] == 0
