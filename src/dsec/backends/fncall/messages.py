"""What edge and warden say to each other: native/cells/cells.h is the definition. Without I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum

from msgspec import Struct

HEADER = struct.Struct("<IIIi")
MAX_TEXT = 49152
MAX_FDS = 8
LANES = 256
_FIELD = struct.Struct("<HHI")
_FILE = struct.Struct("<IIQ")


class Kind(IntEnum):
    """Of a message."""

    LANE = 1
    PARENT = 2
    NEXT = 3
    STOP = 4
    OPEN = 5
    READY = 65
    FAILED = 66
    ENDED = 67
    EMPTY = 68
    PARENT_UP = 69
    PARENT_ENDED = 70
    DIRECTORY = 71


class Tag(IntEnum):
    """Of the fields of a plain worker's call."""

    ARGV = 1
    ENV = 2
    CWD = 3
    CPU_S = 4
    NOFILE = 5
    FSIZE = 6
    STACK = 7


class Message(Struct, frozen=True):
    """One packet."""

    kind: Kind
    lane: int = 0
    value: int = 0
    text: str = ""


def encode(message: Message) -> bytes:
    """The packet."""
    return HEADER.pack(message.kind, message.lane, 0, message.value) + message.text.encode()


def decode(packet: bytes) -> Message:
    """Raises ValueError for what the warden can't have sent."""
    if len(packet) < HEADER.size:
        raise ValueError("a short packet")
    kind, lane, _, value = HEADER.unpack_from(packet)
    return Message(Kind(kind), lane, value, packet[HEADER.size :].decode(errors="replace"))


def plain_call(
    argv: Iterable[str],
    *,
    env: Mapping[str, str],
    cwd: str = "/tmp",
    cpu_s: int = 0,
    nofile: int = 1024,
    fsize: int = 1 << 40,
    stack: int = 0,
) -> bytes:
    """What a plain worker reads: its length and its fields. `stack`, `cpu_s`: 0 leaves the limit as it is."""
    fields = [(Tag.ARGV, word.encode(errors="surrogateescape")) for word in argv]
    fields += [(Tag.ENV, f"{name}={value}".encode(errors="surrogateescape")) for name, value in env.items()]
    fields.append((Tag.CWD, cwd.encode()))
    for tag, number in ((Tag.CPU_S, cpu_s), (Tag.NOFILE, nofile), (Tag.FSIZE, fsize), (Tag.STACK, stack)):
        fields.append((tag, struct.pack("<Q", number)))
    body = b"".join(_FIELD.pack(tag, 0, len(data)) + data for tag, data in fields)
    return struct.pack("<I", len(body)) + body


def file_of_files(files: Mapping[bytes, bytes], mode: int = 0o755) -> bytes:
    """Files that a plain worker unpacks before it executes; relative names are below its working directory."""
    return b"".join(
        part for name, content in files.items() for part in (_FILE.pack(len(name), mode, len(content)), name, content)
    )
