"""Records of the streaming calls on their pipes (layouts in native/common/wire.h), without I/O: events of WATCH, and
what CONNECT says on stderr.

Both decoders hold at most one incomplete record. Paths as in `dsec.wire.entries`.
"""

from __future__ import annotations

import base64
import struct
from typing import Literal

import msgspec
from msgspec import Struct

from dsec.spec.sandbox import FileEvent
from dsec.wire.entries import to_bytes, to_text
from dsec.wire.frames import Buffer, ProtocolError

EVENT_SIZE = 8
MAX_PATH = 65535

_EVENT = struct.Struct("<BBHHH")
_U64 = struct.Struct("<Q")
_Kind = Literal["create", "write", "remove", "rename", "chmod", "overflow"]
_KINDS: dict[int, _Kind] = {
    ord("c"): "create",
    ord("w"): "write",
    ord("r"): "remove",
    ord("m"): "rename",
    ord("a"): "chmod",
    ord("o"): "overflow",
}
_LETTERS: dict[str, int] = {name: letter for letter, name in _KINDS.items()}
_BEGIN = ord("b")
_CONNECTED, _ENDED = ord("c"), ord("e")


def encode_begin() -> bytes:
    """The record that says that a watch has begun."""
    return _EVENT.pack(_BEGIN, 0, 0, 0, 0)


def encode_event(event: FileEvent) -> bytes:
    """An event's bytes. Raises ValueError for paths that are too long."""
    path, before = to_bytes(event.path), to_bytes(event.from_path or "")
    if max(len(path), len(before)) > MAX_PATH:
        raise ValueError("a path of more than 65,535 bytes")
    return _EVENT.pack(_LETTERS[event.kind], int(event.directory), len(path), len(before), 0) + path + before


def json_safe(event: FileEvent) -> FileEvent:
    """The same event for JSON: bytes that aren't UTF-8 appear as U+FFFD; the `_b64` fields have the real paths."""
    if event.path_b64 is None and event.from_path_b64 is None:
        return event
    path = to_bytes(event.path).decode("utf-8", "replace")
    before = None if event.from_path is None else to_bytes(event.from_path).decode("utf-8", "replace")
    return msgspec.structs.replace(event, path=path, from_path=before)


def from_json(event: FileEvent) -> FileEvent:
    """The reverse of `json_safe`. Raises ValueError for bad base64."""
    if event.path_b64 is not None:
        event = msgspec.structs.replace(event, path=to_text(base64.b64decode(event.path_b64, validate=True)))
    if event.from_path_b64 is not None:
        before = to_text(base64.b64decode(event.from_path_b64, validate=True))
        event = msgspec.structs.replace(event, from_path=before)
    return event


class EventDecoder:
    """Events out of the bytes of a WATCH, as they come. The first record has to be the one that says it has begun."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.began = False

    def feed(self, data: Buffer) -> list[FileEvent]:
        """The events that `data` completes. Raises `ProtocolError`."""
        buffer = self._buffer
        buffer += data
        events: list[FileEvent] = []
        at = 0
        while len(buffer) - at >= EVENT_SIZE:
            letter, directory, path_size, before_size, zero = _EVENT.unpack_from(buffer, at)
            if (letter == _BEGIN) == self.began or zero or directory > 1:
                raise ProtocolError("a malformed event")
            if letter == _BEGIN:
                if directory or path_size or before_size:
                    raise ProtocolError("a malformed first event")
                self.began = True
                at += EVENT_SIZE
                continue
            kind = _KINDS.get(letter)
            if kind is None or (before_size and kind != "rename"):
                raise ProtocolError("an unknown event")
            start = at + EVENT_SIZE
            middle, end = start + path_size, start + path_size + before_size
            if len(buffer) < end:
                break
            path, before = bytes(buffer[start:middle]), bytes(buffer[middle:end])
            at = end
            events.append(
                FileEvent(
                    kind=kind,
                    path=to_text(path),
                    from_path=to_text(before) if kind == "rename" else None,
                    directory=bool(directory),
                    path_b64=_b64_if_needed(path),
                    from_path_b64=_b64_if_needed(before),
                )
            )
        del buffer[:at]
        return events

    def end(self) -> None:
        """The output ended. Raises `ProtocolError` where that cut an event."""
        if self._buffer:
            raise ProtocolError("the list of events was cut")


def _b64_if_needed(name: bytes) -> str | None:
    try:
        name.decode()
    except UnicodeDecodeError:
        return base64.b64encode(name).decode()
    return None


# --- CONNECT ----------------------------------------------------------------------------------------------------------


class ConnectState(Struct):
    """What CONNECT has said so far."""

    connected: bool = False
    stdout_bytes: int | None = None
    """Set when the other side has ended its direction: so many bytes it sent in all."""


def encode_connected() -> bytes:
    """The record that says that the connection stands."""
    return bytes([_CONNECTED])


def encode_ended(stdout_bytes: int) -> bytes:
    """The record that says that the other side has ended its direction."""
    return bytes([_ENDED]) + _U64.pack(stdout_bytes)


class ConnectDecoder:
    """CONNECT's stderr, as it comes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.state = ConnectState()

    def feed(self, data: Buffer) -> None:
        """Raises `ProtocolError`."""
        buffer, state = self._buffer, self.state
        buffer += data
        if buffer and not state.connected:
            if buffer[0] != _CONNECTED:
                raise ProtocolError("a malformed record of a connection")
            state.connected = True
            del buffer[:1]
        if len(buffer) > 1 + _U64.size or (buffer and (buffer[0] != _ENDED or state.stdout_bytes is not None)):
            raise ProtocolError("a malformed record of a connection")
        if len(buffer) == 1 + _U64.size:
            state.stdout_bytes = _U64.unpack_from(buffer, 1)[0]
            buffer.clear()
