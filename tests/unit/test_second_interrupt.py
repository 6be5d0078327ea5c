"""A second Ctrl-C doesn't break off what the first one made to tidy up."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPENING = """
import asyncio, os, signal
{before}

async def work():
    {first}
    try:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
    finally:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.01)
        print("tidied up")

try:
    {run}(work())
except (asyncio.CancelledError, KeyboardInterrupt):
    print("interrupted")
"""
SERVER = OPENING.format(before="from dsec.api.serve import Stop", first="stop = Stop()", run="asyncio.run")
"""That is opening."""
BENCH = OPENING.format(before="from dsec.bench.running import run_bench", first="pass", run="run_bench")


@pytest.mark.parametrize("script", [SERVER, BENCH], ids=["server", "bench"])
def test_it_tidies_up_to_the_end(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("tidied up\ninterrupted\n", 0), done.stderr
