"""Verbs that are ended by a signal get time to tidy up, wherever it reaches them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

VERB = """
import asyncio, os, signal, sys
from dsec.cli import signals

signal.signal(signal.SIGINT, signal.{ignored})
signals.as_interrupts()

async def verb():
    try:
        os.kill(os.getpid(), signal.SIGTERM)  # in the middle of a step: nothing is awaited
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(0.01)
        print("tidied up")
        raise

try:
    signals.run(verb())
except (asyncio.CancelledError, KeyboardInterrupt):
    sys.exit(signals.exit_code())
"""


@pytest.mark.parametrize("ignored", ["SIG_IGN", "default_int_handler"])
def test_a_verb_tidies_up_also_where_ctrl_c_is_ignored(ignored: str) -> None:
    script = VERB.format(ignored=ignored)
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("tidied up\n", 128 + signal.SIGTERM), done.stderr
