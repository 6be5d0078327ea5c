"""`ports.Instance` of a container: its channel, its cgroups, its disk, its network."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from dsec.backends.container.network import Connected, NetworkSockets, Query
from dsec.channel import SocketChannel
from dsec.errors import SandboxNotFound
from dsec.kernel import paging
from dsec.kernel.cgroups import Slot
from dsec.kernel.syscalls import KernelError
from dsec.ports import InstanceEnd, PagedOut, Usage

_FREEZE_S = 0.2
"""Processes in the middle of a system call that can't be interrupted may take as long; they write on."""


class ContainerInstance:
    """A running container sandbox."""

    __slots__ = (
        "_channel",
        "_disk_limit_bytes",
        "_disk_used",
        "_end",
        "_image_failures",
        "_make_swap",
        "_network",
        "_network_lock",
        "_network_sockets",
        "_sandbox_id",
        "exited",
        "frozen",
        "phases_s",
        "pid",
        "slot",
    )

    def __init__(
        self,
        sandbox_id: str,
        channel: SocketChannel,
        slot: Slot,
        *,
        pid: int,
        exited: asyncio.Future[int],
        disk_used: Callable[[str], int],
        disk_limit_bytes: int,
        network_sockets: Callable[[str], Awaitable[tuple[socket.socket, socket.socket]]],
        image_failures: Callable[[], int],
        make_swap: Callable[[], None],
    ) -> None:
        """`make_swap`: see to it that the host has somewhere to put memory; in a thread."""
        self._sandbox_id = sandbox_id
        self._channel = channel
        self.slot = slot
        self.pid = pid
        """Of pid 1 inside, as the host counts."""
        self.exited = exited
        """Resolves with pid 1's wait status when it is gone, however it ended."""
        self.phases_s: dict[str, float] = {}
        """The steps of its making: spawn is the zygote's answer, of which mount, clone and setup are parts."""
        self._end: asyncio.Future[InstanceEnd] = asyncio.get_running_loop().create_future()
        self._disk_used = disk_used
        self._network_sockets = network_sockets
        self._image_failures = image_failures
        self._network: NetworkSockets | None = None
        self._network_lock = asyncio.Lock()
        self._disk_limit_bytes = disk_limit_bytes
        self.frozen = False
        self._make_swap = make_swap

    @property
    def sandbox_id(self) -> str:
        return self._sandbox_id

    @property
    def channel(self) -> SocketChannel:
        return self._channel

    def ended(self) -> Awaitable[InstanceEnd]:
        return asyncio.shield(self._end)

    def usage(self) -> Usage:
        usage = self.slot.usage(self._disk_used(self._sandbox_id), self._disk_limit_bytes)
        failures = self._image_failures()
        return replace(usage, image_failures=failures) if failures else usage

    def freeze(self, frozen: bool) -> None:
        """As in `ports.PausableHost`. The guest hears of it while it still, or before it again, runs."""
        if frozen:
            self._channel.hold(time.monotonic_ns())
        else:
            self._channel.hold(0)
        self.slot.freeze(frozen)
        self.frozen = frozen
        if not frozen:
            paging.may_swap(self.slot, False)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Nothing inside moves meanwhile; for milliseconds, in a thread."""
        frozen = self.frozen
        if not frozen:
            self.slot.freeze(True)
            until = time.monotonic() + _FREEZE_S
            while b"frozen 1" not in Path(self.slot.v2, "cgroup.events").read_bytes() and time.monotonic() < until:
                time.sleep(0.0005)
        try:
            yield
        finally:
            if not self.frozen:  # nobody has paused it meanwhile
                self.slot.thaw()

    async def page_out(self) -> PagedOut:
        """As in `ports.PausableHost`."""
        return await asyncio.to_thread(self._page_out)

    def _page_out(self) -> PagedOut:
        self._make_swap()
        pids = [pid for pid in paging.pids_in(self.slot) if pid != self.pid]  # the guest is small, and answers first
        before = paging.resident_bytes(pids)
        compressed = paging.compressed_bytes()
        paging.may_swap(self.slot, True)
        by_pid, text = True, paging.Text()
        try:
            for pid in pids:
                if not self.frozen:
                    break
                paging.page_out(pid, text, lambda: self.frozen)
        except KernelError as error:
            if error.errno != errno.ENOSYS:
                raise
            by_pid = False
        if not (by_pid and paging.can_swap()):  # then its cgroup can give back its cached files at least
            paging.reclaim(self.slot, lambda: self.frozen)
        return PagedOut(before, paging.resident_bytes(pids), max(0, paging.compressed_bytes() - compressed))

    async def serve_network(self, connected: Connected, query: Query) -> None:
        """As in `ports.NetworkHost`."""
        async with self._network_lock:
            if self._network is not None:
                self._network.set_callbacks(connected, query)
                return
            sockets = await self._network_sockets(self._sandbox_id)
            network = NetworkSockets(self._sandbox_id, sockets, connected, query)
            try:
                if self._end.done():
                    raise SandboxNotFound(f"the sandbox {self._sandbox_id} has ended")
                network.start()
            except BaseException:
                network.stop()
                raise
            self._network = network

    async def end_network(self) -> None:
        """As in `ports.NetworkHost`."""
        async with self._network_lock:
            self.let_go_of_network(refuse=True)

    def let_go_of_network(self, *, refuse: bool = False) -> None:
        """Serve it no more; without `refuse` new connections wait for the next edge."""
        if self._network is not None:
            self._network.stop(refuse=refuse)
            self._network = None

    def note_end(self, end: InstanceEnd) -> None:
        """It is gone by itself."""
        if not self._end.done():
            self._end.set_result(end)

    def forget(self) -> None:
        """It is destroyed, or left to the next edge: nobody here hears of its end any more."""
        self._end.cancel()
        self.let_go_of_network()
