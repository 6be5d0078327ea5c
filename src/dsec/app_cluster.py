"""The composition of a cluster's processes: an edge that joins, an apiserver, and what an operator does besides."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from dsec.api.metrics import installed_version
from dsec.api.serve import ApiServer, Stop, check_address
from dsec.app import check_root, make_state, open_api, prepare_first, raise_open_files, run_server
from dsec.cluster.apiserver import ClusterApi
from dsec.cluster.audit import Audit
from dsec.cluster.batches import Batches
from dsec.cluster.bounds import Bounds
from dsec.cluster.bus import Bus, open_bus
from dsec.cluster.certificates import Certificate, make_certificate
from dsec.cluster.creating import Creations
from dsec.cluster.credentials import APISERVER, Credentials, check_urls, make_cluster, read_credentials
from dsec.cluster.ending import Endings
from dsec.cluster.fanout import Fanout
from dsec.cluster.fresh import Freshness
from dsec.cluster.gate import Gate
from dsec.cluster.handing import Handing
from dsec.cluster.iam import Authority, IamRecord
from dsec.cluster.iam_calls import IamCalls
from dsec.cluster.jobs import Records
from dsec.cluster.keys import KeyRecord, Keys, Wish
from dsec.cluster.logs import SHARDS
from dsec.cluster.member import Membership, host_of, keep_member
from dsec.cluster.moves import Moved, Moves, make_streams
from dsec.cluster.nodes import Nodes
from dsec.cluster.numbers import settle
from dsec.cluster.overflow import OverflowConfig, OverflowKeeper, Record, read_overflow
from dsec.cluster.quotas import Quotas
from dsec.cluster.runs import ClusterRuns, RunRecord
from dsec.cluster.shipping import Shipper
from dsec.cluster.spending import Spending
from dsec.cluster.sweeping import Sweeper
from dsec.cluster.upstream import Upstream
from dsec.cluster.wire import ORDER_S, Joined, Made, Member
from dsec.configuration import read_config
from dsec.edge.logs import LogFormat, configure
from dsec.errors import InvalidRequest
from dsec.grading.slots import places_here
from dsec.plan.iam import Iam
from dsec.plan.placement import Placer
from dsec.plan.quota import Holder, Ledger
from dsec.plan.scheduler import Scheduler
from dsec.plan.watch import Watch, WatchPolicy
from dsec.spec.cluster import NodeFacts
from dsec.store.blobs import open_store

SOUND_S = 12.0
"""An apiserver that wasn't heard by a majority of the servers for so long tells no node that it hears it."""
MADE_S = 86400.0
"""How long a key leads to the nodes of its first request."""
LOOPBACK = re.compile(r"127\.|localhost$|::1$")
log = logging.getLogger("dsec.cluster")


class Joining(Struct, frozen=True, kw_only=True):
    """How a process reaches its cluster."""

    urls: list[str]
    credentials: Path
    plain: bool = False
    """The network to the servers is trusted."""

    def read(self, *, edge: bool) -> Credentials:
        """Raises `InvalidRequest` for the other kind's."""
        check_urls(self.urls, plain=self.plain)
        found = read_credentials(self.credentials)
        if (found.edge is not None) != edge:
            raise InvalidRequest(f"{self.credentials} are credentials of {found.user}")
        return found


class Listening(Struct, frozen=True, kw_only=True):
    """Where a process serves HTTP, and how it logs."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    """The URL by which others reach it; empty: where it listens."""
    tls: bool | None = None
    """An edge's: None: where it listens on more than loopback."""
    log_format: LogFormat = "human"
    log_level: str = "info"


