"""The composition: the only place that names concrete parts.

What a server is configured with is read in `configuration.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import resource
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from dsec.api.app import Api
from dsec.api.control import EnvironmentInfo
from dsec.api.layers import OPERATOR
from dsec.api.metrics import installed_version
from dsec.api.serve import ApiServer, Stop, check_address
from dsec.app_volume import renew_volume
from dsec.backends.container.backend import ContainerBackend
from dsec.backends.container.host import Host
from dsec.backends.container.jails import ContainerJails
from dsec.backends.container.native import build_native, probe_network
from dsec.backends.fncall.pool import Jails
from dsec.backends.fncall.programs import CellRunner
from dsec.backends.fncall.service import FunctionService
from dsec.backends.microvm.backend import MicroVmBackend
from dsec.backends.microvm.find import find_node, probe_machines
from dsec.backends.microvm.node import VmNode
from dsec.backends.vm.backend import VmBackend
from dsec.backends.vm.node import FullNode
from dsec.builder.fetching import Downloads
from dsec.builder.service import BuildService
from dsec.configuration import Config, read_config
from dsec.configuration_faces import read_e2b, read_fusion
from dsec.edge.config import EdgeConfig, HostCapacity, SystemClock
from dsec.edge.logs import LogFormat, configure
from dsec.edge.node import Edge
from dsec.egress.gateways.build import open_gateways
from dsec.egress.node import Egress
from dsec.egress.registry import read_network
from dsec.egress.resolver import Resolver
from dsec.errors import DsecError, EnvironmentNotFound, InvalidRequest, PermissionDenied, Unauthenticated, Unavailable
from dsec.grading.containers import ContainerRunner
from dsec.grading.judge import Judge
from dsec.grading.running import FirstOf
from dsec.grading.slots import Slots
from dsec.grading.verifier import Verifier
from dsec.journal.state_dir import StateDir
from dsec.kernel import zram
from dsec.kernel.cgroups import CgroupRoot
from dsec.kernel.features import kernel_features
from dsec.kernel.host import Finding, probe_host
from dsec.kernel.ledger import Ledger, prepare_host
from dsec.kernel.syscalls import KernelError
from dsec.ports import Backend
from dsec.sdk._config import FILE_NAME, Endpoint, write_endpoint
from dsec.store.blobs import open_store
from dsec.store.build import build_debian_layer
from dsec.store.environments import DEFAULT, EnvironmentStore
from dsec.store.index import ChunkIndex
from dsec.store.layers import LayerMounts, LayerStore
from dsec.store.lazy.service import LazyLayers
from dsec.store.leases import Leases
from dsec.store.remote import RemoteCatalog
from dsec.store.service import LayerService
from dsec.store.shared import SharedLayers
from dsec.store.views import Views
from dsec.store.volume import Volume
from dsec.vmm.node import VmHost
from dsec.vmm.qemu import QemuDriver

log = logging.getLogger("dsec")


def open_environments(config: Config) -> EnvironmentStore:
    """The environments of a node, for building and listing; needs no running server."""
    return EnvironmentStore(config.state, LayerStore(config.state))


def open_host(config: Config) -> Host:
    """What the container backend stands on: kernel settings, data volume, layers, cgroups. The backend closes it.

    Raises `PermissionDenied` for who isn't root.
    """
    check_root()
    config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    config.run.mkdir(mode=0o711, parents=True, exist_ok=True)
    ledger = Ledger(config.state / "host.json")
    for line in prepare_host(ledger):
        log.info("host: %s", line)
    ledger.record("directory", str(config.run))
    environments = open_environments(config)
    layers = LayerMounts(config.run, environments.layers)
    layers.open()
    with contextlib.suppress(EnvironmentNotFound):  # so that its hot files are in memory before the first burst
        for digest in environments.get(DEFAULT).layers:
            layers.path(digest)
    groups = CgroupRoot.detect(f"dsec-{config.instance}", config.run / "cgroup2")
    if groups.v1 and not groups.favors_moves:
        ledger.record("favordynmods", str(groups.v2))
        with contextlib.suppress(KernelError):  # Linux before 6.0 has no such option
            groups.favor_moves()
    shared = lazy = remote = None
    if config.store:
        store = open_store(config.store)
        index = ChunkIndex(config.state / "store" / "chunks.db", config.store)
        shared = SharedLayers(store, environments.layers, index, Leases(store, SystemClock(), config.instance))
        filler = [sys.executable, "-m", "dsec.cli.main", "filler", "--state", str(config.state)]
        lazy = LazyLayers(cache=config.cache, run=config.run, filler=filler, way=config.lazy)
        remote = RemoteCatalog(shared, environments, lazy, SystemClock(), f"{_node_name(config)}-lazy")
    return Host(
        state=config.state,
        run=config.run,
        volume=Volume.open(config.state, config.run, ledger),
        environments=environments,
        layers=layers,
        views=Views(config.run),
        cgroups=groups,
        shared=shared,
        lazy=lazy,
        remote=remote,
        make_swap=partial(_make_swap, config, ledger),
    )


def open_machines(config: Config, host: Host, templates: Path | None = None) -> VmNode | None:
    """What the microVM backend stands on; None where this host can run no machines. `templates`: where they are kept.
    Blocks for a moment: KVM is tried."""
    groups = CgroupRoot.detect(f"dsec-{config.instance}-vm", config.run / "cgroup2")
    parts = _machine_host(config, host)
    return find_node(
        parts,
        groups,
        accel=config.vm_accel,
        monitor=config.vm_monitor,
        spare=config.vm_spare,
        templates=templates,
    )


def open_full_machines(config: Config, host: Host, beside: VmNode, templates: Path | None = None) -> FullNode:
    """What the backend of full machines stands on; accelerated as `beside`."""
    groups = CgroupRoot.detect(f"dsec-{config.instance}-full", config.run / "cgroup2")
    parts = _machine_host(config, host)
    driver = QemuDriver.find("kvm" if beside.driver.accel == "kvm" else "tcg")
    return FullNode(parts, driver, groups, accel_reason=beside.accel_reason, templates=templates)


def _machine_host(config: Config, host: Host) -> VmHost:
    return VmHost(
        state=config.state,
        run=config.run,
        volume=host.volume,
        environments=host.environments,
        remote=host.remote,
        make_swap=host.make_swap,
        build_guest=lambda: build_native(config.state) / "guest",
        image_failures=host.image_failures,
        zeros_read=lambda: host.lazy is not None and host.lazy.fresh,
    )


def _make_swap(config: Config, ledger: Ledger) -> None:
    """On the first pause: a host that has no swap gets some, compressed and bounded."""
    limit = zram.default_limit() if config.zram_bytes is None else config.zram_bytes
    try:
        if zram.ensure(partial(ledger.record, "zram"), limit):
            log.info("host: made compressed swap of at most %d MiB", limit >> 20)
    except OSError as error:
        log.warning("paused sandboxes keep their memory, as the host has no swap: %s", error)


def make_state(config: Config) -> None:
    """The state directory, for root alone: it holds keys. Raises `InvalidRequest`."""
    try:
        config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(
            f"the state directory {config.state} can't be made: {error.strerror}",
            remedy="Name another one by --state or DSEC_STATE.",
        ) from None


def check_root() -> None:
    if os.geteuid() != 0:
        raise PermissionDenied("a server needs root: it makes namespaces, mounts and cgroups", remedy="Run it as root.")


@asynccontextmanager
async def open_edge(
    config: Config,
    *,
    edge_config: EdgeConfig | None = None,
    keep: bool = True,
    on_host: Callable[[Host], None] = lambda host: None,
    on_jails: Callable[[Jails], None] = lambda jails: None,
) -> AsyncIterator[Edge]:
    """The edge of this node, recovered and serving. `keep`: whether its sandboxes go on when the context ends; else
    nothing of it is left. `on_host` is told what it stands on, `on_jails` what function calls run in.

    Raises `PermissionDenied` for who isn't root, `Unavailable` where another server has the state directory,
    `InvalidRequest` where the operator's file about the network has a mistake.
    """
    check_root()
    async with AsyncExitStack() as undo:
        state = StateDir(config.state, edge=config.edge)  # its lock comes first: a second must not touch the host
        undo.callback(state.close)
        network = read_network(config.state)
        gateways = await undo.enter_async_context(open_gateways(config.state))
        await renew_volume(config)
        host = await asyncio.to_thread(open_host, config)
        on_host(host)
        clock = SystemClock()
        backend = ContainerBackend(host, clock)
        backends: dict[str, Backend] = {"container": backend}
        if machines := await asyncio.to_thread(open_machines, config, host):
            backends["microvm"] = MicroVmBackend(machines, clock, suspend=config.vm_suspend)
            soon = asyncio.get_running_loop().call_soon_threadsafe
            host.layers.on_unmount = lambda layer: soon(machines.let_go, layer)
            backends["vm"] = VmBackend(open_full_machines(config, host, machines), clock)
        features = await asyncio.to_thread(kernel_features)
        if machines is not None and machines.driver.accel == "kvm":
            features |= {"kvm"}
        edge = await Edge.open(
            backends,
            state,
            clock=clock,
            config=edge_config or EdgeConfig(lasting_records=config.lasting_records, features=features),
            capacity=HostCapacity(host.volume.root),
            egress=Egress(
                definitions=network.definitions,
                gateways=gateways,
                limits=network.limits,
                resolver=Resolver(fixed=network.hosts),
                secret=state.key,
            ),
            key_policy=network.keys,
        )
        for each in backends.values():
            if isinstance(each, MicroVmBackend | VmBackend):
                each.node.machines.kept.count_with(edge.promise)
        if host.lazy is not None:
            host.lazy.adopted()
        jails = Jails(ContainerJails(backend, state.tenant, edge.promise), host.environments.around, clock)
        on_jails(jails)
        try:
            yield edge
        finally:
            await jails.close()
            await edge.close(keep=keep)
            if host.shared is not None:
                await host.shared.store.close()
            if not keep:
                for line in Ledger(config.state / "host.json").undo_kind("zram"):
                    log.info("host: %s", line)
                _remove_empty(config.run)


@asynccontextmanager
async def open_layers(config: Config, edge: Edge, host: Host) -> AsyncIterator[LayerService]:
    """The layers and environments of this node, and the store that it shares with others, where there is one. Raises
    `InvalidRequest` for a bad `DSEC_STORE`, `Unavailable`."""
    service = LayerService(
        host.environments,
        shared=host.shared,
        remote=host.remote,
        used=edge.used_layers,
        release=host.layers.unmount,
        registries=config.registries,
    )
    keeping = asyncio.create_task(service.keep_used(_node_name(config), SystemClock()), name="layers in use")
    try:
        yield service
    finally:
        keeping.cancel()


def _node_name(config: Config) -> str:
    """Names this node in the shared store; tells nobody its key."""
    facts = msgspec.json.decode((config.state / "node.json").read_bytes(), type=dict[str, object])
    return hashlib.sha256(f"layers {facts['key']}".encode()).hexdigest()[:24]


def _remove_empty(top: Path) -> None:
    """The mount points and directories that are left; where something is still in use it stays."""
    for directory, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            Path(directory).rmdir()


def serve(
    *,
    host: str,
    port: int,
    state: Path | None = None,
    on_exit: str = "keep",
    log_format: LogFormat = "human",
    log_level: str = "info",
) -> int:
    """Serve in the foreground until SIGTERM or SIGINT. Returns the exit code.

    `on_exit`: `keep` leaves the sandboxes to the next server, `destroy` ends them and removes every trace.
    """
    configure(log_format, log_level)
    config = read_config(state)
    check_root()
    make_state(config)
    raise_open_files()
    check_address(host, port)  # before minutes go by with the first environment
    prepare_first(config)
    return run_server(_serve(config, host, port, keep=on_exit == "keep"))


def run_server(main: Coroutine[None, None, int]) -> int:
    """A server to its end: the exit code. Raises `Unavailable` where its disk refuses what it has to write."""
    try:
        with disk_refusing():
            return uvloop.run(main)
    except asyncio.CancelledError:
        return 130  # stopped while it was starting


@contextmanager
def disk_refusing() -> Iterator[None]:
    """Raises `Unavailable` for an error that says no more than that the state directory's disk is full or broken."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        numbers = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
        codes = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
        if getattr(error, "errno", 0) in numbers or getattr(error, "sqlite_errorcode", 0) & 0xFF in codes:
            raise Unavailable(
                f"the server can't write what it must: {error}",
                remedy="Look at the free space and health of the state directory's disk.",
            ) from error
        raise


