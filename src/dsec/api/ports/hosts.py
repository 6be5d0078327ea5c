"""Which port of which sandbox a host name means: `{port}-{id}.{domain}`.

Pure. Invariant: a name of this form under our domain is never anything else, whatever its spelling (case, a trailing
dot, a port), and one under another domain is refused, never served.
"""

from __future__ import annotations

import re

from msgspec import Struct

from dsec.errors import InvalidRequest, Misdirected

ENVD_PORT = 49983
"""What E2B's client calls by this port is the API's own business."""
LOCAL = "localhost"
"""The domain where none is set: browsers take any name below it for this machine."""
_SANDBOX = re.compile(rb"([0-9]{1,20})-([0-9a-v]{24})\.(.+)")
_MAX_HOST = 300


class Target(Struct, frozen=True):
    """A port of a sandbox."""

    sandbox_id: str
    port: int


def find(host: bytes, domain: str) -> Target | None:
    """What the `Host` of a request means below `domain` (which may name a port, for clients); None: the API itself.

    Raises `InvalidRequest` for a port that is none, `Misdirected` for a sandbox under a domain that isn't ours.
    """
    if len(host) > _MAX_HOST:
        return None
    match = _SANDBOX.fullmatch(_bare(host))
    if match is None:
        return None
    digits, sandbox_id, under = match[1], match[2].decode(), match[3]
    if digits == b"%d" % ENVD_PORT:
        return None
    if digits[:1] == b"0" or not 1 <= int(digits) <= 65535:
        raise InvalidRequest(
            f"{digits.decode()} in the host name is no port: those are 1 to 65535, without a leading zero"
        )
    if under != _bare(domain.encode("idna" if not domain.isascii() else "ascii")):
        raise Misdirected(
            f"this server has sandboxes under *.{domain}, not under {under[:100].decode('latin-1')!r}",
            remedy='Use that domain, or set "domain" in the server\'s e2b.json.',
        )
    return Target(sandbox_id, int(digits))


def find_any(host: bytes) -> str | None:
    """The sandbox that a `Host` names, under whatever domain; None: the API itself. For who only passes it on."""
    match = _SANDBOX.fullmatch(_bare(host)) if len(host) <= _MAX_HOST else None
    return None if match is None else match[2].decode()


def domain_here(domain: str | None, port: int) -> str:
    """The domain that clients are told: the one that is set, or this machine's with the port that the server has."""
    return domain or f"{LOCAL}:{port}"


def _bare(host: bytes) -> bytes:
    """Lower case, without a port and the dot of the root."""
    name, colon, port = host.rpartition(b":")
    if not colon or not (port.isdigit() or not port):
        name = host
    return name.lower().removesuffix(b".")
