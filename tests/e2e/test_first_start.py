"""The first start of a server on a state directory, which takes a minute or two: what ends it, and what is wrong, at
once. A program that takes for ever and can't be told to end stands for mmdebstrap."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_kit import PATIENCE_S, SOURCES, until

pytestmark = pytest.mark.root

STUBBORN = """#!/bin/sh
trap '' TERM INT
echo "I: $$ is at work"
while :; do sleep 1; done
"""


@pytest.fixture
def state(native_programs: Path, tmp_path: Path) -> Iterator[Path]:
    """Without an environment."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "mmdebstrap").write_text(STUBBORN)
    (programs / "mmdebstrap").chmod(0o755)
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "native").symlink_to(native_programs.parent)
    return tmp_path / "state"


def serve(state: Path, *options: str) -> subprocess.Popen[bytes]:
    path = f"{state.parent / 'bin'}:{os.environ['PATH']}"
    with (state.parent / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "dsec.cli.main", "serve", "--state", str(state), *options],
            env={**os.environ, "PATH": path, "PYTHONPATH": str(SOURCES)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_first_build(state: Path, number: signal.Signals) -> None:
    log = state.parent / "log"
    with serve(state, "--port", "0") as server:
        until(lambda: "is at work" in log.read_text() or server.poll() is not None)
        builder = int(log.read_text().partition(" is at work")[0].split()[-1])
        server.send_signal(number)
        assert server.wait(PATIENCE_S) == 128 + number, log.read_text()
    assert not Path(f"/proc/{builder}").exists()
    assert list((state / "store" / "tmp").iterdir()) == []
    assert "Traceback" not in log.read_text()


def test_a_port_that_is_taken_is_said_before_anything_is_built(state: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with serve(state, "--port", str(taken.getsockname()[1])) as server:
            assert server.wait(PATIENCE_S) == 3
    said = (state.parent / "log").read_text()
    assert "Address already in use" in said
    assert "building" not in said
