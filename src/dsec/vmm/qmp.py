"""A client of QEMU's machine protocol (QMP): JSON lines on a unix socket.

The VMM may be in the hands of what runs in it: lines are bounded, calls have a time limit, and what isn't an answer or
an event ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dsec.errors import Unavailable

MAX_LINE = 1 << 20
TIMEOUT_S = 30.0


class QmpError(Exception):
    """QEMU refused a command."""


class Qmp:
    """One connection. Use `open`."""

    def __init__(self, sock: socket.socket, on_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._socket = sock
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._closed = False
        self._greeting: asyncio.Future[Any] = self._loop.create_future()
        self._loop.add_reader(sock.fileno(), self._readable)

    @classmethod
    async def open(cls, path: Path, on_event: Callable[[str, dict[str, Any]], None]) -> Qmp:
        """Connect and greet. Raises `Unavailable`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise Unavailable(f"the VMM's control socket can't be reached: {error}") from None
        found = cls(sock, on_event)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await found._greeting
            await found.call("qmp_capabilities")
        except BaseException as error:
            found.close()
            if isinstance(error, TimeoutError):
                raise Unavailable("the VMM doesn't answer") from None
            raise
        return found

    async def call(self, command: str, *, fd: int | None = None, **arguments: Any) -> Any:
        """The command's result; `fd` goes with it. Raises `QmpError` where it is refused, `Unavailable`."""
        if self._closed:
            raise Unavailable("the VMM is gone")
        self._number += 1
        number = self._number
        message = {"execute": command, "id": number} | ({"arguments": arguments} if arguments else {})
        answer = self._waiting[number] = self._loop.create_future()
        try:
            data = msgspec.json.encode(message) + b"\n"
            if fd is None:
                self._socket.send(data)
            else:
                socket.send_fds(self._socket, [data], [fd])
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the VMM doesn't answer {command}") from None
        except OSError as error:
            raise Unavailable(f"the VMM can't be told {command}: {error}") from None
        finally:
            self._waiting.pop(number, None)

    def send(self, command: str) -> None:
        """A command whose answer nobody waits for. Nothing where the VMM is gone."""
        with contextlib.suppress(OSError):
            self._socket.send(msgspec.json.encode({"execute": command, "id": 0}) + b"\n")

    def close(self) -> None:
        """Idempotent; calls that wait raise."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for waiting in (*self._waiting.values(), self._greeting):
            if not waiting.done():
                waiting.set_exception(Unavailable("the VMM is gone"))
                waiting.exception()

    def _readable(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._socket.recv(65536)
        self._buffer += data
        if not data or len(self._buffer) > MAX_LINE:
            self.close()
            return
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer[:] = rest
        for line in lines:
            if not line.strip():
                continue
            try:
                self._take(msgspec.json.decode(line, type=dict[str, Any]))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.close()
                return

    def _take(self, message: dict[str, Any]) -> None:
        if "QMP" in message:
            if not self._greeting.done():
                self._greeting.set_result(None)
            return
        if isinstance(message.get("event"), str):
            data = message.get("data")
            self._on_event(message["event"], data if isinstance(data, dict) else {})
            return
        number = message.get("id")
        waiting = self._waiting.get(number) if isinstance(number, int) else None
        if waiting is None or waiting.done():
            return
        if "return" in message:
            waiting.set_result(message["return"])
        else:
            error = message.get("error")
            waiting.set_exception(QmpError(str(error.get("desc") if isinstance(error, dict) else error)[:500]))