def serve_edge(
    joining: Joining,
    listening: Listening,
    *,
    state: Path | None = None,
    labels: dict[str, str] | None = None,
    on_exit: str = "keep",
) -> int:
    """An edge, in the foreground until SIGTERM or SIGINT. Returns the exit code.

    Raises `InvalidRequest`, `Unavailable` (no server of the cluster), and what `dsec serve` raises."""
    configure(listening.log_format, listening.log_level)
    check_root()
    config = read_config(state)
    make_state(config)
    raise_open_files()
    check_address(listening.host, listening.port)
    asyncio.run(_reach(joining))
    prepare_first(config)

    async def run() -> int:
        credentials = await edge_credentials(joining, config.state)
        own = replace(config, edge=credentials.edge)
        stop = Stop()
        ended: list[BaseException] = []

        async def failed(error: BaseException) -> None:
            ended.append(error)
            stop.end()

        async with AsyncExitStack() as undo:
            bus = await open_bus(joining.urls, credentials)
            undo.push_async_callback(bus.close)
            edge, api = await undo.enter_async_context(open_api(own, keep=on_exit == "keep"))
            node = edge.node()
            facts = NodeFacts(
                edge=node.edge,
                backends=tuple(node.backends),
                features=tuple(node.features),
                labels=labels or {},
                max_live=node.max_live,
                max_starting=node.max_starting,
                memory_capacity_bytes=node.memory_capacity_bytes,
                places=places_here(),
            )
            gate = Gate(api, edge)
            certificate = _certificate(listening, own.state, node.edge)
            files = None if certificate is None else (certificate.certificate, certificate.key)
            server = ApiServer(gate, listening.host, listening.port, tls=files)
            await server.start()
            undo.push_async_callback(server.stop)
            store = open_store(own.store) if own.store else None
            if store is not None:
                undo.push_async_callback(store.close)
            trajectories, key = edge.logs()
            shipper = Shipper(bus, trajectories, store=store, edge=node.edge, key=key, state=own.state)
            undo.push_async_callback(shipper.close)
            moving = edge.moving()
            await moving.end_unfinished()
            member = Membership(
                edge,
                bus,
                facts,
                url=listening.advertise or server.url,
                state=own.state,
                certificate=certificate.digest if certificate is not None else "",
            )

            def joined(answer: Joined) -> None:
                if answer.claim is not None:
                    shipper.start(answer.shards, answer.claim.incarnation, edge.live())

            member.joined, member.unshipped = joined, lambda: shipper.waiting
            edge.trust(member.asserted)
            gate.member, gate.handing = member, Handing(moving, shipper, store)
            keeping = asyncio.create_task(keep_member(member, failed), name="membership")
            undo.callback(keeping.cancel)
            log.info("edge %d at %s, state in %s", node.edge, server.url, own.state)
            await stop.wait()
        if ended:
            raise ended[0]
        return 0

    return run_server(run())


async def edge_credentials(joining: Joining, state: Path) -> Credentials:
    """Of this node; where it is given those of many it gets a number that is free. Raises `InvalidRequest`,
    `Unavailable`."""
    if not joining.credentials.is_dir():
        return joining.read(edge=True)
    check_urls(joining.urls, plain=joining.plain)
    return await settle(joining.urls, joining.credentials, state, host=host_of(state))


async def _reach(joining: Joining) -> None:
    """See that the cluster's servers take this node's credentials, before a new node prepares itself for minutes. It
    takes no number yet. Raises `InvalidRequest`, `Unavailable`."""
    one = joining
    if joining.credentials.is_dir():
        files = sorted(joining.credentials.glob("edge-*.json"))
        if not files:
            return  # `edge_credentials` says it
        one = replace(joining, credentials=files[0])
    bus = await open_bus(one.urls, one.read(edge=True))
    await bus.close()


def _certificate(listening: Listening, state: Path, edge: int) -> Certificate | None:
    wanted = not LOOPBACK.match(listening.host) if listening.tls is None else listening.tls
    return make_certificate(state, f"edge-{edge}") if wanted else None


def serve_api(
    joining: Joining,
    listening: Listening,
    *,
    lost_s: float,
    cut_off_s: float,
    replicas: int,
    overflow: Path | None = None,
    log_bytes: int = 0,
    sweep_s: float = 3600.0,
) -> int:
    """An apiserver, in the foreground until SIGTERM or SIGINT: see `open_cluster`. Returns the exit code. Raises
    `InvalidRequest`, `Unavailable`."""
    configure(listening.log_format, listening.log_level)
    credentials = joining.read(edge=False)
    elastic = read_overflow(overflow) if overflow is not None else None
    raise_open_files()

    async def run() -> int:
        stop = Stop()
        async with AsyncExitStack() as undo:
            bus = await open_bus(joining.urls, credentials)
            undo.push_async_callback(bus.close)
            api = await undo.enter_async_context(
                open_cluster(
                    bus,
                    lost_s=lost_s,
                    cut_off_s=cut_off_s,
                    replicas=replicas,
                    overflow=elastic,
                    log_bytes=log_bytes,
                    sweep_s=sweep_s,
                )
            )
            server = ApiServer(api, listening.host, listening.port)
            await server.start()
            undo.push_async_callback(server.stop)
            log.info("apiserver at %s", server.url)
            await stop.wait()
        return 0

    return run_server(run())


