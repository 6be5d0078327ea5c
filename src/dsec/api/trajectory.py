"""Trajectories over HTTP: reading and following one, and making a sandbox again from it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import msgspec

from dsec.api.exchange import Exchange
from dsec.api.held import HeldAnswer
from dsec.edge.client import EdgeClient
from dsec.spec.trajectory import RebuildRequest

NDJSON = b"application/x-ndjson"
_REBUILD = msgspec.json.Decoder(RebuildRequest)


async def read(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """GET .../trajectory: the lines as they are stored, so that whoever has them can check the chain. Not for
    the sandbox's own token."""
    x.check_query("follow", "after")
    x.project()
    after = x.natural("after") or 0
    held = HeldAnswer(x, NDJSON)
    if not x.value("follow", bool, False):
        lines = edge.trajectory(sandbox_id, after)
        async with held:
            for line in lines:
                held.push(line)
                if held.full:
                    await held.flush()
            await held.finish()
        return
    stream = cast("AsyncGenerator[bytes]", edge.follow_trajectory(sandbox_id, after))
    async with held, aclosing(stream):
        async for line in stream:
            held.push(line)
            if held.full:
                await held.flush()
        await held.finish()


async def rebuild(edge: EdgeClient, x: Exchange) -> None:
    """POST /v1/sandboxes:rebuild"""
    x.check_query()
    principal = x.owner()
    request = x.decode(_REBUILD, await x.body())
    edge.authorize(principal, request.sandbox)
    await x.answer(200, await edge.rebuild(request, principal))
