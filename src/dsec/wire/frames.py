"""Frames and fields of the guest and zygote protocols, without I/O: the Python mirror of native/common/wire.h.

Owns: the header, the frame types, which flags and payload sizes each allows, the list of fields, and splitting and
joining of long requests. Invariant: whatever bytes come in, the answer is a well-formed value or `ProtocolError`,
in bounded memory; there is no partial success. Layouts are in wire.h; tests/unit/test_wire_header.py compares every
constant.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, IntFlag
from functools import lru_cache

from msgspec import Struct

PROTOCOL_VERSION = 3
HEADER_SIZE = 16
MAX_PAYLOAD = 65552
MAX_DATA = 65536
MAX_REQUEST = 4 << 20
WINDOW = 256 << 10
MAX_OPS = 1024
MAX_KEY = 128
MAX_TERMINAL = 4096
MAX_WATCHES = 8192
TOKEN_SIZE = 16
STATUS_SIZE = 48
MAX_FRAME = HEADER_SIZE + MAX_PAYLOAD

Buffer = bytes | bytearray | memoryview


class ProtocolError(Exception):
    """The peer broke the protocol: the channel is to be closed. Never sent to callers as it is."""


class FrameType(IntEnum):
    """What a frame says; the direction is in the name's group in wire.h."""

    HELLO = 1
    START = 2
    STDIN = 3
    ACK = 4
    SIGNAL = 5
    RELEASE = 6
    PING = 7
    RESIZE = 8
    HOLD = 9
    CONFIGURE = 10
    WARM = 11
    HALT = 12
    AGAIN = 13

    WELCOME = 65
    OPSTATE = 66
    SYNCED = 67
    STARTED = 68
    OUT = 69
    STDIN_ACK = 70
    EXIT = 71
    REFUSED = 72
    PONG = 73
    READY = 74
    CONFIGURED = 75
    STATUS = 76

    Z_HELLO = 129
    Z_SPAWN = 130
    Z_ATTACH = 131
    Z_FORGET = 132
    Z_SHUTDOWN = 133
    Z_NETWORK = 135

    Z_WELCOME = 193
    Z_SANDBOX = 194
    Z_EXITED = 195
    Z_SYNCED = 196
    Z_SPAWNED = 197
    Z_ATTACHED = 198
    Z_FAILED = 199
    Z_OK = 200


class Flag(IntFlag):
    """Frame flags; each is allowed on the types that `_RULES` says."""

    MORE = 1
    EOF = 2
    STDERR = 4


class Tag(IntEnum):
    """Tags of fields."""

    KIND = 1
    ARGV = 2
    ENV = 3
    CWD = 4
    USER = 5
    TIMEOUT_MS = 6
    OUTPUT_CAP = 7
    KEY = 8
    FLAGS = 9
    PATH = 10
    PATH2 = 11
    MODE = 12
    OFFSET = 13
    LENGTH = 14
    DEPTH = 15
    FILE_FLAGS = 16
    NOFILE = 17
    PTY_SIZE = 18
    PORT = 19

    STATE = 32
    PID = 33
    STDIN_OFFSET = 34
    STDOUT_BASE = 35
    STDOUT_END = 36
    STDERR_BASE = 37
    STDERR_END = 38
    AGE_MS = 39

    SANDBOX = 64
    HOSTNAME = 65
    LOWER = 66
    UPPER = 67
    WORK = 68
    ID_BASE = 69
    ID_COUNT = 70
    CGROUP2 = 71
    CGROUP = 72
    DEV = 73
    VIEW = 74
    CPUS = 75
    OOM_SCORE_ADJ = 76
    SPAWN_FLAGS = 77
    MEMORY = 78

    TOKEN = 96
    CLOCK_NS = 97
    SEED = 98
    MACHINE_ID = 99
    PIDS = 100


