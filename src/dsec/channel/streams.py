"""Calls on a guest channel that go on: watching a directory, a connection to a port inside.

Each is an un-keyed operation that is released when its object is closed, or by the next edge. Invariants: an object
that was handed out has begun (nothing is missed from then on, the connection stands); memory is bounded by the
channel's window for each, however slow its reader is.
"""

from __future__ import annotations

import errno
import os
from collections import deque

from dsec.channel.files import Path, _path, _user, file_error
from dsec.errors import DsecError, Internal, InvalidRequest, PortClosed, QuotaExceeded
from dsec.ports import GuestChannel, Operation
from dsec.spec.operations import EndKind, FileFlag, Kind, OpEnd, OpRequest, Stage
from dsec.spec.sandbox import FileEvent
from dsec.wire.events import ConnectDecoder, EventDecoder
from dsec.wire.frames import MAX_WATCHES, WINDOW, ProtocolError
from dsec.wire.messages import MAX_MESSAGE


class Watch:
    """Events of a directory, as `dsec.edge.client.FileWatch` has it. Made by `watch`."""

    def __init__(self, operation: Operation, path: bytes) -> None:
        self._operation = operation
        self._path = path
        self._items = operation.read()
        self._decoder = EventDecoder()
        self._events: deque[FileEvent] = deque()
        self._said = b""
        self._closed = False

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> FileEvent:
        while not self._events:
            if self._closed or not await self._more():
                raise StopAsyncIteration
        return self._events.popleft()

    async def begin(self) -> None:
        """Wait until the guest watches. Raises what keeps it from that."""
        while not self._decoder.began:
            if not await self._more():
                raise Internal("the guest ended a watch before it began")

    async def _more(self) -> bool:
        """Take something from the guest; False at the end. Raises what went wrong."""
        item = await anext(self._items)
        if isinstance(item, OpEnd):
            await self.aclose()
            if item.kind is EndKind.EXITED and item.code == 0:
                return False
            raise self._error(item)
        if item.stderr:
            self._said = (self._said + item.data)[:MAX_MESSAGE]
        else:
            try:
                self._events += self._decoder.feed(item.data)
            except ProtocolError as error:
                await self.aclose()
                raise Internal(f"the guest answered with {error}") from error
        return True

    def _error(self, end: OpEnd) -> DsecError:
        if end.kind is EndKind.START_FAILED and end.stage is Stage.FILE:
            if end.code == errno.ENOSPC:
                return QuotaExceeded(
                    f"more directories than a watch can follow ({MAX_WATCHES}), or the sandbox's watches are used up",
                    remedy="Watch a smaller tree, or without `recursive`.",
                )
            if end.code == errno.EMFILE:
                return QuotaExceeded("the sandbox has no room for another watch", remedy="Close some.")
        return file_error(end, self._path, self._said.decode("utf-8", "replace").strip())

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._items.aclose()
            await self._operation.release()


async def watch(channel: GuestChannel, path: Path, *, user: str | None = None, recursive: bool = False) -> Watch:
    """See `EdgeClient.watch`."""
    raw = _path(path)
    flags = FileFlag.RECURSIVE if recursive else FileFlag(0)
    request = OpRequest(kind=Kind.WATCH, path=raw, user=_user(user), file_flags=flags)
    found = Watch(await channel.start(request), raw)
    try:
        await found.begin()
    except BaseException:
        await found.aclose()
        raise
    return found


class Stream:
    """A connection inside, as `dsec.edge.client.PortStream` has it. Made by `connect`."""

    def __init__(self, operation: Operation, where: str) -> None:
        self._operation = operation
        self._where = where
        self._items = operation.read()
        self._decoder = ConnectDecoder()
        self._data: deque[bytes] = deque()
        self._taken = 0
        self._done = self._closed = False

    async def begin(self) -> None:
        """Wait until the connection stands. Raises what keeps it from that."""
        while not self._decoder.state.connected:
            await self._more()

    async def read(self) -> bytes:
        while not self._data:
            if self._done or self._closed or self._taken == self._decoder.state.stdout_bytes:
                return b""
            await self._more()
        return self._data.popleft()

    async def _more(self) -> None:
        """Take something from the guest. Raises what went wrong."""
        item = await anext(self._items)
        if isinstance(item, OpEnd):
            self._done = True
            if item.kind is not EndKind.EXITED or item.code != 0:
                raise self._error(item)
        elif not item.stderr:
            self._data.append(item.data)
            self._taken += len(item.data)
            if self._taken > WINDOW and not self._decoder.state.connected:
                raise Internal("the guest sends data of a connection that doesn't stand")
        else:
            try:
                self._decoder.feed(item.data)
            except ProtocolError as error:
                raise Internal(f"the guest answered with {error}") from error

    def _error(self, end: OpEnd) -> DsecError:
        reason = os.strerror(end.code)
        if end.kind is EndKind.START_FAILED and end.stage is Stage.USER:
            return InvalidRequest(f"no such user inside the sandbox: {reason}")
        if end.kind is EndKind.START_FAILED and end.stage is not Stage.CONNECT:
            return QuotaExceeded(f"the sandbox cannot start another process: {reason}")
        if end.kind is EndKind.START_FAILED and not self._decoder.state.connected:
            return PortClosed(
                f"nothing answers at {self._where} inside the sandbox: {reason}",
                remedy="Start what listens there first; it has to listen on the loopback or on all addresses.",
                errno=errno.errorcode.get(end.code, str(end.code)),
            )
        what = reason if end.kind is EndKind.START_FAILED else end.kind.name.lower()
        return PortClosed(f"the connection to {self._where} inside the sandbox was cut: {what}")

    async def write(self, data: bytes) -> None:
        if not self._closed:
            await self._operation.write(data)

    async def close_write(self) -> None:
        if not self._closed:
            await self._operation.close_stdin()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._items.aclose()
            await self._operation.release()


async def connect(channel: GuestChannel, port: int | bytes, *, user: str | None = None) -> Stream:
    """See `EdgeClient.connect`."""
    if isinstance(port, bytes):
        where = port.decode("utf-8", "replace")
        request = OpRequest(kind=Kind.CONNECT, path=_path(port), user=_user(user))
    else:
        if not 1 <= port <= 65535:
            raise InvalidRequest("a port is 1 to 65535", field="port")
        where = f"port {port}"
        request = OpRequest(kind=Kind.CONNECT, port=port, user=_user(user))
    stream = Stream(await channel.start(request), where)
    try:
        await stream.begin()
    except BaseException:
        await stream.close()
        raise
    return stream
