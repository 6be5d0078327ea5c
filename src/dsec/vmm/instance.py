"""`ports.Instance` of a virtual machine: its channel, its VMM's cgroups, what its own kernel counts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from msgspec.structs import replace

from dsec.channel.movable import MovableChannel
from dsec.errors import DsecError, Unavailable
from dsec.kernel import paging
from dsec.ports import GuestChannel, InstanceEnd, PagedOut, Usage
from dsec.vmm.flow import Connected
from dsec.vmm.looking import MachineLook, Seen
from dsec.vmm.machine import Machine
from dsec.vmm.network import MachineNetwork, Query
from dsec.vmm.screens import Screen
from dsec.wire.session import Status

log = logging.getLogger(__name__)

REJOIN_S = 20.0
"""For a guest to be there again after its port was cut."""


class MachineChannel(GuestChannel, Protocol):
    """A channel to a machine, which knows what its kernel last said of itself."""

    status: Status


class Suspender(Protocol):
    """What pauses machines by ending their VMMs."""

    async def suspend(self, instance: MachineInstance) -> PagedOut: ...

    def wake(self, instance: MachineInstance) -> None: ...


class MachineInstance:
    """A running virtual machine."""

    def __init__(
        self,
        sandbox_id: str,
        channel: MachineChannel,
        machine: Machine,
        *,
        disk_limit_bytes: int,
        make_swap: Callable[[], None],
        image_failures: Callable[[], int] = int,
    ) -> None:
        """`image_failures`: counts the reads of its layers that failed.
        `make_swap`: see to it that the host has somewhere to put memory; in a thread."""
        self._sandbox_id = sandbox_id
        self._channel = channel
        self.machine = machine
        self.phases_s: dict[str, float] = {}
        """The steps of its making."""
        self.frozen = False
        self._disk_limit_bytes = disk_limit_bytes
        self._make_swap = make_swap
        self._image_failures = image_failures
        self.lock = asyncio.Lock()
        """Of whoever has the VMM do something for longer than a moment."""
        self.suspended = False
        """It has no VMM: its memory is in a file."""
        self.suspender: Suspender | None = None
        self.adopted = False
        """An earlier edge made it."""
        self._network: MachineNetwork | None = None
        self._look: MachineLook | None = None
        self._end: asyncio.Future[InstanceEnd] = asyncio.get_running_loop().create_future()

    @property
    def sandbox_id(self) -> str:
        return self._sandbox_id

    @property
    def channel(self) -> MachineChannel:
        return self._channel

    def ended(self) -> Awaitable[InstanceEnd]:
        return asyncio.shield(self._end)

    def usage(self) -> Usage:
        """CPU and memory are the VMM's, as the host counts them; the rest is what the kernel inside says."""
        inside = self._channel.status
        return replace(
            self.machine.slot.usage(),
            oom_kills=inside.oom_kills,
            pids=inside.pids + 1,  # and the guest
            pids_refused=inside.pids_refused,
            disk_bytes=inside.disk_bytes,
            disk_limit_bytes=inside.disk_limit_bytes or self._disk_limit_bytes,
            image_failures=self._image_failures(),
        )

    def freeze(self, frozen: bool) -> None:
        """As in `ports.PausableHost`: the VMM stands still. Its machine's clock goes on, as a container's does."""
        self._channel.hold(time.monotonic_ns() if frozen else 0)
        self.frozen = frozen
        if self.suspended and self.suspender is not None:
            if not frozen:
                self.suspender.wake(self)
            return
        if not self.lock.locked():  # else what is being done sees to it at its end
            self.machine.slot.freeze(frozen)
        if not frozen:
            paging.may_swap(self.machine.slot, False)

    async def find_screen(self) -> Screen | None:
        """Where what it shows is, which is no part of its state. Raises `Unavailable`."""
        return None

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """As `held`, one at a time."""
        async with self.lock, self.held():
            yield

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Nothing in the machine moves meanwhile, but its VMM answers; for who has the lock. A frozen one may move for
        the few milliseconds until its VMM has heard of it, and is frozen again. Raises `Unavailable`."""
        slot, control = self.machine.slot, self.machine.control
        cut = await self._settled() if self.machine.copies_whole else None
        stopping = asyncio.ensure_future(control.stop())
        await asyncio.sleep(0)  # it is said before the VMM can do anything else
        if self.frozen:
            slot.freeze(False)
        try:
            await stopping
            if cut is not None:
                cut.part()
            yield
        finally:
            if self.suspended:
                pass
            elif cut is not None:
                await self.rejoin(cut)
            elif self.frozen:
                slot.freeze(True)
                control.resume_soon()
            else:
                await control.resume()

    async def _settled(self) -> MovableChannel:
        """Its channel, whose stream may be cut: nothing of ours is under way in it. A frozen machine moves for that.
        Raises `Unavailable`, `OutcomeUnknown`; then it is as before."""
        assert isinstance(self._channel, MovableChannel)
        self.machine.slot.freeze(False)
        try:
            await self._channel.settle()
        except BaseException:
            self.machine.slot.freeze(self.frozen)
            raise
        return self._channel

    async def rejoin(self, channel: MovableChannel) -> None:
        """Have the machine and its channel, whose stream was cut, go on; a frozen one moves for that. Raises
        `Unavailable`, `OutcomeUnknown`; then it can't."""
        try:
            async with asyncio.timeout(REJOIN_S):
                await self.machine.control.resume()
                if channel.parted:
                    await channel.renew(await self.machine.port())
                else:
                    channel.go_on()
        except (DsecError, OSError, TimeoutError) as error:
            channel.give_up()
            if isinstance(error, DsecError):
                raise
            raise Unavailable("the machine's guest can't be reached any more") from error
        finally:
            self.machine.slot.freeze(self.frozen)

    async def page_out(self) -> PagedOut:
        """As in `ports.PausableHost`. Memory that is still the template's stays: others share it."""
        if self.suspender is not None:
            try:
                return await self.suspender.suspend(self)
            except DsecError as error:
                log.warning("sandbox %s can't be suspended: %s", self._sandbox_id, error.message)
        return await asyncio.to_thread(self._page_out)

    def _page_out(self) -> PagedOut:
        self._make_swap()
        pids = paging.pids_in(self.machine.slot)
        before = paging.resident_bytes(pids)
        compressed = paging.compressed_bytes()
        paging.may_swap(self.machine.slot, True)
        text = paging.Text()
        for pid in pids:
            paging.page_out(pid, text, lambda: self.frozen)
        return PagedOut(before, paging.resident_bytes(pids), max(0, paging.compressed_bytes() - compressed))

    async def serve_network(self, connected: Connected, query: Query) -> None:
        """As in `ports.NetworkHost`. Connections inside don't wait for the next edge: they are reset. What an earlier
        edge made, or stands still, isn't waited for: its guest may be anybody's."""
        if self._network is not None:
            self._network.set_callbacks(connected, query)
            return
        network = self._network = MachineNetwork(self._sandbox_id, self._channel, connected, query)
        network.start()
        if self.adopted or self.frozen:
            return
        try:
            await network.ready()
        except BaseException:
            await self.end_network()
            raise

    async def end_network(self) -> None:
        """As in `ports.NetworkHost`."""
        network, self._network = self._network, None
        if network is not None:
            network.stop()

    async def look(self, wanted: Sequence[bytes], seen: Seen) -> None:
        """As in `ports.TellingHost`; who is waited for as in `serve_network`."""
        await self.end_look()
        look = self._look = MachineLook(self._sandbox_id, self._channel, wanted, seen)
        look.start()
        if self.adopted or self.frozen:
            return
        try:
            await look.ready()
        except BaseException:
            await self.end_look()
            raise

    async def end_look(self) -> None:
        """As in `ports.TellingHost`."""
        look, self._look = self._look, None
        if look is not None:
            look.stop()

    def note_end(self, end: InstanceEnd) -> None:
        """It is gone by itself."""
        if not self._end.done():
            self._end.set_result(end)

    def forget(self) -> None:
        """It is destroyed, or left to the next edge: nobody here hears of its end any more."""
        if self._network is not None:
            self._network.stop()
        if self._look is not None:
            self._look.stop()
        self._end.cancel()
