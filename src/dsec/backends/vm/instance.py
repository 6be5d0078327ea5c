"""`ports.Instance` of a full machine: what every machine has, and a screen, keys, a mouse and a serial console."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Never

from dsec.backends.vm import screen
from dsec.backends.vm.node import Full
from dsec.channel import SocketChannel
from dsec.errors import Unsupported
from dsec.ports import Operation
from dsec.spec.operations import OpRequest
from dsec.spec.screen import Input
from dsec.vmm.instance import MachineInstance
from dsec.vmm.screens import Screen, find
from dsec.wire.session import Status


class FullInstance(MachineInstance):
    """A running full machine."""

    def __init__(
        self,
        sandbox_id: str,
        channel: SocketChannel | NoGuest,
        full: Full,
        *,
        disk_limit_bytes: int,
        make_swap: Callable[[], None],
    ) -> None:
        """As `MachineInstance`."""
        super().__init__(sandbox_id, channel, full.machine, disk_limit_bytes=disk_limit_bytes, make_swap=make_swap)
        self.full = full
        self._typing = asyncio.Lock()

    async def find_screen(self) -> Screen | None:
        """As in `MachineInstance`."""
        return await find(self.full.control, self.full.machine.pid)

    async def screenshot(self) -> bytes:
        """As in `screen_ports.ScreenHost`."""
        return await screen.screenshot(self.full.control)

    async def input(self, inputs: Sequence[Input]) -> None:
        """As in `screen_ports.ScreenHost`."""
        async with self._typing:
            await screen.send(self.full.control, inputs)

    async def read_console(self, after: int, wait_s: float) -> tuple[int, bytes]:
        """As in `screen_ports.ScreenHost`."""
        return await self.full.console.read(after, wait_s)

    async def write_console(self, data: bytes) -> None:
        """As in `screen_ports.ScreenHost`."""
        await self.full.console.write(data)


class NoGuest:
    """The channel to a machine that has none of our guests: every operation is refused."""

    def __init__(self) -> None:
        self.status = Status()
        self.congested = False
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, request: OpRequest) -> Operation:
        self._refuse()

    def find(self, key: bytes) -> Operation | None:
        return None

    def operations(self) -> Sequence[Operation]:
        return ()

    async def ping(self) -> float:
        self._refuse()

    def hold(self, since_ns: int) -> None:
        """Nothing inside has our timeouts."""

    def lost(self) -> asyncio.Future[str]:
        return self._lost

    async def close(self) -> None:
        self._lost.cancel()

    def _refuse(self) -> Never:
        raise Unsupported(
            "this machine's disk has no guest of ours: there are its consoles, screen, keys and mouse, nothing else",
            remedy="Import the disk with our guest as a service (docs/VM.md), or use screenshot, type and click.",
        )
