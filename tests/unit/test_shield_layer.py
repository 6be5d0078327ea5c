"""The packages that a shield's machine gets."""

from __future__ import annotations

import subprocess
import sys

NAMES = "from dsec.backends.microvm.shield_layer import _packages; print(*(path.name for path in _packages()))"


def test_what_a_server_needs_is_there_whoever_asks() -> None:
    """`click` was missing where the process that asked had not loaded it."""
    result = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=True)
    names = set(result.stdout.split())
    assert {"click", "aiohttp", "uvicorn", "httptools", "litestar", "zstandard", "cryptography"} <= names
    assert not {"dsec", "pytest", "nats"} & names
