"""Many sandboxes in one call, and the look-up by name: raw ASGI.

`create_many` answers NDJSON, a line an item as it is ready. A client that goes away stops nothing: with the same key
it gets the same sandboxes again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, cast

import msgspec
from msgspec import Meta, Struct

from dsec.api.exchange import MAX_BATCH_BYTES, Exchange
from dsec.api.held import HeldAnswer
from dsec.edge.client import BatchItem, DeleteItem, EdgeClient
from dsec.errors import InvalidRequest
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec

_NDJSON = b"application/x-ndjson"
MAX_ITEMS = 32768


class BatchRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Either `specs`, or one `spec` and a `count`."""

    specs: Annotated[list[SandboxSpec], Meta(min_length=1, max_length=MAX_ITEMS)] | None = None
    spec: SandboxSpec | None = None
    count: Annotated[int, Meta(ge=1, le=MAX_ITEMS)] | None = None


class DeleteRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a delete call for several sandboxes."""

    ids: Annotated[list[str], Meta(max_length=MAX_ITEMS)]


class Deleted(Struct, frozen=True):
    """Answer to it, in the order given."""

    results: list[DeleteItem]


_BATCH = msgspec.json.Decoder(BatchRequest)
_DELETE = msgspec.json.Decoder(DeleteRequest)
_ENCODER = msgspec.json.Encoder()


async def create_many(edge: EdgeClient, x: Exchange) -> None:
    """POST /v1/sandboxes:batch"""
    x.check_query("deadline_s", "key")
    project = x.project()
    deadline_s, key = deadline(x), idempotency_key(x)
    request = x.decode(_BATCH, await x.body(MAX_BATCH_BYTES))
    if request.specs is not None and request.spec is None and request.count is None:
        specs = request.specs
    elif request.spec is not None and request.count is not None and request.specs is None:
        specs = [request.spec] * request.count
    else:
        raise InvalidRequest("a batch is either `specs`, or `spec` and `count`")
    items = cast("AsyncGenerator[BatchItem]", edge.create_many(specs, project=project, deadline_s=deadline_s, key=key))
    async with aclosing(items):
        item = await anext(items)  # what is wrong with the whole request comes as its status
        held = HeldAnswer(x, _NDJSON)
        async with held:
            held.push(_line(item))
            async for item in items:
                held.push(_line(item))
                if held.full:
                    await held.flush()
            await held.finish()


async def delete_many(edge: EdgeClient, x: Exchange) -> None:
    """POST /v1/sandboxes:delete"""
    x.check_query("cause")
    project = x.project()
    cause = x.value("cause", Cause, Cause.DELETED)
    request = x.decode(_DELETE, await x.body())
    results = await edge.delete_many(request.ids, project=project, cause=cause)
    await x.answer(200, Deleted(results))


async def find_named(edge: EdgeClient, run: str, name: str, x: Exchange) -> None:
    """GET /v1/named/{run}/{name}"""
    x.check_query()
    await x.answer(200, edge.find_named(x.project(), None if run == "-" else run, name))


def deadline(x: Exchange) -> float | None:
    """The argument `deadline_s`."""
    value = x.value("deadline_s", float, -1.0)
    if value == -1.0:
        return None
    if not 0 < value <= 86400:
        raise InvalidRequest("deadline_s is above 0 and at most a day")
    return value


def idempotency_key(x: Exchange) -> str | None:
    """The argument `key`."""
    key = x.text("key")
    if key is not None and not 1 <= len(key) <= 120:
        raise InvalidRequest("key is 1 to 120 characters")
    return key


def _line(item: BatchItem) -> bytes:
    return _ENCODER.encode(item) + b"\n"
