"""Directory entries as STAT and LIST write them on stdout (layout in native/common/wire.h), without I/O.

Names are bytes on Linux. A `FileInfo` carries them as UTF-8 with surrogate escapes; where a name holds such an
escape `name_b64` has its bytes, because JSON cannot carry the escape (`json_safe`).
"""

from __future__ import annotations

import base64
import struct
from typing import Literal

import msgspec

from dsec.spec.sandbox import FileInfo
from dsec.wire.frames import Buffer, ProtocolError

ENTRY_SIZE = 40
MAX_NAME = 65535

_ENTRY = struct.Struct("<BBHHHIIIIQq")
_Type = Literal["file", "directory", "symlink", "fifo", "socket", "char", "block"]
_TYPES: dict[int, _Type] = {
    ord("f"): "file",
    ord("d"): "directory",
    ord("l"): "symlink",
    ord("p"): "fifo",
    ord("s"): "socket",
    ord("c"): "char",
    ord("b"): "block",
}
_LETTERS: dict[str, int] = {name: letter for letter, name in _TYPES.items()}


def to_bytes(name: str) -> bytes:
    """A path or name as Linux has it."""
    return name.encode("utf-8", "surrogateescape")


def to_text(name: bytes) -> str:
    """The reverse of `to_bytes`; every byte string has one."""
    return name.decode("utf-8", "surrogateescape")


def _b64_if_needed(name: bytes) -> str | None:
    try:
        name.decode()
    except UnicodeDecodeError:
        return base64.b64encode(name).decode()
    return None


def encode_entry(info: FileInfo) -> bytes:
    """An entry's bytes. Raises ValueError for names that are too long."""
    name = to_bytes(info.name)
    target = to_bytes(info.target or "")
    if max(len(name), len(target)) > MAX_NAME:
        raise ValueError("a name of more than 65,535 bytes")
    head = _ENTRY.pack(
        _LETTERS[info.type],
        0,
        len(name),
        len(target),
        0,
        info.mode,
        info.uid,
        info.gid,
        info.nlink,
        info.size,
        round(info.mtime * 1e9),
    )
    return head + name + target


def json_safe(info: FileInfo) -> FileInfo:
    """The same entry for JSON: bytes that aren't UTF-8 appear as U+FFFD in `name` and `target`, `name_b64` has the
    real name.
    """
    name = to_bytes(info.name).decode("utf-8", "replace")
    target = None if info.target is None else to_bytes(info.target).decode("utf-8", "replace")
    return msgspec.structs.replace(info, name=name, target=target)


def from_json(info: FileInfo) -> FileInfo:
    """The reverse of `json_safe`, for `name`. Raises ValueError for bad base64."""
    if info.name_b64 is None:
        return info
    return msgspec.structs.replace(info, name=to_text(base64.b64decode(info.name_b64, validate=True)))


class EntryDecoder:
    """Entries out of the bytes of a STAT or LIST, as they come. Holds at most one incomplete entry."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: Buffer) -> list[FileInfo]:
        """The entries that `data` completes. Raises `ProtocolError`."""
        buffer = self._buffer
        buffer += data
        entries: list[FileInfo] = []
        at = 0
        while len(buffer) - at >= ENTRY_SIZE:
            letter, zero, name_size, link_size, zero2, mode, uid, gid, nlink, size, mtime_ns = _ENTRY.unpack_from(
                buffer, at
            )
            kind = _TYPES.get(letter)
            if kind is None or zero or zero2 or mode > 0o7777 or (link_size and kind != "symlink"):
                raise ProtocolError("a malformed directory entry")
            start = at + ENTRY_SIZE
            if len(buffer) < start + name_size + link_size:
                break
            name = bytes(buffer[start : start + name_size])
            at = start + name_size + link_size
            entries.append(
                FileInfo(
                    name=to_text(name),
                    type=kind,
                    size=size,
                    mode=mode,
                    uid=uid,
                    gid=gid,
                    nlink=nlink,
                    mtime=mtime_ns / 1e9,
                    target=to_text(bytes(buffer[start + name_size : at])) if kind == "symlink" else None,
                    name_b64=_b64_if_needed(name),
                )
            )
        del buffer[:at]
        return entries

    def end(self) -> None:
        """The output ended. Raises `ProtocolError` where that cut an entry."""
        if self._buffer:
            raise ProtocolError("the list of entries was cut")
