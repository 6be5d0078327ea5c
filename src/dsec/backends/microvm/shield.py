"""A shield: one larger machine in which a server of containers and function calls runs, so that a kernel that is
brought down from inside is that machine's and not the host's.

It is booted, not cloned, with the node's layers as read-only disks beside its own, and a disk for its server's state,
which outlives it: the next machine's server finds there which sandboxes were lost (`node_lost`). All that the host has
to do with it goes through its channel; its HTTP too, a connection inside for each one outside.

Owns what `vmm.machine.Machines` owns for a machine, and `<state>/shield/state.disk`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.backends.microvm import shield_inside
from dsec.backends.microvm.node import VmNode
from dsec.backends.microvm.shield_layer import LIBRARY, check_python
from dsec.backends.microvm.templates import BOOT_S, closing, first_word
from dsec.channel import SocketChannel, Spool
from dsec.channel.files import read_file
from dsec.channel.streams import Stream, connect
from dsec.errors import CreateFailed, FileMissing, PlatformError, PortClosed, Unsupported
from dsec.ports import Clock, GuestChannel
from dsec.spec.operations import Chunk, EndKind, ExecFlag, OpEnd, OpRequest
from dsec.vmm.driver import ExtraDisk, Shape, Start
from dsec.vmm.ends import stopped, why
from dsec.vmm.first_words import Identity, configure, new_token
from dsec.vmm.machine import Machine

log = logging.getLogger(__name__)

STATE = "/var/lib/dsec"
PORT = 7000
START_S = 300.0
"""On an imitated CPU a server takes its time to load."""
_RUN_S = 120.0
_POLL_S = 0.25
_ENV = (b"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", b"HOME=/root", b"LANG=C.UTF-8")


class ShieldShape(Struct, frozen=True, kw_only=True):
    """How large it is."""

    vcpus: int
    memory_bytes: int
    state_bytes: int
    scratch_bytes: int = 1 << 30
    """For what is written outside of the state directory."""


class Shield:
    """One machine, from its boot to its end."""

    def __init__(self, name: str, reservation: str, machine: Machine, channel: SocketChannel, node: VmNode) -> None:
        self.name = name
        self.machine = machine
        self.channel = channel
        self._reservation = reservation
        self._node = node
        self._server: asyncio.Task[None] | None = None

    async def serve(self, prepare: dict[str, object], on_line: Callable[[str], None]) -> bytes:
        """Start the server inside; returns when it answers, with what it wrote into client.json. `prepare`: as
        `shield_inside` takes it. Raises `CreateFailed` with its last words, `Unsupported`."""
        check_python(await _run(self.channel, (b"python3", b"--version")))
        program = f"{LIBRARY}/dsec/backends/microvm/{Path(shield_inside.__file__).name}"
        await _run(self.channel, (b"python3", b"-IS", program.encode()), msgspec.json.encode(prepare))
        said: list[str] = []

        def note(line: str) -> None:
            said.append(line)
            del said[:-40]
            on_line(line)

        self._server = asyncio.create_task(_follow(self.channel, note), name="the shield's server")
        async with asyncio.timeout(START_S):
            while True:
                if self._server.done() or self.gone():
                    raise CreateFailed(f"the shield's server ended: {' / '.join(said)[-1500:] or self.console()}")
                with contextlib.suppress(PortClosed, FileMissing):
                    await (await connect(self.channel, PORT)).close()
                    client = await _read(self.channel, f"{STATE}/client.json")
                    await _run(self.channel, (b"sync",))  # the key shall outlive this machine
                    return client
                await asyncio.sleep(_POLL_S)

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
        await _run(self.channel, (b"pkill", b"-TERM", b"-f", b"dsec.cli.main serve"))
        await asyncio.wait((server,))
        await _run(self.channel, (b"sync",))

    async def close(self) -> None:
        """End it; its state's disk stays."""
        if self._server is not None:
            self._server.cancel()
        await self.channel.close()
        await self._node.machines.end(self.name, self._reservation, self.machine)
        self._node.host.volume.remove_spool(self.name)


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
        return Shield(name, reservation, machine, await _greet(node, machine, name, clock), node)
    except BaseException:
        await asyncio.shield(node.machines.end(name, reservation, machine))
        raise


async def _greet(node: VmNode, machine: Machine, name: str, clock: Clock) -> SocketChannel:
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
        return await SocketChannel.open(sock, clock=clock, token=token, spool=spool)
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


async def _follow(channel: GuestChannel, on_line: Callable[[str], None]) -> None:
    """The server inside, from its start to its end."""
    env = (
        *_ENV,
        f"PYTHONPATH={LIBRARY}".encode(),
        f"DSEC_STATE={STATE}".encode(),
        b"DSEC_RUN=/run/dsec",
        b"DSEC_LASTING_RECORDS=1",
    )
    serve = ("python3", "-m", "dsec.cli.main", "serve", "--host", "127.0.0.1", "--port", str(PORT))
    argv = tuple(word.encode() for word in serve)
    operation = await channel.start(OpRequest(argv=argv, env=env, flags=ExecFlag.MERGE))
    line = b""
    async for item in operation.read():
        if isinstance(item, OpEnd):
            return
        line += item.data
        *whole, line = line.split(b"\n")
        for each in whole:
            on_line(each.decode(errors="replace"))