# type: (least payload, most payload, flags allowed: plain ints, as ~ of an IntFlag forgets unknown bits)
_RULES: dict[int, tuple[int, int, int]] = {
    FrameType.HELLO: (16, 16, 0),
    FrameType.START: (0, MAX_PAYLOAD, int(Flag.MORE)),
    FrameType.STDIN: (8, 8 + MAX_DATA, int(Flag.EOF)),
    FrameType.ACK: (16, 16, 0),
    FrameType.SIGNAL: (8, 8, 0),
    FrameType.RELEASE: (0, 0, 0),
    FrameType.PING: (8, 8, 0),
    FrameType.RESIZE: (4, 4, 0),
    FrameType.HOLD: (8, 8, 0),
    FrameType.CONFIGURE: (0, MAX_PAYLOAD, 0),
    FrameType.WARM: (0, MAX_PAYLOAD, 0),
    FrameType.HALT: (0, 0, 0),
    FrameType.AGAIN: (0, 0, 0),
    FrameType.WELCOME: (24, 24, 0),
    FrameType.OPSTATE: (0, MAX_PAYLOAD, 0),
    FrameType.SYNCED: (0, 0, 0),
    FrameType.STARTED: (8, 8, 0),
    FrameType.OUT: (8, 8 + MAX_DATA, int(Flag.STDERR)),
    FrameType.STDIN_ACK: (8, 8, 0),
    FrameType.EXIT: (64, 64, 0),
    FrameType.REFUSED: (8, MAX_PAYLOAD, 0),
    FrameType.PONG: (16, 16, 0),
    FrameType.READY: (8, 8, 0),
    FrameType.CONFIGURED: (8, 8, 0),
    FrameType.STATUS: (STATUS_SIZE, STATUS_SIZE, 0),
    FrameType.Z_HELLO: (8, 8, 0),
    FrameType.Z_SPAWN: (0, MAX_PAYLOAD, int(Flag.MORE)),
    FrameType.Z_ATTACH: (1, 40, 0),
    FrameType.Z_FORGET: (1, 40, 0),
    FrameType.Z_SHUTDOWN: (0, 0, 0),
    FrameType.Z_NETWORK: (1, 40, 0),
    FrameType.Z_WELCOME: (24, 24, 0),
    FrameType.Z_SANDBOX: (9, 48, 0),
    FrameType.Z_EXITED: (9, 48, 0),
    FrameType.Z_SYNCED: (0, 0, 0),
    FrameType.Z_SPAWNED: (40, 40, 0),
    FrameType.Z_ATTACHED: (8, 8, 0),
    FrameType.Z_FAILED: (8, MAX_PAYLOAD, 0),
    FrameType.Z_OK: (0, 0, 0),
}

_HEADER = struct.Struct("<IBBHQ")
FIELD = struct.Struct("<HHI")
NUMBER = struct.Struct("<HHIQ")  # a field with an integer
_U64 = struct.Struct("<Q")
_KNOWN_TAGS = frozenset(int(t) for t in Tag)
_TYPES = {int(t): t for t in FrameType}


class Frame(Struct, frozen=True, gc=False):
    """One frame, checked: its type is known and its flags and payload size are ones that the type allows."""

    type: FrameType
    op: int = 0
    payload: bytes = b""
    flags: int = 0

    def encode(self) -> bytes:
        """The frame's bytes. Raises ValueError for a frame that the protocol doesn't allow."""
        return encode(self.type, self.op, self.payload, self.flags)


def encode(kind: FrameType, op: int = 0, payload: Buffer = b"", flags: int = 0) -> bytes:
    """A frame's bytes. Raises ValueError for a frame that the protocol doesn't allow: that is a bug of the caller's."""
    return header(kind, op, len(payload), flags) + payload


def header(kind: FrameType, op: int, size: int, flags: int = 0) -> bytes:
    """A frame's first bytes, before a payload of `size`. Raises ValueError as `encode`."""
    least, most, allowed = _RULES[kind]
    if not least <= size <= most or flags & ~allowed:
        raise ValueError(f"no such frame: {kind.name}, {size} bytes, flags {flags}")
    return _HEADER.pack(size, kind, flags, 0, op)


def _check_header(size: int, kind: int, flags: int, zero: int) -> FrameType:
    rule = _RULES.get(kind)
    if rule is None:
        raise ProtocolError(f"unknown frame type {kind}")
    if zero:
        raise ProtocolError(f"reserved bytes of a {FrameType(kind).name} frame are not zero")
    if not rule[0] <= size <= rule[1]:
        raise ProtocolError(f"a {FrameType(kind).name} frame of {size} bytes")
    if flags & ~rule[2]:
        raise ProtocolError(f"flags {flags} on a {FrameType(kind).name} frame")
    return _TYPES[kind]


