"""Watches and connections that callers hold: they count as use of their sandbox while they are open, and a guest that
is gone is explained as for commands.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from dsec.channel.streams import Stream, Watch
from dsec.edge.commands import Commands
from dsec.edge.lives import Lives
from dsec.edge.sandbox import Sandbox
from dsec.errors import OutcomeUnknown, Unavailable
from dsec.spec.sandbox import FileEvent

T = TypeVar("T")


class _Hold:
    """Use of a sandbox, from now until `end`."""

    __slots__ = ("_commands", "_ended", "_lives", "_sandbox")

    def __init__(self, lives: Lives, commands: Commands, sandbox: Sandbox) -> None:
        self._lives = lives
        self._commands = commands
        self._sandbox = sandbox
        self._ended = False
        lives.use(sandbox)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._lives.unuse(self._sandbox)

    async def explained(self, call: Awaitable[T]) -> T:
        """What the call gives; a guest that is gone says why."""
        try:
            return await call
        except (OutcomeUnknown, Unavailable) as error:
            raise await self._commands.explain(self._sandbox, error) from error


class HeldWatch:
    """`dsec.edge.client.FileWatch`."""

    def __init__(self, hold: _Hold, watch: Watch) -> None:
        self._hold = hold
        self._watch = watch

    def __aiter__(self) -> HeldWatch:
        return self

    async def __anext__(self) -> FileEvent:
        return await self._hold.explained(anext(self._watch))

    async def aclose(self) -> None:
        self._hold.end()
        await self._watch.aclose()


class HeldStream:
    """`dsec.edge.client.PortStream`."""

    def __init__(self, hold: _Hold, stream: Stream) -> None:
        self._hold = hold
        self._stream = stream

    async def read(self) -> bytes:
        return await self._hold.explained(self._stream.read())

    async def write(self, data: bytes) -> None:
        await self._hold.explained(self._stream.write(data))

    async def close_write(self) -> None:
        await self._hold.explained(self._stream.close_write())

    async def close(self) -> None:
        self._hold.end()
        await self._stream.close()


async def hold_watch(lives: Lives, commands: Commands, sandbox: Sandbox, opening: Awaitable[Watch]) -> HeldWatch:
    """A watch that is being opened, held."""
    hold = _Hold(lives, commands, sandbox)
    try:
        return HeldWatch(hold, await hold.explained(opening))
    except BaseException:
        hold.end()
        raise


async def hold_stream(lives: Lives, commands: Commands, sandbox: Sandbox, opening: Awaitable[Stream]) -> HeldStream:
    """A connection that is being opened, held."""
    hold = _Hold(lives, commands, sandbox)
    try:
        return HeldStream(hold, await hold.explained(opening))
    except BaseException:
        hold.end()
        raise
