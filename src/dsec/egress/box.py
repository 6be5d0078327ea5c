"""One sandbox's way out: its policy as it is now, its stand-in names, its connections.

Owns every socket that the sandbox's backend hands over, until it is closed. Invariants: nothing is connected, and no
look-up made outside, before the policy has allowed the name and port, and (at ports 80 and 443) what the program said
agrees with them; a change of policy is looked at again after every wait, and cuts what it doesn't allow any more; a
failure of one connection is that connection's.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Any, Protocol

from dsec.egress import authority, dns, proxy
from dsec.egress.audit import Audit, Note
from dsec.egress.flight import Flight, answer_dns, explain, pump, read_head
from dsec.egress.gates import gate_of
from dsec.egress.gateway import Grant
from dsec.egress.http1 import Refused, Requests
from dsec.egress.meters import Use
from dsec.egress.splice import Gate, Splice, reset
from dsec.egress.standins import PROXY, StandIns, is_stand_in
from dsec.plan.addresses import plain
from dsec.plan.egress import EMPTY, Decision, GatewayGrant, Policy, Rule
from dsec.spec.events import EventType
from dsec.spec.network import Address, Reason

if TYPE_CHECKING:
    from dsec.egress.node import Egress

log = logging.getLogger("dsec.egress")
_TRIES = 3
"""Addresses of a name that are tried."""


class Peer(Protocol):
    """A connection to a port of another sandbox."""

    async def read(self) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    async def close_write(self) -> None: ...
    async def close(self) -> None: ...


class Host(Protocol):
    """What a box needs of the edge."""

    def note(self, kind: EventType, data: dict[str, Any]) -> None:
        """A line for the sandbox's event log."""
        ...

    def stands_for(self, name: str, address: int) -> None:
        """Remember this pair for a later edge."""
        ...

    async def connect(self, name: str, port: int) -> Peer:
        """To a port of the sandbox of this name. Raises `DsecError`."""
        ...


