"""What a benchmark says: progress on stderr, its result on stdout."""

from __future__ import annotations

import sys
from typing import Any

import msgspec


def say(text: str) -> None:
    """A line of progress."""
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()


def write_result(result: dict[str, Any], *, as_json: bool) -> None:
    """One JSON object, on one line or (for a person) indented."""
    encoded = msgspec.json.encode(result)
    sys.stdout.buffer.write((encoded if as_json else msgspec.json.format(encoded, indent=2)) + b"\n")
    sys.stdout.buffer.flush()
