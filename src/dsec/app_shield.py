"""The composition of a node whose containers and function calls run in one virtual machine: `dsec serve --in-vm`,
`dsec edge --in-vm` (`app_shield_edge.py`).

The process on the host owns a shield (`backends.microvm.shield`) and the address where HTTP is served; the server is
inside. When the machine dies, of its kernel or otherwise, another is booted with the same disk of state: its server
ends what was lost as `node_lost`. Meanwhile the address takes no connection. `<run>/shield.json` leads the next process
to a machine that goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dsec.api.serve import Stop, check_address
from dsec.app import (
    check_root,
    make_state,
    open_environments,
    open_host,
    open_machines,
    prepare_first,
    raise_open_files,
    run_server,
)
from dsec.backends.container.host import Host
from dsec.backends.container.native import build_native, source_dir
from dsec.backends.microvm.node import VmNode
from dsec.backends.microvm.shield import PORT, STATE, Left, Shield, ShieldShape, adopt, boot, make_state_disk
from dsec.backends.microvm.shield_layer import shield_layer
from dsec.backends.microvm.shield_out import Outlet, Servers
from dsec.backends.microvm.shield_store import Stored, data_serial, image_serial, others, stored
from dsec.channel.streams import Stream
from dsec.configuration import Config, read_config
from dsec.edge.config import SystemClock
from dsec.edge.logs import LogFormat, configure
from dsec.egress.registry import read_network
from dsec.errors import DsecError, InvalidRequest, Unsupported
from dsec.journal.state_dir import StateDir
from dsec.kernel.files import replace_file
from dsec.sdk._config import Endpoint, write_endpoint
from dsec.store.environments import DEFAULT, EnvironmentStore
from dsec.store.views import remove_dev
from dsec.vmm.driver import ExtraDisk

STATE_SERIAL = "state"
LEFT = "shield.json"
_PIECE = 64 << 10
_AGAIN_S = 1.0
_MOST_AGAIN_S = 60.0
_STOP_S = 60.0
log = logging.getLogger("dsec.shield")


class Inner(Struct, frozen=True, kw_only=True):
    """The server inside."""

    argv: Callable[[str], list[str]]
    """What follows `dsec`, by the URL where it is reached."""
    files: dict[str, str] = {}
    """What it finds in its state directory besides, by name."""
    servers: Servers = Servers()
    """Of its cluster."""
    client: bool = True
    """It leaves its URL and a key for this host's client."""
    network: bool = False
    """It is of no use without a way out."""
    edge: int | None = None
    """Its number in a cluster."""
    extras: tuple[str, ...] = ()
    """Of the package's, that it takes besides the server's."""


def one_node() -> Inner:
    """Of a node without a cluster."""
    return Inner(argv=lambda url: ["serve", "--host", "127.0.0.1", "--port", str(PORT)])


def shape_of(*, vm_cpus: int, vm_memory_mib: int, vm_state_gib: int) -> ShieldShape:
    """How large a machine the command line asks for. The size of its state counts where there is none yet."""
    return ShieldShape(vcpus=vm_cpus, memory_bytes=vm_memory_mib << 20, state_bytes=vm_state_gib << 30)


def serve_in_vm(
    *,
    host: str,
    port: int,
    shape: ShieldShape,
    keep: bool,
    state: Path | None = None,
    log_format: LogFormat = "human",
    log_level: str = "info",
) -> int:
    """Serve in the foreground until SIGTERM or SIGINT. Returns the exit code. `keep`: the machine goes on then, and the
    next process takes it over."""
    check_address(host, port)
    config = prepare(state, log_format, log_level)
    return run_server(run_shield(config, one_node(), host, port, shape, keep=keep))


def prepare(state: Path | None, log_format: LogFormat, log_level: str) -> Config:
    """What comes before an event loop. Raises `InvalidRequest`, `PermissionDenied`, `Unsupported`."""
    config = read_config(state)
    if config.store:
        raise Unsupported(
            "DSEC_STORE is set, and a server in a machine of its own has no shared store in this version",
            remedy="Leave DSEC_STORE out: environments of this node's own are in the machine. Or leave --in-vm out.",
        )
    configure(log_format, log_level)
    check_root()
    make_state(config)
    raise_open_files()
    prepare_first(config)
    return config


