"""Grading over HTTP: `POST /v1/sandboxes/{id}/verify`, `POST /v1/judge`. A client that goes away stops it; nothing
is left of it. In a cluster the apiserver counts what runs here for as long as it waits for the answer, so that the
sandboxes that are made for it count on nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import msgspec

from dsec.api.exchange import MAX_BATCH_BYTES, ClientGone, Exchange
from dsec.api.waiting import while_awaited
from dsec.edge.context import CHARGED_TO
from dsec.errors import DsecError
from dsec.grading.judge import Judge
from dsec.grading.verifier import Verifier
from dsec.spec.grading import VerifySpec
from dsec.spec.judging import JudgeLine, JudgeSpec

_SPEC = msgspec.json.Decoder(VerifySpec)
_JUDGE = msgspec.json.Decoder(JudgeSpec)
_ENCODER = msgspec.json.Encoder()


async def verify(verifier: Verifier, sandbox_id: str, x: Exchange) -> None:
    """POST /v1/sandboxes/{id}/verify"""
    x.check_query()
    principal = x.owner()
    spec = x.decode(_SPEC, await x.body(MAX_BATCH_BYTES))
    CHARGED_TO.set("")
    await x.answer(200, await while_awaited(x, verifier.verify(principal, sandbox_id, spec)))


async def judge(judge: Judge, x: Exchange) -> None:
    """POST /v1/judge: NDJSON, a line a case as it ends, the verdict last."""
    x.only("POST")
    x.check_query()
    principal = x.owner()
    spec = x.decode(_JUDGE, await x.body(MAX_BATCH_BYTES))
    CHARGED_TO.set("")
    lines = cast("AsyncGenerator[JudgeLine]", judge.judge(principal.project, spec, principal.at_once))
    gone = asyncio.ensure_future(x.next_message())
    async with aclosing(lines):
        try:
            while True:
                line = asyncio.ensure_future(anext(lines))
                await asyncio.wait((line, gone), return_when=asyncio.FIRST_COMPLETED)
                if not line.done():
                    line.cancel()
                    with contextlib.suppress(asyncio.CancelledError, DsecError):
                        await line
                    raise ClientGone
                try:
                    told = line.result()
                except StopAsyncIteration:
                    break
                if not x.began:
                    await x.begin(200, b"application/x-ndjson")
                await x.more(_ENCODER.encode(told) + b"\n")
        finally:
            gone.cancel()
    await x.finish()