@asynccontextmanager
async def open_cluster(
    bus: Bus,
    *,
    lost_s: float,
    cut_off_s: float,
    replicas: int,
    overflow: OverflowConfig | None = None,
    log_bytes: int = 0,
    sweep_s: float = 3600.0,
) -> AsyncIterator[ClusterApi]:
    """An apiserver's parts. `cut_off_s`: without word from a majority of the servers for so long it takes no keys.
    `log_bytes`: what the streams of logs may hold, all together (0: what the servers have room for). `sweep_s`: how
    often records of moved sandboxes are looked through. Raises `Unavailable`."""
    instance = f"{APISERVER}-{secrets.token_hex(6)}"
    iam = Iam()
    bounds = Bounds(iam)
    scheduler = Scheduler(
        placer=Placer(instance, Random(instance)),
        watch=Watch(WatchPolicy(lost_s=lost_s, mass_lost_s=10 * lost_s)),
        holder=Holder(instance, bounds.charges, expiry_s=ORDER_S),
        iam=iam,
    )
    async with AsyncExitStack() as undo:
        nodes = Nodes(bus, await bus.bucket("dsec_members", Member, replicas=replicas), scheduler)
        rights = await bus.bucket("dsec_iam", IamRecord, replicas=replicas)
        records = await bus.bucket("dsec_keys", KeyRecord, replicas=replicas)
        authority = Authority(rights, iam)
        fresh = Freshness(cut_off_s, bus, {rights: IamRecord(), records: KeyRecord(project="")})
        nodes.sound = lambda: fresh.within(SOUND_S)
        keys = Keys(records, authority, fresh)
        audit = await Audit.open(bus, replicas)
        runs = ClusterRuns(bus, await bus.bucket("dsec_runs", RunRecord, replicas=replicas), nodes)
        quotas = Quotas(bus, await bus.bucket("dsec_ledgers", Ledger, replicas=replicas), authority, scheduler, bounds)
        made = await bus.bucket("dsec_made", Made, replicas=replicas, ttl_s=MADE_S)
        upstream = Upstream(nodes, instance)
        await upstream.start()
        undo.push_async_callback(upstream.close)
        creations = Creations(nodes, upstream, Records(made, instance), runs, quotas)
        moved = await bus.bucket("dsec_moved", Moved, replicas=replicas)
        moves = Moves(bus, moved, made, nodes, upstream, runs, quotas)
        await make_streams(bus, replicas=replicas, most_bytes=log_bytes // SHARDS if log_bytes > 0 else -1)
        await nodes.start()
        undo.push_async_callback(nodes.close)
        if overflow is not None:
            machines = await bus.bucket("dsec_overflow", Record, replicas=replicas)
            elastic = OverflowKeeper(overflow, nodes, machines, instance=instance, urls=bus.urls)
            elastic.start()
            undo.push_async_callback(elastic.close)
        sweeper = Sweeper(bus, moved, moves, nodes, upstream, sweep_s)
        for each in (authority, keys, fresh, runs, moves, sweeper):
            each.start()
            undo.push_async_callback(each.close)
        await quotas.start()
        undo.push_async_callback(quotas.close)
        fanout = Fanout(nodes, upstream, moves)
        endings = Endings(nodes, fanout, iam.deleted)
        endings.start()
        undo.push_async_callback(endings.close)
        yield ClusterApi(
            nodes=nodes,
            upstream=upstream,
            creations=creations,
            batches=Batches(creations),
            fanout=fanout,
            keys=keys,
            iam=IamCalls(authority, keys, audit, ended=endings.end, live=nodes.live_in),
            audit=audit,
            runs=runs,
            moves=moves,
            spending=Spending(upstream, quotas),
            version=installed_version(),
        )


def init_cluster(directory: Path, edges: int, ca_file: str) -> Sequence[Path]:
    """Keys of a new cluster: see `make_cluster`."""
    return make_cluster(directory, edges, ca_file)


def create_key(joining: Joining, project: str, label: str, ttl_s: float | None, replicas: int) -> str:
    """A new API key of a project, straight into the cluster's store. Raises `InvalidRequest`, `Unavailable`."""
    credentials = joining.read(edge=False)

    async def run() -> str:
        bus = await open_bus(joining.urls, credentials)
        try:
            authority = Authority(await bus.bucket("dsec_iam", IamRecord, replicas=replicas), Iam())
            keys = Keys(await bus.bucket("dsec_keys", KeyRecord, replicas=replicas), authority)
            audit = await Audit.open(bus, replicas)
            secret, key_id = await keys.create(Wish(project=project, label=label, ttl_s=ttl_s))
            await audit.note("key.create", by="operator", project=project, about=key_id)
            return secret
        finally:
            await bus.close()

    return asyncio.run(run())
