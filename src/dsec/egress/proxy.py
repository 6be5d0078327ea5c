"""What programs ask of the HTTP proxy: the address to connect to, and requests in absolute form. Pure.

The proxy grants nothing: it is another spelling of a connection to a name or address, which is then decided, checked
and noted as if it had been made without. Owns the reading of a request's head and the form in which it goes on.
Invariants: a connection to the proxy is for one target; behind CONNECT nothing comes before its answer; a request in
absolute form goes on in origin form, with what is meant for proxies left out, read as strictly as `http1` reads; a
later one on the same connection has to be for the same target.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable

from msgspec import Struct

from dsec.egress.http1 import MAX_HEAD, Refused, Requests
from dsec.plan.permissions import OWN_DOMAIN
from dsec.spec.network import Address, Reason, host_name

NAME = "proxy" + OWN_DOMAIN
PORT = 3128
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_CHUNK = 16 << 10
_HERE = ("localhost", "127.0.0.1", "127.0.0.0/8", "::1", OWN_DOMAIN)
_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,40}) ([!-~]{1,16384}) HTTP/1\.[01]")
_FIELD = re.compile(rb"host:[ \t]*([!-~]*)[ \t]*", re.IGNORECASE)
_ABSOLUTE = re.compile(rb"http://([^/?#@]*)((?:[/?#][!-~]*)?)", re.IGNORECASE)
_HOP = re.compile(rb"(?:connection|keep-alive|proxy-[a-z-]+|upgrade|te)[ \t]*:", re.IGNORECASE)


class Asked(Struct, frozen=True):
    """What the first request on a connection is for."""

    target: str | Address
    """A name in its one form, or an address."""
    port: int
    connect: bool
    """CONNECT: from its answer on the connection is the program's."""
    held: bytes
    """What was read."""


def environment(direct: Iterable[str]) -> dict[str, str]:
    """The variables that point programs at the proxy. `direct`: names that they connect to themselves."""
    url, direct_names = f"http://{NAME}:{PORT}", ",".join(dict.fromkeys((*_HERE, *direct)))
    values = {"http_proxy": url, "https_proxy": url, "no_proxy": direct_names}
    return values | {name.upper(): value for name, value in values.items()}


async def read(sock: socket.socket) -> Asked:
    """The first head on a connection. Raises `Refused`."""
    loop, held = asyncio.get_running_loop(), b""
    while (asked := parse(held)) is None:
        data = await loop.sock_recv(sock, _CHUNK)
        if not data:
            raise Refused(Reason.SAID_NOTHING, "it closed")
        held += data
    return asked


def parse(held: bytes) -> Asked | None:
    """What is asked for; None while the head isn't whole. Raises `Refused`."""
    end = held.find(b"\r\n\r\n", 0, MAX_HEAD)
    if end < 0:
        if len(held) >= MAX_HEAD:
            raise Refused(Reason.HTTP_MALFORMED, "a head that is too long")
        return None
    lines = held[:end].split(b"\r\n")
    matched = _LINE.fullmatch(lines[0])
    if matched is None:
        raise Refused(Reason.HTTP_MALFORMED, "a request line")
    if matched[1] != b"CONNECT":
        absolute = _ABSOLUTE.fullmatch(matched[2])
        if absolute is None:
            raise Refused(Reason.HTTP_MALFORMED, "a proxy is asked for http://... or CONNECT")
        return Asked(*_authority(absolute[1], 80), False, held)
    target, port = _authority(matched[2], None)
    for line in lines[1:]:
        name = line.partition(b":")[0].strip().lower()
        if name in (b"content-length", b"transfer-encoding"):
            raise Refused(Reason.HTTP_MALFORMED, "CONNECT with a body")
        if name == b"host":
            host = _FIELD.fullmatch(line)
            if host is None or _authority(host[1], port) != (target, port):
                raise Refused(Reason.HTTP_HOST_MISMATCH, line.decode("latin-1")[:200])
    if len(held) > end + 4:
        raise Refused(Reason.HTTP_MALFORMED, "data before CONNECT was answered")
    return Asked(target, port, True, held)


def _authority(text: bytes, default: int | None) -> tuple[str | Address, int]:
    """HOST:PORT, [ADDRESS]:PORT; without a port the default. Raises `Refused`."""
    shown = text.decode("latin-1")
    matched = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?", shown)
    port = int(matched[2]) if matched is not None and matched[2] else default
    if matched is None or port is None or not 1 <= port <= 65535:
        raise Refused(Reason.HTTP_MALFORMED, f"{shown[:200]!r} is not a host and port")
    host = matched[1]
    try:
        return ipaddress.ip_address(host.strip("[]")), port
    except ValueError:
        pass
    try:
        return host_name(host), port
    except ValueError as error:
        raise Refused(Reason.HTTP_MALFORMED, str(error)) from None


class Forwarded(Requests):
    """Requests in absolute form for one target, in the form in which the server wants them."""

    def __init__(self, target: str | Address, port: int) -> None:
        super().__init__(str(target), port)
        self._target = target

    def _pass(self, lines: list[bytes]) -> bytes:
        """See `Requests`: the head, spelled anew. The server is asked to end the connection with its answer, so that
        the client makes another for another target; one that doesn't may be asked for more."""
        method, target, version = lines[0].split(b" ")
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None or self.waits_for_answer:
            raise Refused(Reason.HTTP_MALFORMED, "an upgrade, or not in absolute form")
        path = absolute[2].partition(b"#")[0]
        if not path.startswith(b"/"):
            path = b"/" + path
        kept = [line for line in lines[1:] if not _HOP.match(line)]
        return b"\r\n".join([b" ".join([method, path, version]), *kept, b"Connection: close", b"", b""])

    def _is_ours(self, value: bytes) -> bool:
        try:
            return _authority(value, 80) == (self._target, self._port)
        except Refused:
            return False
