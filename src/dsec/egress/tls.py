"""The name in a TLS ClientHello. Pure.

Invariants: reads at most `MAX_HELLO` bytes, in whatever pieces and records they come; a hello that two parsers could
read differently (two names, lengths that don't add up) is malformed, not guessed at.
"""

from __future__ import annotations

MAX_HELLO = 32 << 10
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_MAX_RECORD = 1 << 14


class Malformed(ValueError):
    """Not a ClientHello."""


def looks_like_tls(data: bytes) -> bool:
    """Whether the first bytes (any number) may begin a TLS handshake."""
    return all(one == other for one, other in zip(data[:2], b"\x16\x03", strict=False))


def server_name(data: bytes) -> str | None:
    """The name that a client asks for, lower case; "" where it names none; None while the hello isn't whole. Raises
    `Malformed`."""
    hello = _hello(data)
    if hello is None:
        if len(data) > MAX_HELLO:
            raise Malformed("the hello is too long")
        return None
    body = _Reader(hello)
    body.take(34)  # version, random
    body.vector(1)
    body.vector(2)
    body.vector(1)
    if body.empty:
        return ""
    extensions = _Reader(body.vector(2))
    body.end()
    found: str | None = None
    while not extensions.empty:
        kind = extensions.number(2)
        content = extensions.vector(2)
        if kind == 0:
            if found is not None:
                raise Malformed("two server names")
            found = _name(content)
    return found or ""


def _hello(data: bytes) -> bytes | None:
    """The handshake message, put together from its records."""
    message = bytearray()
    at = 0
    while True:
        if not looks_like_tls(data[at:]):
            raise Malformed("not a TLS handshake")
        if len(data) < at + 5:
            return None
        size = int.from_bytes(data[at + 3 : at + 5], "big")
        if not 1 <= size <= _MAX_RECORD:
            raise Malformed("a record of impossible length")
        message += data[at + 5 : at + 5 + size]
        if message and message[0] != _CLIENT_HELLO:
            raise Malformed("not a ClientHello")
        if len(message) >= 4:
            length = int.from_bytes(message[1:4], "big")
            if length > MAX_HELLO:
                raise Malformed("the hello is too long")
            if len(message) >= 4 + length:
                return bytes(message[4 : 4 + length])
        at += 5 + size
        if at > len(data):
            return None


def _name(content: bytes) -> str:
    names = _Reader(_Reader(content).vector(2, last=True))
    if names.number(1) != 0:
        raise Malformed("a server name of an unknown kind")
    name = names.vector(2)
    names.end()
    if not name.isascii() or not name:
        raise Malformed("a server name that isn't ASCII")
    return name.decode("ascii").lower().removesuffix(".")


class _Reader:
    """Bounded reading; whatever is missing is malformed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def empty(self) -> bool:
        return self._at == len(self._data)

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise Malformed("cut short")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int, *, last: bool = False) -> bytes:
        found = self.take(self.number(size))
        if last:
            self.end()
        return found

    def end(self) -> None:
        if not self.empty:
            raise Malformed("more than it says")
