"""WebSockets through an apiserver: messages passed between the caller and the edge, both ways, until either closes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import quote, unquote_to_bytes

import aiohttp
import msgspec

from dsec.api.exchange import Receive, Scope, Send
from dsec.cluster.upstream import Upstream, node_socket, trust_of
from dsec.cluster.wire import Member
from dsec.errors import DsecError, ErrorBody, Unavailable, from_body
from dsec.tasks import ended

_CUT = 4000
_line = msgspec.json.Encoder().encode


async def bridge(
    scope: Scope,
    receive: Receive,
    send: Send,
    upstream: Upstream,
    target: Callable[[Scope], Awaitable[tuple[Member, str, dict[str, str]]]],
) -> None:
    """Connect to the URL of `target` (which raises what refuses the caller), and pass messages."""
    await receive()  # "connect"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=3.0)
    connector = aiohttp.TCPConnector(socket_factory=node_socket)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        try:
            member, url, headers = await target(scope)
            try:
                async with upstream.while_there(member):
                    edge = await session.ws_connect(
                        url, headers=headers, max_msg_size=0, autoping=True, ssl=trust_of(member)
                    )
            except aiohttp.WSServerHandshakeError as error:
                raise _refusal(error) from error
            except (aiohttp.ClientError, OSError) as error:
                raise Unavailable(f"the edge can't be reached now: {error}") from error
        except DsecError as error:
            await refuse(send, error)
            return
        await send({"type": "websocket.accept"})
        try:
            async with upstream.while_there(member):
                await _pass(edge, receive, send)
        except TimeoutError:  # its node is lost
            await _cut(send)


async def _pass(edge: aiohttp.ClientWebSocketResponse, receive: Receive, send: Send) -> None:
    async def out() -> None:
        while (message := await receive())["type"] == "websocket.receive":
            data = message.get("bytes")
            if data is not None:
                await edge.send_bytes(data)
            else:
                await edge.send_str(message.get("text") or "")

    async def back() -> None:
        while True:
            message = await edge.receive()
            if message.type is aiohttp.WSMsgType.BINARY:
                await send({"type": "websocket.send", "bytes": message.data})
            elif message.type is aiohttp.WSMsgType.TEXT:
                await send({"type": "websocket.send", "text": message.data})
            elif message.type is aiohttp.WSMsgType.CLOSE:
                await send({"type": "websocket.close", "code": message.data, "reason": message.extra or ""})
                return
            else:
                await _cut(send)
                return

    tasks = [asyncio.create_task(out()), asyncio.create_task(back())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await ended(tasks)
        await edge.close()


async def _cut(send: Send) -> None:
    """The connection to the edge broke."""
    with suppress(OSError):
        await send({"type": "websocket.close", "code": _CUT, "reason": Unavailable.code})


def _refusal(error: aiohttp.WSServerHandshakeError) -> DsecError:
    """What the edge said, which is in a header too."""
    from_header = error.headers.get("x-dsec-error") if error.headers is not None else None
    if from_header:
        with suppress(msgspec.MsgspecError):
            return from_body(msgspec.json.decode(unquote_to_bytes(from_header), type=ErrorBody))
    return Unavailable(f"the edge answered {error.status}")


async def refuse(send: Send, error: DsecError) -> None:
    """Answer a WebSocket's handshake with an error."""
    body = _line(error.body())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-dsec-error", quote(body).encode()),
    ]
    await send({"type": "websocket.http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
