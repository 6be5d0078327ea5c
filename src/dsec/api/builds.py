"""Builds over HTTP. `POST /v1/builds?options=`, the body a tar archive of the context: the answer is NDJSON, `{"log"}`
lines while it works, then `{"result"}` or `{"error": ErrorBody}`, always last. `POST /v1/layers:packages` answers as
whatever makes layers (`dsec.api.layers`). A client that goes away stops the build; nothing is left of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dsec.api.exchange import Exchange
from dsec.api.layers import LAYER_NAME, OPERATOR, Layers, as_ours, stream
from dsec.builder.packages import PackagesRequest, build_packages
from dsec.builder.service import BuildOptions, BuildService
from dsec.edge.context import CHARGED_TO
from dsec.errors import DsecError, ErrorBody, InvalidRequest, PermissionDenied
from dsec.store.environments import Environment
from dsec.store.shared import Progress

_NDJSON = b"application/x-ndjson"
_PACKAGES = msgspec.json.Decoder(PackagesRequest)
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


async def packages(service: BuildService, layers: Layers, x: Exchange) -> None:
    """POST /v1/layers:packages"""
    x.only("POST")
    x.check_query()
    principal = x.owner()
    asked = x.decode(_PACKAGES, await x.body())
    if re.search(LAYER_NAME, asked.name) is None:
        raise InvalidRequest(f"not a name: {asked.name[:200]!r}", remedy=f"It has to match {LAYER_NAME}.", field="name")
    if asked.mirror is not None and principal.project != OPERATOR:
        raise PermissionDenied(
            "where the node fetches packages from is its operator's to say",
            remedy=f"Leave the mirror out, or use a key of the project {OPERATOR!r}.",
        )
    CHARGED_TO.set("")  # as in `build`

    async def work(progress: Progress) -> dict[str, Any]:
        then = layers.layer_named(principal.project, asked.name, asked.readers)
        meta = await build_packages(service, principal, asked, then, progress)
        return {"layer": meta.digest, "name": asked.name, "size_bytes": meta.size_bytes}

    await stream(x, work)


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
