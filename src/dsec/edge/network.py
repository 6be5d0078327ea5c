"""The networks of a node's sandboxes, between their records and the egress.

Owns which sandboxes have a way out at all: one whose policy grants nothing has none, not even for names. Invariants: a
policy takes effect in the moment that it is accepted, and is durable before its caller hears of it; a sandbox that is
adopted has the policy that is on record, and its stand-in names mean what they meant.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from msgspec.structs import replace

from dsec.channel import files
from dsec.edge.notes import Notes
from dsec.edge.sandbox import Sandbox
from dsec.edge.tally import Family, Sample, one
from dsec.edge.tasks import log, quiet
from dsec.egress import authority
from dsec.egress.box import Box, Peer, describe
from dsec.egress.node import Egress
from dsec.errors import DsecError, InvalidRequest, Unavailable, Unsupported
from dsec.journal.records import Journal
from dsec.plan.egress import Policy
from dsec.ports import Instance, NetworkHost
from dsec.spec.events import EventType
from dsec.spec.network import MAX_PERMISSIONS, Network, NetworkInfo, Reason

Connect = Callable[[str, str, str, int], Awaitable[Peer]]
"""To a port of a sandbox: project, run, name, port."""


class Networks:
    """Begins, changes and ends them."""

    def __init__(self, *, egress: Egress, journal: Journal, notes: Notes, connect: Connect) -> None:
        self._egress = egress
        self._journal = journal
        self._notes = notes
        self._connect = connect

    def check(self, network: Network | None) -> None:
        """Raises `InvalidRequest`, `Unsupported`: why this policy can't be."""
        if network:
            self._egress.compile(network)

    async def begin(self, sandbox: Sandbox, instance: Instance, *, adopted: bool = False) -> None:
        """It is made, or adopted, and may reach something. Raises `Unsupported`, `Unavailable`."""
        network = sandbox.record.network or {}
        policy = self._egress.compile(network)
        if policy.empty:
            return
        if not isinstance(instance, NetworkHost):
            raise Unsupported(
                f"the backend {sandbox.record.backend!r} can't give a sandbox a network", remedy="Leave network out."
            )
        box = self._box(sandbox, self._journal.stand_ins(sandbox.id) if adopted else ())
        if not adopted:
            await _trust(box, policy, instance)
        box.set_policy(policy)
        sandbox.network_env = box.environment() or None
        await instance.serve_network(box.connected, box.query)

    async def adopt(self, sandbox: Sandbox) -> None:
        """An earlier edge made it. Where its policy can't be any more, it reaches nothing."""
        if not sandbox.record.network or sandbox.instance is None:
            return
        try:
            await self.begin(sandbox, sandbox.instance, adopted=True)
        except DsecError as error:
            log.warning("sandbox %s has no network any more: %s", sandbox.id, error)

    async def go_on(self, sandbox: Sandbox, instance: Instance) -> None:
        """It has gone back to an earlier moment, as this instance: it may reach what it might before."""
        box = self._egress.boxes.get(sandbox.id)
        if box is None or box.policy.empty or not isinstance(instance, NetworkHost):
            return
        try:
            await instance.serve_network(box.connected, box.query)
        except DsecError as error:
            log.warning("sandbox %s has no network any more: %s", sandbox.id, error)

    async def change(self, sandbox: Sandbox, network: Network, *, merge: bool) -> NetworkInfo:
        """Another policy from now on. `merge`: laid over the one it has. Raises `InvalidRequest`, `Unsupported`, and
        as `Sandbox.running`."""
        instance = sandbox.here()
        if merge:
            network = {**(sandbox.record.network or {}), **network}
            if len(network) > MAX_PERMISSIONS:
                raise InvalidRequest(f"a policy has at most {MAX_PERMISSIONS} permissions", field="network")
        policy = self._egress.compile(network)
        box = self._egress.boxes.get(sandbox.id)
        if box is None and not policy.empty:
            if not isinstance(instance, NetworkHost):
                raise Unsupported("this sandbox's backend can't give it a network")
            box = self._box(sandbox, self._journal.stand_ins(sandbox.id))
        if box is not None and not box.policy.intercepts:
            await _trust(box, policy, instance)
        sandbox.record = replace(sandbox.record, network=network)
        self._notes.network_changed(sandbox.id, network, describe(network))
        durable = self._journal.put(sandbox.record)
        if box is not None:
            box.set_policy(policy)
            sandbox.network_env = box.environment() or None
            if not policy.empty and isinstance(instance, NetworkHost):
                await instance.serve_network(box.connected, box.query)
        info = self.info(sandbox)
        await durable
        return info

    def info(self, sandbox: Sandbox) -> NetworkInfo:
        """As it is now."""
        box = self._egress.boxes.get(sandbox.id)
        policy = sandbox.record.network or {}
        if box is None:
            return NetworkInfo(policy=policy)
        return NetworkInfo(
            policy=policy,
            environment=sandbox.network_env or {},
            open=box.open,
            out_bytes=box.out,
            in_bytes=box.back,
            refused=box.refused,
        )

    def end(self, sandbox: Sandbox) -> None:
        """Its end is decided. Idempotent."""
        box = self._egress.boxes.get(sandbox.id)
        if box is None:
            return
        self._egress.forget(sandbox.id)
        if box.has_names:
            with contextlib.suppress(Unavailable):
                quiet(self._journal.drop_stand_ins(sandbox.id))

    async def close(self) -> None:
        """Connections end with the edge; the sandboxes' policies are on record."""
        await self._egress.close()

    def _box(self, sandbox: Sandbox, stand_ins: Iterable[tuple[str, int]]) -> Box:
        host = _Host(sandbox, self._journal, self._notes, self._connect)
        return self._egress.box(sandbox.id, sandbox.record.project, host, stand_ins)

    def families(self) -> list[Family]:
        """Metrics."""
        totals = self._egress.totals
        return [
            one("dsec_network_open", "gauge", "Connections of sandboxes that are open.", totals.open),
            one("dsec_network_queries_total", "counter", "Look-ups of names.", totals.queries),
            one("dsec_network_queries_refused_total", "counter", "Of names not granted.", totals.queries_refused),
            one("dsec_network_gateway_requests_total", "counter", "Answered by gateways.", totals.gateway_requests),
            Family(
                "dsec_network_connections_total",
                "counter",
                "Connections that were refused or have ended, by reason (granted: ended by themselves).",
                [Sample(totals.reasons[reason], {"reason": reason.value}) for reason in Reason],
            ),
            Family(
                "dsec_network_bytes_total",
                "counter",
                "Bytes of connections that have ended.",
                [Sample(totals.out, {"direction": "out"}), Sample(totals.back, {"direction": "in"})],
            ),
        ]


async def _trust(box: Box, policy: Policy, instance: Instance) -> None:
    """The file that says whom programs inside trust, where a policy needs one."""

    async def whole() -> AsyncIterator[bytes]:
        yield await asyncio.to_thread(box.authority.bundle)

    if policy.intercepts:
        await files.write_file(instance.channel, authority.BUNDLE.encode(), whole(), mode=0o644, parents=True)


class _Host:
    """`dsec.egress.box.Host`."""

    def __init__(self, sandbox: Sandbox, journal: Journal, notes: Notes, connect: Connect) -> None:
        self._sandbox = sandbox
        self._journal = journal
        self._notes = notes
        self._connect = connect

    def note(self, kind: EventType, data: dict[str, Any]) -> None:
        self._notes.events.add(self._sandbox.id, kind, data)

    def stands_for(self, name: str, address: int) -> None:
        with contextlib.suppress(Unavailable):  # the edge closes
            quiet(self._journal.put_stand_in(self._sandbox.id, name, address))

    async def connect(self, name: str, port: int) -> Peer:
        record = self._sandbox.record
        return await self._connect(record.project, record.run, name, port)