def decode(packet: Buffer) -> Frame:
    """The frame in one packet of a SOCK_SEQPACKET; the packet must hold exactly one. Raises `ProtocolError`."""
    if len(packet) < HEADER_SIZE:
        raise ProtocolError(f"a packet of {len(packet)} bytes is shorter than a header")
    size, kind, flags, zero, op = _HEADER.unpack_from(packet)
    checked = _check_header(size, kind, flags, zero)
    if len(packet) != HEADER_SIZE + size:
        raise ProtocolError(f"a packet of {len(packet)} bytes says that its payload has {size}")
    return Frame(checked, op, bytes(packet[HEADER_SIZE:]), flags)


def decode_all(packet: Buffer) -> list[Frame]:
    """The frames in one packet of a guest's SOCK_SEQPACKET: one or more, whole. Raises `ProtocolError`."""
    frames: list[Frame] = []
    at, length = 0, len(packet)
    while at < length or not frames:
        if length - at < HEADER_SIZE:
            raise ProtocolError(f"{length - at} bytes are shorter than a header")
        size, kind, flags, zero, op = _HEADER.unpack_from(packet, at)
        checked = _check_header(size, kind, flags, zero)
        end = at + HEADER_SIZE + size
        if end > length:
            raise ProtocolError(f"a packet ends {end - length} bytes before its last frame does")
        frames.append(Frame(checked, op, bytes(packet[at + HEADER_SIZE : end]), flags))
        at = end
    return frames


class StreamDecoder:
    """Frames out of a byte stream. Holds at most one incomplete frame; after an error it stays broken."""

    _WELCOME = _HEADER.pack(24, FrameType.WELCOME, 0, 0, 0)
    _INCARNATION_AT = HEADER_SIZE + 8
    _OP_AT, _REFUSED = 8, bytes((FrameType.REFUSED, 0, 0, 0))
    """In a header: the op, and what is before it."""

    def __init__(self, incarnation: int | None = None) -> None:
        """`incarnation`: of our HELLO, on a stream that an earlier edge may have left in the middle of a frame
        (wire.h, STREAMS): what comes before the WELCOME that answers it is dropped, but for a REFUSED of that op:
        `ProtocolError`."""
        self._mark = None if incarnation is None else _U64.pack(incarnation)
        self._buffer = bytearray()
        self._broken: ProtocolError | None = None

    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that `data` completes. Raises `ProtocolError`; the frames before the bad one are then lost
        with the channel.
        """
        if self._broken:
            raise self._broken
        buffer = self._buffer
        buffer += data
        if self._mark is not None and not self._found(buffer, self._mark):
            return []
        frames: list[Frame] = []
        at = 0
        try:
            while len(buffer) - at >= HEADER_SIZE:
                size, kind, flags, zero, op = _HEADER.unpack_from(buffer, at)
                checked = _check_header(
                    size, kind, flags, zero
                )  # before the payload is waited for: its size is bounded
                end = at + HEADER_SIZE + size
                if len(buffer) < end:
                    break
                frames.append(Frame(checked, op, bytes(buffer[at + HEADER_SIZE : end]), flags))
                at = end
        except ProtocolError as error:
            self._broken = error
            buffer.clear()
            raise
        del buffer[:at]
        return frames

    def _found(self, buffer: bytearray, mark: bytes) -> bool:
        """Whether the WELCOME is there; `buffer` then begins with it, else holds what may be its beginning."""
        at = buffer.find(mark)
        while at >= 0:
            if at >= self._OP_AT and buffer.startswith(self._REFUSED, at - len(self._REFUSED)):
                raise ProtocolError(f"it refused: {buffer[at + 16 : at + 300].decode(errors='replace')}")
            start = at - self._INCARNATION_AT
            if start >= 0 and buffer.startswith(self._WELCOME, start):
                self._mark = None
                del buffer[:start]
                return True
            at = buffer.find(mark, at + 1)
        del buffer[: -(self._INCARNATION_AT + len(mark))]
        return False

    def end(self) -> None:
        """The stream ended. Raises `ProtocolError` where that cut a frame."""
        if self._buffer:
            raise ProtocolError(f"the stream ended {len(self._buffer)} bytes into a frame")


# --- fields -----------------------------------------------------------------------------------------------------------


@lru_cache(1024)
def path_field(tag: Tag, path: str) -> bytes:
    """One encoded field with a path of the host's; for those that many requests name."""
    return field(tag, os.fsencode(path))


