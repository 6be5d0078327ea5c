"""The composition of a node whose containers and function calls run in one virtual machine: `dsec serve --in-vm`.

The process on the host owns a shield (`backends.microvm.shield`) and the address where HTTP is served; the server is
inside. When the machine dies, of its kernel or otherwise, another is booted with the same disk of state: its server
ends what was lost as `node_lost`. Meanwhile the address takes no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import uvloop
from msgspec.structs import replace

from dsec.api.serve import Stop
from dsec.app import (
    build_default,
    check_root,
    make_state,
    open_environments,
    open_host,
    open_machines,
    raise_open_files,
)
from dsec.backends.container.host import Host
from dsec.backends.container.native import build_native, source_dir
from dsec.backends.microvm.node import VmNode
from dsec.backends.microvm.shield import STATE, Shield, ShieldShape, boot, make_state_disk
from dsec.backends.microvm.shield_layer import shield_layer
from dsec.channel.streams import Stream
from dsec.configuration import Config, read_config
from dsec.edge.config import SystemClock
from dsec.edge.logs import LogFormat, configure
from dsec.errors import DsecError, InvalidRequest, Unsupported
from dsec.journal.state_dir import StateDir
from dsec.sdk._config import Endpoint, write_endpoint
from dsec.store.environments import DEFAULT, EnvironmentStore
from dsec.store.views import remove_dev
from dsec.vmm.driver import ExtraDisk

STATE_SERIAL = "state"
_PIECE = 64 << 10
_AGAIN_S = 1.0
_MOST_AGAIN_S = 60.0
_STOP_S = 60.0
log = logging.getLogger("dsec.shield")


def serve_in_vm(
    *,
    host: str,
    port: int,
    vcpus: int,
    memory_bytes: int,
    state_bytes: int,
    state: Path | None = None,
    log_format: LogFormat = "human",
    log_level: str = "info",
) -> int:
    """Serve in the foreground until SIGTERM or SIGINT, which end the machine. Returns the exit code. `state_bytes`: of
    its state's disk, where there is none yet."""
    configure(log_format, log_level)
    config = read_config(state)
    check_root()
    make_state(config)
    raise_open_files()
    shape = ShieldShape(vcpus=vcpus, memory_bytes=memory_bytes, state_bytes=state_bytes)
    uvloop.run(_serve(config, host, port, shape))
    return 0


async def _serve(config: Config, host: str, port: int, shape: ShieldShape) -> None:
    stop = Stop()
    async with open_shield(config, shape) as front, front.listen(host, port):
        keeping = asyncio.create_task(front.keep(), name="shield")
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((keeping, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if keeping.done():
            keeping.result()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@asynccontextmanager
async def open_shield(config: Config, shape: ShieldShape) -> AsyncIterator[Front]:
    """What a shield stands on; nothing of it is left at the end but its state's disk. Raises `PermissionDenied`,
    `Unavailable` where another server has the state directory, `Unsupported`."""
    check_root()
    async with AsyncExitStack() as undo:
        state = StateDir(config.state, edge=config.edge)
        undo.callback(state.close)
        environments = open_environments(config)
        await asyncio.to_thread(environments.ensure_default, build_default)
        on_host = await asyncio.to_thread(open_host, config)
        undo.callback(_close_host, on_host)
        node = await asyncio.to_thread(open_machines, replace(config, vm_spare=0), on_host)
        if node is None:
            raise Unsupported("this host can run no virtual machines", remedy="`dsec doctor` says what is missing.")
        await node.open(lambda: None)
        undo.push_async_callback(node.close, keep=False)
        await asyncio.to_thread(node.pool.open, {})
        native = await asyncio.to_thread(build_native, config.state)
        own = await asyncio.to_thread(shield_layer, environments.layers, native, source_dir())
        kind = "btrfs" if node.kernel().origin == "built" else "ext4"  # the other kernel has no btrfs
        disk = config.state / "shield" / f"state.{kind}"
        await asyncio.to_thread(make_state_disk, disk, shape.state_bytes, kind=kind)
        front = Front(config, node, environments, shape=shape, own=own, disk=disk)
        undo.push_async_callback(front.close)
        yield front


def _close_host(host: Host) -> None:
    host.volume.close(keep=False)
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
        *,
        shape: ShieldShape,
        own: str,
        disk: Path,
    ) -> None:
        """`own`: the layer with our server. `disk`: of its state."""
        self.url = ""
        self.shield: Shield | None = None
        self.ready = asyncio.Event()
        self.losses: list[str] = []
        """Why the last ones were lost."""
        self._config = config
        self._node = node
        self._environments = environments
        self._shape = shape
        self._own = own
        self._disk = disk

    @asynccontextmanager
    async def listen(self, host: str, port: int) -> AsyncIterator[None]:
        """Serve HTTP there, as long as there is a shield. Raises `InvalidRequest`."""
        try:
            server = await asyncio.start_server(self._pass, host, port)
        except OSError as error:
            raise InvalidRequest(f"{host}:{port} can't be listened at: {error.strerror}") from None
        name, number = server.sockets[0].getsockname()[:2]
        self.url = f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"
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
        found = self._environments.get(DEFAULT)
        wanted = {digest for each in self._environments.list() for digest in each.layers}
        files = {digest: self._environments.layers.files(digest) for digest in sorted(wanted)}
        with contextlib.ExitStack() as stack:
            state = stack.enter_context(_opened(self._disk, os.O_RDWR))
            disks = [ExtraDisk(STATE_SERIAL, state, read_only=False)]
            for digest, each in files.items():
                for letter, path in (("m", each.image), ("d", each.data)):
                    if path is not None:
                        disks.append(ExtraDisk(f"{letter}{digest[:18]}", stack.enter_context(_opened(path)), True))
            layers = (self._own, *found.layers)
            self.shield = await boot(self._node, self._shape, layers, tuple(disks), SystemClock())
        client = await self.shield.serve(await asyncio.to_thread(self._prepare, sorted(wanted)), _log)
        key = msgspec.json.decode(client, type=Endpoint).api_key
        write_endpoint(self._config.state, Endpoint(self.url, key))

    def _prepare(self, digests: list[str]) -> dict[str, object]:
        """What the state directory inside has of this one's store."""
        files: dict[str, str] = {}
        for digest in digests:
            image, data = self._environments.layers.files(digest)
            files[f"store/layers/{digest}/{image.name}"] = f"disk m{digest[:18]}"
            if data is not None:
                files[f"store/layers/{digest}/data"] = f"disk d{digest[:18]}"
            for name in ("manifest.json", "meta.json"):
                if (path := image.with_name(name)).exists():
                    files[f"store/layers/{digest}/{name}"] = path.read_text()
        store = self._config.state / "store"
        for path in sorted((store / "environments").rglob("*.json")):
            files[f"store/{path.relative_to(store)}"] = path.read_text()
        for name in ("e2b.json", "sandboxfusion.json", "network.toml"):
            if (path := self._config.state / name).exists():
                files[name] = path.read_text()
        return {"state": [STATE_SERIAL, self._disk.suffix.removeprefix(".")], "where": STATE, "files": files}

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

    async def close(self) -> None:
        """End the machine, in order where it goes on."""
        if self.shield is not None:
            await self.shield.stop(_STOP_S)
        await self._drop()

    async def _drop(self) -> None:
        shield, self.shield = self.shield, None
        if shield is not None:
            await shield.close()


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
