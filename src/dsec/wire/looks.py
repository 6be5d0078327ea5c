"""Records of what a machine's own kernel says that its programs do (layout: native/common/wire.h, LOOKING OUT), without
I/O.

The decoder is for what a guest says, which is hostile: it holds at most one incomplete record, and what no guest may
say is a `ProtocolError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

from msgspec import Struct

from dsec.wire.frames import ProtocolError

HEADER_SIZE = 12
MAX_TEXT = 12288
MAX_WORDS = 64
_SHOWN = 512
_HEADER = struct.Struct("<BBHII")


class LookKind(IntEnum):
    READY = 1
    READ = 2
    WRITE = 3
    REMOVE = 4
    START = 5
    LOST = 6


class Look(Struct, frozen=True):
    """A record of a guest's: a claim of a kernel that is the sandbox's own."""

    kind: LookKind
    path: str
    pid: int
    """Inside; 0: nobody's."""
    uid: int
    exe: str
    """Empty: it had ended."""
    argv: list[str]
    parents: list[str]
    """`PID PROGRAM`, the nearest first."""


class LookDecoder:
    """Bytes in any pieces to records."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> Iterator[Look]:
        """The whole ones, as far as they are good. Raises `ProtocolError` at the first that isn't. To be used up before
        the next call."""
        data = self._held + data
        at, end = 0, len(data)
        while end - at >= HEADER_SIZE:
            number, words, size, pid, uid = _HEADER.unpack_from(data, at)
            if not LookKind.READY <= number <= LookKind.LOST or words > MAX_WORDS or not 2 <= size <= MAX_TEXT:
                raise ProtocolError(f"a malformed record of a machine's programs: kind {number}, {size} bytes")
            if end - at - HEADER_SIZE < size:
                break
            at += HEADER_SIZE + size
            *texts, rest = data[at - size : at].split(b"\0")
            if rest or len(texts) < 2 + words:
                raise ProtocolError("a record of a machine's programs that is cut")
            path, exe, *others = (text.decode("utf-8", "replace") for text in texts)
            others = [text[:_SHOWN] for text in others]
            yield Look(LookKind(number), path, pid, uid, exe, others[:words], others[words:])
        self._held = data[at:]
