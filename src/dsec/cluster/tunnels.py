"""WebSockets to ports of sandboxes by host name, through an apiserver: the edge's proxy decides, we pass bytes.

Invariant: it is one request. The head that goes to the edge is the one that was routed; what the edge answers, whatever
it is, goes back as it comes; then both connections end, at the latest with the edge's node.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Coroutine
from contextlib import suppress
from urllib.parse import urlsplit

from multidict import CIMultiDict

from dsec.api.exchange import Exchange
from dsec.api.ports.raw import RAW, RawConnection
from dsec.cluster.upstream import Upstream
from dsec.cluster.wire import Member
from dsec.errors import Unavailable
from dsec.sockets import CLUSTER_SILENCE_S, keep_alive
from dsec.tasks import ended

CONNECT_S = 3.0
_STEP = 64 << 10


async def tunnel(x: Exchange, upstream: Upstream, member: Member, headers: CIMultiDict[str]) -> None:
    """Ask the edge for the WebSocket that a request asks for, and pass what follows. Raises `Unavailable` where it
    can't be reached."""
    raw: RawConnection = x.scope[RAW]
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await _connect(member)
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"edge {member.claim.edge} can't be reached now: {error}", remedy="Try again.") from error
    try:
        keep_alive(writer.get_extra_info("socket"), CLUSTER_SILENCE_S)
        writer.write(_head(x, headers))
        raw.take()
        with suppress(TimeoutError, OSError):  # its node is lost; or the connection
            async with upstream.while_there(member):
                try:
                    await _first(_out(raw, writer), _back(raw, reader))
                finally:
                    raw.close()
                writer.close()
                await writer.wait_closed()
    finally:
        writer.transport.abort()


async def _connect(member: Member) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError, also for another certificate than the edge's."""
    url = urlsplit(member.url)
    if url.scheme != "https":
        return await asyncio.open_connection(url.hostname, url.port or 80)
    context = ssl.create_default_context()
    if member.certificate:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # it is compared below, before anything is sent
    reader, writer = await asyncio.open_connection(url.hostname, url.port or 443, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if member.certificate and hashlib.sha256(shown or b"").hexdigest() != member.certificate:
        writer.close()
        raise OSError("it shows another certificate than it named when it joined")
    return reader, writer


def _head(x: Exchange, headers: CIMultiDict[str]) -> bytes:
    scope = x.scope
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    lines = [scope["method"].encode("ascii") + b" " + target + b" HTTP/1.1"]
    lines += [f"{name}: {value}".encode("latin-1") for name, value in headers.items()]
    return b"\r\n".join([*lines, b"connection: Upgrade", b"upgrade: websocket", b"", b""])


async def _out(raw: RawConnection, writer: asyncio.StreamWriter) -> None:
    while data := await raw.read():
        writer.write(data)
        await writer.drain()


async def _back(raw: RawConnection, reader: asyncio.StreamReader) -> None:
    while data := await reader.read(_STEP):
        await raw.write(data)


async def _first(*work: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await ended(tasks)
