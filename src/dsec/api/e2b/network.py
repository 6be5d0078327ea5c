"""E2B's network options as named permissions.

Owns the mapping (docs/E2B.md shows it). Invariant: whatever is asked for is granted, refused with an error, or (where
the server's `e2b.json` says so) left out whole; never in part, and never beyond the API key's own policy.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dsec.errors import InvalidRequest, Unsupported
from dsec.spec.network import Network, host_name, permission

_ALL = frozenset({"0.0.0.0/0", "::/0", "*", "all"})
_INCOMING = frozenset({"allowPublicTraffic"})
"""Says who may come in by a port, not what goes out."""
_RULES = frozenset({"allowOut", "denyOut"})


class NetworkUpdate(msgspec.Struct, rename="camel"):
    """Body of `PUT /sandboxes/{id}/network`."""

    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)
    rules: Any = None


def network_of(internet: bool | None, options: dict[str, Any] | None, default: Network) -> Network:
    """What a creation or change asks for. `internet`: allow_internet_access; `default`: what the key's sandboxes get
    where nothing is said. Raises `InvalidRequest`, `Unsupported`."""
    given = {name: value for name, value in (options or {}).items() if value and name not in _INCOMING}
    other = sorted(given.keys() - _RULES)
    if other:
        raise Unsupported(
            f"network rules ({', '.join(other)[:200]}): not available in this version of dsec", remedy="Leave it out."
        )
    try:
        allowed = msgspec.convert(given.get("allowOut") or [], list[str])
        denied = msgspec.convert(given.get("denyOut") or [], list[str])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"network: {error}") from None
    found: Network = {"internet": True} if internet else {} if internet is not None else dict(default)
    if _ALL & set(denied):
        found.clear()
    for text in denied:
        if text not in _ALL:
            found[_permission(text)] = False
    for text in allowed:  # wins over what is denied, as there
        if text in _ALL:
            found["internet"] = True
        else:
            found[_permission(text)] = True
    if not any(found.values()):
        return {}
    return found


def _permission(text: str) -> str:
    """An address, a block, or a name with or without `*.`, maybe with a port."""
    for kind in ("ip", "host"):
        try:
            return permission(f"{kind}:{text}").text
        except ValueError as error:
            why = str(error)
    try:  # E2B also takes a whole top-level domain's, which we don't
        host_name(text.removeprefix("*."))
    except ValueError as error:
        why = str(error)
    raise InvalidRequest(f"network: {why}")