def raise_open_files() -> None:
    """A channel, and with a network two sockets, for each sandbox, and every connection: the usual 1,024 are few."""
    for most in (1 << 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            return


async def _serve(config: Config, host: str, port: int, *, keep: bool) -> int:
    stop = Stop()
    async with open_api(config, keep=keep) as (edge, api):
        server = ApiServer(api, host, port)
        await server.start()
        try:
            await _write_client(config, edge, server.url)
            log.info("serving at %s, state in %s", server.url, config.state)
            await stop.wait()
        finally:
            await server.stop()
    return 0


@asynccontextmanager
async def _written(edge: Edge, volume: Volume, sandbox_id: str) -> AsyncIterator[Path]:
    """What a sandbox has written, as an upper directory that is left as it is: a container's own, while it stands
    still; a machine's files as they were."""
    if edge.get(sandbox_id).spec.backend == "container":
        async with edge.still(sandbox_id):
            upper, _ = await asyncio.to_thread(volume.written, sandbox_id)
            yield upper
    else:
        async with edge.captured(sandbox_id) as captured:
            yield captured.upper


@asynccontextmanager
async def open_api(config: Config, *, keep: bool) -> AsyncIterator[tuple[Edge, Api]]:
    """The edge of this node and its HTTP, not yet on a socket. Raises as `open_edge` and `open_layers`."""
    e2b, fusion = read_e2b(config), read_fusion(config)
    hosts: list[Host] = []
    jails: list[Jails] = []
    async with (
        open_edge(config, keep=keep, on_host=hosts.append, on_jails=jails.append) as edge,
        open_layers(config, edge, hosts[0]) as layers,
    ):
        layers.layers.clear_scratch()  # what builds that were killed left
        builds = BuildService(layers, edge, hosts[0].volume.written, Downloads(edge.egress), edge.charges)
        await builds.clear()
        verifier = Verifier(
            edge,
            written=partial(_written, edge, hosts[0].volume),
            lending=layers.environments.lending,
            scratch=layers.layers.scratch,
        )
        await verifier.clear()

        def listed(project: str) -> list[EnvironmentInfo]:
            layers.environments.refresh()
            found = layers.environments.list(project)
            return [EnvironmentInfo(name=each.name, layers=list(each.layers)) for each in found]

        slots = Slots(weights=config.weights)
        api = Api(
            edge,
            environments=listed,
            version=installed_version(),
            e2b=e2b,
            layers=layers,
            builder=builds,
            verifier=verifier,
            functions=FunctionService(jails[0], slots=slots),
            judge=Judge(
                FirstOf(CellRunner(jails[0]), ContainerRunner(edge)),
                layers.environments.around,
                slots=slots,
            ),
            fusion=fusion,
        )
        try:
            yield edge, api
        finally:
            await builds.close()


def prepare_first(config: Config) -> None:
    """What a node makes once: the programs in C and the environment `debian`, a minute of work or two. Before there is
    an event loop, so that Ctrl-C ends it at once: what a thread does nobody can end. Raises `InvalidRequest` for what
    is wrong with the configuration before that."""
    read_e2b(config), read_fusion(config), read_network(config.state)
    with disk_refusing():
        build_native(config.state)
        open_environments(config).ensure_default(build_default)


def build_default(layers: LayerStore) -> str:
    """Make the layer of the environment `debian`; its digest. Blocks for half a minute."""
    log.info("building the environment 'debian'; this happens once")
    return build_debian_layer(layers, progress=lambda line: log.info("debian: %s", line)).digest


async def _write_client(config: Config, edge: Edge, url: str) -> None:
    """Leave URL and key where the client of this machine finds them: the key that is there while it is good, so that
    clients live through a restart."""
    try:
        key = msgspec.json.decode((config.state / FILE_NAME).read_bytes(), type=Endpoint).api_key
        edge.authenticate(key)
    except (OSError, msgspec.MsgspecError, Unauthenticated):
        key = await edge.create_key(OPERATOR, "this machine")
    write_endpoint(config.state, Endpoint(url, key))


def probe(state: Path | None = None) -> list[Finding]:
    """What this host offers, the backends' own probes included; takes about two seconds and leaves nothing."""
    return [*probe_host(state), probe_network(), *probe_machines(read_config(state).state)]


def undo_host(*, state: Path | None = None, packages: bool = False) -> list[str]:
    """Take back what dsec changed on this host: sandboxes, mounts, cgroups, settings. Data in the state stays.

    Returns what was done, a line each. Raises `Unavailable` while a server runs on the state directory.
    """
    config = read_config(state)
    if not config.state.exists() and not config.run.exists():
        return []
    make_state(config)

    async def end_all() -> None:
        async with open_edge(config, keep=False):
            pass
        if not config.store:  # an earlier server that had one may have left a holder and its filler
            await LazyLayers(cache=config.cache, run=config.run, filler=[], way=config.lazy).close(keep=False)

    try:
        with disk_refusing():
            asyncio.run(end_all())
    except Unavailable as error:
        raise Unavailable(f"nothing was undone: {error.message}", remedy=error.remedy) from error
    except DsecError as error:
        log.warning("sandboxes could not be ended in order: %s", error)
    said = list(Ledger(config.state / "host.json").undo(packages=packages))
    return [*said, f"kept: {config.state} (environments and records; remove it by hand to be rid of them)"]
