"""One request of E2B's client: its headers, which sandbox it is for, and whether it may.

Data-plane requests name their sandbox by `E2b-Sandbox-Id` and `E2b-Sandbox-Port`, or by the host name
`{port}-{id}.{domain}`. Invariant: nothing of a sandbox is touched before the request showed the sandbox's access
token, an API key of its project, or (for one file) a signature that is made with the token.
"""

from __future__ import annotations

import base64
import binascii
import re

from dsec.api.exchange import Exchange
from dsec.api.ports.hosts import ENVD_PORT
from dsec.edge.client import EdgeClient, Principal
from dsec.errors import DsecError, InvalidRequest, SandboxNotFound, Unauthenticated

_HOST = re.compile(r"(\d{1,5})-([0-9a-v]{24})\.", re.IGNORECASE)
_MAX_TIMEOUT_MS = 10**10


class Call:
    """A request with its headers by name."""

    __slots__ = ("headers", "x")

    def __init__(self, x: Exchange) -> None:
        self.x = x
        self.headers: dict[bytes, bytes] = dict(x.scope["headers"])

    def header(self, name: bytes) -> str:
        """A header as text, or ''."""
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def method(self) -> str:
        return str(self.x.scope["method"])

    def project(self, edge: EdgeClient) -> Principal:
        """Who makes a control-plane request. Raises `Unauthenticated`."""
        principal = edge.authenticate(self.header(b"x-api-key") or self.x.bearer())
        self.x.principal = principal
        self.x.project()
        return principal

    def target(self) -> tuple[str, int] | None:
        """Sandbox and port that a data-plane request names, or None."""
        sandbox_id = self.header(b"e2b-sandbox-id")
        if sandbox_id:
            port = self.headers.get(b"e2b-sandbox-port", b"%d" % ENVD_PORT).decode("latin-1")
            if not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
                raise InvalidRequest("E2b-Sandbox-Port is not a port")
            return sandbox_id, int(port)
        match = _HOST.match(self.header(b"host"))
        return (match[2].lower(), int(match[1])) if match else None

    def authorize(self, edge: EdgeClient, sandbox_id: str) -> str:
        """The request may use this sandbox, by the token that is returned. Raises `Unauthenticated`,
        `SandboxNotFound`, `PermissionDenied`."""
        token = self.header(b"x-access-token") or self.header(b"x-api-key")
        if not token:
            raise Unauthenticated("the request carries no access token", remedy="Send it as X-Access-Token.")
        try:
            principal = edge.authenticate(token)
        except Unauthenticated:
            if token.startswith(f"dst_{sandbox_id}_") and _is_gone(edge, sandbox_id):
                raise SandboxNotFound(f"there is no sandbox {sandbox_id}") from None
            raise
        edge.authorize(principal, sandbox_id)
        self.x.principal = principal
        return token

    @property
    def signed(self) -> bool:
        """Whether a signature stands in for the token."""
        return self.x.raw("signature") is not None

    def user(self) -> str | None:
        """The user that the request names by Basic authorization, or None. Raises `InvalidRequest`."""
        kind, _, value = self.header(b"authorization").partition(" ")
        if kind.lower() != "basic":
            return None
        try:
            name = base64.b64decode(value.strip(), validate=True).decode().partition(":")[0]
        except (binascii.Error, UnicodeDecodeError):
            raise InvalidRequest("the Basic authorization is not base64 of UTF-8 text") from None
        return name or None

    def timeout_s(self) -> float | None:
        """`Connect-Timeout-Ms` in seconds, or None. Raises `InvalidRequest`."""
        text = self.header(b"connect-timeout-ms")
        if not text:
            return None
        if not text.isascii() or not text.isdigit() or not 0 < int(text) < _MAX_TIMEOUT_MS:
            raise InvalidRequest("Connect-Timeout-Ms is 1 to 10 digits, above 0")
        return int(text) / 1000

    def keepalive_s(self) -> float:
        """How often a stream that stands still says that it lives."""
        text = self.header(b"keepalive-ping-interval")
        seconds = int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0
        return float(seconds or 90)


def _is_gone(edge: EdgeClient, sandbox_id: str) -> bool:
    try:
        edge.get(sandbox_id)
    except DsecError:
        return True
    return False
