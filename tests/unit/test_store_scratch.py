"""Directories for what is being made: who clears which."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from dsec.store.scratch import ScratchRoot

MAKER = """
import sys, time
from pathlib import Path
from dsec.store.scratch import ScratchRoot
made = ScratchRoot(Path(sys.argv[1])).make()
(Path(made.name) / "file").touch()
print(made.name, flush=True)
time.sleep(100)
"""


def test_what_is_being_made_stays_and_what_was_left_goes(tmp_path: Path) -> None:
    """Another server over the same store cleared what was being made, and neither could start."""
    root = ScratchRoot(tmp_path)
    with subprocess.Popen([sys.executable, "-c", MAKER, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            theirs = Path(other.stdout.readline().strip())
            with root.make() as ours:
                root.clear()
                assert (theirs / "file").exists()
                assert Path(ours).is_dir()
            assert not Path(ours).exists()
        finally:
            other.kill()
    assert theirs.exists()
    root.clear()
    assert not theirs.exists()


def test_one_that_is_still_written_to_does_not_raise(tmp_path: Path) -> None:
    """A program that a killed server had started goes on for a while."""
    root = ScratchRoot(tmp_path)
    left = tmp_path / "store" / "tmp" / "left"
    left.mkdir(parents=True)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            (left / "lib").mkdir(parents=True, exist_ok=True)
            try:
                (left / "lib" / str(number)).touch()
            except FileNotFoundError:
                continue

    writer = threading.Thread(target=write)
    writer.start()
    timer = threading.Timer(0.5, stop.set)
    timer.start()
    try:
        root.clear()
    finally:
        stop.set()
        writer.join()
        timer.cancel()
    root.clear()
    assert not left.exists()
