"""What a command wrote and was given, as it goes into its trajectory entry. Pure.

Owns what is kept of it: little of it inline, more as blobs, beyond a bound only its size and digest.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from dsec.errors import DsecError
from dsec.spec.trajectory import INLINE_BYTES

_plain = msgspec.json.Encoder().encode


class Stream:
    """One stream of a command, or a file's content, as it passes by."""

    __slots__ = ("_hash", "_keep", "holes", "kept", "size")

    def __init__(self, keep: int) -> None:
        """`keep`: bytes from its begin that are kept."""
        self._keep = keep
        self._hash: Any = None
        self.kept = bytearray()
        self.size = 0
        self.holes = False
        """Part of it passed where nobody looked."""

    def feed(self, data: bytes | memoryview, offset: int | None = None) -> None:
        """What comes next. `offset`: where it says that it begins."""
        if offset is not None and offset != self.size:
            self.holes = True
            self.size = max(self.size, offset)
        self.size += len(data)
        if self._hash is not None:
            self._hash.update(data)
        elif self.size > INLINE_BYTES:
            self._hash = hashlib.sha256(self.kept)
            self._hash.update(data)
        room = self._keep - len(self.kept)
        if room > 0 and not self.holes:
            self.kept += data if len(data) <= room else data[:room]

    @property
    def sha256(self) -> str:
        """Of all that passed."""
        return str((self._hash or hashlib.sha256(self.kept)).hexdigest())

    def entry(self, inline: bool, put: Callable[[bytes], str | None]) -> dict[str, Any]:
        """Its description. `put` keeps a blob and says its digest, or None where there is no room."""
        found: dict[str, Any] = {"bytes": self.size}
        if self.holes:
            found["holes"] = True
        elif inline:
            found.update(as_text(bytes(self.kept)))
        else:
            found["sha256"] = self.sha256
            blob = put(bytes(self.kept)) if self.kept else None
            if blob is not None:
                found["blob"] = blob
                if len(self.kept) < self.size:
                    found["kept"] = len(self.kept)
        return found


class Recorder:
    """`ports.Tap` of one command."""

    __slots__ = ("_ended", "_keep", "_streams", "broken", "noticed", "output_bytes")

    def __init__(self, keep: int, ended: Callable[[], object]) -> None:
        """`ended` is called at its end, before any reader sees it. Where it raises a `DsecError`, whoever asks for the
        result is told: it is tried again then."""
        self._keep = keep
        self._streams: dict[str, Stream] = {}
        self._ended = ended
        self.output_bytes = 0
        self.broken = False
        """It can't go on here, or was released."""
        self.noticed: Callable[[], None] | None = None
        """Called after whatever this was told of but stdin."""

    def output(self, stderr: bool, offset: int, data: bytes) -> None:
        self._stream("stderr" if stderr else "stdout").feed(data, offset)
        self.output_bytes += len(data)
        if self.noticed is not None:
            self.noticed()

    def stdin(self, data: memoryview) -> None:
        self._stream("stdin").feed(data)

    def _stream(self, name: str) -> Stream:
        found = self._streams.get(name)
        if found is None:
            found = self._streams[name] = Stream(self._keep)
        return found

    def ended(self) -> None:
        with suppress(DsecError):
            self._ended()
        if self.noticed is not None:
            self.noticed()

    def failed(self) -> None:
        self.broken = True
        if self.noticed is not None:
            self.noticed()
        self._ended, self.noticed = _nothing, None  # nobody is kept by a command that was cut off

    def whole_output(self) -> tuple[bytes, bytes] | None:
        """stdout and stderr; None where not all of them is kept."""
        found = []
        for name in ("stdout", "stderr"):
            stream = self._streams.get(name)
            if stream is not None and (stream.holes or len(stream.kept) != stream.size):
                return None
            found.append(b"" if stream is None else bytes(stream.kept))
        return found[0], found[1]

    def entry(self, put: Callable[[bytes], str | None]) -> dict[str, Any]:
        """stdout, stderr, stdin as far as there were any; the small ones inline."""
        found: dict[str, Any] = {}
        room = {"output": INLINE_BYTES, "stdin": INLINE_BYTES}
        for name, stream in sorted(self._streams.items(), key=lambda each: each[1].size):
            which = "stdin" if name == "stdin" else "output"
            inline = stream.size <= room[which]
            room[which] -= stream.size if inline else 0
            found[name] = stream.entry(inline, put)
        return found


def _nothing() -> None:
    pass


def as_text(data: bytes) -> dict[str, str]:
    """Bytes in JSON: as text where they are text."""
    try:
        return {"text": data.decode("utf-8")}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def bytes_of(entry: dict[str, Any], blob: Callable[[str], bytes | None]) -> bytes | None:
    """What is kept of a stream that `entry` describes; None where nothing is."""
    if "text" in entry:
        return str(entry["text"]).encode("utf-8")
    if "base64" in entry:
        return base64.b64decode(entry["base64"])
    if "blob" in entry:
        return blob(entry["blob"])
    return None if entry.get("bytes") else b""


def digest_of(env: dict[str, str]) -> str:
    """What stands for variables in an entry."""
    return hashlib.sha256(env_bytes(env)).hexdigest()


def env_bytes(env: dict[str, str]) -> bytes:
    """Variables as they are kept."""
    try:
        return _plain(env)
    except UnicodeEncodeError:
        return repr(sorted(env.items())).encode("ascii", "backslashreplace")


def printable(value: Any) -> Any:
    """The same without text that has no bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {printable(name): printable(item) for name, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list) else value
