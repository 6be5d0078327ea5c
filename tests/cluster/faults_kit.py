"""What tests of a faulty cluster share: what servers say, who is connected to whom, a node that lies."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections import Counter
from pathlib import Path

import aiohttp
import msgspec
import nats
from cluster_kit import PATIENCE_S, Cluster, Process, eventually, until
from nats.aio.client import Client
from nats.errors import Error as NatsError

from dsec import AsyncRun
from dsec.cluster.credentials import read_credentials
from dsec.cluster.wire import Join, Joined
from dsec.spec.cluster import NodeFacts


async def answer(url: str, key: str) -> str:
    """What a server says to this key, at once: `ok` or the code of an error."""
    headers = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/v1/sandboxes") as got:
        body = msgspec.json.decode(await got.read())
        return "ok" if got.status == 200 else str(body["code"])


async def until_said(url: str, key: str, wanted: str, within_s: float) -> list[tuple[float, str]]:
    """What it said until it said `wanted`, and when it was asked (`time.monotonic`)."""
    began, said = time.monotonic(), list[tuple[float, str]]()
    while True:
        asked_at = time.monotonic()
        said.append((asked_at, await answer(url, key)))
        if said[-1][1] == wanted:
            return said
        assert time.monotonic() - began < within_s, Counter(each for _, each in said)
        await asyncio.sleep(0.1)


async def renewed(run: AsyncRun) -> None:
    """Returns when its client has renewed its lease for longer than a whole one."""
    assert run.info is not None
    first = run.info

    async def is_later() -> bool:
        return run.info is not None and run.info.expires_at > first.expires_at + first.lease_s

    await eventually(is_later)


async def as_apiserver(cluster: Cluster) -> Client:
    """To be closed."""
    user = read_credentials(cluster.directory / "keys" / "apiserver.json")
    return await nats.connect(cluster.urls, nkeys_seed_str=user.seed, inbox_prefix="_INBOX.apiserver")


async def caught_up(cluster: Cluster) -> None:
    """Returns when all NATS servers are there and have all that the streams hold, so that any may go."""
    bus = await as_apiserver(cluster)

    async def have_all() -> bool:
        with contextlib.suppress(NatsError):
            for stream in await bus.jetstream().streams_info():
                peers = stream.cluster.replicas or [] if stream.cluster is not None else []
                if len(peers) < cluster.replicas - 1 or not all(peer.current and not peer.offline for peer in peers):
                    return False
            return True
        return False

    try:
        await eventually(have_all)
    finally:
        await bus.close()


async def beaten(cluster: Cluster) -> None:
    """Returns after two heartbeats of each node."""
    bus = await as_apiserver(cluster)
    try:
        beats = await bus.subscribe("dsec.beat.*")
        heard: Counter[str] = Counter()
        while len(heard) < len(cluster.edges) or min(heard.values()) < 2:
            heard[(await beats.next_msg(PATIENCE_S)).subject] += 1
    finally:
        await bus.close()


def healed(cluster: Cluster) -> None:
    """All is well; what went and came too often for this minute is forgiven."""
    cluster.all_hear()
    for api in cluster.apis:
        if "flapping" in cluster.healths(api):
            api.kill()
            api.start()
    until(lambda: all(cluster.healths(api) == ["well", "well"] for api in cluster.apis), "all is well")


def server_of(cluster: Cluster, process: Process) -> Process:
    """The NATS server that a process, alone in its network, is connected to."""
    until(lambda: len(servers_of(cluster, process)) == 1, f"{process.name} has one server")
    return servers_of(cluster, process)[0]


def servers_of(cluster: Cluster, process: Process) -> list[Process]:
    """All of them: none or two while it goes from one to another."""
    lines = [line.split() for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]]
    ends = {line[2] for line in lines if line[3] == "01"}
    numbers = {each: int.from_bytes(socket.inet_aton(each.address), "little") for each in cluster.nats}
    return [each for each, number in numbers.items() if f"{number:08X}:{each.port:04X}" in ends]


def incarnation(cluster: Cluster, edge: int) -> int:
    return int(cluster.get("/v1/nodes")["nodes"][edge - 1]["incarnation"])


def apart_from(cluster: Cluster, some: list[Process], others: list[Process], whole: bool = False) -> None:
    """These don't reach those, nor the other way round; `whole`: they do again."""
    assert cluster.spaces is not None
    far = [each.space for each in others if each.space is not None]
    for each in some:
        assert each.space is not None
        cluster.spaces.isolate(each.space, far, whole=whole)


class Liar:
    """Whoever took over a node's credentials, and joins with a process of their own."""

    def __init__(self, cluster: Cluster, edge: int) -> None:
        self._credentials = read_credentials(cluster.directory / "keys" / f"edge-{edge}.json")
        self._urls = cluster.urls
        self.edge = edge
        self.asked: list[str] = []

    async def __aenter__(self) -> Liar:
        name = self._credentials.user
        self.client = await nats.connect(
            self._urls, nkeys_seed_str=self._credentials.seed, inbox_prefix=f"_INBOX.{name}", error_cb=_quiet
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def join(self, url: str) -> Joined:
        known = NodeFacts(edge=self.edge, max_live=1 << 40, max_starting=1 << 40, memory_capacity_bytes=1 << 60)
        asked = Join(facts=known, instance="liar", host="h", had=None, url=url, secret=secrets.token_hex(32))
        reply = await self.client.request(f"dsec.join.{self.edge}", msgspec.json.encode(asked), timeout=10)
        return msgspec.json.decode(reply.data, type=Joined)

    async def beat(self, data: bytes) -> None:
        await self.client.publish(f"dsec.beat.{self.edge}", data)


async def _quiet(_: Exception) -> None:
    pass


async def serve_lies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """To each order: that it was done, with sandboxes of other nodes' names; or garbage."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"id":"00000000000000000000000000","state":"running"}'
        writer.write(
            b"HTTP/1.1 201 Created\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        await writer.drain()
    writer.close()
