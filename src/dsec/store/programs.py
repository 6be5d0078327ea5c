"""Programs of this host that take long (mmdebstrap, apt): run in a group of their own, watched, and ended with it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

Stop = threading.Event
"""Set by who no longer wants what a thread waits for."""

_LOOK_S = 0.2
_PATIENCE_S = 3.0
"""For a program that was told to end."""
_KEPT_LINES = 100_000
_READ = 1 << 16


class Failed(Exception):
    """It ended with another code than 0."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__(f"exit code {code}")
        self.code = code
        self.output = output
        """What it said."""


class Stopped(Exception):
    """Nobody wants its outcome any more."""


def run_program(
    command: Sequence[str],
    *,
    stop: Stop | None = None,
    line: Callable[[str], None] = lambda line: None,
    tick: Callable[[], None] = lambda: None,
    env: Mapping[str, str] | None = None,
) -> str:
    """What a program says, without end of lines it may have had from a terminal. `line`: is
    told each; `tick`: is called a few times a second. Blocks.

    Raises `Failed`, `Stopped`, and what `line` and `tick` raise; it and all of its group are gone then.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    variables = {"PATH": path, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", "PYTHONHASHSEED": "0"}
    variables |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables | dict(env or {}),
        start_new_session=True,
    )
    assert process.stdout is not None
    said: deque[str] = deque(maxlen=_KEPT_LINES)
    rest = b""
    try:
        with process.stdout as out:
            while True:
                if stop is not None and stop.is_set():
                    raise Stopped
                tick()
                if not select.select([out], [], [], _LOOK_S)[0]:
                    continue
                data = os.read(out.fileno(), _READ)
                *lines, rest = (rest + data).split(b"\n")
                for raw in lines if data else filter(None, [rest]):
                    text = raw.decode(errors="replace").rstrip()
                    said.append(text)
                    line(text)
                if not data:
                    break
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)  # mmdebstrap unmounts what it mounted, but waits for dpkg first
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    output = "\n".join(said)
    if code:
        raise Failed(code, output)
    return output
