"""Simulated edges in one process: the real membership, the real gate and the real HTTP server of an edge each, over
sandboxes that are made at once and cost nothing.

Run as `python -m dsec.bench.cluster_edges KEYS EDGES URL...`; what they have on disk is beside the keys. It is told
what to do by lines of JSON on stdin, and answers each with one on stdout: `{"do": "look"}`, and `{"do": "end", "count":
N}`, which ends N sandboxes that are chosen at random.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import Counter, OrderedDict
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qs

import msgspec
import uvloop
from msgspec import Struct

from dsec.api.batch import BatchRequest, DeleteRequest
from dsec.api.control import ForkRequest, ForkResults
from dsec.api.exchange import MAX_BATCH_BYTES, Exchange, Receive, Scope, Send
from dsec.api.metrics import ServerMetrics
from dsec.api.quick import ShortWay
from dsec.api.serve import ApiServer
from dsec.app import raise_open_files
from dsec.cluster.bus import open_bus
from dsec.cluster.credentials import read_credentials
from dsec.cluster.gate import Gate
from dsec.cluster.member import Membership, keep_member
from dsec.cluster.routes import header_of
from dsec.edge.client import DeleteItem, NodeInfo, Page, Principal
from dsec.edge.clustered import Counts, charged_by
from dsec.edge.context import CHARGED_TO
from dsec.edge.kept import BatchItem
from dsec.errors import DsecError, NotFound, SandboxNotFound
from dsec.plan.quota import account_of
from dsec.spec.cluster import NodeFacts
from dsec.spec.functions import FunctionBatch, FunctionResult
from dsec.spec.ids import SandboxId, encode_id
from dsec.spec.runs import RunInfo
from dsec.spec.sandbox import SandboxInfo, SandboxSpec, State

MAX_LIVE = 3200
MEMORY_BYTES = 640 << 20
LAYERS = 192
"""Environments whose layers a node keeps."""
KEYS_KEPT = 4096
REQUESTS_KEPT = 4096
_SPEC = msgspec.json.Decoder(SandboxSpec)
_BATCH = msgspec.json.Decoder(BatchRequest)
CALL_S = 0.1
_DELETE = msgspec.json.Decoder(DeleteRequest)
_FORK = msgspec.json.Decoder(ForkRequest)
_CALLS = msgspec.json.Decoder(FunctionBatch)
_encode = msgspec.json.Encoder().encode


class Locality(Struct):
    """How often a sandbox came to a node that had its layers, and how often chance would have done it."""

    asked: int = 0
    hits: int = 0
    by_chance: float = 0.0


class _Group(Struct, frozen=True):
    """What sandboxes that are alike share."""

    project: str
    spec: SandboxSpec
    charge: tuple[str, str]
    """The apiserver and the account that they count on."""


class Fleet:
    """What all simulated edges share."""

    def __init__(self, edges: int) -> None:
        self.random = Random(7)
        self.edges = [SimEdge(self, number) for number in range(1, edges + 1)]
        self.locality = Locality()
        self.calling: Counter[str] = Counter()
        self.most_calling: Counter[str] = Counter()
        """Function calls at one time, by project."""
        self.holders: dict[str, set[int]] = {}
        """Nodes that hold an environment's layers."""
        self._first: OrderedDict[tuple[str, str], frozenset[int]] = OrderedDict()

    def held_at_first(self, run: str, environment: str) -> frozenset[int]:
        """Who held an environment's layers when the first of a run's sandboxes of it came anywhere: the request's own
        make nobody a holder."""
        found = self._first.get((run, environment))
        if found is None:
            found = self._first[run, environment] = frozenset(self.holders.get(environment, ()))
            if len(self._first) > REQUESTS_KEPT:
                self._first.popitem(last=False)
        return found

    def look(self) -> dict[str, Any]:
        """Figures of this moment."""
        return {
            "live": [len(edge.live) for edge in self.edges],
            "created": sum(edge.made for edge in self.edges),
            "asked": self.locality.asked,
            "hits": self.locality.hits,
            "by_chance": self.locality.by_chance,
            "projects": sum((edge.projects for edge in self.edges), Counter()),
            "serving": sum(edge.serves for edge in self.edges),
            "most_calling": self.most_calling,
        }

    def end(self, count: int) -> None:
        """So many sandboxes end, each as likely as any other."""
        total = sum(len(edge.live) for edge in self.edges)
        count = min(count, total)
        for edge in self.edges:
            if total:
                share = min(len(edge.live), round(count * len(edge.live) / total))
                total -= len(edge.live)
                count -= share
                edge.end(self.random.sample(list(edge.live), share))