async def run_shield(
    config: Config, inner: Inner, host: str, port: int, shape: ShieldShape, *, keep: bool, scheme: str = "http"
) -> int:
    """Until a signal, or what kept the first machine from starting. Returns the exit code."""
    stop = Stop()
    async with open_shield(config, shape, inner, keep=keep) as front, front.listen(host, port, scheme):
        keeping = asyncio.create_task(front.keep(), name="shield")
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((keeping, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if keeping.done():
            keeping.result()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    return 0


@asynccontextmanager
async def open_shield(
    config: Config, shape: ShieldShape, inner: Inner | None = None, *, keep: bool = False
) -> AsyncIterator[Front]:
    """What a shield stands on. Without `keep`, or where no machine serves at the end that the next process could take
    over, nothing of it is left but its state's disk. Raises `PermissionDenied`, `Unavailable` where another server has
    the state directory, `Unsupported`."""
    check_root()
    inner = inner or one_node()
    left: Left | None = None
    front: Front | None = None

    def goes_on() -> bool:
        return keep and (left is not None if front is None else front.goes_on)

    async with AsyncExitStack() as undo:
        state = StateDir(config.state, edge=inner.edge)
        undo.callback(state.close)
        network = read_network(config.state)
        environments = open_environments(config)
        on_host = await asyncio.to_thread(open_host, config)
        undo.callback(lambda: _close_host(on_host, keep=goes_on()))
        node = await asyncio.to_thread(open_machines, replace(config, vm_spare=0), on_host)
        if node is None:
            raise Unsupported("this host can run no virtual machines", remedy="`dsec doctor` says what is missing.")
        if inner.network and not node.kernel().leads_out:
            raise Unsupported(
                "the kernel of machines here was imported without what a way out takes",
                remedy="Import it again: `dsec kernel import`.",
            )
        undo.push_async_callback(lambda: node.close(keep=goes_on()))
        left = await _open_node(node, config.run / LEFT)
        native = await asyncio.to_thread(build_native, config.state)
        own = await asyncio.to_thread(shield_layer, environments.layers, native, source_dir(), extras=inner.extras)
        kind = "btrfs" if node.kernel().origin == "built" else "ext4"  # the other kernel has no btrfs
        disk = config.state / "shield" / f"state.{kind}"
        await asyncio.to_thread(make_state_disk, disk, shape.state_bytes, kind=kind)
        outlet = Outlet(network, inner.servers)
        undo.push_async_callback(outlet.close)
        front = Front(config, node, environments, inner, outlet, shape=shape, own=own, disk=disk, left=left)
        undo.push_async_callback(front.close, keep=keep)
        yield front


async def _open_node(node: VmNode, path: Path) -> Left | None:
    """The machine that an earlier process left, where it runs; every other one ends."""
    state, _ = await node.open(lambda: None)
    left: Left | None = None
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        left = msgspec.json.decode(path.read_bytes(), type=Left)  # noqa: ASYNC240 (some bytes)
    await asyncio.to_thread(node.pool.open, {} if left is None else {left.reservation: left.name})
    node.machines.expect(state.live)
    if left is not None and left.name not in state.live:
        left = None
    for name in state.live.keys() | state.ended.keys() | node.machines.names():
        if left is None or name != left.name:
            await node.machines.end(name, "")
    return left


def _close_host(host: Host, *, keep: bool) -> None:
    host.volume.close(keep=keep)
    if keep:
        return
    host.layers.unmount_all()
    host.views.remove()
    remove_dev(host.run)


class Front:
    """The shield that is there now, and the way to it."""

    def __init__(
        self,
        config: Config,
        node: VmNode,
        environments: EnvironmentStore,
        inner: Inner,
        outlet: Outlet,
        *,
        shape: ShieldShape,
        own: str,
        disk: Path,
        left: Left | None = None,
    ) -> None:
        """`own`: the layer with our server. `disk`: of its state. `left`: a machine that runs."""
        self.url = ""
        self.shield: Shield | None = None
        self.ready = asyncio.Event()
        self.losses: list[str] = []
        """Why the last ones were lost."""
        self._config = config
        self._node = node
        self._environments = environments
        self._inner = inner
        self._outlet = outlet
        self._shape = shape
        self._own = own
        self._disk = disk
        self._left = left

    @property
    def goes_on(self) -> bool:
        """Whether there is a machine for the next process: one that serves, or one of an earlier process that this one
        has not begun to serve."""
        return self._left is not None or (self.ready.is_set() and self.shield is not None)

    @asynccontextmanager
    async def listen(self, host: str, port: int, scheme: str = "http") -> AsyncIterator[None]:
        """Serve HTTP there, as long as there is a shield. Raises `InvalidRequest`."""
        try:
            server = await asyncio.start_server(self._pass, host, port)
        except OSError as error:
            raise InvalidRequest(f"{host}:{port} can't be listened at: {error.strerror}") from None
        name, number = server.sockets[0].getsockname()[:2]
        self.url = f"{scheme}://[{name}]:{number}" if ":" in name else f"{scheme}://{name}:{number}"
        async with server:
            yield

    async def keep(self) -> None:
        """See to it that there is one, until cancelled. Raises what keeps the first from starting."""
        first, pause_s = True, _AGAIN_S
        while True:
            try:
                await self._start()
            except (DsecError, OSError, TimeoutError) as error:
                await self._drop()
                if first:
                    raise
                log.error("the shield can't be started: %s; again in %.0f s", error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _MOST_AGAIN_S)
                continue
            first, pause_s = False, _AGAIN_S
            assert self.shield is not None
            self.ready.set()
            log.info("serving at %s, from a machine of its own", self.url)
            why = await self.shield.ended()
            self.ready.clear()
            self.losses = [*self.losses[-9:], why]
            log.error("the shield is lost, and every sandbox in it: %s", why)
            await self._drop()

    async def _start(self) -> None:
        found = await asyncio.to_thread(stored, self._config.state, self._environments.layers)
        argv = self._inner.argv(self.url)
        settings = await asyncio.to_thread(self._settings)
        disk = [STATE_SERIAL, self._disk.suffix.removeprefix(".")]
        # Environments don't count: one that is made on the host is no reason to end all that is in the machine.
        started = msgspec.json.encode([self._own, argv, self._shape, disk, settings], order="sorted")
        what = hashlib.sha256(started).hexdigest()
        taken = self._left is not None and await self._take_over(self._left, what, found)
        self._left = None  # until then it goes on, whatever becomes of this process
        if not taken:
            self.shield = await self._boot(found)
            left = self.shield.left(what, environments=found.marks())
            replace_file(self._config.run / LEFT, msgspec.json.encode(left))
            await self._lead_out(self.shield)
            prepared: dict[str, object] = {"state": disk, "where": STATE, "files": found.files() | settings}
            await self.shield.serve(prepared, argv, _log)
        if self._inner.client:
            assert self.shield is not None
            key = msgspec.json.decode(await self.shield.client(), type=Endpoint).api_key
            write_endpoint(self._config.state, Endpoint(self.url, key))

    async def _take_over(self, left: Left, what: str, found: Stored) -> bool:
        """Whether the machine that runs is ours from now on; else it is ended. `found`: what it would have."""
        try:
            if left.what == what:
                self.shield = await adopt(self._node, left, SystemClock())
                await self._lead_out(self.shield)
                await self.shield.serve_on(_log)
                log.info("the shield that ran goes on")
                if changed := others(left.environments, found.marks()):
                    log.warning(
                        "%d environments were made, changed or removed on this host since the shield was booted; it "
                        "has them as they were, until another is booted: %s",
                        len(changed),
                        ", ".join(changed)[:300],
                    )
                return True
            log.warning("the shield that runs isn't what would be started now: it ends, and its sandboxes with it")
        except (DsecError, OSError, TimeoutError) as error:
            log.error("the shield that ran can't be taken over: %s", error)
            await self._drop()
            return False
        await self._node.machines.end(left.name, left.reservation)
        return False

    async def _boot(self, found: Stored) -> Shield:
        await asyncio.to_thread(self._environments.refresh)
        with contextlib.ExitStack() as stack:
            state = stack.enter_context(_opened(self._disk, os.O_RDWR))
            disks = [ExtraDisk(STATE_SERIAL, state, read_only=False)]
            for digest, (image, data) in sorted(found.layers.items()):
                disks.append(ExtraDisk(image_serial(digest), stack.enter_context(_opened(image)), True))
                if data is not None:
                    disks.append(ExtraDisk(data_serial(digest), stack.enter_context(_opened(data)), True))
            layers = (self._own, *self._environments.get(DEFAULT).layers)
            return await boot(self._node, self._shape, layers, tuple(disks), SystemClock())

    async def _lead_out(self, shield: Shield) -> None:
        try:
            await shield.lead_out(self._outlet)
        except Unsupported as error:
            if self._inner.network:
                raise
            log.warning("no sandbox of the shield's reaches anything: %s", error.message)

    def _settings(self) -> dict[str, str]:
        """What the operator has set, by name, as the state directory inside has it too."""
        files: dict[str, str] = {}
        names = [path.relative_to(self._config.state) for path in self._config.state.glob("network.d/*.toml")]
        for name in ("e2b.json", "sandboxfusion.json", "network.toml", *sorted(map(str, names))):
            if (path := self._config.state / name).exists():
                files[name] = path.read_text()
        return files | self._inner.files

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a caller's."""
        with contextlib.suppress(DsecError, OSError):
            if self.ready.is_set() and self.shield is not None:
                stream = await self.shield.connect()
                both = (asyncio.create_task(_in(reader, stream)), asyncio.create_task(_out(stream, writer)))
                try:
                    await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
                finally:
                    for task in both:
                        task.cancel()
                    await asyncio.gather(*both, return_exceptions=True)
                    await stream.close()
        writer.close()

    async def close(self, *, keep: bool = False) -> None:
        """End the machine, in order where it goes on. `keep`: leave one that serves to the next process."""
        if keep and self.goes_on:
            if self.shield is not None:
                await self.shield.let_go()
            return
        if self.shield is not None:
            await self.shield.stop(_STOP_S)
        await self._drop()

    async def _drop(self) -> None:
        shield, self.shield = self.shield, None
        if shield is not None:
            await shield.close()
        (self._config.run / LEFT).unlink(missing_ok=True)


async def _in(reader: asyncio.StreamReader, stream: Stream) -> None:
    while data := await reader.read(_PIECE):
        await stream.write(data)
    await stream.close_write()


async def _out(stream: Stream, writer: asyncio.StreamWriter) -> None:
    while data := await stream.read():
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _log(line: str) -> None:
    log.info("inside: %s", line)


@contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
