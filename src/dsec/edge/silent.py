"""Guests that fall silent. A command's time limit is kept by its guest, so a command whose time is long over asks for a
look: a guest that doesn't answer then either never will (who is root in a machine can see to that), and its sandbox
ends, lest callers wait for ever.
"""

from __future__ import annotations

import asyncio

from dsec.edge.config import EdgeConfig
from dsec.edge.lives import Lives
from dsec.edge.sandbox import Sandbox
from dsec.edge.tasks import Tasks, quiet
from dsec.errors import DsecError
from dsec.ports import Clock
from dsec.spec.causes import Cause
from dsec.spec.sandbox import State


class Silent:
    """Looks for them, among all of a node's."""

    def __init__(self, *, lives: Lives, clock: Clock, config: EdgeConfig, tasks: Tasks) -> None:
        self._lives = lives
        self._clock = clock
        self._silence_s = config.silence_s
        self._tasks = tasks
        self._asked: set[str] = set()

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(self._silence_s / 2)
            before = self._clock.monotonic() - self._silence_s
            for sandbox in list(self._lives.sandboxes.values()):
                if sandbox.id not in self._asked and _late(sandbox, before):
                    self._asked.add(sandbox.id)
                    self._tasks.spawn(self._ask(sandbox))

    async def _ask(self, sandbox: Sandbox) -> None:
        try:
            async with asyncio.timeout(self._silence_s):
                await sandbox.running().channel.ping()
        except TimeoutError:
            if sandbox.state is State.RUNNING:
                words = f"its guest said nothing for {self._silence_s:g} s when a command's time was over"
                quiet(self._lives.end(sandbox, Cause.GUEST_EXITED, words))
        except DsecError:
            pass  # its end is known, or about to be
        finally:
            self._asked.discard(sandbox.id)


def _late(sandbox: Sandbox, before: float) -> bool:
    """Whether a command's time was over by then."""
    if sandbox.state is not State.RUNNING or not sandbox.commands:
        return False
    for command in sandbox.commands.values():
        limit_s, running = command.asked.timeout_s, command.operation
        if limit_s is None or command.began is None or running is None or running.end is not None:
            continue
        if command.began + limit_s < before:
            return True
    return False
