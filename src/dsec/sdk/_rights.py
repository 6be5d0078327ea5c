"""Rights in a cluster: projects, roles, keys with an end or scopes, and what the audit stream says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from dsec.sdk._transport import Transport
from dsec.spec.network import KeyPolicy

_JSON = {"Content-Type": "application/json"}

Row = dict[str, Any]
"""As the HTTP API answers; docs/CLUSTER.md says what is in it."""


class AsyncRights:
    """Who may do what, in the project of this client's key and in those below it. Only in a cluster: one machine has
    API keys alone (`Unsupported` or `NotFound`)."""

    def __init__(self, transport: Transport) -> None:
        """Not for callers: `client.rights`."""
        self._transport = transport

    async def projects(self) -> list[Row]:
        """Those on record, each with its quota, its weight, and how many sandboxes live in it and below."""
        found: list[Row] = (await self._call("GET", "/v1/projects"))["projects"]
        return found

    async def create_project(self, path: str, *, quota: Mapping[str, Any] | None = None, weight: float = 1.0) -> Row:
        """A sub-project. `quota`: `sandboxes`, `backends` (by name), `cpus`, `memory_bytes`, `creates_per_s`; of it and
        all below it together. Raises `PermissionDenied`, `Conflict` (names are used once), `InvalidRequest` (above a
        parent's)."""
        return await self._call("POST", "/v1/projects", {"path": path, "quota": quota or {}, "weight": weight})

    async def change_project(
        self, path: str, *, quota: Mapping[str, Any] | None = None, weight: float | None = None
    ) -> Row:
        """Another quota or weight; None: as it is. Takes the right to make projects in its parent."""
        body = {"quota": quota, "weight": weight}
        return await self._call("PATCH", f"/v1/projects/{quote(path, safe='')}", body)

    async def delete_project(self, path: str) -> None:
        """It and all below it, for good: their keys are refused from now on, their sandboxes are ended."""
        await self._delete(f"/v1/projects/{quote(path, safe='')}")

    async def roles(self, project: str | None = None) -> list[Row]:
        """Those on a project and below it; None: the client's."""
        found: list[Row] = (await self._call("GET", "/v1/roles", project=project))["roles"]
        return found

    async def give_role(
        self,
        principal: str,
        role: str | None = None,
        *,
        verbs: Sequence[str] | None = None,
        project: str | None = None,
        ttl_s: float | None = None,
    ) -> Row:
        """A role (or single permissions) on a project and all below it, at most what this key's principal holds.
        `principal`: `person:NAME`, `agent:NAME` or `service:NAME`. Raises `PermissionDenied`."""
        body = {"principal": principal, "project": project, "role": role, "verbs": verbs, "ttl_s": ttl_s}
        return await self._call("POST", "/v1/roles", body)

    async def take_role(self, role_id: str) -> None:
        """Take it away, and all that was given by it. Raises `NotFound`, `PermissionDenied`."""
        await self._delete(f"/v1/roles/{quote(role_id, safe='')}")

    async def create_key(
        self,
        label: str = "",
        *,
        project: str | None = None,
        principal: str | None = None,
        scopes: Sequence[str] | None = None,
        ttl_s: float | None = None,
        policy: KeyPolicy | None = None,
    ) -> Row:
        """A key: `key` (seen this once), `id`, `project`. `principal`: whose roles it uses; None: this key's own.
        `scopes`: at most these permissions. Raises `PermissionDenied`."""
        body = {
            "label": label,
            "policy": policy,
            "project": project,
            "principal": principal,
            "scopes": scopes,
            "ttl_s": ttl_s,
        }
        return await self._call("POST", "/v1/keys", body)

    async def rotate_key(self, key_id: str, *, overlap_s: float = 300.0) -> Row:
        """A new key with the same rights; the old one is good for `overlap_s` more."""
        return await self._call("POST", f"/v1/keys/{quote(key_id, safe='')}/rotate", {"overlap_s": overlap_s})

    async def audit(self, after: int = 0, limit: int = 100) -> tuple[list[Row], int]:
        """What was changed and refused in the project and below it, oldest first, and the number to go on from."""
        page = await self._call("GET", "/v1/audit", after=after, limit=limit)
        return page["entries"], page["next"]

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: object) -> Row:
        """What changes something isn't repeated where the connection breaks (`OutcomeUnknown`)."""
        return await self._transport.call(
            method,
            self._transport.url(path, **query),
            dict[str, Any],
            body=None if body is None else msgspec.json.encode(body),
            headers=None if body is None else _JSON,
            replay=method == "GET",
        )

    async def _delete(self, path: str) -> None:
        await self._transport.call("DELETE", self._transport.url(path), type(None))
