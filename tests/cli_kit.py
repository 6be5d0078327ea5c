"""The command line as people and scripts use it, against a real server: run by itself, and on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

from server_kit import PATIENCE_S, Server


class Live:
    """Runs `dsec` for people and scripts."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.environment = {**server.environment(), "TERM": "xterm"}

    def __call__(self, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        done = subprocess.run(
            self.command(*arguments), input=stdin, capture_output=True, env=self.environment, timeout=120, check=False
        )
        return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")

    @staticmethod
    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "dsec.cli.main", *arguments]

    def sandbox(self, *options: str) -> str:
        code, _, err = self("run", "--keep", *options, "debian", "--", "true")
        assert code == 0, err
        return err.split()[-1]


class Terminal:
    """A program on a terminal of its own, and somebody who sits at it."""

    def __init__(self, live: Live, *arguments: str, cols: int = 80, rows: int = 24) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(cols, rows)
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.process = subprocess.Popen(
            live.command(*arguments),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=live.environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 (one thread)
        )
        self.seen = b""

    def resize(self, cols: int, rows: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: bytes) -> None:
        os.write(self.ours, text)

    def until(self, pattern: bytes, patience_s: float = PATIENCE_S) -> re.Match[bytes]:
        """Wait for it on the screen; what came before it is not looked at again."""
        os.set_blocking(self.ours, False)
        deadline = time.monotonic() + patience_s
        while (found := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < deadline, self.seen[-2000:]
            try:
                self.seen += os.read(self.ours, 65536)
            except BlockingIOError:
                time.sleep(0.01)
        self.seen = self.seen[found.end() :]
        return found

    def is_raw(self) -> bool:
        return not termios.tcgetattr(self.theirs)[3] & termios.ICANON

    def wait(self) -> int:
        """Its exit code; the terminal must be as it was."""
        code = self.process.wait(PATIENCE_S)
        assert termios.tcgetattr(self.theirs) == self.before
        return code

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)
