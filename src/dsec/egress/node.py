"""The way out of all sandboxes of a node.

Owns the registry of permissions, the gateways, the resolver and the node's limits and counts; a `Box` owns one
sandbox's part. Invariants: `close` leaves no socket and no task; a policy is compiled once for all sandboxes that have
the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from dsec.egress.box import Box, Host, grant_of
from dsec.egress.flight import Flight
from dsec.egress.gateway import Gateway, Visit
from dsec.egress.http1 import Refused
from dsec.egress.meters import Bucket, Limits, Totals
from dsec.egress.resolver import Resolver
from dsec.plan.egress import EMPTY, Policy, compile_policy
from dsec.plan.permissions import Definition, Registry
from dsec.spec.events import EventType
from dsec.spec.network import Network, Reason

SWEEP_S = 5.0
_COMPILED = 256
_QUIET: dict[str, Any] = {"access_log": None}
_encode = msgspec.json.Encoder().encode


class Egress:
    """Made by the composition, which closes the gateways; for one event loop."""

    def __init__(
        self,
        *,
        definitions: Mapping[str, Definition],
        gateways: Sequence[Gateway] = (),
        limits: Limits | None = None,
        resolver: Resolver | None = None,
        secret: bytes | None = None,
    ) -> None:
        """`secret`: the node's, for certificates (None: one of this process's)."""
        self.gateways: dict[str, Gateway] = {kind: gateway for gateway in gateways for kind in gateway.kinds}
        self.registry = Registry(definitions, {kind: tuple(each.hosts) for kind, each in self.gateways.items()})
        self.limits = limits or Limits()
        self.resolver = resolver or Resolver()
        self.secret = secret or secrets.token_bytes(32)
        self.totals = Totals()
        self.boxes: dict[str, Box] = {}
        self._compiled: dict[bytes, Policy] = {}
        self._servers: dict[int, web.Server] = {}
        self._rates: dict[tuple[str, str], Bucket] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- policies ---

    def compile(self, network: Network) -> Policy:
        """A checked, compiled policy. Raises `InvalidRequest`, `Unsupported`."""
        if not network:
            return EMPTY
        key = _encode(network)
        found = self._compiled.get(key)
        if found is None:
            self.registry.check(network)
            if len(self._compiled) >= _COMPILED:
                self._compiled.pop(next(iter(self._compiled)))
            found = compile_policy(network, self.registry)
            for each in found.gateways:
                self.gateways[each.kind].check(grant_of(each))
            self._compiled[key] = found
        return found

    # --- sandboxes ---

    def box(self, sandbox_id: str, project: str, host: Host, stand_ins: Iterable[tuple[str, int]] = ()) -> Box:
        """A sandbox's way out; nothing is granted yet."""
        found = self.boxes[sandbox_id] = Box(self, sandbox_id, project, host, stand_ins)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        return found

    def forget(self, sandbox_id: str) -> None:
        """It ends: cut what is open. Idempotent."""
        found = self.boxes.pop(sandbox_id, None)
        if found is not None:
            found.close()
            for key in [key for key in self._rates if key[0] == sandbox_id]:
                del self._rates[key]

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A connection's task; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cut everything. Idempotent."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for sandbox_id in list(self.boxes):
            self.forget(sandbox_id)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers.values():
            await server.shutdown(0)
        self._servers.clear()
        await self.resolver.close()

    def _sweep(self) -> None:
        """Connections on which nothing happens any more."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for box in self.boxes.values():
            for flight in list(box.flights):
                splice = flight.splice
                if splice is not None:
                    idle_s = self.limits.half_closed_s if splice.half_closed else self.limits.idle_s
                    if now - splice.active_at > idle_s:
                        flight.cut(Reason.IDLE)
        self._sweeping = loop.call_later(SWEEP_S, self._sweep) if self.boxes else None

    # --- gateways ---

    async def serve_gateway(self, box: Box, flight: Flight, kind: str, context: ssl.SSLContext | None = None) -> None:
        """Hand a connection to the gateway of a kind, until it is closed. `context`: it is TLS, for the name that the
        connection was made to."""
        gateway = self.gateways[kind]
        server = self._servers.get(id(gateway))
        if server is None:
            server = self._servers[id(gateway)] = web.Server(self._handle)
        loop = asyncio.get_running_loop()
        closed = loop.create_future()

        def protocol() -> _Conversation:
            return _Conversation(server, loop, box, gateway, closed, name=None if context is None else flight.name)

        try:
            flight.transport, _ = await loop.connect_accepted_socket(
                protocol,
                flight.sock,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self.limits.head_s,
            )
        except ssl.SSLError as error:
            named = error.reason == "CALLBACK_FAILED"
            raise Refused(Reason.TLS_NAME_MISMATCH if named else Reason.NOT_TLS, error.reason or "") from None
        flight.connected = flight.quiet = True
        await closed
        flight.end(Reason.GRANTED)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        conversation = request.protocol
        assert isinstance(conversation, _Conversation)
        box, gateway = conversation.box, conversation.gateway
        name = conversation.name
        if name is not None and request.host.lower().removesuffix(":443").rstrip(".") != name:
            return web.Response(status=421, text=f"dsec: this connection is for {name}\n")
        grants = box.grants(gateway.kinds)
        if not grants:
            return web.Response(status=403, text="dsec: this permission was taken away\n")
        for grant in grants:
            await self._pace(box, grant.permission, grant.options.get("requests_per_s"))
        self.totals.gateway_requests += 1

        def note(kind: str, data: Mapping[str, Any]) -> None:
            with contextlib.suppress(ValueError):
                box.audit.add(EventType(kind), dict(data))

        return await gateway.handle(request, Visit(box.sandbox_id, box.project, grants, note))

    async def _pace(self, box: Box, permission: str, rate: float | None) -> None:
        if rate is None:
            return
        key = (box.sandbox_id, permission)
        bucket = self._rates.get(key)
        if bucket is None:
            bucket = self._rates[key] = Bucket(rate)
        await asyncio.sleep(bucket.take(1.0))


class _Conversation(web.RequestHandler):
    """aiohttp's side of one connection to a gateway."""

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        box: Box,
        gateway: Gateway,
        closed: asyncio.Future[None],
        *,
        name: str | None,
    ) -> None:
        super().__init__(server, loop=loop, **_QUIET)
        self.box = box
        self.gateway = gateway
        self.name = name
        """The one host that may be asked for; None: any, the gateway looks."""
        self._closed_future = closed

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if not self._closed_future.done():
            self._closed_future.set_result(None)
