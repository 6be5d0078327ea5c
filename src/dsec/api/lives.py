"""The calls on a sandbox's life that every user makes: create, look, end. Raw ASGI, because Litestar costs as much
again as one of them does.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from dsec.api.batch import deadline
from dsec.api.exchange import Exchange
from dsec.edge.client import EdgeClient
from dsec.errors import PermissionDenied
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxInfo, SandboxSpec

_SPEC = msgspec.json.Decoder(SandboxSpec)


async def create(edge: EdgeClient, x: Exchange) -> None:
    """POST /v1/sandboxes"""
    x.check_query("deadline_s", "key")
    principal = x.owner()
    deadline_s, key = deadline(x), x.text("key")
    spec = x.decode(_SPEC, await x.body())
    edge.check_grants(principal, spec.network)
    created = await edge.create(spec, project=principal.project, deadline_s=deadline_s, key=key)
    await x.answer(200 if created.existed else 201, created.sandbox)


async def inspect(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """GET /v1/sandboxes/ID"""
    x.check_query()
    await x.answer(200, _as_seen(x, edge.get(sandbox_id)))


async def end(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """DELETE /v1/sandboxes/ID"""
    x.check_query("cause")
    cause = x.value("cause", Cause, Cause.DELETED)
    if cause is not Cause.DELETED and (x.principal is None or x.principal.sandbox_id is not None):
        raise PermissionDenied("a sandbox token ends its sandbox with the cause `deleted` only")
    await x.answer(200, _as_seen(x, await edge.delete(sandbox_id, cause)))


def _as_seen(x: Exchange, info: SandboxInfo) -> SandboxInfo:
    """What the sandbox's own token is told: not what is watched, nor what was hit."""
    principal = x.principal
    if principal is None or principal.sandbox_id is None:
        return info
    paused = None if info.paused is None else replace(info.paused, rule="")
    return replace(info, spec=replace(info.spec, tripwires=[]), paused=paused)
