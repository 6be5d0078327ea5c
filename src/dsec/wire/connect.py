"""The Connect protocol with JSON messages, without I/O: envelopes of streams, error codes and their HTTP statuses.

An envelope is u8 flags, u32 big-endian length, payload. Flag 1 (compressed) is refused: nothing is ever compressed
here. Flag 2 marks the last envelope of an answer, whose payload is `{}` or `{"error": {"code", "message"}}`.
Invariants: a decoder that has raised stays broken; no payload above `MAX_PAYLOAD` is buffered.
"""

from __future__ import annotations

import json
import struct
from enum import StrEnum

from dsec.wire.frames import Buffer, ProtocolError

STREAM_TYPE = "application/connect+json"
UNARY_TYPE = "application/json"
HEADER_SIZE = 5
MAX_PAYLOAD = 4 << 20
COMPRESSED = 1
END_STREAM = 2

_HEADER = struct.Struct(">BI")


class Code(StrEnum):
    """Error codes of the protocol."""

    CANCELED = "canceled"
    UNKNOWN = "unknown"
    INVALID_ARGUMENT = "invalid_argument"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    PERMISSION_DENIED = "permission_denied"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    FAILED_PRECONDITION = "failed_precondition"
    ABORTED = "aborted"
    OUT_OF_RANGE = "out_of_range"
    UNIMPLEMENTED = "unimplemented"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    DATA_LOSS = "data_loss"
    UNAUTHENTICATED = "unauthenticated"

    @property
    def http_status(self) -> int:
        """The status of a unary answer that carries this code."""
        return _STATUS[self]


_STATUS = {
    Code.CANCELED: 499,
    Code.UNKNOWN: 500,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 500,
    Code.UNAUTHENTICATED: 401,
}


def encode(payload: Buffer, flags: int = 0) -> bytes:
    """One envelope."""
    return _HEADER.pack(flags, len(payload)) + payload


def encode_end(code: Code | None = None, message: str = "") -> bytes:
    """The last envelope of an answer: success, or an error."""
    if code is None:
        return encode(b"{}", END_STREAM)
    return encode(json.dumps({"error": {"code": code.value, "message": message}}).encode(), END_STREAM)


class Decoder:
    """Takes a request's envelopes apart."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._broken: ProtocolError | None = None

    def feed(self, data: Buffer) -> list[bytes]:
        """Payloads that `data` completes. Raises `ProtocolError`."""
        if self._broken is not None:
            raise self._broken
        self._buffer += data
        payloads: list[bytes] = []
        at = 0
        try:
            while len(self._buffer) - at >= HEADER_SIZE:
                flags, size = _HEADER.unpack_from(self._buffer, at)
                if flags:
                    what = "a compressed envelope" if flags & COMPRESSED else f"an envelope with flags {flags:#x}"
                    raise ProtocolError(f"{what} is not taken here")
                if size > MAX_PAYLOAD:
                    raise ProtocolError(f"an envelope of {size} bytes; at most {MAX_PAYLOAD}")
                end = at + HEADER_SIZE + size
                if len(self._buffer) < end:
                    break
                payloads.append(bytes(self._buffer[at + HEADER_SIZE : end]))
                at = end
        except ProtocolError as error:
            self._broken = error
            self._buffer.clear()
            raise
        del self._buffer[:at]
        return payloads

    def end(self) -> None:
        """The body ended. Raises `ProtocolError` where that cut an envelope."""
        if self._buffer:
            raise ProtocolError("the body ended inside an envelope")
