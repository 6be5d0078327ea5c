"""The body of an exec call over HTTP (`application/vnd.dsec.exec`), without I/O, for the server and the SDK.

A frame is u8 kind, u32 little-endian length, payload. Client to server: 0 `ExecSpec` JSON (first), 1 stdin, 2 stdin
end. Server to client: 0 started, 1 stdout, 2 stderr, 3 end (`ExecStatus` JSON), 4 error (`ErrorBody` JSON); 3 and 4
are last. A body that ends without them was cut. This module owns framing, kinds and sizes; the JSON is the
caller's.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from dsec.wire.frames import Buffer, ProtocolError

MEDIA_TYPE = "application/vnd.dsec.exec"
HEADER_SIZE = 5
MAX_PAYLOAD = 4 << 20
"""Of one frame, received. Data frames that we send are far smaller; the JSON of an `ExecSpec` is what needs room."""

_HEADER = struct.Struct("<BI")


class ClientKind(IntEnum):
    """Frames that the client sends."""

    SPEC = 0
    STDIN = 1
    STDIN_END = 2


class ServerKind(IntEnum):
    """Frames that the server sends."""

    STARTED = 0
    STDOUT = 1
    STDERR = 2
    END = 3
    ERROR = 4


def encode(kind: ClientKind | ServerKind, payload: Buffer = b"") -> bytes:
    """One frame. Raises ValueError for a payload above MAX_PAYLOAD."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a frame of {len(payload)} bytes; at most {MAX_PAYLOAD}")
    return _HEADER.pack(kind, len(payload)) + payload


class _Decoder:
    """Common part: framing only. `feed` and `end` are the interface."""

    _last_kind: int
    _finals: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._broken: ProtocolError | None = None
        self._count = 0
        self.finished = False
        """A final frame (server: end or error; client: stdin end) has come."""

    def _split(self, data: Buffer) -> list[tuple[int, bytes]]:
        """Whole frames are taken from `data` as they are; of one that is cut the rest is waited for in the buffer."""
        if self._broken:
            raise self._broken
        frames: list[tuple[int, bytes]] = []
        view, at, total = memoryview(data), 0, len(data)
        buffer = self._buffer
        try:
            while True:
                if buffer:
                    at = self._complete(view, at, frames)
                    if buffer:
                        break
                if total - at < HEADER_SIZE:
                    buffer += view[at:]
                    break
                kind, size = _HEADER.unpack_from(view, at)
                self._check(kind, size)
                end = at + HEADER_SIZE + size
                if end > total:
                    buffer += view[at:]
                    break
                self._add(frames, kind, bytes(view[at + HEADER_SIZE : end]))
                at = end
            if self.finished and buffer:
                raise ProtocolError("bytes after the last frame")
        except ProtocolError as error:
            self._broken = error
            buffer.clear()
            raise
        return frames

    def _complete(self, view: memoryview, at: int, frames: list[tuple[int, bytes]]) -> int:
        """Go on with the frame in the buffer, with `view` from `at` on; how far that was taken."""
        buffer = self._buffer
        while True:
            headed = len(buffer) >= HEADER_SIZE
            size = _HEADER.unpack_from(buffer)[1] if headed else 0
            some = view[at : at + HEADER_SIZE + size - len(buffer)]
            buffer += some
            at += len(some)
            if len(buffer) < HEADER_SIZE + size:
                return at
            kind, size = _HEADER.unpack_from(buffer)
            if not headed:
                self._check(kind, size)
            if len(buffer) == HEADER_SIZE + size:
                self._add(frames, kind, bytes(memoryview(buffer)[HEADER_SIZE:]))
                buffer.clear()
                return at

    def _add(self, frames: list[tuple[int, bytes]], kind: int, payload: bytes) -> None:
        frames.append((kind, payload))
        self._count += 1
        self.finished = kind in self._finals

    def _check(self, kind: int, size: int) -> None:
        if self.finished:
            raise ProtocolError("a frame after the last one")
        if kind > self._last_kind:
            raise ProtocolError(f"unknown frame kind {kind}")
        if size > MAX_PAYLOAD:
            raise ProtocolError(f"a frame of {size} bytes; at most {MAX_PAYLOAD}")

    def end(self) -> None:
        """The body ended. Raises `ProtocolError` where that cut a frame."""
        if self._buffer:
            raise ProtocolError("the body ended inside a frame")


class ServerDecoder(_Decoder):
    """What the SDK reads. `finished` tells a whole answer from one that was cut."""

    _last_kind = ServerKind.ERROR
    _finals = frozenset({ServerKind.END, ServerKind.ERROR})

    def feed(self, data: Buffer) -> list[tuple[ServerKind, bytes]]:
        """Frames that `data` completes. Raises `ProtocolError`."""
        return [(ServerKind(kind), payload) for kind, payload in self._split(data)]


class ClientDecoder(_Decoder):
    """What the server reads: the spec first, once, then stdin."""

    _last_kind = ClientKind.STDIN_END
    _finals = frozenset({ClientKind.STDIN_END})

    def feed(self, data: Buffer) -> list[tuple[ClientKind, bytes]]:
        """Frames that `data` completes. Raises `ProtocolError`."""
        return [(ClientKind(kind), payload) for kind, payload in self._split(data)]

    def _check(self, kind: int, size: int) -> None:
        super()._check(kind, size)
        if (self._count == 0) != (kind == ClientKind.SPEC):
            raise ProtocolError("the first frame, and only the first, is the spec")
        if kind == ClientKind.STDIN_END and size:
            raise ProtocolError("a stdin end carries no bytes")
