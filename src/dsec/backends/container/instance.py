"""`ports.Instance` of a container: its channel, its cgroups, its disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dsec.channel import SocketChannel
from dsec.kernel.cgroups import Slot
from dsec.ports import InstanceEnd, Usage


class ContainerInstance:
    """A running container sandbox."""

    __slots__ = (
        "_channel",
        "_disk_limit_bytes",
        "_disk_used",
        "_end",
        "_mount_terminals",
        "_sandbox_id",
        "_terminals",
        "exited",
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
        mount_terminals: Callable[[str], Awaitable[None]],
    ) -> None:
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
        self._mount_terminals = mount_terminals
        self._terminals: asyncio.Task[None] | None = None
        self._disk_limit_bytes = disk_limit_bytes

    @property
    def sandbox_id(self) -> str:
        return self._sandbox_id

    @property
    def channel(self) -> SocketChannel:
        return self._channel

    def ended(self) -> Awaitable[InstanceEnd]:
        return asyncio.shield(self._end)

    def usage(self) -> Usage:
        return self.slot.usage(self._disk_used(self._sandbox_id), self._disk_limit_bytes)

    async def prepare_terminal(self) -> None:
        """As in `ports.TerminalHost`: once, for all who ask meanwhile; what failed is tried again."""
        task = self._terminals
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._terminals = asyncio.create_task(_call(self._mount_terminals, self._sandbox_id))
        if not task.done():
            await asyncio.shield(task)
        else:
            task.result()

    def note_end(self, end: InstanceEnd) -> None:
        """It is gone by itself."""
        if not self._end.done():
            self._end.set_result(end)

    def forget(self) -> None:
        """It is destroyed on purpose: nobody hears of its end any more."""
        self._end.cancel()


async def _call(mount: Callable[[str], Awaitable[None]], sandbox_id: str) -> None:
    await mount(sandbox_id)
