"""A shield: one larger machine in which a server of containers and function calls runs, so that a kernel that is
brought down from inside is that machine's and not the host's.

It is booted, not cloned, with the node's layers as read-only disks beside its own, and a disk for its server's state,
which outlives it: the next machine's server finds there which sandboxes were lost (`node_lost`). All that the host has
to do with it goes through its channel; its HTTP too, a connection inside for each one outside, and its way out.

The machine and the server in it outlive the process that started them; the next one finds them by `Left`, which is
written before the server starts.

Owns what `vmm.machine.Machines` owns for a machine, and `<state>/shield/state.*`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.backends.microvm import shield_inside
from dsec.backends.microvm.node import VmNode
from dsec.backends.microvm.shield_layer import LIBRARY, check_python
from dsec.backends.microvm.shield_out import Outlet
from dsec.backends.microvm.templates import BOOT_S, closing, first_word
from dsec.channel import SocketChannel, Spool
from dsec.channel.files import read_file
from dsec.channel.streams import Stream, connect
from dsec.errors import CreateFailed, FileMissing, PlatformError, PortClosed, Unavailable, Unsupported
from dsec.ports import Clock, GuestChannel, Operation
from dsec.spec.operations import Chunk, EndKind, ExecFlag, Kind, OpEnd, OpRequest
from dsec.vmm.driver import ExtraDisk, Shape, Start
from dsec.vmm.ends import stopped, why
from dsec.vmm.first_words import Identity, configure, new_token
from dsec.vmm.machine import Machine
from dsec.vmm.network import MachineNetwork

log = logging.getLogger(__name__)

STATE = "/var/lib/dsec"
PORT = 7000
START_S = 1200.0
"""On an imitated CPU a server takes its time to load: half a minute of CPU time, whatever that is on a busy host."""
_RUN_S = 120.0
_POLL_S = 1.0
"""Between two looks whether it serves: each starts a process inside."""
_ENV = (b"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", b"HOME=/root", b"LANG=C.UTF-8")
_SERVER_ENV = (
    *_ENV,
    f"PYTHONPATH={LIBRARY}".encode(),
    f"DSEC_STATE={STATE}".encode(),
    b"DSEC_RUN=/run/dsec",
    b"DSEC_LASTING_RECORDS=1",
)


class ShieldShape(Struct, frozen=True, kw_only=True):
    """How large it is."""

    vcpus: int
    memory_bytes: int
    state_bytes: int
    scratch_bytes: int = 1 << 30
    """For what is written outside of the state directory."""


class Left(Struct, frozen=True, kw_only=True):
    """What leads the next process to a machine."""

    name: str
    reservation: str
    token: str
    what: str
    """Tells whether what runs there is what that process would start."""
    environments: dict[str, str] = {}
    """Which it has, as `shield_store` marks them."""


class Shield:
    """One machine, from its boot to its end."""

    def __init__(
        self, node: VmNode, machine: Machine, channel: SocketChannel, *, reservation: str, token: bytes
    ) -> None:
        self.name = machine.name
        self.machine = machine
        self.channel = channel
        self._reservation = reservation
        self._node = node
        self._token = token
        self._operation: Operation | None = None
        self._server: asyncio.Task[None] | None = None
        self._network: MachineNetwork | None = None

    def left(self, what: str, environments: dict[str, str]) -> Left:
        """What leads to it; the rest as there."""
        token = self._token.hex()
        return Left(name=self.name, reservation=self._reservation, token=token, what=what, environments=environments)

    async def lead_out(self, outlet: Outlet) -> None:
        """Let it reach what the outlet lets it. Raises `Unsupported` where its kernel can't, `Unavailable`."""
        self._network = MachineNetwork(self.name, self.channel, outlet.connected, outlet.query)
        self._network.start()
        await self._network.ready(_RUN_S)

    async def serve(self, prepare: dict[str, object], argv: Sequence[str], on_line: Callable[[str], None]) -> None:
        """Start the server inside; returns when it answers. `prepare`: as `shield_inside` takes it. `argv`: what
        follows `dsec`; it has to listen at `PORT` of loopback. Raises `CreateFailed` with its last words,
        `Unsupported`."""
        check_python(await _run(self.channel, (b"python3", b"--version")))
        program = f"{LIBRARY}/dsec/backends/microvm/{Path(shield_inside.__file__).name}"
        await _run(self.channel, (b"python3", b"-IS", program.encode()), msgspec.json.encode(prepare))
        words = ("python3", "-m", "dsec.cli.main", *argv)
        request = OpRequest(argv=tuple(word.encode() for word in words), env=_SERVER_ENV, flags=ExecFlag.MERGE)
        await self._follow(await self.channel.start(request), on_line)

    async def serve_on(self, on_line: Callable[[str], None]) -> None:
        """Follow the server that runs in it already. Raises `CreateFailed` where there is none."""
        running = [each for each in self.channel.operations() if each.kind is Kind.EXEC and each.end is None]
        if not running:
            raise CreateFailed("no server runs in the shield")
        await self._follow(min(running, key=lambda each: each.op), on_line)

    async def _follow(self, operation: Operation, on_line: Callable[[str], None]) -> None:
        said: list[str] = []

        def note(line: str) -> None:
            said.append(line)
            del said[:-40]
            on_line(line)

        self._operation = operation
        self._server = asyncio.create_task(_lines(operation, note), name="the shield's server")
        until = asyncio.get_running_loop().time() + START_S
        while asyncio.get_running_loop().time() < until:
            if self._server.done() or self.gone():
                raise CreateFailed(f"the shield's server ended: {' / '.join(said)[-1500:] or self.console()}")
            with contextlib.suppress(PortClosed):
                await (await connect(self.channel, PORT)).close()
                return
            await asyncio.sleep(_POLL_S)
        raise CreateFailed(f"the shield's server doesn't serve: {' / '.join(said)[-1500:]}")

    async def client(self) -> bytes:
        """What its server wrote into client.json. Raises `CreateFailed`."""
        until = asyncio.get_running_loop().time() + _RUN_S
        while asyncio.get_running_loop().time() < until and not self.gone():
            with contextlib.suppress(FileMissing):
                found = await _read(self.channel, f"{STATE}/client.json")
                await _run(self.channel, (b"sync",))  # the key shall outlive this machine
                return found
            await asyncio.sleep(_POLL_S)
        raise CreateFailed("the shield's server left no client.json")

    async def connect(self) -> Stream:
        """To the server's HTTP. Raises `PortClosed`, `OutcomeUnknown`."""
        return await connect(self.channel, PORT)

    def gone(self) -> bool:
        """Its machine, or its server."""
        ended = self._node.machines.exited(self.name)
        return ended.done() or (self._server is not None and self._server.done())

    def console(self) -> str:
        ended = self._node.machines.exited(self.name)
        return ended.result().said.strip()[-1000:] if ended.done() else ""

    async def ended(self) -> str:
        """Wait until it is gone: why."""
        exited = self._node.machines.exited(self.name)
        halted = asyncio.ensure_future(self.machine.control.ended())
        try:
            assert self._server is not None
            await asyncio.wait((exited, halted, self._server), return_when=asyncio.FIRST_COMPLETED)
            if halted.done() and not halted.cancelled():
                return stopped(halted.result().reason, halted.result().console).message
            if not exited.done():
                with contextlib.suppress(TimeoutError):  # a machine that halts takes its server with it
                    async with asyncio.timeout(1):
                        return stopped((await halted).reason, halted.result().console).message
                return "its server ended"
            return why(exited.result()).message
        finally:
            halted.cancel()

    async def stop(self, timeout_s: float) -> None:
        """Have the server end in order, and the machine write down what it has."""
        if self._server is None or self.gone():
            return
        stopping = asyncio.create_task(self._stop(self._server))
        halted = asyncio.ensure_future(self.machine.control.ended())
        exited = self._node.machines.exited(self.name)
        await asyncio.wait((stopping, halted, exited), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, halted):
            task.cancel()
        await asyncio.gather(stopping, halted, return_exceptions=True)

    async def _stop(self, server: asyncio.Task[None]) -> None:
        assert self._operation is not None
        await self._operation.signal(signal.SIGTERM)
        await asyncio.wait((server,))
        await _run(self.channel, (b"sync",))

    async def let_go(self) -> None:
        """It goes on, for the next process."""
        await self._part()
        self.machine.close()

    async def close(self) -> None:
        """End it; its state's disk stays."""
        await self._part()
        await self._node.machines.end(self.name, self._reservation, self.machine)
        self._node.host.volume.remove_spool(self.name)

    async def _part(self) -> None:
        if self._server is not None:
            self._server.cancel()
        if self._network is not None:
            self._network.stop()
        await self.channel.close()


