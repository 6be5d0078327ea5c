"""A WebSocket through an apiserver, whose edge stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from multidict import CIMultiDict

from dsec.api.ports.raw import RAW, RawConnection
from dsec.cluster.nodes import Nodes
from dsec.cluster.tunnels import tunnel
from dsec.cluster.upstream import Upstream

PATIENCE_S = 60.0
MUCH = 64 << 20
"""More than all buffers between two ends hold."""


class Caller:
    """A client's connection that says nothing more."""

    def __init__(self) -> None:
        self.ended = False

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def send(self, data: bytes) -> Awaitable[None]:
        return asyncio.sleep(0)

    def end(self) -> None:
        self.ended = True


async def test_a_tunnel_to_an_edge_that_stands_still_ends_with_its_node() -> None:
    stands, let_go = asyncio.Event(), asyncio.Event()

    async def stand_still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cast("asyncio.Transport", writer.transport).pause_reading()
        writer.write_eof()
        stands.set()
        await let_go.wait()
        writer.transport.abort()

    server = await asyncio.start_server(stand_still, "127.0.0.1", 0)
    caller = Caller()
    raw = RawConnection(caller, lambda: None)
    raw.feed(bytes(MUCH))
    scope = {"method": "GET", "raw_path": b"/", "query_string": b"", RAW: raw}
    upstream = Upstream(cast("Nodes", None), "apiserver")
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    member = SimpleNamespace(url=url, claim=SimpleNamespace(edge=1))
    task = asyncio.create_task(
        tunnel(cast("Any", SimpleNamespace(scope=scope)), upstream, cast("Any", member), CIMultiDict())
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            await stands.wait()
            while not caller.ended:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            upstream._lost(1)
            await task
    except TimeoutError:
        pytest.fail("it goes on")
    finally:
        let_go.set()
        server.close()
