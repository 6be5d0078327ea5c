"""Places for function environments: one project alone doesn't take them all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from dsec.backends.fncall.pool import Jails
from dsec.edge.config import SystemClock
from dsec.errors import CreateFailed, QuotaExceeded
from dsec.kernel.cgroups import Shape, Slot


class Slow:
    """A host that takes its time with every jail, and makes none (`JailHost`)."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go_on = asyncio.Event()

    def native_part(self) -> int:
        raise NotImplementedError

    async def make(self, name: str, layers: Sequence[str], project: str, shape: Shape) -> socket.socket:
        self.asked.append(project)
        await self.go_on.wait()
        raise CreateFailed("not here")

    async def destroy(self, name: str) -> None:
        raise NotImplementedError

    def take_slot(self, owner: str, project: str, shape: Shape) -> Slot:
        raise NotImplementedError

    def promise(self, change_bytes: int) -> None:
        raise NotImplementedError

    def give_back(self, slot: Slot) -> None:
        raise NotImplementedError


async def test_imports_that_hang_leave_room_for_another_project() -> None:
    host = Slow()
    jails = Jails(host, lambda name, project: ((), {}), SystemClock(), most=8)
    waiting: list[asyncio.Task[object]] = []

    async def ask(project: str, number: int) -> None:
        waiting.append(asyncio.create_task(jails.use(jails.key(project, "any", [f"module{number}"]))))
        for _ in range(5):
            await asyncio.sleep(0)

    for number in range(10):
        await ask("greedy", number)
    assert host.asked == ["greedy"] * 6
    for number in range(3):
        await ask("modest", number)
    assert host.asked == ["greedy"] * 6 + ["modest"] * 2
    host.go_on.set()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in ended] == [CreateFailed] * 6 + [QuotaExceeded] * 4 + [CreateFailed] * 2 + [
        QuotaExceeded
    ]
    await jails.close()
