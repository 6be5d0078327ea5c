"""Records of a machine's programs: in any pieces, and what no guest says."""

from __future__ import annotations

import struct

import pytest

from dsec.wire.frames import ProtocolError
from dsec.wire.looks import MAX_TEXT, Look, LookDecoder, LookKind


def record(kind: int, text: bytes, words: int = 0, size: int | None = None) -> bytes:
    return struct.pack("<BBHII", kind, words, len(text) if size is None else size, 7, 1000) + text


def test_records_in_any_pieces() -> None:
    data = record(2, b"/a\0/bin/cat\0cat\0/a\0001 /sbin/init\0", words=2) + record(3, b"/b\xff\0\0")
    wanted = [
        Look(LookKind.READ, "/a", 7, 1000, "/bin/cat", ["cat", "/a"], ["1 /sbin/init"]),
        Look(LookKind.WRITE, "/b\N{REPLACEMENT CHARACTER}", 7, 1000, "", [], []),
    ]
    for step in (1, 5, len(data)):
        decoder = LookDecoder()
        found = [each for at in range(0, len(data), step) for each in decoder.feed(data[at : at + step])]
        assert found == wanted


@pytest.mark.parametrize(
    "data",
    [
        record(0, b"/a\0\0"),
        record(7, b"/a\0\0"),
        record(2, b"/a\0"),
        record(2, b"/a\0\0x"),
        record(2, b"/a\0\0", words=1),
        record(2, b"/a\0\0", words=65),
        record(2, b"", size=MAX_TEXT + 1),
    ],
)
def test_what_no_guest_says(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(LookDecoder().feed(data))
