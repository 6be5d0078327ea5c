"""How SandboxFusion's calls are served: `sandboxfusion.json` in the state directory; `dsec.app` reads it.

Owns its form, and who may come without a key.
"""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address, ip_network
from socket import gethostname
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from dsec.spec.sandbox import GIB, MIB


class FusionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of SandboxFusion's calls."""

    environment: str = "debian"
    """What programs run in, unless the URL names another."""
    environments: dict[str, str] = {}
    """Language -> what is different for it."""
    memory_bytes: Annotated[int, Meta(ge=16 * MIB)] = 1 * GIB
    """Of a program whose request names no limit."""
    wait_s: Annotated[float, Meta(gt=0)] = 8.0
    """How long a request waits for a place before it is answered 504. verl's client gives up 10 s after the sum of
    both time limits, without another attempt; after a 504 it comes again."""
    keyless_project: str | None = None
    """Requests without a key are this project's. None: they are refused."""
    keyless_from: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    """Networks from which that holds."""

    def environment_for(self, language: str) -> str:
        """The environment of a language's programs."""
        return self.environments.get(language, self.environment)

    def keyless(self, address: str, host: str, *, forwarded: bool) -> str | None:
        """The project of a request without a key from this address, or None. `host`: what it says whom it is for;
        `forwarded`: it says that it comes from elsewhere."""
        if self.keyless_project is None or forwarded:
            return None
        try:
            found = ip_address(address.partition("%")[0])
        except ValueError:
            return None
        found = getattr(found, "ipv4_mapped", None) or found
        if found.is_loopback and not _is_here(host):
            return None
        allowed = any(found in ip_network(each) for each in self.keyless_from)
        return self.keyless_project if allowed else None

    def check(self) -> None:
        """Raises ValueError for what is no network."""
        for each in self.keyless_from:
            ip_network(each)


def _is_here(host: str) -> bool:
    """Whether a Host header is an address or this machine's own name: not one that a page's owner has lead here."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    with suppress(ValueError):
        return bool(ip_address(name))
    return name in ("localhost", gethostname().lower()) or name.endswith(".localhost")
