"""`ports.Backend` without a kernel: sandboxes are `FakeGuest`s in this process, behind the real channel over a
socketpair.

A `FakeHost` stands for the machine: it keeps guests alive between one backend ("edge incarnation") and the next,
and is where tests turn the knobs: environments, creates that fail, guests that die.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar

from dsec.backends.fake.guest import FakeGuest
from dsec.channel import SocketChannel, Spool
from dsec.errors import CreateFailed, EnvironmentNotFound, InvalidRequest, Unsupported
from dsec.ports import Clock, Handle, InstanceEnd, PagedOut, Usage
from dsec.spec.causes import Cause
from dsec.spec.sandbox import SandboxSpec


class FakeHost:
    """What outlives an edge. `spool_root`: where the channels keep what they spool; the caller removes it."""

    def __init__(self, spool_root: Path, environments: frozenset[str] = frozenset({"base"})) -> None:
        self.epoch = secrets.randbelow((1 << 24) - 1) + 1
        self.environments = environments
        self.spool_root = spool_root
        self.guests: dict[str, FakeGuest] = {}
        self.create_delay_s = 0.0
        self.go_on: asyncio.Event | None = None
        """What creations wait for, besides."""
        self._failures: list[str] = []

    def fail_next_create(self, step: str) -> None:
        """The next create fails at this step."""
        self._failures.append(step)

    def take_failure(self) -> str | None:
        return self._failures.pop(0) if self._failures else None

    def kill_guest(self, sandbox_id: str) -> None:
        """The guest dies by itself, as if its pid 1 had ended."""
        self.guests[sandbox_id].die()


class FakeInstance:
    """`ports.Instance` of a fake guest."""

    def __init__(self, sandbox_id: str, spec_limits: tuple[int, int], guest: FakeGuest, channel: SocketChannel) -> None:
        self._sandbox_id = sandbox_id
        self._memory_bytes, self._disk_bytes = spec_limits
        self._guest = guest
        self._channel = channel
        self._end: asyncio.Future[InstanceEnd] = asyncio.get_running_loop().create_future()
        self._connected: Callable[[socket.socket, str, int], None] | None = None
        self._query: Callable[[bytes], bytes | None] | None = None

    @property
    def sandbox_id(self) -> str:
        return self._sandbox_id

    @property
    def channel(self) -> SocketChannel:
        return self._channel

    @property
    def frozen(self) -> bool:
        return self._guest.frozen

    def freeze(self, frozen: bool) -> None:
        """As in `ports.PausableHost`; its programs go on, only time stands still for them."""
        self._channel.hold(time.monotonic_ns() if frozen else 0)
        self._guest.frozen = frozen

    async def page_out(self) -> PagedOut:
        """As in `ports.PausableHost`."""
        return PagedOut(1 << 20, 0)

    async def serve_network(
        self, connected: Callable[[socket.socket, str, int], None], query: Callable[[bytes], bytes | None]
    ) -> None:
        """As in `ports.NetworkHost`."""
        self._connected, self._query = connected, query

    async def end_network(self) -> None:
        """As in `ports.NetworkHost`."""
        self._connected = self._query = None

    def dial(self, address: str, port: int) -> socket.socket:
        """A connection from a program inside; refused where no network is served. Blocking, as a program's."""
        if self._connected is None:
            raise ConnectionRefusedError(f"{address}:{port}")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            inside = socket.create_connection(listener.getsockname())
            arrived, _ = listener.accept()
        arrived.setblocking(False)
        self._connected(arrived, address, port)
        return inside

    def look_up(self, query: bytes) -> bytes | None:
        """A program's DNS query."""
        return None if self._query is None else self._query(query)

    def ended(self) -> Awaitable[InstanceEnd]:
        return asyncio.shield(self._end)

    def note_end(self, end: InstanceEnd) -> None:
        """The guest is gone by itself."""
        if not self._end.done():
            self._end.set_result(end)

    def forget(self) -> None:
        """It was destroyed on purpose: nobody hears of its end any more."""
        self._end.cancel()

    def usage(self) -> Usage:
        running = sum(1 for operation in self._guest.operations.values() if operation.finished is None)
        return Usage(
            cpu_us=self._guest.cpu_us,
            memory_bytes=1 << 20,
            memory_peak_bytes=1 << 20,
            pids=1 + running,
            disk_bytes=self._guest.fs.used(),
            disk_limit_bytes=self._disk_bytes,
        )


