"""`POST /v1/functions`: calls of a function. Asked in msgpack, the answer is frames of u32 length and msgpack, a result
each; asked in JSON, it is NDJSON. A client that goes away ends what still runs: calls have no state that anybody could
come back to."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import msgspec

from dsec.api.exchange import MAX_BATCH_BYTES, ClientGone, Exchange
from dsec.errors import DsecError, InvalidRequest
from dsec.ports import FunctionHost
from dsec.spec.functions import FunctionBatch, FunctionError, FunctionResult
from dsec.wire import packed

MSGPACK = b"application/msgpack"
RESULTS = b"application/vnd.dsec.results"
_LONG = 64 << 10
"""What is longer is looked at in a thread."""
MAX_JSON_VALUE = 1 << 20
"""Of a result that is to be built here; as msgpack it is passed on as it is."""
_JSON = msgspec.json.Decoder(FunctionBatch)
_PACKED = msgspec.msgpack.Decoder(FunctionBatch)
_json_encoder = msgspec.json.Encoder()
_packer = msgspec.msgpack.Encoder()


async def call(functions: FunctionHost, x: Exchange) -> None:
    """POST /v1/functions"""
    x.only("POST")
    x.check_query()
    principal = x.owner()
    body = await x.body(MAX_BATCH_BYTES)
    binary = x.content_type == MSGPACK
    if binary:
        batch = await asyncio.to_thread(unpacked, body) if len(body) > _LONG else unpacked(body)
    else:
        batch = x.decode(_JSON, body)
    encode = _frame if binary else _line
    results = cast("AsyncGenerator[FunctionResult]", functions.stream(principal.project, batch, principal.at_once))
    media = RESULTS if binary else b"application/x-ndjson"
    telling = asyncio.ensure_future(_tell(results, x, encode, media))
    gone = asyncio.ensure_future(x.next_message())
    try:
        await asyncio.wait((telling, gone), return_when=asyncio.FIRST_COMPLETED)
        if not telling.done():
            raise ClientGone
        telling.result()
    finally:
        gone.cancel()
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError, DsecError):
            await telling  # what runs has ended by then


async def _tell(
    results: AsyncGenerator[FunctionResult],
    x: Exchange,
    encode: Callable[[FunctionResult], Awaitable[bytes]],
    media: bytes,
) -> None:
    async with aclosing(results):
        async for result in results:
            if not x.began:
                await x.begin(200, media)
            await x.more(await encode(result))
    await x.finish()


def unpacked(body: bytes) -> FunctionBatch:
    """Of msgpack. Raises `InvalidRequest`."""
    try:
        packed.check(body)
        return _PACKED.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"the body: {error}") from None


def framed(result: FunctionResult) -> bytes:
    """A frame of `RESULTS`."""
    data = _packer.encode(result)
    return struct.pack("<I", len(data)) + data


async def _frame(result: FunctionResult) -> bytes:
    return framed(result)


async def _line(result: FunctionResult) -> bytes:
    if not isinstance(result.value, msgspec.Raw):
        return _said(result)
    value = bytes(result.value)
    return _plain(result, value) if len(value) <= _LONG else await asyncio.to_thread(_plain, result, value)


def _said(result: FunctionResult) -> bytes:
    return _json_encoder.encode(result) + b"\n"


def _plain(result: FunctionResult, value: bytes) -> bytes:
    """With the value built, as JSON can say it."""
    why = f"more than {MAX_JSON_VALUE} bytes"
    if len(value) <= MAX_JSON_VALUE:
        try:
            packed.check(value)
            built = _sayable(msgspec.msgpack.decode(value, strict=False))
            return _said(msgspec.structs.replace(result, value=built))
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError) as error:
            why = str(error)
    error_ = FunctionError(type="ResultRefused", message=f"the result can't be said in JSON: {why}; ask in msgpack")
    return _said(msgspec.structs.replace(result, ok=False, value=None, error=error_))


def _sayable(value: Any) -> Any:
    """Bytes become base64 by the encoder; what isn't a number to JSON becomes text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_sayable(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _sayable(each) for key, each in value.items()}
    return value
