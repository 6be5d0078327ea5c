"""What a gateway is: a plain HTTP service that sandboxes reach at a name of its own, where a rule is finer than a name
(a repository, a path, a date, credentials that must not be inside). It speaks TLS outside.

The egress owns the connections: it hands each request to the gateway of the name that the connection was made to,
together with what this sandbox may do there right now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web
from msgspec import Struct


class Grant(Struct, frozen=True):
    """One permission of a sandbox's that names a gateway."""

    permission: str
    """As the policy names it: `pypi`, `git:github.com/org/repo`."""
    kind: str
    """Before the colon: `pypi`, `git`."""
    argument: str = ""
    """After it."""
    options: Mapping[str, Any] = {}
    """The options of the permission's definition and of the policy: `before` (a date), `paths`, `headers`, ..."""


class Visit(Struct, frozen=True):
    """One request's context."""

    sandbox_id: str
    project: str
    grants: Sequence[Grant]
    """Those that this gateway serves; never empty. Looked up anew for each request: a policy changes live."""
    note: Callable[[str, Mapping[str, Any]], None]
    """A line in the sandbox's event log: `note("gateway", {"permission", "method", "path", "status", "bytes"})`."""


class Gateway(Protocol):
    """Serves some kinds of permissions. Stateless towards sandboxes: one instance a node."""

    kinds: tuple[str, ...]
    """The kinds of permissions it serves."""
    hosts: tuple[str, ...]
    """The names at which it answers inside, port 80."""

    def check(self, grant: Grant) -> None:
        """Before a permission is granted: whether it and its options can be. Raises `InvalidRequest`."""
        ...

    async def handle(self, request: web.BaseRequest, visit: Visit) -> web.StreamResponse:
        """Answer. What the grants don't allow is 403 with a text that says which permission is missing."""
        ...

    def environment(self, grants: Sequence[Grant]) -> Mapping[str, str]:
        """Variables that point the tools inside at it: index URLs, registry settings, git's `insteadOf`."""
        ...

    async def close(self) -> None:
        """Let go of connections and caches."""
        ...