class SimEdge:
    """One edge's sandboxes, and its part of the API. A sandbox is one entry of a table: its number, and the group that
    it was made in."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.number = number
        self.live: dict[int, _Group] = {}
        self.made = 0
        self.member: Membership | None = None
        self.metrics = ServerMetrics("0")
        self.lanes: dict[bytes, ShortWay] = {}
        self.ports = self
        self._fleet = fleet
        self._key = secrets.token_bytes(16)
        self._groups: dict[tuple[object, ...], _Group] = {}
        self._taken: Counter[tuple[str, str]] = Counter()
        self._charged: Counter[tuple[str, str]] = Counter()
        self.projects: Counter[str] = Counter()
        self._runs: Counter[str] = Counter()
        self._layers: OrderedDict[str, None] = OrderedDict()
        self._answers: OrderedDict[str, list[int]] = OrderedDict()
        self._memory = 0

    @property
    def serves(self) -> bool:
        return self.member is not None and self.member.claim is not None

    # --- what its membership asks -----------------------------------------------------------------------------------

    def node(self) -> NodeInfo:
        return NodeInfo(
            edge=self.number,
            backends={"container": 1},
            live=len(self.live),
            starting=0,
            queued=0,
            ending=0,
            max_live=MAX_LIVE,
            max_starting=64,
            memory_committed_bytes=self._memory,
            memory_capacity_bytes=(MAX_LIVE + 200) * MEMORY_BYTES,
            disk_free_bytes=1 << 40,
            started_at=0.0,
        )

    def counts(self) -> Counts:
        charged = charged_by(self._taken, self._charged)
        return Counts(dict(self.projects), dict(self._runs), sorted(self._layers), 4.0, charged)

    def hear_run(self, project: str, run: RunInfo) -> None:
        pass

    async def end_lost(self, timeout_s: float) -> bool:
        self.end(list(self.live))
        return True

    # --- sandboxes --------------------------------------------------------------------------------------------------

    def _create(self, group: _Group) -> int:
        self.made += 1
        self.live[self.made] = group
        self._taken[group.charge] += 1
        self._count(group, 1)
        return self.made

    def _group(self, project: str, spec: SandboxSpec) -> _Group:
        """Those of one project, apiserver and environment are one group."""
        holder = CHARGED_TO.get()
        name = (project, holder, spec.run or "", spec.environment, spec.cpus, spec.memory_bytes)
        found = self._groups.get(name)
        if found is None:
            account = account_of(project, spec.backend, spec.cpus, spec.memory_bytes)
            found = self._groups[name] = _Group(project, spec, (holder, account))
        return found

    def _count(self, group: _Group, count: int) -> None:
        project, spec = group.project, group.spec
        _add(self.projects, project, count)
        if spec.run is not None:
            _add(self._runs, f"{project}\0{spec.run}", count)
        _add(self._charged, group.charge, count)
        self._memory += count * spec.memory_bytes

    def _touch(self, run: str | None, environment: str, count: int) -> None:
        """Its layers are here from now on."""
        fleet = self._fleet
        held = fleet.held_at_first(run or "", environment)
        where = fleet.locality
        where.asked += count
        where.by_chance += count * len(held) / len(fleet.edges)
        where.hits += count * (self.number in held)
        self._layers[environment] = None
        self._layers.move_to_end(environment)
        fleet.holders.setdefault(environment, set()).add(self.number)
        if len(self._layers) > LAYERS:
            gone, _ = self._layers.popitem(last=False)
            fleet.holders[gone].discard(self.number)

    def end(self, numbers: list[int]) -> None:
        """They are gone; unknown ones are nothing."""
        for number in numbers:
            group = self.live.pop(number, None)
            if group is not None:
                self._count(group, -1)

    def _info(self, number: int) -> SandboxInfo:
        sandbox = encode_id(SandboxId(self.number, 1, number), self._key)
        return SandboxInfo(
            id=sandbox,
            state=State.RUNNING,
            spec=self.live[number].spec,
            created_at=time.time(),
            create_ms=4.0,
            token=f"dst_{sandbox}_{secrets.token_urlsafe(32)}",
        )

    # --- HTTP -------------------------------------------------------------------------------------------------------

    @staticmethod
    def claims(host: bytes) -> bool:
        return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        x = Exchange(scope, receive, send)
        try:
            await self._answer(x)
        except DsecError as error:
            await x.fail(error)

    async def _answer(self, x: Exchange) -> None:
        assert self.member is not None
        principal = self.member.asserted(x.bearer() or header_of(x.scope, b"x-api-key"))
        raw, method = x.scope["raw_path"], x.scope["method"]
        key = parse_qs(x.scope["query_string"].decode()).get("key", [""])[0]
        if method == "POST" and raw == b"/v1/sandboxes":
            spec = x.decode(_SPEC, await x.body())
            (number,) = self._make(principal.project, [spec], key)
            await x.answer(201, self._info(number))
        elif method == "POST" and raw == b"/v1/sandboxes:batch":
            request = x.decode(_BATCH, await x.body(MAX_BATCH_BYTES))
            specs = request.specs or ([request.spec] * (request.count or 0) if request.spec is not None else [])
            numbers = self._make(principal.project, specs, key)
            lines = [_encode(BatchItem(index=i, sandbox=self._info(n))) + b"\n" for i, n in enumerate(numbers)]
            body = b"".join(lines)
            await x.begin(200, b"application/x-ndjson", (b"content-length", b"%d" % len(body)))
            await x.finish(body)
        elif method == "GET" and raw == b"/v1/sandboxes":
            await x.answer(200, self._page(principal.project, x.value("limit", int, 100), x.text("after")))
        elif method == "POST" and raw == b"/v1/sandboxes:delete":
            ids = x.decode(_DELETE, await x.body(MAX_BATCH_BYTES)).ids
            self.end([_number(each) for each in ids])
            await x.answer(200, {"results": [DeleteItem(id=each) for each in ids]})
        elif method == "GET" and raw.startswith(b"/v1/sandboxes/"):
            await x.answer(200, self._info(self._known(raw[14:].decode())))
        elif method == "POST" and raw.startswith(b"/v1/sandboxes/") and raw.endswith(b"/fork"):
            spec = self.live[self._known(raw[14:-5].decode())].spec
            specs = [spec] * x.decode(_FORK, await x.body()).count
            infos = [self._info(number) for number in self._make(principal.project, specs, "")]
            await x.answer(200, ForkResults([BatchItem(index=i, sandbox=info) for i, info in enumerate(infos)]))
        elif method == "POST" and raw == b"/v1/functions":
            await self._call(x, principal)
        else:
            raise NotFound("a simulated edge has nothing else")

    def _known(self, sandbox: str) -> int:
        number = _number(sandbox)
        if number not in self.live:
            raise SandboxNotFound(f"there is no sandbox {sandbox}")
        return number

    async def _call(self, x: Exchange, principal: Principal) -> None:
        """Calls that take a moment each, and do nothing."""
        calls = x.decode(_CALLS, await x.body(MAX_BATCH_BYTES)).calls
        width = min(len(calls), principal.at_once or len(calls))
        calling, most = self._fleet.calling, self._fleet.most_calling
        calling[principal.project] += width
        most[principal.project] = max(most[principal.project], calling[principal.project])
        try:
            await asyncio.sleep(CALL_S * -(-len(calls) // width))
        finally:
            calling[principal.project] -= width
        body = b"".join(_encode(FunctionResult(index=index, ok=True)) + b"\n" for index in range(len(calls)))
        await x.begin(200, b"application/x-ndjson", (b"content-length", b"%d" % len(body)))
        await x.finish(body)

    def _page(self, project: str, limit: int, after: str | None) -> Page:
        """All of them are running; ids are in the order of numbers."""
        first = 0 if after is None else _number(after) + 1
        numbers = sorted(n for n, group in self.live.items() if group.project == project and n >= first)
        found = [self._info(number) for number in numbers[:limit]]
        return Page(sandboxes=found, next=found[-1].id if len(numbers) > limit else None)

    def _make(self, project: str, specs: list[SandboxSpec], key: str) -> list[int]:
        """The same key again gives the same sandboxes."""
        known = self._answers.get(f"{project}\0{key}") if key else None
        if known is not None and all(number in self.live for number in known):
            return known
        for (run, environment), count in Counter((spec.run, spec.environment) for spec in specs).items():
            self._touch(run, environment, count)
        made = [self._create(self._group(project, spec)) for spec in specs]
        self._answers[f"{project}\0{key}"] = made
        if len(self._answers) > KEYS_KEPT:
            self._answers.popitem(last=False)
        return made


def _add(counts: Counter[Any], name: object, count: int) -> None:
    """Nothing is kept of what there is none of."""
    counts[name] += count
    if not counts[name]:
        del counts[name]


def _number(sandbox_id: str) -> int:
    """The sequence number that an id has."""
    return int.from_bytes(int(sandbox_id, 32).to_bytes(15, "big")[5:9], "big")


async def serve(keys: Path, edges: int, urls: list[str]) -> None:
    """All of them, until stdin ends."""
    raise_open_files()
    fleet = Fleet(edges)
    async with AsyncExitStack() as undo:

        async def failed(error: BaseException) -> None:
            sys.stderr.write(f"edge: {error}\n")

        for edge in fleet.edges:
            state = keys.parent / f"edge-{edge.number}"
            state.mkdir()
            bus = await open_bus(urls, read_credentials(keys / f"edge-{edge.number}.json"))
            undo.push_async_callback(bus.close)
            node = edge.node()
            facts = NodeFacts(
                edge=edge.number,
                features=("simulated", "odd" if edge.number % 2 else "even"),
                max_live=node.max_live,
                max_starting=node.max_starting,
                memory_capacity_bytes=node.memory_capacity_bytes,
            )
            gate = Gate(edge, edge)
            server = ApiServer(gate, "127.0.0.1", 0)
            await server.start()
            undo.push_async_callback(server.stop)
            edge.member = gate.member = Membership(edge, bus, facts, url=server.url, state=state)
            keeping = asyncio.create_task(keep_member(edge.member, failed))
            undo.callback(keeping.cancel)
        reader = asyncio.StreamReader(limit=1 << 20)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            asked = msgspec.json.decode(line)
            if asked["do"] == "end":
                fleet.end(asked["count"])
            sys.stdout.buffer.write(_encode(fleet.look()) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