def field(tag: Tag, value: int | bytes) -> bytes:
    """One encoded field; an int is a u64."""
    return NUMBER.pack(tag, 0, 8, value) if isinstance(value, int) else FIELD.pack(tag, 0, len(value)) + value


def encode_fields(fields: Iterable[tuple[Tag, int | bytes]]) -> bytes:
    """The payload of a request. Raises ValueError above MAX_REQUEST."""
    return joined([field(tag, value) for tag, value in fields])


def joined(fields: Iterable[bytes]) -> bytes:
    """The payload of a request out of encoded fields. Raises ValueError above MAX_REQUEST."""
    data = b"".join(fields)
    if len(data) > MAX_REQUEST:
        raise ValueError(f"a request of {len(data)} bytes; at most {MAX_REQUEST}")
    return data


def decode_fields(data: bytes) -> list[tuple[Tag, bytes]]:
    """The fields of a request in their order. Raises `ProtocolError`."""
    if len(data) > MAX_REQUEST:
        raise ProtocolError(f"a request of {len(data)} bytes")
    fields: list[tuple[Tag, bytes]] = []
    at, end = 0, len(data)
    while at < end:
        if end - at < FIELD.size:
            raise ProtocolError("a field's header is cut")
        tag, zero, size = FIELD.unpack_from(data, at)
        at += FIELD.size
        if tag not in _KNOWN_TAGS:
            raise ProtocolError(f"unknown field tag {tag}")
        if zero:
            raise ProtocolError(f"reserved bytes of field {tag} are not zero")
        if size > end - at:
            raise ProtocolError(f"field {tag} is cut")
        fields.append((Tag(tag), data[at : at + size]))
        at += size
    return fields


def field_int(tag: Tag, value: bytes) -> int:
    """The u64 of an integer field. Raises `ProtocolError`."""
    if len(value) != 8:
        raise ProtocolError(f"field {tag.name} is an integer, but has {len(value)} bytes")
    number: int = _U64.unpack(value)[0]
    return number


# --- requests of more than one frame ----------------------------------------------------------------------------------


def split_request(kind: FrameType, op: int, payload: bytes) -> Iterator[bytes]:
    """The frames of a START or Z_SPAWN: all but the last carry MORE. Raises ValueError above MAX_REQUEST."""
    if len(payload) > MAX_REQUEST:
        raise ValueError(f"a request of {len(payload)} bytes; at most {MAX_REQUEST}")
    at = 0
    while len(payload) - at > MAX_PAYLOAD:
        yield encode(kind, op, payload[at : at + MAX_PAYLOAD], Flag.MORE)
        at += MAX_PAYLOAD
    yield encode(kind, op, payload[at:] if at else payload)


class RequestJoiner:
    """Puts the frames of requests together again: at most `pending` half ones at a time, MAX_REQUEST bytes in all."""

    def __init__(self, pending: int = 16) -> None:
        self._parts: dict[int, bytearray] = {}
        self._limit = pending

    def add(self, frame: Frame) -> bytes | None:
        """The whole request's payload if this was its last frame. Raises `ProtocolError`."""
        parts = self._parts.get(frame.op)
        more = frame.flags & Flag.MORE
        if parts is None and not more:
            return frame.payload
        if parts is None:
            if len(self._parts) >= self._limit:
                raise ProtocolError("too many half requests")
            parts = self._parts[frame.op] = bytearray()
        if sum(map(len, self._parts.values())) + len(frame.payload) > MAX_REQUEST:
            raise ProtocolError(f"a request of more than {MAX_REQUEST} bytes")
        parts += frame.payload
        if more:
            return None
        del self._parts[frame.op]
        return bytes(parts)


def encode_many(frames: Sequence[Frame]) -> bytes:
    """Frames one after the other, as a stream carries them."""
    return b"".join(frame.encode() for frame in frames)
