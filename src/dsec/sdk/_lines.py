"""Answers of a line an item: each item once, over as many connections as it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from dsec.errors import ErrorBody
from dsec.sdk._answers import cut_errors, decoded
from dsec.sdk._transport import Retry, Transport, timed_out
from dsec.spec.sandbox import ExecStatus, SandboxInfo

if TYPE_CHECKING:
    from yarl import URL

_JSON: Mapping[str, str] = {"Content-Type": "application/json"}


class Line(Struct, frozen=True):
    """One item of any such answer."""

    index: int
    sandbox: SandboxInfo | None = None
    status: ExecStatus | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    attach: bool = False
    error: ErrorBody | None = None


async def lines(
    transport: Transport, url: URL, body: Callable[[set[int]], bytes], total: int, request_timeout_s: float | None
) -> AsyncGenerator[Line]:
    """The items 0..total-1 as they come. `body`: the request, given the items that are missing still.

    Raises what is wrong with the request as a whole, `Unavailable`, `RequestTimeout`.
    """
    if request_timeout_s is None:
        async for line in _lines(transport, url, body, total, None):
            yield line
        return
    until = asyncio.get_running_loop().time() + request_timeout_s
    items = _lines(transport, url, body, total, until)
    while True:
        try:
            line = await anext(items)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise timed_out(request_timeout_s) from None
        yield line


async def _lines(
    transport: Transport, url: URL, body: Callable[[set[int]], bytes], total: int, until: float | None
) -> AsyncGenerator[Line]:
    missing = set(range(total))
    retry = Retry(transport)
    while missing:
        async with asyncio.timeout_at(until):
            response = await transport.open("POST", url, body=body(missing), headers=_JSON, retry=retry)
        began = time.monotonic()
        cut: BaseException = ConnectionResetError("the answer was cut")
        rest = b""
        try:
            while missing:
                try:
                    data = await _read(response.content, until)
                except cut_errors() as error:
                    cut = error
                    break
                if not data:
                    break
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    item = decoded(line, Line)
                    if item.index in missing:
                        missing.remove(item.index)
                        retry = Retry(transport)
                        yield item
            if not missing and not response.content.is_eof():
                await response.content.readany()
        finally:
            response.release()
        if missing:
            await retry.wait(cut, stood_s=time.monotonic() - began)


async def _read(content: Any, until: float | None) -> bytes:
    if until is None:
        data: bytes = await content.readany()
        return data
    async with asyncio.timeout_at(until):
        return await _read(content, None)
