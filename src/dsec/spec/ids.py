"""Sandbox ids: 24 lower-case letters and digits that say which edge owns the sandbox and in which epoch it was made.

Layout, 15 bytes in base32 (`0-9a-v`): u16 edge, u24 epoch, u32 sequence, 6 bytes of HMAC-SHA256 over the former under
the node's key. So any apiserver routes by decoding, an id of an older epoch fails fast as lost, and no id can be
guessed. Short enough for a DNS label together with a port.
"""

from __future__ import annotations

import hmac
import re

from msgspec import Struct

_PATTERN = re.compile(r"[0-9a-v]{24}")
ID_CHARACTERS = 24
_TAG_BYTES = 6
EPOCH_MASK = (1 << 24) - 1
_DIGITS = "0123456789abcdefghijklmnopqrstuv"
_PAIRS = [high + low for high in _DIGITS for low in _DIGITS]
_SHIFTS = range(110, -1, -10)


class SandboxId(Struct, frozen=True):
    """The parts of an id."""

    edge: int
    epoch: int
    sequence: int


def encode_id(parts: SandboxId, key: bytes) -> str:
    """The text of an id, tagged under `key`."""
    body = parts.edge.to_bytes(2, "big") + parts.epoch.to_bytes(3, "big") + parts.sequence.to_bytes(4, "big")
    number = int.from_bytes(body + hmac.digest(key, body, "sha256")[:_TAG_BYTES], "big")
    return "".join([_PAIRS[number >> shift & 1023] for shift in _SHIFTS])


def decode_id(text: str, key: bytes) -> SandboxId | None:
    """The parts of an id, or None where it is malformed or its tag is not ours."""
    if not _PATTERN.fullmatch(text):
        return None
    raw = int(text, 32).to_bytes(9 + _TAG_BYTES, "big")
    body, tag = raw[:9], raw[9:]
    if not hmac.compare_digest(hmac.digest(key, body, "sha256")[:_TAG_BYTES], tag):
        return None
    return SandboxId(
        int.from_bytes(body[:2], "big"), int.from_bytes(body[2:5], "big"), int.from_bytes(body[5:9], "big")
    )


def edge_of(text: str) -> int | None:
    """The edge that an id names, None where it is malformed. Whether the id is good only that edge can say."""
    if not _PATTERN.fullmatch(text):
        return None
    return int(text[:8], 32) >> 24
