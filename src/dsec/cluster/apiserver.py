"""An apiserver: the same HTTP as one machine's, over all edges.

What names a sandbox goes to the edge in its id, streamed both ways and not looked into; creations go through placement;
lists and batches are split and put together; keys and runs are the cluster's. Calls that name nothing of the kind
(environments, layers, builds, the judge) go to an edge that is well: with a shared store it is all the same which.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import msgspec

from dsec.api.batch import MAX_ITEMS, BatchRequest, deadline, idempotency_key
from dsec.api.control import RunList, RunRenewal, pair
from dsec.api.exchange import MAX_BATCH_BYTES, ClientGone, Exchange, Receive, Scope, Send, headers_of
from dsec.api.held import GROUP_HOLD_S, HeldAnswer
from dsec.api.metrics import ServerMetrics, exposition
from dsec.api.ports.heads import credentials
from dsec.api.ports.hosts import ENVD_PORT, find_any
from dsec.api.ports.raw import RAW
from dsec.api.quick import ShortWay
from dsec.cluster.admission import Admission
from dsec.cluster.audit import Audit
from dsec.cluster.batches import Batches
from dsec.cluster.creating import Creations
from dsec.cluster.fanout import NDJSON, Fanout
from dsec.cluster.foreign import Foreign
from dsec.cluster.iam import Caller
from dsec.cluster.iam_calls import IamCalls
from dsec.cluster.keys import Keys as KeyStore
from dsec.cluster.moves import Moves
from dsec.cluster.nodes import Nodes
from dsec.cluster.routes import SANDBOXES
from dsec.cluster.runs import ClusterRuns
from dsec.cluster.sockets import bridge
from dsec.cluster.spending import Spending
from dsec.cluster.tunnels import tunnel
from dsec.cluster.upstream import PORT_KEY, Upstream
from dsec.cluster.wire import Member
from dsec.edge.client import Principal
from dsec.edge.observed import Check, Readiness
from dsec.edge.tally import Family, Sample
from dsec.errors import DsecError, Internal, InvalidRequest, NotFound, SandboxLost, Unavailable
from dsec.spec.iam import Verb
from dsec.spec.runs import RunRequest
from dsec.spec.sandbox import SandboxSpec
from dsec.spec.trajectory import RebuildRequest

ENVD = b"%d-" % ENVD_PORT
DRAIN_S = 300.0
"""How long a drain waits for commands to end."""
_SHARED = frozenset({"environments", "layers", "judge", "functions"})
_RUN = frozenset({"judge", "functions"})
"""What of these runs something."""
_SPEC = msgspec.json.Decoder(SandboxSpec)
_BATCH = msgspec.json.Decoder(BatchRequest)
_log = logging.getLogger("dsec.cluster")


class ClusterApi:
    """ASGI application."""

    def __init__(
        self,
        *,
        nodes: Nodes,
        upstream: Upstream,
        creations: Creations,
        batches: Batches,
        fanout: Fanout,
        keys: KeyStore,
        iam: IamCalls,
        audit: Audit,
        runs: ClusterRuns,
        moves: Moves,
        spending: Spending,
        version: str,
    ) -> None:
        self._nodes = nodes
        self._upstream = upstream
        self._creations = creations
        self._batches = batches
        self._fanout = fanout
        self._audit = audit
        self._admission = Admission(keys, iam.authority, audit)
        self._runs = runs
        self._moves = moves
        self._spending = spending
        self._foreign = Foreign(
            nodes=nodes,
            upstream=upstream,
            creations=creations,
            fanout=fanout,
            admission=self._admission,
            moves=moves,
            spending=spending,
        )
        self.metrics = ServerMetrics(version)
        self.ports = _Ports()
        self.lanes: dict[bytes, ShortWay] = {}
        self._own: dict[str, Callable[[Exchange, str], Awaitable[None]]] = {
            "sandboxes": self._sandboxes,
            "named": self._named,
            "runs": self._run_calls,
            "keys": lambda x, rest: iam.keys(x, rest, _caller(x)),
            "projects": lambda x, rest: iam.projects(x, rest, _caller(x)),
            "roles": lambda x, rest: iam.roles(x, rest, _caller(x)),
            "audit": lambda x, rest: iam.audit(x, rest, _caller(x)),
            "node": self._node,
            "nodes": self._node_calls,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await bridge(scope, receive, send, self._upstream, self._socket_target)
            return
        if scope["type"] != "http":
            raise RuntimeError(scope["type"])
        x = Exchange(scope, receive, send)
        self.metrics.requests += 1
        try:
            await self._route(x)
        except DsecError as error:
            self.metrics.errors[error.code] += 1
            _log.log(logging.WARNING if error.infra else logging.DEBUG, "%s: %s", scope["path"], error)
            if RAW in scope:  # what follows on this connection may be no request
                await x.answer(error.http_status, error.body(), *headers_of(error), (b"connection", b"close"))
            else:
                await x.fail(error)
        except ClientGone:
            pass
        except Exception:  # noqa: BLE001 (the last resort: answered, logged, counted as ours)
            request_id = x.request_id.decode("latin-1")
            self.metrics.errors[Internal.code] += 1
            _log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            await x.fail(Internal("a bug in the server", remedy=f"report it with the log of request {request_id}"))

    # --- where to ---------------------------------------------------------------------------------------------------

    async def _route(self, x: Exchange) -> None:
        raw: str = x.scope["raw_path"].decode("ascii")
        named = find_any(x.host)
        if named is not None and not x.host.startswith(ENVD):
            await self._port(x, named)
        elif self._foreign.claims(raw):
            await self._foreign(x, raw)
        elif raw.startswith(SANDBOXES):
            await self._sandbox(x, raw)
        elif raw.startswith("/v1/"):
            x.principal = await self._admission.admit(x.bearer(), x.scope)
            await self._check_run(x)
            head, _, rest = raw[4:].partition("/")
            name, _, verb = head.partition(":")
            if name in self._own:
                await self._own[name](x, f":{verb}" if verb else rest)
            elif raw == "/v1/exec:batch":
                x.only("POST")
                await self._fanout.exec(x, x.owner())
            elif name in _RUN and self._spending.bounds(x.owner()):
                x.only("POST")
                await self._spending.run(x, name, self._foreign.any(name), x.owner(), "authorization")
            elif raw in ("/v1/builds", "/v1/layers:packages"):
                x.only("POST")
                await self._spending.build(x, self._foreign.any(name), x.owner())
            elif name in _SHARED:
                await self._upstream.forward(x, self._foreign.any(name), x.owner())
            else:
                raise NotFound(f"no such path: {raw}", remedy="GET /openapi.json lists them")
        elif raw == "/healthz":
            x.only("GET")
            await x.answer(200, {"ok": True})
        elif raw == "/readyz":
            x.only("GET")
            found = self._readiness()
            await x.answer(200 if found.ok else 503, found)
        elif raw == "/openapi.json":
            x.only("GET")
            await self._upstream.forward(x, self._foreign.any(raw), None)
        elif raw == "/metrics":
            x.only("GET")
            await self._metrics(x)
        else:
            raise NotFound(f"no such path: {raw}", remedy="GET /openapi.json lists them")

    async def _sandbox(self, x: Exchange, raw: str) -> None:
        """A call on one sandbox: its edge's business. A sandbox's token is for the edge to look at, too."""
        sandbox_id, _, rest = raw[len(SANDBOXES) :].partition("/")
        bearer = x.bearer()
        principal = None if bearer.startswith("dst_") else await self._admission.admit(bearer, x.scope)
        x.principal = principal or Principal("", sandbox_id)
        await self._check_run(x)
        try:
            member = await self._moves.find(sandbox_id)
        except SandboxLost:
            if rest != "trajectory" or principal is None:
                raise
            await self._lost_trajectory(x, principal, sandbox_id)
            return
        edge = member.claim.edge

        async def elsewhere() -> bool:
            return await self._moves.elsewhere(sandbox_id, edge)

        # Of this one the edge reads the path as it is meant, not as it is written.
        if principal is not None and [part for part in unquote(rest).split("/") if part] == ["fork"]:
            x.only("POST")
            await self._spending.fork(x, member, principal, sandbox_id, elsewhere, "authorization")
        elif principal is not None and rest == "verify" and self._spending.bounds(principal):
            x.only("POST")
            await self._spending.verify(x, member, principal, sandbox_id, elsewhere)
        else:
            await self._upstream.forward(x, member, principal, elsewhere=elsewhere)

    async def _lost_trajectory(self, x: Exchange, principal: Principal, sandbox_id: str) -> None:
        """GET .../trajectory of a sandbox whose node is lost: what the streams have."""
        x.only("GET")
        x.check_query("follow", "after")
        after = x.natural("after") or 0
        chain = await self._moves.chain(principal, sandbox_id)
        body = b"".join(chain.lines[after:])
        await x.begin(200, NDJSON, (b"content-length", b"%d" % len(body)))
        await x.finish(body)

    async def _port(self, x: Exchange, sandbox_id: str) -> None:
        """A request for a port of a sandbox, by host name."""
        shown = next((value for value in credentials(x.scope["headers"]) if value.startswith(b"dsk_")), None)
        principal = None
        if shown is not None:
            principal = await self._admission.admit_to(shown.decode("latin-1"), Verb.USE, sandbox_id)
        member = await self._moves.find(sandbox_id)
        if RAW in x.scope:
            await tunnel(x, self._upstream, member, self._upstream.port_headers(x, member, principal))
            return
        edge = member.claim.edge
        await self._upstream.forward(
            x,
            member,
            principal,
            key_header=PORT_KEY,
            elsewhere=lambda: self._moves.elsewhere(sandbox_id, edge),
        )

    async def _check_run(self, x: Exchange) -> None:
        speaks_for = x.run()
        if speaks_for is not None and x.principal is not None and x.principal.sandbox_id is None:
            await self._runs.check(x.principal.project, *speaks_for)

    async def _socket_target(self, scope: Scope) -> tuple[Member, str, dict[str, str]]:
        """Where a WebSocket goes, and with which headers. Raises as `_sandbox`."""
        raw = scope["raw_path"].decode("ascii")
        if not raw.startswith(SANDBOXES):
            raise NotFound(f"no such path: {raw}", remedy="GET /openapi.json lists them")
        sandbox_id = raw[len(SANDBOXES) :].partition("/")[0]
        headers = {name: value for name, value in scope["headers"] if name in (b"authorization", b"x-request-id")}
        bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")[2].strip()
        principal = None if bearer.startswith("dst_") else await self._admission.admit(bearer, scope, "GET")
        member = await self._moves.find(sandbox_id)
        if principal is not None:
            bearer = self._upstream.bearer(member, principal)
        query = scope["query_string"].decode("latin-1")
        url = "ws" + member.url.removeprefix("http") + raw + ("?" + query if query else "")
        return member, url, {"authorization": f"Bearer {bearer}"}

    # --- sandboxes --------------------------------------------------------------------------------------------------

    async def _sandboxes(self, x: Exchange, rest: str) -> None:
        principal = x.owner()
        if not rest:
            x.only("GET", "POST")
            await (self._list if x.scope["method"] == "GET" else self._create)(x, principal)
            return
        x.only("POST")
        if rest == ":batch":
            await self._create_many(x, principal)
        elif rest == ":delete":
            await x.answer(200, {"results": await self._fanout.delete(x, principal)})
        elif rest in (":pause", ":resume"):
            resume = rest == ":resume"
            await x.answer(200, {"results": await self._fanout.pause(x, principal, resume=resume)})
        elif rest == ":rebuild":
            asked = x.decode(msgspec.json.Decoder(RebuildRequest), await x.body())
            answer = await self._moves.rebuild(principal, asked)
            await x.begin(answer.status, b"application/json", (b"content-length", b"%d" % len(answer.body)))
            await x.finish(answer.body)
        else:
            raise NotFound(f"no such path: {x.scope['path']}", remedy="GET /openapi.json lists them")

    async def _create(self, x: Exchange, principal: Principal) -> None:
        x.check_query("deadline_s", "key")
        wait_s, key = deadline(x), idempotency_key(x)
        spec = x.decode(_SPEC, await x.body())
        answer = await self._creations.one(principal, spec, key=key, deadline_s=wait_s)
        await x.begin(answer.status, b"application/json", (b"content-length", b"%d" % len(answer.body)))
        await x.finish(answer.body)

    async def _create_many(self, x: Exchange, principal: Principal) -> None:
        x.check_query("deadline_s", "key")
        wait_s, key = deadline(x), idempotency_key(x)
        request = x.decode(_BATCH, await x.body(MAX_BATCH_BYTES))
        if request.specs is not None and request.spec is None and request.count is None:
            specs = request.specs
        elif request.spec is not None and request.count is not None and request.specs is None:
            specs = [request.spec] * min(request.count, MAX_ITEMS)
        else:
            raise InvalidRequest("a batch is either `specs`, or `spec` and `count`")
        batch = await self._batches.many(principal, specs, key=key, deadline_s=wait_s)
        held = HeldAnswer(x, NDJSON, hold_s=GROUP_HOLD_S)
        async with held:
            async for lines in batch.lines():
                held.push(lines)
                if held.full:
                    await held.flush()
            await held.finish()

    async def _list(self, x: Exchange, principal: Principal) -> None:
        x_query = {name: [value.decode() for value in values] for name, values in x.query.items()}
        known = {"state", "run", "label", "limit", "after"}
        if not known.issuperset(x_query):
            raise InvalidRequest(f"unknown argument {sorted(set(x_query) - known)[0]!r}")
        limit = x.value("limit", int, 100)
        if not 1 <= limit <= 1000:
            raise InvalidRequest("limit is 1 to 1000")
        for label in x_query.get("label", []):
            pair(label)
        query = [(name, value) for name in ("state", "run", "label") for value in x_query.get(name, [])]
        await x.answer(200, await self._fanout.page(principal, query, limit, x.text("after")))

    async def _named(self, x: Exchange, rest: str) -> None:
        x.only("GET")
        x.check_query()
        run, _, name = rest.partition("/")
        if not name or "/" in name:
            raise NotFound(f"no such path: {x.scope['path']}", remedy="GET /openapi.json lists them")
        await x.answer(200, await self._fanout.named(x.owner(), unquote(run), unquote(name)))

    # --- what is the cluster's --------------------------------------------------------------------------------------

    async def _run_calls(self, x: Exchange, rest: str) -> None:
        project = x.owner().project
        if rest == ":renew":
            x.only("POST")
            asked = x.decode(msgspec.json.Decoder(RunRenewal), await x.body())
            await x.answer(200, await self._runs.renew(project, asked.name, asked.epoch))
        elif rest:
            raise NotFound(f"no such path: {x.scope['path']}", remedy="GET /openapi.json lists them")
        elif x.scope["method"] == "POST":
            asked_run = x.decode(msgspec.json.Decoder(RunRequest), await x.body())
            await x.answer(200, await self._runs.open(project, asked_run))
        else:
            x.only("GET", "POST")
            x.check_query("name")
            name = x.text("name")
            await x.answer(
                200, RunList(self._runs.list(project) if name is None else [await self._runs.get(project, name)])
            )

    async def _node(self, x: Exchange, rest: str) -> None:
        """`/v1/node`: the cluster as if it were one."""
        if rest:
            raise NotFound(f"no such path: {x.scope['path']}", remedy="GET /openapi.json lists them")
        x.only("GET")
        x.check_query()
        await x.answer(200, await self._fanout.node(x.owner()))

    async def _node_calls(self, x: Exchange, rest: str) -> None:
        """`/v1/nodes`, `/v1/nodes/{edge}/cordon`, `.../uncordon`, `.../drain`"""
        if not rest:
            x.only("GET")
            await x.answer(200, {"nodes": [self._describe(member) for member in self._nodes.members()]})
            return
        number, _, verb = rest.partition("/")
        if not number.isdigit() or len(number) > 5 or verb not in ("cordon", "uncordon", "drain"):
            raise NotFound(f"no such path: {x.scope['path']}", remedy="GET /openapi.json lists them")
        x.only("POST")
        caller = _caller(x)
        await self._audit.note(f"node.{verb}", by=caller.name, project=caller.project, about=number)
        if verb == "drain":
            await self._drain(x, int(number))
            return
        await x.answer(200, self._describe(await self._nodes.cordon(int(number), verb == "cordon")))

    async def _drain(self, x: Exchange, edge: int) -> None:
        """NDJSON: what became of each sandbox, as it is known."""
        x.check_query("deadline_s")
        wait_s = deadline(x)
        held = HeldAnswer(x, NDJSON)
        async with held:
            async for result in self._moves.drain(edge, DRAIN_S if wait_s is None else wait_s):
                held.push(msgspec.json.encode(result) + b"\n")
                await held.flush()
            await held.finish()

    def _describe(self, member: Member) -> dict[str, Any]:
        claim = member.claim
        report = self._nodes.scheduler.watch.report(claim.edge)
        return {
            "edge": claim.edge,
            "incarnation": claim.incarnation,
            "health": "lost" if claim.lost else self._nodes.health(claim.edge).value,
            "cordoned": member.cordoned,
            "url": member.url,
            "unshipped": self._nodes.unshipped.get(claim.edge, 0),
            "backends": list(member.facts.backends),
            "features": list(member.facts.features),
            "labels": member.facts.labels,
            "live": report.live if report is not None else 0,
            "starting": report.starting if report is not None else 0,
            "queued": report.queued if report is not None else 0,
            "max_live": member.facts.max_live,
            "memory_committed_bytes": report.memory_committed_bytes if report is not None else 0,
            "memory_capacity_bytes": member.facts.memory_capacity_bytes,
        }

    def _readiness(self) -> Readiness:
        try:
            self._foreign.any("")
        except Unavailable as error:
            return Readiness(False, [Check(name="edges", ok=False, detail=error.message)])
        return Readiness(True, [Check(name="edges", ok=True)])

    async def _metrics(self, x: Exchange) -> None:
        x.principal = await self._admission.admit(x.bearer(), x.scope)
        self.metrics.watch()
        nodes: dict[str, int] = {}
        for member in self._nodes.members():
            state = "lost" if member.claim.lost else self._nodes.health(member.claim.edge).value
            nodes[state] = nodes.get(state, 0) + 1
        family = Family(
            "dsec_cluster_nodes",
            "gauge",
            "Nodes by health.",
            [Sample(count, {"health": state}) for state, count in sorted(nodes.items())],
        )
        waiting = Family(
            "dsec_cluster_waiting",
            "gauge",
            "Requests for sandboxes that wait here for room, or parts of them.",
            [Sample(self._nodes.scheduler.waiting(), {})],
        )
        body = exposition([*self.metrics.families(), family, waiting])
        await x.begin(200, b"text/plain; version=0.0.4", (b"content-length", b"%d" % len(body)))
        await x.finish(body)


def _caller(x: Exchange) -> Caller:
    caller = x.owner()
    assert isinstance(caller, Caller)
    return caller


class _Ports:
    """WebSockets by host name are passed on as bytes."""

    @staticmethod
    def claims(host: bytes) -> bool:
        return find_any(host) is not None and not host.startswith(ENVD)