async def adopt(node: VmNode, left: Left, clock: Clock) -> Shield:
    """One of an earlier process. Raises `DsecError`, OSError, TimeoutError; then it is as it was."""
    slot = node.pool.find(left.reservation, left.name)
    if slot is None:
        raise Unavailable("its cgroups are gone")
    slot.thaw()
    machine = await node.machines.adopt(left.name, slot)
    try:
        token = bytes.fromhex(left.token)
        async with asyncio.timeout(BOOT_S):
            spool = Spool(node.host.volume.spool_path(left.name), fresh=False)
            channel = await SocketChannel.open(await machine.port(), clock=clock, token=token, spool=spool)
    except BaseException:
        machine.close()
        raise
    return Shield(node, machine, channel, reservation=left.reservation, token=token)


async def boot(
    node: VmNode, shape: ShieldShape, layers: tuple[str, ...], disks: tuple[ExtraDisk, ...], clock: Clock
) -> Shield:
    """Raises `CreateFailed`, `Unavailable`, `Unsupported`, OSError; then nothing of it is left."""
    await node.serving()
    name = f"s{secrets.token_hex(8)}"
    reservation = node.pool.reserve(groups := node.machines.group_shape(shape.memory_bytes, shape.vcpus))
    whole = Shape(shape.vcpus, shape.memory_bytes, shape.scratch_bytes, layers)
    kernel = node.kernel()
    machine: Machine | None = None
    try:
        with contextlib.ExitStack() as stack:
            image, first = (stack.enter_context(closing(fd)) for fd in node.templates.boot_files(kernel))
            memory = stack.enter_context(closing(os.memfd_create("shield", os.MFD_CLOEXEC)))
            os.ftruncate(memory, shape.memory_bytes)
            machine = await node.machines.start(
                name,
                reservation,
                groups,
                disk=lambda: node.disks.make(name, whole.disk_bytes),
                disk_bytes=max(whole.disk_bytes, shape.state_bytes),
                layers=layers,
                make=lambda channel, control, disk, files: node.driver.command(
                    Start(
                        shape=whole,
                        machine=kernel.machine,
                        channel=channel,
                        control=control,
                        memory=memory,
                        disk=disk,
                        layers=files,
                        extra=disks,
                        kernel=image,
                        initramfs=first,
                    )
                ),
            )
        channel, token = await _greet(node, machine, name, clock)
        return Shield(node, machine, channel, reservation=reservation, token=token)
    except BaseException:
        await asyncio.shield(node.machines.end(name, reservation, machine))
        raise


