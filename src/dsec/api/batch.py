"""Many sandboxes or commands in one call, and the look-up by name: raw ASGI.

`create_many` and `exec_many` answer NDJSON, a line an item as it is ready. A client that goes away stops nothing: with
the same key it gets the same sandboxes again; every command of a batch has a key, so that those that it has no line of
can be sent again: they are attached to, nothing runs twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, cast

import msgspec
from msgspec import Meta, Struct

from dsec.api.exchange import MAX_BATCH_BYTES, Exchange
from dsec.api.held import GROUP_HOLD_S, HeldAnswer
from dsec.edge.client import DeleteItem, EdgeClient, Principal
from dsec.edge.kept import BatchItem, PauseItem
from dsec.errors import DsecError, ErrorBody, InvalidRequest
from dsec.spec.causes import Cause
from dsec.spec.operations import Chunk
from dsec.spec.sandbox import ExecSpec, ExecStatus, Key, SandboxSpec

_NDJSON = b"application/x-ndjson"
MAX_ITEMS = 32768
MAX_COMMANDS = 4096
INLINE_BYTES = 64 << 10
"""Of a command's output in its line."""


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


class PauseRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `POST /v1/sandboxes:pause` and `:resume`: either `ids`, or all that `run` and `labels` say."""

    ids: Annotated[list[str], Meta(max_length=MAX_ITEMS)] | None = None
    run: str | None = None
    labels: dict[str, str] | None = None


class PauseResults(Struct, frozen=True):
    """Answer to it."""

    results: list[PauseItem]


class ExecItem(Struct, frozen=True, forbid_unknown_fields=True):
    """One command. `spec.key` must be there, `spec.stdin` not."""

    sandbox: str
    spec: ExecSpec
    index: int | None = None
    """Its number in the answer; None: its place in the list."""
    release: Annotated[list[Key], Meta(max_length=1024)] = []
    """Finished commands of that sandbox to forget, as `X-Dsec-Release` does for a single one."""


class ExecBatch(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/exec:batch`."""

    items: Annotated[list[ExecItem], Meta(min_length=1, max_length=MAX_COMMANDS)]


class ExecResult(Struct, frozen=True, omit_defaults=True):
    """One line of the answer: a status with all output, `attach`, or an error."""

    index: int
    status: ExecStatus | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    attach: bool = False
    """There is more output than a line holds: attach by the key."""
    error: ErrorBody | None = None


_BATCH = msgspec.json.Decoder(BatchRequest)
_EXECS = msgspec.json.Decoder(ExecBatch)
_DELETE = msgspec.json.Decoder(DeleteRequest)
_PAUSE = msgspec.json.Decoder(PauseRequest)
_ENCODER = msgspec.json.Encoder()


async def create_many(edge: EdgeClient, x: Exchange) -> None:
    """POST /v1/sandboxes:batch"""
    x.check_query("deadline_s", "key")
    principal = x.owner()
    deadline_s, key = deadline(x), idempotency_key(x)
    request = x.decode(_BATCH, await x.body(MAX_BATCH_BYTES))
    if request.specs is not None and request.spec is None and request.count is None:
        specs = request.specs
    elif request.spec is not None and request.count is not None and request.specs is None:
        specs = [request.spec] * request.count
    else:
        raise InvalidRequest("a batch is either `specs`, or `spec` and `count`")
    for each in specs if request.spec is None else [request.spec]:
        edge.check_grants(principal, each.network)
    items = cast(
        "AsyncGenerator[BatchItem]", edge.create_many(specs, project=principal.project, deadline_s=deadline_s, key=key)
    )
    async with aclosing(items):
        item = await anext(items)  # what is wrong with the whole request comes as its status
        held = HeldAnswer(x, _NDJSON, hold_s=GROUP_HOLD_S)
        async with held:
            held.push(_line(item))
            async for item in items:
                held.push(_line(item))
                if held.full:
                    await held.flush()
            await held.finish()


async def exec_many(edge: EdgeClient, x: Exchange) -> None:
    """POST /v1/exec:batch"""
    x.check_query()
    principal = Principal(x.project())
    items = x.decode(_EXECS, await x.body(MAX_BATCH_BYTES)).items
    ended: asyncio.Queue[asyncio.Task[ExecResult]] = asyncio.Queue()
    tasks = [asyncio.create_task(_run(edge, principal, place, item)) for place, item in enumerate(items)]
    try:
        for task in tasks:
            task.add_done_callback(ended.put_nowait)
        held = HeldAnswer(x, _NDJSON, hold_s=GROUP_HOLD_S)
        async with held:
            for _ in tasks:
                held.push(_ENCODER.encode((await ended.get()).result()) + b"\n")
                if held.full:
                    await held.flush()
            await held.finish()
    finally:
        for task in tasks:
            task.cancel()  # whoever reads; the commands go on


async def delete_many(edge: EdgeClient, x: Exchange) -> None:
    """POST /v1/sandboxes:delete"""
    x.check_query("cause")
    project = x.project()
    cause = x.value("cause", Cause, Cause.DELETED)
    request = x.decode(_DELETE, await x.body())
    results = await edge.delete_many(request.ids, project=project, cause=cause)
    await x.answer(200, Deleted(results))


async def pause_many(edge: EdgeClient, x: Exchange, *, resume: bool) -> None:
    """POST /v1/sandboxes:pause, POST /v1/sandboxes:resume"""
    x.check_query()
    project = x.project()
    asked = x.decode(_PAUSE, await x.body())
    if (asked.ids is None) == (asked.run is None and asked.labels is None):
        raise InvalidRequest("name sandboxes by `ids`, or by `run` and `labels`")
    results = await edge.pause_many(project, ids=asked.ids, run=asked.run, labels=asked.labels, resume=resume)
    await x.answer(200, PauseResults(results))


async def find_named(edge: EdgeClient, run: str, name: str, x: Exchange) -> None:
    """GET /v1/named/{run}/{name}"""
    x.check_query()
    await x.answer(200, edge.find_named(x.project(), None if run == "-" else run, name))


def deadline(x: Exchange) -> float | None:
    """The argument `deadline_s`."""
    if x.raw("deadline_s") is None:
        return None
    value = x.value("deadline_s", float, 0.0)
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


async def _run(edge: EdgeClient, principal: Principal, place: int, item: ExecItem) -> ExecResult:
    index = place if item.index is None else item.index
    try:
        edge.authorize(principal, item.sandbox)
        if item.spec.key is None or item.spec.stdin:
            raise InvalidRequest("a command of a batch has a key, and no stdin", field="spec")
        for key in item.release:
            await edge.release(item.sandbox, key)
        execution = await edge.exec(item.sandbox, item.spec, patient=True)
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        size = 0
        events = cast("AsyncGenerator[Chunk | ExecStatus]", execution.events())
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ExecStatus):
                    stdout, stderr = (b"".join(each) for each in parts)
                    return ExecResult(index, event, stdout, stderr)
                parts[event.stderr].append(event.data)
                size += len(event.data)
                if size > INLINE_BYTES:
                    break
        return ExecResult(index, attach=True)
    except DsecError as error:
        return ExecResult(index, error=error.body())
