"""One function environment: a jail, its lanes, and (where libraries are to be imported) its warm parent.

Invariants: a lane's cell serves one call and is ended before the next one is made; a lane that was taken is given back,
whatever became of the call; when the warden or the warm parent is gone, so is the jail: `broken` says why, whoever
waits is told, and nothing is begun in it any more.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from dsec.backends.fncall import messages
from dsec.backends.fncall.host import JailHost
from dsec.backends.fncall.lane import Lane
from dsec.backends.fncall.messages import Kind, Message
from dsec.errors import CreateFailed, DsecError, Unsupported
from dsec.kernel.cgroups import Shape, Slot
from dsec.spec.sandbox import GIB, MIB

log = logging.getLogger(__name__)

SHAPE = Shape(memory_bytes=8 * GIB, cpus=float(os.cpu_count() or 1), pids=16384)
"""Of a jail itself: the warden, the warm parent, the first processes of cells."""
LANE_SHAPE = Shape(memory_bytes=512 * MIB, cpus=1.0, pids=64)
TMPFS_MIB = 256
IMPORTS_S = 120.0
READY_S = 30.0
AHEAD = 2
"""Lanes that a jail has from its beginning, and keeps where nobody calls, each with a worker that waits."""
SPARE = 2 * (os.cpu_count() or 1)
"""Cells that are made beyond those that somebody waits for, while calls follow one another: most of the time that
making one takes is waiting, for other processors and until the kernel has let go of the last one."""
_FDS_SPACE = socket.CMSG_SPACE(messages.MAX_FDS * array.array("i").itemsize)
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_SAID_BYTES = 8192
_NOT_FOUND = 127


class FunctionJail:
    """Made by `open_jail`."""

    def __init__(self, host: JailHost, name: str, project: str, channel: socket.socket, *, warm: bool) -> None:
        self.name = name
        self.warm = warm
        self.broken: DsecError | None = None
        self.used_at = 0.0
        self.spare = SPARE
        self.users = 0
        """Calls that hold, or wait for, one of its lanes."""
        self._host = host
        self._project = project
        self._channel = channel
        self._lanes: list[Lane] = []
        self._ready: deque[Lane] = deque()
        self._resting: list[Lane] = []
        """Without a cell, until they are needed."""
        self._waiting: deque[asyncio.Future[Lane]] = deque()
        self._preparing = 0
        self._up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._directories: dict[int, asyncio.Future[int]] = {}
        self._said = -1
        self._words = b""
        """The last of what the warm parent says on stdout and stderr."""
        asyncio.get_running_loop().add_reader(channel, self._readable)

    # --- beginning and ending ---

    async def start_parent(self, code: str, imports: Sequence[str], env: Mapping[str, str]) -> None:
        """Import the libraries. Raises `Unsupported` where that fails."""
        theirs, native = -1, await asyncio.to_thread(self._host.native_part)
        try:
            self._said, theirs = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._said, False)
            asyncio.get_running_loop().add_reader(self._said, self._hear)
            words = ["python3", "-I", "-c", code, *imports, "", *(f"{name}={value}" for name, value in env.items())]
            text = "".join(f"{word}\0" for word in words)
            if len(text.encode()) > messages.MAX_TEXT:
                raise Unsupported("the names of the imports, or the environment's variables, are too long")
            self._send(Message(Kind.PARENT, text=text), theirs, theirs, native)
        finally:
            os.close(native)
            os.close(theirs)
        try:
            async with asyncio.timeout(IMPORTS_S):
                failed = await self._up
        except TimeoutError:
            failed = f"the imports did not end within {IMPORTS_S:g} s"
        if failed:
            raise Unsupported(
                f"the environment can't import what the function wants: {failed.strip()[-4000:]}",
                remedy="Use an environment with these modules, or leave `imports` out.",
                field="imports",
            )

    async def close(self) -> None:
        """End it whole. Idempotent."""
        self._break(CreateFailed("the function environment is being closed"))
        await self._host.destroy(self.name)
        for lane in self._lanes:
            lane.close()
            self._host.give_back(lane.slot)
        self._lanes.clear()
        self._deaf()

    def _break(self, error: DsecError) -> None:
        if self.broken is not None:
            return
        self.broken = error
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        waiting: list[asyncio.Future[Any]] = [*self._waiting, *self._directories.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        if not self._up.done():
            self._up.set_exception(error)
            self._up.exception()  # where nobody waits for it, nobody has to hear of it
        for lane in self._lanes:
            lane.lost()

    # --- lanes ---

    @property
    def ready_lanes(self) -> int:
        """How many have a worker that waits, and nobody to use it."""
        return len(self._ready)

    @property
    def preparing_lanes(self) -> int:
        """For how many a cell is being made."""
        return self._preparing

    async def take(self) -> Lane:
        """A lane whose worker waits for its call. Raises `CreateFailed`, which is why the jail is no good any more."""
        self._check()
        if self._ready:
            return self._ready.popleft()
        if self._preparing <= len(self._waiting) + self.spare:
            self.add_lane()
        future: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            async with asyncio.timeout(READY_S):
                return await future
        except TimeoutError:
            self._break(CreateFailed("a cell was not ready in time", remedy="Try again."))
            raise CreateFailed("a cell was not ready in time", remedy="Try again.") from None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._offer(future.result())
            raise

    def take_ready(self) -> Lane | None:
        """As `take`; None where nothing waits."""
        return self._ready.popleft() if self._ready and self.broken is None else None

    def give(self, lane: Lane) -> None:
        """The call is over: end what is left of it, and make the next cell."""
        if self.broken is None:
            self._prepare(lane)

    def add_lane(self) -> None:
        """One more, with its first cell. Nothing where there are as many as there may be."""
        if self._resting:
            self._prepare(self._resting.pop())
            return
        if len(self._lanes) >= messages.LANES or self.broken is not None:
            return
        index = len(self._lanes)
        slot: Slot | None = None
        try:
            slot = self._host.take_slot(f"{self.name}l{index}", self._project, LANE_SHAPE)
            lane = Lane(index, slot, LANE_SHAPE, self._host.promise)
            groups = lane.groups()
        except OSError as error:
            if slot is not None:
                self._host.give_back(slot)
            raise CreateFailed(f"the host refused cgroups for a call: {error}", remedy="See `dsec doctor`.") from error
        self._lanes.append(lane)
        try:
            self._send(Message(Kind.LANE, index, TMPFS_MIB), *groups)
        finally:
            for fd in groups:
                os.close(fd)
        self._prepare(lane)

    def rest(self) -> None:
        """Nobody has called for a while: end the cells that a few calls at a time don't need."""
        while len(self._ready) > AHEAD and self.broken is None:
            self._let_rest(self._ready.pop())

    async def directory(self, lane: Lane) -> int:
        """A descriptor of the /tmp of the lane's cell; the caller closes it. What is in it is hostile. Raises
        `CreateFailed`."""
        self._check()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._directories[lane.index] = future
        self._send(Message(Kind.OPEN, lane.index))
        return await future

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def _let_rest(self, lane: Lane) -> None:
        lane.drop()
        self._send(Message(Kind.STOP, lane.index))
        self._resting.append(lane)

    def _prepare(self, lane: Lane) -> None:
        try:
            theirs, out, err = lane.begin()
        except OSError as error:  # no descriptors are to be had; who waits is told in time
            log.error("no descriptors for a function call: %s", error)
            self._let_rest(lane)
            return
        self._preparing += 1
        try:
            self._send(Message(Kind.NEXT, lane.index, int(self.warm)), theirs.fileno(), out, err)
        finally:
            theirs.close()
            os.close(out)
            os.close(err)

    def _offer(self, lane: Lane) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(lane)
                return
        self._ready.append(lane)

    # --- the warden ---

    def _send(self, message: Message, *fds: int) -> None:
        if self.broken is not None:
            return
        try:
            socket.send_fds(self._channel, [messages.encode(message)], fds)
        except OSError as error:  # it reads at once what comes: one that doesn't is stuck
            self._break(CreateFailed(f"the function environment doesn't answer: {error}", remedy="Try again."))

    def _readable(self) -> None:
        while self.broken is None:
            try:
                packet, ancillary, _, _ = self._channel.recvmsg(
                    messages.HEADER.size + messages.MAX_TEXT, _FDS_SPACE, _RECEIVE
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                packet, ancillary = b"", []
            fds = [fd for _, _, data in ancillary for fd in array.array("i", data[: len(data) - len(data) % 4])]
            if not packet:
                self._break(CreateFailed("the function environment ended", remedy="Try again."))
                return
            self._receive(messages.decode(packet), fds)

    def _receive(self, message: Message, fds: list[int]) -> None:
        lane = self._lanes[message.lane] if message.lane < len(self._lanes) else None
        match message.kind:
            case Kind.READY if lane is not None:
                self._preparing -= 1
                lane.ready = True
                self._offer(lane)
            case Kind.ENDED if lane is not None:
                if lane.ready and lane.on_ended is not None:
                    lane.on_ended(message.value)
                elif lane.ready:  # it waited for its call: the next one would wait in vain
                    with contextlib.suppress(ValueError):
                        self._ready.remove(lane)
                        self._prepare(lane)
            case Kind.FAILED:
                self._preparing -= 1
                why = f"{message.text} ({os.strerror(message.value)})"
                self._break(CreateFailed(f"a cell can't be made: {why}", remedy="Try again; see `dsec doctor`."))
            case Kind.PARENT_UP:
                if not self._up.done():
                    self._up.set_result(message.text)
            case Kind.PARENT_ENDED:
                self._hear()
                said = f"its Python ended {_how(message.value)} {self._words.decode(errors='replace')}".strip()
                self._break(CreateFailed(said, remedy="Try again.") if self._up.done() else Unsupported(said))
            case Kind.DIRECTORY if lane is not None:
                future = self._directories.pop(message.lane, None)
                if future is not None and not future.done() and fds:
                    future.set_result(fds.pop())
                elif future is not None and not future.done():
                    future.set_exception(CreateFailed("the cell is gone"))
            case _:
                pass
        for fd in fds:
            os.close(fd)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self._said, 65536) if self._said >= 0 else b""
            self._words = (self._words + part)[-_SAID_BYTES:]
            if not part:
                self._deaf()

    def _deaf(self) -> None:
        if self._said >= 0:
            asyncio.get_running_loop().remove_reader(self._said)
            os.close(self._said)
            self._said = -1


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"by signal {os.WTERMSIG(status)}"
    if os.WEXITSTATUS(status) == _NOT_FOUND:
        return "at once: there is no python3"
    return f"with code {os.WEXITSTATUS(status)}"
