"""What the first bytes of a connection have to say, by its port.

Owns the choice. Port 443 speaks TLS and names what was granted; port 80 speaks HTTP and names it in every request;
elsewhere either is checked where it is recognised, and anything else goes by the name of the connection alone.
"""

from __future__ import annotations

from dsec.egress import tls
from dsec.egress.http1 import Refused, Requests, looks_like_http
from dsec.egress.splice import Gate
from dsec.spec.network import Reason

_LONGEST_METHOD = 8


class Hello:
    """TLS: the ClientHello names the host."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held = b""
        self.raw = False

    def feed(self, data: bytes) -> bytes:
        """See `Gate`."""
        if self.raw:
            return data
        self._held += data
        try:
            named = tls.server_name(self._held)
        except tls.Malformed as error:
            raise Refused(Reason.NOT_TLS, str(error)) from None
        if named is None:
            return b""
        if not named:
            raise Refused(Reason.TLS_NAME_MISSING)
        if named != self._name:
            raise Refused(Reason.TLS_NAME_MISMATCH, named[:200])
        self.raw = True
        held, self._held = self._held, b""
        return held


class Whatever:
    """Any protocol: TLS and HTTP are found by their first bytes."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port
        self._held = b""
        self._gate: Gate | None = None
        self._open = False

    @property
    def raw(self) -> bool:
        return self._open or (self._gate is not None and self._gate.raw)

    def feed(self, data: bytes) -> bytes:
        """See `Gate`."""
        if self._gate is not None:
            return self._gate.feed(data)
        held = self._held = self._held + data
        if not held:
            return b""
        if tls.looks_like_tls(held):
            if len(held) < 2:
                return b""
            self._gate = Hello(self._name)
        elif looks_like_http(held):
            if len(held) < _LONGEST_METHOD:
                return b""
            self._gate = Requests(self._name, self._port)
        else:
            self._open = True
            return held
        return self._gate.feed(held)


def gate_of(name: str, port: int) -> Hello | Requests | Whatever:
    """For a connection to a granted name."""
    if port == 443:
        return Hello(name)
    if port == 80:
        return Requests(name, port)
    return Whatever(name, port)
