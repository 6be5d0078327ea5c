"""What a gateway answers when it doesn't serve: a status and a text for whoever reads a tool's output inside."""

from __future__ import annotations

from collections.abc import Mapping


class Refusal(Exception):
    """Ends a request with an answer. `text` never holds a secret or what an upstream sent."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text
        self.headers = headers or {}


def forbidden(permission: str, text: str) -> Refusal:
    """403: the permission doesn't allow this."""
    return Refusal(403, f"refused by the network policy of this sandbox (permission {permission}): {text}")


def missing(text: str) -> Refusal:
    """404."""
    return Refusal(404, text)


def broken(permission: str, text: str) -> Refusal:
    """502: it was allowed, but the platform couldn't do it."""
    return Refusal(
        502, f"the platform could not serve the permission {permission}: {text}. This is not the fault of your request."
    )


class UpstreamError(Exception):
    """The outside failed: unreachable, too slow, cut, or an answer that can't be one. Becomes a 502."""


class TooBig(UpstreamError):
    """The outside sent more than the gateway takes."""
