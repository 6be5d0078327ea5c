"""SHA-256 of what is short: keys, entries of a log, tokens.

The same digests as hashlib's, by the small implementation that CPython brings, where it is there. OpenSSL's goes
through several times the code and data for a call, which costs nothing with all of it in the processor's caches.
Between two commands the caches belong to others: then the log's work for one takes a tenth less by the small one. For
what is long, take hashlib's.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from typing import Protocol


class Digest(Protocol):
    """What a hash has come to."""

    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


def _smallest() -> Callable[[bytes], Digest]:
    for module in ("_sha2", "_sha256"):  # from Python 3.12 on, before it
        try:
            found: Callable[[bytes], Digest] = importlib.import_module(module).sha256
        except (ImportError, AttributeError):
            continue
        return found
    return hashlib.sha256


sha256 = _smallest()
