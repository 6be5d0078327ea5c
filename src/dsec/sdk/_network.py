"""What a sandbox may reach: named permissions, changed while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dsec.errors import InvalidRequest
from dsec.sdk._transport import Transport
from dsec.spec.network import Network, NetworkInfo, PermissionOptions

_JSON = {"Content-Type": "application/json"}
Grants = Mapping[str, "bool | PermissionOptions | Mapping[str, Any]"]
"""By the names of docs/NETWORK.md. Options as a `PermissionOptions`, or as a mapping of its fields."""


class AsyncNetworkAccess:
    """`sandbox.network`. Changes take effect at once, for open connections too; they need an API key.

    All calls raise `SandboxNotFound`, `SandboxEnded`, `PermissionDenied` (the key can't grant that), `Unavailable`, and
    `RequestTimeout` after `request_timeout_s`.
    """

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        """Not for callers: use `sandbox.network`."""
        self._transport = transport
        self._path = f"/v1/sandboxes/{sandbox_id}/network"

    async def get(self, *, request_timeout_s: float | None = None) -> NetworkInfo:
        """The policy as it is now, and what was reached under it."""
        url = self._transport.url(self._path)
        return await self._transport.call("GET", url, NetworkInfo, request_timeout_s=request_timeout_s)

    async def update(self, grants: Grants, *, request_timeout_s: float | None = None) -> NetworkInfo:
        """Change some permissions (True: grant, False: take away, or options) and leave the others as they are.

        Raises `InvalidRequest`, `Unsupported` too: nothing was changed then.
        """
        return await self._change("PATCH", grants, request_timeout_s)

    async def set(self, grants: Grants, *, request_timeout_s: float | None = None) -> NetworkInfo:
        """Replace the whole policy; an empty one reaches nothing. Raises as `update`."""
        return await self._change("PUT", grants, request_timeout_s)

    async def _change(self, method: str, grants: Grants, request_timeout_s: float | None) -> NetworkInfo:
        body = msgspec.json.encode({"network": network_of(grants)})
        url = self._transport.url(self._path)
        return await self._transport.call(
            method, url, NetworkInfo, body=body, headers=_JSON, request_timeout_s=request_timeout_s
        )


def network_of(grants: Grants) -> Network:
    """A policy from a caller's mapping. Raises `InvalidRequest`."""
    try:
        return msgspec.convert(dict(grants), Network)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"network: {error}", field="network") from None
