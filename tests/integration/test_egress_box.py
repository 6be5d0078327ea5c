"""What the egress connects to, over real sockets: the address that was checked, and nothing after the policy has
changed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dsec.egress.box import Box
from dsec.egress.meters import Limits
from dsec.egress.node import Egress
from dsec.egress.resolver import Resolver
from dsec.plan.permissions import BUILT_IN, Definition
from dsec.spec.events import EventType


class Host:
    """`dsec.egress.box.Host` that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[EventType, dict[str, Any]]] = []

    def note(self, kind: EventType, data: dict[str, Any]) -> None:
        self.events.append((kind, data))

    def stands_for(self, name: str, address: int) -> None:
        pass

    async def connect(self, name: str, port: int) -> Any:
        raise ConnectionRefusedError(name)

    def last(self) -> dict[str, Any]:
        return self.events[-1][1]


class Lookup:
    """Names outside, which change between two questions."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, name: str) -> list[str]:
        self.asked += 1
        await self.gate.wait()
        return self.answers.pop(0)


class World:
    def __init__(self, egress: Egress, box: Box, host: Host, port: int) -> None:
        self.egress = egress
        self.box = box
        self.host = host
        self.port = port
        self.reached = 0

    def dial(self, name: str) -> socket.socket:
        """A program's end of a connection."""
        address = self.box._stand_ins.address(name)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            inside = socket.create_connection(listener.getsockname())
            arrived, _ = listener.accept()
        arrived.setblocking(False)
        inside.setblocking(False)
        self.box.connected(arrived, str(address), self.port)
        return inside

    async def ask(self, inside: socket.socket, data: bytes = b"hello") -> bytes | None:
        """None where it was reset."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            try:
                await loop.sock_sendall(inside, data)
                return await loop.sock_recv(inside, 100)
            except OSError:
                return None
            finally:
                inside.close()


@asynccontextmanager
async def world(lookup: Lookup, limits: Limits | None = None) -> AsyncIterator[World]:
    found: World

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.reached += 1
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    definitions = {
        "in": Definition(hosts=["in.example"], ports=(port,), private=True),
        "out": Definition(hosts=["out.example"], ports=(port,)),
    }
    egress = Egress(definitions={**BUILT_IN, **definitions}, resolver=Resolver(lookup), limits=limits)
    host = Host()
    found = World(egress, egress.box("box", "p", host), host, port)
    found.box.set_policy(egress.compile({"in": True, "out": True}))
    try:
        yield found
    finally:
        await egress.close()
        server.close()
        assert egress.totals.open == 0


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_name_that_is_rebound_stays_what_was_checked() -> None:
    lookup = Lookup(["127.0.0.1"], ["169.254.169.254"])
    async with world(lookup) as it:
        for _ in range(3):
            assert await it.ask(it.dial("in.example")) == b"hello"
        assert lookup.asked == 1
        await until(lambda: len(it.host.events) == 3)
        assert {data["address"] for _, data in it.host.events} == {"127.0.0.1"}


async def test_of_several_addresses_only_the_allowed_are_tried() -> None:
    async with world(Lookup(["169.254.169.254", "127.0.0.1"], ["127.0.0.1", "::ffff:10.0.0.1"], [])) as it:
        assert await it.ask(it.dial("in.example")) == b"hello"
        assert await it.ask(it.dial("out.example")) is None
        await until(lambda: len(it.host.events) == 2)
        assert {data["reason"] for _, data in it.host.events} == {"granted", "private_address"}
        it.egress.resolver._known.clear()
        assert await it.ask(it.dial("in.example")) is None
        assert it.host.last()["reason"] == "unresolved"
        assert it.reached == 1


async def test_a_change_during_a_look_up_counts() -> None:
    lookup = Lookup(["127.0.0.1"])
    async with world(lookup) as it:
        lookup.gate.clear()
        inside = it.dial("in.example")
        asking = asyncio.ensure_future(it.ask(inside))
        await until(lambda: lookup.asked)
        it.box.set_policy(it.egress.compile({"out": True}))
        lookup.gate.set()
        assert await asking is None
        assert it.host.last()["reason"] == "policy_changed"
        assert it.reached == 0


async def test_idle_connections_end() -> None:
    async with world(Lookup(["127.0.0.1"]), Limits(idle_s=0.0)) as it:
        inside = it.dial("in.example")
        await until(lambda: it.reached)
        it.egress._sweep()
        assert await it.ask(inside) is None
        assert it.host.last()["reason"] == "idle"


async def test_the_sandboxes_end_ends_its_connections() -> None:
    async with world(Lookup(["127.0.0.1"])) as it:
        held = [it.dial("in.example") for _ in range(20)]
        await until(lambda: it.reached == 20)
        it.egress.forget("box")
        assert [await it.ask(inside) for inside in held] == [None] * 20
        assert sum(data.get("count", 1) for _, data in it.host.events) == 20
        assert {data["reason"] for _, data in it.host.events} == {"ended"}