class FakeBackend:
    """`ports.Backend` over a `FakeHost`."""

    name: ClassVar[str] = "fake"
    api_version: ClassVar[int] = 1

    def __init__(self, host: FakeHost, clock: Clock) -> None:
        self.host = host
        self._clock = clock
        self._instances: dict[str, FakeInstance] = {}

    @property
    def epoch(self) -> int:
        return self.host.epoch

    def instance(self, sandbox_id: str) -> FakeInstance:
        """A running one, for tests that play its programs."""
        return self._instances[sandbox_id]

    async def open(self, known: dict[str, Handle]) -> dict[str, FakeInstance]:
        for sandbox_id in self.host.guests.keys() - known.keys():
            await self.destroy(sandbox_id, {})
        alive = {i for i in known if i in self.host.guests and not self.host.guests[i].dead}
        for sandbox_id in known.keys() - alive:
            await self.destroy(sandbox_id, known[sandbox_id])
        return {sandbox_id: await self._adopt(sandbox_id, known[sandbox_id]) for sandbox_id in sorted(alive)}

    def check(self, spec: SandboxSpec) -> None:
        if spec.gpus is not None:
            raise Unsupported("GPUs are not built yet", remedy="Leave the field out.")
        if spec.environment not in self.host.environments:
            raise EnvironmentNotFound(f"there is no environment {spec.environment}")
        if spec.workdir and not spec.workdir.startswith("/"):
            raise InvalidRequest("workdir is an absolute path")

    def reserve(self, sandbox_id: str, spec: SandboxSpec, tenant: int = 0, capture: str = "") -> Handle:
        return {"guest": sandbox_id, "memory_bytes": spec.memory_bytes, "disk_bytes": spec.disk_bytes}

    async def create(self, sandbox_id: str, spec: SandboxSpec, handle: Handle) -> FakeInstance:
        if sandbox_id in self.host.guests:
            raise CreateFailed(f"sandbox {sandbox_id} exists")
        await asyncio.sleep(self.host.create_delay_s)
        if self.host.go_on is not None:
            await self.host.go_on.wait()
        step = self.host.take_failure()
        if step is not None:
            raise CreateFailed(f"create failed at {step}", step=step)
        hostname = (spec.hostname or sandbox_id).encode()
        guest = FakeGuest(hostname=hostname, disk_bytes=spec.disk_bytes)
        self.host.guests[sandbox_id] = guest
        try:
            return await self._adopt(sandbox_id, handle)
        except BaseException:
            await self.destroy(sandbox_id, handle)
            raise

    async def _adopt(self, sandbox_id: str, handle: Handle) -> FakeInstance:
        guest = self.host.guests[sandbox_id]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guest.attach(theirs)
        channel = await SocketChannel.open(ours, clock=self._clock, spool=Spool(self._spool(sandbox_id)))
        limits = (handle["memory_bytes"], handle["disk_bytes"])
        instance = self._instances[sandbox_id] = FakeInstance(sandbox_id, limits, guest, channel)
        guest.on_death = lambda: instance.note_end(InstanceEnd(Cause.GUEST_EXITED, "pid 1 inside ended"))
        if guest.dead:
            guest.on_death()
        return instance

    def _spool(self, sandbox_id: str) -> Path:
        return self.host.spool_root / sandbox_id

    async def destroy(self, sandbox_id: str, handle: Handle) -> None:
        instance = self._instances.pop(sandbox_id, None)
        if instance is not None:
            instance.forget()
            await instance.channel.close()
        guest = self.host.guests.pop(sandbox_id, None)
        if guest is not None:
            guest.on_death = lambda: None
            guest.die()
        shutil.rmtree(self._spool(sandbox_id), ignore_errors=True)

    async def close(self, *, keep: bool) -> None:
        if not keep:
            for sandbox_id in list(self.host.guests):
                await self.destroy(sandbox_id, {})
        for instance in self._instances.values():
            instance.forget()
            await instance.channel.close()
        self._instances.clear()
