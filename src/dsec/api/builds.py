"""Builds over HTTP: `POST /v1/builds?options=`, the body a tar archive of the context. The answer is NDJSON: `{"log"}`
lines while it works, then `{"result"}` or `{"error": ErrorBody}`, always last. A client that goes away stops the build;
nothing is left of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dsec.api.exchange import Exchange
from dsec.api.layers import as_ours
from dsec.builder.service import BuildOptions, BuildService
from dsec.edge.context import CHARGED_TO
from dsec.errors import DsecError, ErrorBody
from dsec.store.environments import Environment

_NDJSON = b"application/x-ndjson"
_OPTIONS = msgspec.json.Decoder(BuildOptions)
_ENCODER = msgspec.json.Encoder()


class BuildLine(Struct, frozen=True, omit_defaults=True):
    """One line of the answer."""

    log: str | None = None
    result: dict[str, Any] | None = None
    error: ErrorBody | None = None


async def build(service: BuildService, x: Exchange) -> None:
    """POST /v1/builds"""
    x.only("POST")
    x.check_query("options")
    principal = x.owner()
    options = x.decode(_OPTIONS, x.raw("options") or b"{}")
    CHARGED_TO.set("")  # the apiserver counts it for as long as this request is open
    with service.layers.layers.scratch() as scratch:
        path = Path(scratch) / "context"
        await service.layers.spool(x.chunks(), path)
        lines: asyncio.Queue[str | None] = asyncio.Queue()
        task = asyncio.ensure_future(service.build(principal, options, path, lines.put_nowait))
        task.add_done_callback(lambda _: lines.put_nowait(None))
        gone = asyncio.ensure_future(x.next_message())
        gone.add_done_callback(lambda _: task.cancel())
        try:
            await _tell(x, lines, task, options.name)
        finally:
            gone.cancel()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, DsecError, OSError):
                await task


async def _tell(x: Exchange, lines: asyncio.Queue[str | None], task: asyncio.Task[Environment], name: str) -> None:
    """What fails before there was anything to tell is the answer's status."""
    while (line := await lines.get()) is not None:
        if not x.began:
            await x.begin(200, _NDJSON)
        await x.more(_ENCODER.encode(BuildLine(log=line)) + b"\n")
    if task.cancelled():
        return  # nobody is there any more
    error = task.exception()
    if error is not None and not x.began:
        raise as_ours(error)
    if not x.began:
        await x.begin(200, _NDJSON)
    if error is not None:
        last = BuildLine(error=as_ours(error).body())
    else:
        last = BuildLine(result={"environment": name, "layers": list(task.result().layers)})
    await x.finish(_ENCODER.encode(last) + b"\n")