class Box:
    """Made by `Egress.box`."""

    def __init__(
        self,
        egress: Egress,
        sandbox_id: str,
        project: str,
        host: Host,
        stand_ins: Iterable[tuple[str, int]],
    ) -> None:
        self.sandbox_id = sandbox_id
        self.project = project
        self.policy: Policy = EMPTY
        self.audit = Audit(host.note)
        self._egress = egress
        self._host = host
        self._stand_ins = StandIns(sandbox_id, host.stands_for, stand_ins)
        self._flights: set[Flight] = set()
        self._uses: dict[str, Use] = {}
        self._closed = False
        self.out = self.back = self.refused = 0

    @functools.cached_property
    def authority(self) -> authority.Authority:
        """Of its certificates."""
        return authority.Authority(self._egress.secret, self.sandbox_id)

    @property
    def note(self) -> Note:
        """An event that is never aggregated."""
        return self._host.note

    @property
    def has_names(self) -> bool:
        """Some name was ever looked up: it has a stand-in address."""
        return len(self._stand_ins) > 0

    @property
    def open(self) -> int:
        """Connections now."""
        return len(self._flights)

    @property
    def flights(self) -> Iterable[Flight]:
        """The open connections."""
        return self._flights

    # --- what the backend calls ---

    def query(self, message: bytes) -> bytes | None:
        """A DNS query from inside (see `ports.NetworkHost`)."""
        self._egress.totals.queries += 1
        return dns.answer(message, self._resolve, self._stand_ins.name)

    def connected(self, sock: socket.socket, address: str, port: int) -> None:
        """A connection from inside (see `ports.NetworkHost`)."""
        flight = Flight(sock, address[:64], port, asyncio.get_running_loop().time())
        try:
            where = plain(ipaddress.ip_address(address))
            self._begin(flight, where)
        except Refused as refused:
            self.refuse(flight, refused.reason, str(refused))
        except ValueError:
            self.refuse(flight, Reason.ADDRESS_NOT_GRANTED)

    # --- what the edge calls ---

    def set_policy(self, policy: Policy) -> None:
        """From now on; what isn't allowed any more is cut."""
        self.policy = policy
        for flight in list(self._flights):
            decision = self._decide(flight)
            if not decision.allowed or decision.rule is None or _other(decision.rule, flight.rule):
                flight.cut(Reason.POLICY_CHANGED)
                continue
            self._use(decision.rule)

    def environment(self) -> dict[str, str]:
        """Variables that point the tools inside at the gateways, and at the proxy for the rest."""
        if self.policy.empty:
            return {}
        found = proxy.environment(self.policy.own_names())
        if self.policy.intercepts:
            found |= authority.environment()
        for gateway in dict.fromkeys(self._egress.gateways.values()):
            grants = self.grants(gateway.kinds)
            if grants:
                found.update(gateway.environment(grants))
        return found

    def grants(self, kinds: Iterable[str]) -> list[Grant]:
        """What a gateway of these kinds may do for this sandbox now."""
        return [grant_of(each) for each in self.policy.gateways if each.kind in kinds]

    def close(self) -> None:
        """The sandbox ends, or this edge does: cut everything. Idempotent."""
        if self._closed:
            return
        for flight in list(self._flights):
            flight.cut(Reason.ENDED)
        self._closed = True
        self.audit.close()

    # --- deciding ---

    def _resolve(self, name: str) -> IPv4Address | None:
        if name == proxy.NAME and not self.policy.empty:
            return PROXY
        if not self._closed and self.policy.resolves(name):
            return self._stand_ins.address(name)
        self._egress.totals.queries_refused += 1
        self.audit.add(EventType.NAME_REFUSED, {"name": name})
        return None

    def _begin(self, flight: Flight, where: Address) -> None:
        limits = self._egress.limits
        if self._closed:
            raise Refused(Reason.ENDED)
        if len(self._flights) >= limits.sandbox_connections or self._egress.totals.open >= limits.node_connections:
            raise Refused(Reason.CONNECTIONS_LIMIT, "of the sandbox or node")
        if where == PROXY and flight.port == proxy.PORT and not self.policy.empty:
            self._keep(flight, functools.partial(self._proxy, flight))
            return
        self._aim(flight, where)
        if flight.port == 53 and flight.name is None and not self.policy.empty and not self._decide(flight).allowed:
            self._keep(flight, functools.partial(answer_dns, flight, self.query, limits.head_s))
            return
        rule = self._admit(flight)
        self._keep(flight, functools.partial(self._route, flight, rule))

    def _aim(self, flight: Flight, where: Address) -> None:
        stands_for = self._stand_ins.name(where) if isinstance(where, IPv4Address) else None
        if stands_for is not None:
            flight.name = stands_for
        else:
            flight.where = where

    def _admit(self, flight: Flight) -> Rule:
        """The rule by which it may go on; counted from now on. Raises `Refused`."""
        decision = self._decide(flight)
        if not decision.allowed or decision.rule is None:
            raise Refused(decision.reason, "" if decision.rule is None else decision.rule.permission)
        rule = decision.rule
        flight.rule = rule
        flight.permission = rule.permission
        use = self._use(rule)
        if use.refusal is not None:
            raise Refused(use.refusal)
        flight.use = use
        use.connections += 1
        return rule

    def _decide(self, flight: Flight) -> Decision:
        """By the policy as it is now."""
        if flight.name is not None:
            return self.policy.decide(flight.name, flight.port)
        if flight.where is None:
            return Decision(Reason.ADDRESS_NOT_GRANTED)
        if isinstance(flight.where, IPv4Address) and is_stand_in(flight.where):
            return Decision(Reason.UNKNOWN_ADDRESS)
        return self.policy.decide_address(flight.where, flight.port)

    def _use(self, rule: Rule) -> Use:
        found = self._uses.get(rule.permission)
        if found is None:
            found = self._uses[rule.permission] = Use(rule)
        elif found.rule is not rule:
            found.changed(rule)
        return found

    # --- serving ---

    def _keep(self, flight: Flight, work: Callable[[], Awaitable[None]]) -> None:
        self._flights.add(flight)
        self._egress.totals.open += 1
        flight.done = functools.partial(self._done, flight)
        flight.follow(self._egress.spawn(self._run(flight, work)))

    async def _run(self, flight: Flight, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Refused as refused:
            await explain(flight, refused.reason)
            flight.end(refused.reason, str(refused))
        except TimeoutError:
            flight.end(Reason.SAID_NOTHING)
        except OSError as error:
            flight.end(Reason.RESET, error.strerror or "")
        except Exception:
            log.exception("sandbox %s: a connection failed", self.sandbox_id)
            flight.end(Reason.RESET, "a bug in the server")

    async def _route(self, flight: Flight, rule: Rule) -> None:
        if rule.gateway is not None:
            context = self.authority.context(flight.name) if rule.intercept and flight.name else None
            await self._egress.serve_gateway(self, flight, rule.gateway, context)
        elif rule.sandbox is not None:
            await self._to_sandbox(flight, rule.sandbox)
        else:
            await self._to_outside(flight, rule)

    async def _proxy(self, flight: Flight) -> None:
        """What is asked of the proxy, as if the program had connected to it itself."""
        flight.proxied = True
        async with asyncio.timeout(self._egress.limits.head_s):
            asked = await proxy.read(flight.sock)
        flight.port = asked.port
        if isinstance(asked.target, str):
            flight.name = asked.target
        else:
            self._aim(flight, plain(asked.target))
        if flight.where is not None and (flight.where.is_loopback or flight.where.is_unspecified):
            raise Refused(Reason.ADDRESS_NOT_GRANTED, "loopback is the sandbox's own: connect without the proxy")
        rule = self._admit(flight)
        if rule.gateway is not None:
            raise Refused(Reason.NOT_GRANTED, "a gateway: connect without the proxy")
        if asked.connect:
            await asyncio.get_running_loop().sock_sendall(flight.sock, proxy.ESTABLISHED)
            flight.proxied = False
            await self._route(flight, rule)
            return
        if rule.sandbox is not None:
            raise Refused(Reason.NOT_GRANTED, "another sandbox: connect without the proxy, or by CONNECT")
        if flight.port == 443:
            raise Refused(Reason.NOT_TLS, "connect to it by CONNECT")
        gate = proxy.Forwarded(flight.name or flight.where or asked.target, asked.port)
        await self._join(flight, rule, gate, gate.feed(asked.held))

    async def _to_outside(self, flight: Flight, rule: Rule) -> None:
        gate = None if flight.name is None else gate_of(flight.name, flight.port)
        first = b""
        if gate is not None and flight.port in (80, 443):
            async with asyncio.timeout(self._egress.limits.head_s):
                first = await read_head(flight.sock, gate)
        await self._join(flight, rule, gate, first)

    async def _join(self, flight: Flight, rule: Rule, gate: Gate | None, first: bytes) -> None:
        """Connect, and let go on what has passed the gate. Raises `Refused`."""
        outside = await self._connect(flight, rule)
        try:
            decision = self._decide(flight)  # the policy may have changed meanwhile
            if not decision.allowed:
                raise Refused(Reason.POLICY_CHANGED)
        except BaseException:
            reset(outside)
            raise
        answers = gate.upgraded if isinstance(gate, Requests) and gate.waits_for_answer else None
        splice = Splice(
            flight.sock,
            outside,
            meter=flight.use,
            gate=None if gate is None or gate.raw else gate,
            answers=None if answers is None else functools.partial(_answered, flight, answers),
            ended=flight.spliced_end,
        )
        flight.splice = splice
        flight.connected = True
        splice.start(first)

    async def _connect(self, flight: Flight, rule: Rule) -> socket.socket:
        """To an address that was checked. Raises `Refused`."""
        if flight.name is None:
            addresses = [str(flight.where)]
        else:
            addresses = list(await self._egress.resolver.resolve(flight.name))
            if not addresses:
                raise Refused(Reason.UNRESOLVED)
            parsed = [ipaddress.ip_address(text.partition("%")[0]) for text in addresses]
            verdicts = [self.policy.check_address(rule, each, flight.port) for each in parsed]
            addresses = [text for text, verdict in zip(addresses, verdicts, strict=True) if verdict is Reason.GRANTED]
            if not addresses:
                flight.outside = str(parsed[0])
                raise Refused(verdicts[0])
        failure = ""
        for address in addresses[:_TRIES]:
            flight.outside = address
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.timeout(self._egress.limits.connect_s):
                    await asyncio.get_running_loop().sock_connect(sock, (address, flight.port))
            except OSError as error:
                sock.close()
                failure = error.strerror or "no answer in time"
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise Refused(Reason.CONNECT_FAILED, failure)

    async def _to_sandbox(self, flight: Flight, name: str) -> None:
        try:
            peer = await self._host.connect(name, flight.port)
        except Exception as error:  # noqa: BLE001 (whatever keeps it from being reached)
            raise Refused(Reason.CONNECT_FAILED, str(error)[:200]) from None
        await pump(flight, peer)
        flight.end(Reason.GRANTED)

    # --- the end of a connection ---

    def refuse(self, flight: Flight, reason: Reason, text: str = "") -> None:
        """One that never began."""
        reset(flight.sock)
        self._tell(flight, reason, text)

    def _done(self, flight: Flight, reason: Reason, text: str) -> None:
        self._flights.discard(flight)
        totals = self._egress.totals
        totals.open -= 1
        totals.out += flight.out
        totals.back += flight.back
        self.out += flight.out
        self.back += flight.back
        if flight.use is not None:
            flight.use.connections -= 1
        if flight.quiet:
            return
        self._tell(flight, reason, text)

    def _tell(self, flight: Flight, reason: Reason, text: str) -> None:
        data: dict[str, Any] = {"port": flight.port}
        if flight.name is not None:
            data["name"] = flight.name
            if flight.outside:
                data["address"] = flight.outside
        else:
            data["address"] = flight.address
        if flight.permission:
            data["permission"] = flight.permission
        data["reason"] = reason
        if text and text != reason.value:
            data["detail"] = text[:200]
        self._egress.totals.reasons[reason] += 1
        if flight.connected:
            seconds = asyncio.get_running_loop().time() - flight.began
            data |= {"out": flight.out, "in": flight.back, "ms": round(seconds * 1e3, 3)}
            self.audit.add(EventType.CONNECTION, data)
        else:
            self.refused += 1
            self.audit.add(EventType.REFUSED, data)


def _answered(flight: Flight, upgraded: Callable[[bytes], None], first: bytes) -> None:
    upgraded(first)
    if flight.splice is not None:
        flight.splice.released()


def _other(rule: Rule, before: Rule | None) -> bool:
    """Whether a connection that was allowed by one rule is another thing by the other."""
    return before is not None and (rule.gateway, rule.sandbox, rule.intercept) != (
        before.gateway,
        before.sandbox,
        before.intercept,
    )


def grant_of(each: GatewayGrant) -> Grant:
    """As gateways know it."""
    return Grant(each.permission, each.kind, each.argument, each.options)


def describe(network: Mapping[str, Any]) -> dict[str, Any]:
    """A policy in an event: bounded."""
    shown = list(network.items())[:100]
    return {"policy": {name[:200]: grant is not False for name, grant in shown}, "permissions": len(network)}
