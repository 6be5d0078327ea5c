"""What goes on over HTTP: watching a directory (NDJSON), and connections to ports inside (WebSocket).

A connection: `GET /v1/sandboxes/{id}/ports/{port}` as a WebSocket. Binary messages are the data, in both directions;
the text message `end` ends the sender's direction. A close ends the connection; code 4000 says that it was cut, its
reason is the error's code. What keeps it from being opened is answered as HTTP: status and body as for all calls, the
body in the header `x-dsec-error` too (percent-encoded), because WebSocket clients don't show the bodies of refusals.

Invariants: nobody is connected who wasn't authenticated and authorised; each direction waits for its reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import cast
from urllib.parse import quote

import msgspec
from msgspec import Struct

from dsec.api.exchange import Exchange, Receive, Scope, Send
from dsec.api.files import path_of
from dsec.api.held import HeldAnswer
from dsec.edge.client import EdgeClient, PortStream
from dsec.errors import DsecError, ErrorBody, InvalidRequest, NotFound
from dsec.spec.sandbox import FileEvent
from dsec.wire.events import json_safe

_NDJSON = b"application/x-ndjson"
_PREFIX = "/v1/sandboxes/"
_CUT = 4000
_END = "end"
_line = msgspec.json.Encoder().encode


class WatchItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the answer to a watch: exactly one of both; an error is the last."""

    event: FileEvent | None = None
    error: ErrorBody | None = None


async def watch(edge: EdgeClient, sandbox_id: str, x: Exchange) -> None:
    """GET .../files/watch: the answer begins when the watch has, with an empty line, and ends with its directory."""
    x.check_query("path", "user", "recursive")
    recursive = x.value("recursive", bool, False)
    found = await edge.watch(sandbox_id, path_of(x), user=x.text("user"), recursive=recursive)
    held = HeldAnswer(x, _NDJSON)
    held.push(b"\n")  # an answer's head leaves with the first of its body
    async with aclosing(cast("AsyncGenerator[FileEvent]", found)), held:
        try:
            async for event in found:
                held.push(_line(WatchItem(event=json_safe(event))) + b"\n")
                if held.full:
                    await held.flush()
        except DsecError as error:
            held.push(_line(WatchItem(error=error.body())) + b"\n")
        await held.finish()


# --- ports ------------------------------------------------------------------------------------------------------------


async def websocket(edge: EdgeClient, scope: Scope, receive: Receive, send: Send) -> None:
    """A WebSocket of any path: a connection to a port, or refused."""
    x = Exchange(scope, receive, send)
    await receive()  # "connect"
    try:
        stream = await _opened(edge, x)
    except DsecError as error:
        await _refuse(x, error)
        return
    try:
        await send({"type": "websocket.accept", "headers": [(b"x-request-id", x.request_id)]})
        await _pump(stream, receive, send)
    finally:
        await stream.close()


async def _opened(edge: EdgeClient, x: Exchange) -> PortStream:
    raw: str = x.scope["raw_path"].decode("ascii")
    if not raw.startswith(_PREFIX):
        raise NotFound(f"no such path: {raw}", remedy="GET /openapi.json lists them")
    principal = edge.authenticate(x.bearer())
    if (speaks_for := x.run()) is not None:
        edge.check_run(principal.project, *speaks_for)
    sandbox_id, _, rest = raw[len(_PREFIX) :].partition("/")
    edge.authorize(principal, sandbox_id)
    head, _, port = rest.partition("/")
    if head != "ports":
        raise NotFound(f"no such path: {raw}", remedy="GET /openapi.json lists them")
    if not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise InvalidRequest("a port is 1 to 65535", field="port")
    return await edge.connect(sandbox_id, int(port))


async def _refuse(x: Exchange, error: DsecError) -> None:
    body = _line(error.body())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", x.request_id),
        (b"x-dsec-error", quote(body).encode()),
    ]
    await x.send({"type": "websocket.http.response.start", "status": error.http_status, "headers": headers})
    await x.send({"type": "websocket.http.response.body", "body": body})


async def _pump(stream: PortStream, receive: Receive, send: Send) -> None:
    """Until the client closes, both directions have ended, or the connection was cut."""

    async def from_client() -> None:
        while (message := await receive())["type"] == "websocket.receive":
            data = message.get("bytes")
            if data:
                await stream.write(data)
            elif data is None and message.get("text") == _END:
                await stream.close_write()
                ours.set()

    async def to_client() -> None:
        while data := await stream.read():
            await send({"type": "websocket.send", "bytes": data})
        await send({"type": "websocket.send", "text": _END})
        await ours.wait()

    ours = asyncio.Event()
    tasks = [asyncio.create_task(from_client()), asyncio.create_task(to_client())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        code, reason = 1000, ""
        for task in tasks:
            error = task.exception() if task.done() else None
            if isinstance(error, DsecError):
                code, reason = _CUT, error.code
            elif error is not None and not isinstance(error, OSError):
                raise error
        if not tasks[0].done() or code == _CUT:
            with suppress(OSError):  # the client may be gone
                await send({"type": "websocket.close", "code": code, "reason": reason})
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
