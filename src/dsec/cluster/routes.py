"""Which sandbox a request names, whoever's client sent it. Pure; whether it may is for others to say."""

from __future__ import annotations

from dsec.api.exchange import Scope
from dsec.api.ports.hosts import find_any
from dsec.api.swerex import ENDPOINTS
from dsec.errors import SandboxNotFound
from dsec.spec.ids import edge_of

SANDBOXES = "/v1/sandboxes/"
_PLACES = (SANDBOXES, "/v2/sandboxes/", "/sandboxes/", "/swerex/")
_DATA = frozenset({"files", "health", "process.Process", "filesystem.Filesystem"})


def edge_for(sandbox_id: str) -> int:
    """The edge that an id names. Raises `SandboxNotFound` for what is no id."""
    edge = edge_of(sandbox_id)
    if edge is None:
        raise SandboxNotFound(
            f"there is no sandbox {sandbox_id[:64]}", remedy="Records of ended sandboxes are kept for a day."
        )
    return edge


def host_of(scope: Scope) -> bytes:
    """The `Host` of a request."""
    return next((value for name, value in scope["headers"] if name == b"host"), b"")


def header_of(scope: Scope, wanted: bytes) -> str:
    """A header as text, or ''."""
    return next((value for name, value in scope["headers"] if name == wanted), b"").decode("latin-1")


def is_data(raw: str) -> bool:
    """Whether a path is of E2B's data plane."""
    return raw[1:].partition("/")[0] in _DATA


def sandbox_of(scope: Scope) -> str | None:
    """The id, which may be of no sandbox; None: the request names none."""
    raw = scope["raw_path"].decode("ascii", "replace")
    by_host = find_any(host_of(scope))
    if by_host is not None:
        return by_host
    for place in _PLACES:
        if raw.startswith(place):
            found = raw[len(place) :].partition("/")[0]
            return found if found != "metrics" else None
    if is_data(raw):
        return header_of(scope, b"e2b-sandbox-id") or token_of(header_of(scope, b"x-access-token"))
    if raw[1:] in ENDPOINTS:
        return token_of(header_of(scope, b"x-api-key") or header_of(scope, b"authorization").rpartition(" ")[2])
    return None


def token_of(bearer: str) -> str | None:
    """The sandbox of a token."""
    found = bearer[4:].partition("_")[0] if bearer.startswith("dst_") else ""
    return found if edge_of(found) is not None else None
