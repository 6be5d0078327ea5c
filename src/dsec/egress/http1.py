"""Requests of one plain HTTP connection, checked as they pass: every one of them asks for the granted name. Pure.

Owns the framing. Invariants: what passes is read in one way only (RFC 9112 without its leniencies: no bare LF, no
folding, no spaces before colons, one Host, Content-Length or Transfer-Encoding but not both, chunk sizes without
extensions), so that no server behind can find another request in it; nothing of a request passes before its head was
checked; a connection leaves HTTP only for a WebSocket, and only once the server has agreed.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from dsec.spec.network import Reason, host_name

MAX_HEAD = 64 << 10
_MAX_TRAILER = 8 << 10
_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,40}) ([!-~]{1,16384}) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_METHODS = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT ", b"TRACE ")


class Refused(Exception):
    """Something that must not pass; `reason` says what kind of thing."""

    def __init__(self, reason: Reason, text: str = "") -> None:
        super().__init__(text or reason.value)
        self.reason = reason


class _At(Enum):
    HEAD = auto()
    BODY = auto()
    CHUNK = auto()
    CHUNK_DATA = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    UPGRADE = auto()
    RAW = auto()


def looks_like_http(data: bytes) -> bool:
    """Whether the first bytes (any number) may begin a request."""
    start = data.lstrip(b"\r\n")[:8]
    return any(start[: len(method)] == method[: len(start)] for method in _METHODS)


class Requests:
    """One direction of one connection. Feed it what the client sends; send on what it gives back."""

    def __init__(self, name: str, port: int) -> None:
        """`name`: the only host that may be asked for."""
        self._name = name
        self._port = port
        self._at = _At.HEAD
        self._held = bytearray()
        self._left = 0
        self._trailer = 0
        self.count = 0

    @property
    def waits_for_answer(self) -> bool:
        """The client wants a WebSocket: nothing passes until the server has said yes (`upgraded`)."""
        return self._at is _At.UPGRADE

    @property
    def raw(self) -> bool:
        """Not HTTP any more."""
        return self._at is _At.RAW

    def upgraded(self, answer: bytes) -> None:
        """The first line of the server's answer to an upgrade."""
        if self._at is _At.UPGRADE:
            self._at = _At.RAW if answer.startswith((b"HTTP/1.1 101 ", b"HTTP/1.1 101\r")) else _At.HEAD

    def feed(self, data: bytes) -> bytes:
        """What may pass now; the rest is held. Raises `Refused`."""
        out = bytearray()
        self._held += data
        while self._held and self._step(out):
            pass
        if len(self._held) > MAX_HEAD and self._at is not _At.RAW:
            raise Refused(Reason.HTTP_MALFORMED, "a head that is too long")
        return bytes(out)

    def _step(self, out: bytearray) -> bool:
        """One part; False where more is needed."""
        held, at = self._held, self._at
        if at is _At.UPGRADE:
            return False
        if at is _At.RAW:
            out += held
            held.clear()
            return False
        if at in (_At.BODY, _At.CHUNK_DATA):
            size = min(self._left, len(held))
            out += held[:size]
            del held[:size]
            self._left -= size
            if not self._left:
                self._at = _At.HEAD if at is _At.BODY else _At.CHUNK_END
            return not self._left
        if at is _At.HEAD:
            return self._head(out)
        line = self._line(out)
        if line is None:
            return False
        if at is _At.CHUNK:
            if not _SIZE.fullmatch(line):
                raise Refused(Reason.HTTP_MALFORMED, "a chunk size")
            self._left = int(line, 16)
            self._at = _At.CHUNK_DATA if self._left else _At.TRAILER
            self._trailer = 0
        elif at is _At.CHUNK_END:
            if line:
                raise Refused(Reason.HTTP_MALFORMED, "a chunk that goes on")
            self._at = _At.CHUNK
        elif not line:
            self._at = _At.HEAD
        else:
            self._trailer += len(line)
            if self._trailer > _MAX_TRAILER or not _FIELD.fullmatch(line):
                raise Refused(Reason.HTTP_MALFORMED, "a trailer")
        return True

    def _line(self, out: bytearray) -> bytes | None:
        end = self._held.find(b"\n", 0, _MAX_TRAILER)
        if end < 0:
            if len(self._held) >= _MAX_TRAILER:
                raise Refused(Reason.HTTP_MALFORMED, "a line that is too long")
            return None
        if end == 0 or self._held[end - 1] != 13:
            raise Refused(Reason.HTTP_MALFORMED, "a line without CR")
        line = bytes(self._held[: end - 1])
        out += self._held[: end + 1]
        del self._held[: end + 1]
        return line

    def _head(self, out: bytearray) -> bool:
        held = self._held
        while held[:2] == b"\r\n":  # some clients send one after a body
            del held[:2]
        if held and not looks_like_http(bytes(held[:16])) and not _begins(held):
            raise Refused(Reason.HTTP_MALFORMED, "not a request")
        end = held.find(b"\r\n\r\n", 0, MAX_HEAD)
        if end < 0:
            return False
        lines = bytes(held[:end]).split(b"\r\n")
        self._check(lines)
        out += self._pass(lines)
        del held[: end + 4]
        self.count += 1
        return True

    def _pass(self, lines: list[bytes]) -> bytes:
        """A head that was checked, as it goes on. Raises `Refused`."""
        return b"\r\n".join([*lines, b"", b""])

    def _check(self, lines: list[bytes]) -> None:
        matched = _LINE.fullmatch(lines[0])
        if matched is None:
            raise Refused(Reason.HTTP_MALFORMED, "a request line")
        method, target = matched[1], matched[2]
        fields: dict[bytes, bytes] = {}
        for line in lines[1:]:
            field = _FIELD.fullmatch(line)
            if field is None:
                raise Refused(Reason.HTTP_MALFORMED, "a header field")
            key = field[1].lower()
            if key in fields and key in _ONCE:
                raise Refused(Reason.HTTP_MALFORMED, f"{key.decode()} twice")
            fields[key] = field[2]
        if method == b"CONNECT":
            raise Refused(Reason.HTTP_MALFORMED, "CONNECT")
        self._check_host(fields.get(b"host"))
        if target.lower().startswith(b"http://"):
            self._check_host(re.split(rb"[/?#]", target[7:], maxsplit=1)[0])
        elif not target.startswith(b"/") and target != b"*":
            raise Refused(Reason.HTTP_MALFORMED, "a request target")
        coding, length = fields.get(b"transfer-encoding"), fields.get(b"content-length")
        if coding is not None:
            if coding.lower() != b"chunked" or length is not None or matched[3] == b"0":
                raise Refused(Reason.HTTP_MALFORMED, "an ambiguous length")
            self._at = _At.CHUNK
        elif length is not None:
            if not _LENGTH.fullmatch(length):
                raise Refused(Reason.HTTP_MALFORMED, "a length")
            self._left = int(length)
            self._at = _At.BODY if self._left else _At.HEAD
        if b"upgrade" in fields:
            if self.count or fields[b"upgrade"].lower() != b"websocket" or self._at is not _At.HEAD:
                raise Refused(Reason.HTTP_MALFORMED, "an upgrade")
            self._at = _At.UPGRADE

    def _check_host(self, value: bytes | None) -> None:
        if not self._is_ours(value or b""):
            raise Refused(Reason.HTTP_HOST_MISMATCH, (value or b"").decode("latin-1")[:200])

    def _is_ours(self, value: bytes) -> bool:
        host, _, port = value.partition(b":")
        try:
            name = host_name(host.decode("ascii"))
        except ValueError:
            return False
        return name == self._name and (not port or port == str(self._port).encode())


_ONCE = frozenset({b"host", b"content-length", b"transfer-encoding", b"upgrade"})


def _begins(held: bytearray) -> bool:
    """Whether this may be a request line with a method of another name."""
    first = bytes(held[:41]).split(b" ", 1)[0]
    return len(first) <= 40 and bool(re.fullmatch(rb"[A-Z-]*", first))
