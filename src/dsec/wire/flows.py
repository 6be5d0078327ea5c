"""Records of a machine's way out on the streams of its operation (layout and rules: native/common/wire.h, WAYS OUT),
without I/O.

The decoder is for what a guest says, which is hostile: it holds at most one incomplete record, and what no guest may
say is a `ProtocolError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from ipaddress import IPv4Address

from msgspec import Struct

from dsec.wire.frames import Buffer, ProtocolError

HEADER_SIZE = 8
MAX_DATA = 16384
WINDOW = 65536
MAX_FLOWS = 1024
MAX_CREDIT = WINDOW
MAX_QUERY = 4096


class FlowKind(IntEnum):
    READY = 1
    OPEN = 2
    DATA = 3
    END = 4
    RESET = 5
    CREDIT = 6
    QUERY = 7
    ANSWER = 8


class FlowRecord(Struct, frozen=True, gc=False):
    """A record of a guest's; its size is one that this kind may have."""

    kind: FlowKind
    flow: int
    data: bytes

    @property
    def address(self) -> str:
        """OPEN: whom the program believes to be connected to."""
        return str(IPv4Address(self.data[:4]))

    @property
    def number(self) -> int:
        """OPEN: its port. CREDIT: how many bytes more."""
        return int.from_bytes(self.data[4:] if self.kind is FlowKind.OPEN else self.data, "little")


_HEADER = struct.Struct("<BBHI")
_SIZES = {
    FlowKind.READY: (0, 0),
    FlowKind.OPEN: (6, 6),
    FlowKind.DATA: (1, MAX_DATA),
    FlowKind.END: (0, 0),
    FlowKind.RESET: (0, 0),
    FlowKind.CREDIT: (4, 4),
    FlowKind.QUERY: (1, MAX_QUERY),
}
"""Of what a guest says: the least and the most."""
_KINDS = {int(kind): (kind, *sizes) for kind, sizes in _SIZES.items()}


def encode(kind: FlowKind, flow: int, data: Buffer = b"") -> bytes:
    """A record's bytes; `data` is at most 65,535."""
    return _HEADER.pack(kind, 0, len(data), flow) + data


def encode_credit(flow: int, size: int) -> bytes:
    """So many bytes were taken."""
    return encode(FlowKind.CREDIT, flow, size.to_bytes(4, "little"))


class FlowDecoder:
    """Bytes in any pieces to records."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> Iterator[FlowRecord]:
        """The whole ones, as far as they are good. Raises `ProtocolError` at the first that isn't. To be used up before
        the next call."""
        data = self._held + data
        at, end = 0, len(data)
        while end - at >= HEADER_SIZE:
            number, zero, size, flow = _HEADER.unpack_from(data, at)
            kind, least, most = _KINDS.get(number, (None, 0, 0))
            if kind is None or zero or not least <= size <= most:
                raise ProtocolError(f"a malformed record of a way out: kind {number}, {size} bytes")
            if end - at - HEADER_SIZE < size:
                break
            at += HEADER_SIZE + size
            yield FlowRecord(kind, flow, data[at - size : at])
        self._held = data[at:]