async def _greet(node: VmNode, machine: Machine, name: str, clock: Clock) -> tuple[SocketChannel, bytes]:
    exited = node.machines.exited(name)
    halted = asyncio.ensure_future(machine.control.ended())
    ready = asyncio.ensure_future(first_word(machine))
    try:
        await asyncio.wait((ready, halted, exited), timeout=BOOT_S, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            said = halted.result().console if halted.done() else exited.result().said if exited.done() else "no answer"
            raise CreateFailed(f"the shield's machine could not boot: {said.strip()[-1000:]}")
        sock, token = await ready, new_token()
        try:
            await configure(sock, Identity(token=token, hostname="shield", pids=0))
        except BaseException:
            sock.close()
            raise
        spool = Spool(node.host.volume.spool_path(name), fresh=True)
        return await SocketChannel.open(sock, clock=clock, token=token, spool=spool), token
    finally:
        ready.cancel()
        halted.cancel()


def make_state_disk(path: Path, size: int, *, kind: str) -> None:
    """An empty one, where there is none. `kind`: ext4 or btrfs. Blocks. Raises `Unsupported`, `PlatformError`."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    program = shutil.which(f"mkfs.{kind}", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise Unsupported(f"mkfs.{kind} is missing", remedy="apt-get install e2fsprogs btrfs-progs")
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        file.truncate(size)
    done = subprocess.run([program, "-q", str(temporary)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PlatformError(f"mkfs.{kind} failed: {done.stderr.strip()[-300:]}")
    temporary.rename(path)


async def _run(channel: GuestChannel, argv: tuple[bytes, ...], stdin: bytes | None = None) -> str:
    """What a short program says. Raises `CreateFailed` where it fails."""
    flags = ExecFlag.MERGE | (ExecFlag.STDIN if stdin is not None else ExecFlag(0))
    operation = await channel.start(OpRequest(argv=argv, env=_ENV, flags=flags, timeout_ms=int(_RUN_S * 1000)))
    try:
        if stdin is not None:
            await operation.write(stdin)
            await operation.close_stdin()
        said = b""
        async for item in operation.read():
            if isinstance(item, Chunk):
                said += item.data
            elif (item.kind, item.code) != (EndKind.EXITED, 0):
                raise CreateFailed(f"{argv[0].decode()} failed inside: {said.decode(errors='replace')[-500:]}")
        return said.decode(errors="replace")
    finally:
        await operation.release()


async def _read(channel: GuestChannel, path: str) -> bytes:
    found = b""
    async for data in read_file(channel, path):
        found += data
    return found


async def _lines(operation: Operation, on_line: Callable[[str], None]) -> None:
    """The server inside, to its end."""
    line = b""
    async for item in operation.read(-1):
        if isinstance(item, OpEnd):
            return
        line += item.data
        *whole, line = line.split(b"\n")
        for each in whole:
            on_line(each.decode(errors="replace"))
