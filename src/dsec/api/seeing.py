"""Seeing inside, over HTTP: a sandbox's events, the node's metrics, whether it is ready.

`/metrics` needs an API key of any project, as `/v1/node` does: it names no sandbox and no project. `/readyz` needs
none.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import msgspec

from dsec.api.exchange import Exchange
from dsec.api.held import HeldAnswer
from dsec.api.metrics import MEDIA, ServerMetrics, exposition
from dsec.edge.client import EdgeClient
from dsec.spec.events import SandboxEvent

NDJSON = b"application/x-ndjson"
_line = msgspec.json.Encoder().encode


async def metrics(edge: EdgeClient, server: ServerMetrics, x: Exchange) -> None:
    """GET /metrics"""
    x.check_query()
    x.project()
    server.watch()
    body = exposition([*server.families(), *edge.metrics()])
    await x.begin(200, MEDIA, (b"content-length", b"%d" % len(body)))
    await x.finish(body)


async def ready(edge: EdgeClient, x: Exchange) -> None:
    """GET /readyz"""
    found = await edge.ready()
    await x.answer(200 if found.ok else 503, found)


async def events(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """GET .../events: a line an event; with `follow` those to come too, until the sandbox has ended. Not for the
    sandbox's own token: they tell of its tripwires."""
    x.check_query("follow", "after")
    x.project()
    after = x.natural("after") or 0
    if not x.value("follow", bool, False):
        found = edge.events(sandbox_id, after)
        await x.begin(200, NDJSON)
        await x.finish(b"".join([_line(event) + b"\n" for event in found]))
        return
    stream = cast("AsyncGenerator[SandboxEvent]", edge.follow_events(sandbox_id, after))
    held = HeldAnswer(x, NDJSON)
    async with held, aclosing(stream):
        async for event in stream:
            held.push(_line(event) + b"\n")
            if held.full:
                await held.flush()
        await held.finish()
