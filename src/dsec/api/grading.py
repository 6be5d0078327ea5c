"""Verification over HTTP: `POST /v1/sandboxes/{id}/verify`. A client that goes away stops it; nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from dsec.api.exchange import MAX_BATCH_BYTES, ClientGone, Exchange
from dsec.errors import DsecError
from dsec.grading.verifier import Verifier
from dsec.spec.grading import VerifySpec

_SPEC = msgspec.json.Decoder(VerifySpec)


async def verify(verifier: Verifier, sandbox_id: str, x: Exchange) -> None:
    """POST /v1/sandboxes/{id}/verify"""
    x.check_query()
    principal = x.owner()
    spec = x.decode(_SPEC, await x.body(MAX_BATCH_BYTES))
    task = asyncio.ensure_future(verifier.verify(principal, sandbox_id, spec))
    gone = asyncio.ensure_future(x.next_message())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, DsecError, OSError):
                await task
    await x.answer(200, task.result())
