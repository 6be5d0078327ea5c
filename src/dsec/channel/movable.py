"""A channel whose stream can leave its socket and go on at another: of a machine that ends, and goes on elsewhere."""

from __future__ import annotations

import select
import socket
from typing import Any

from dsec.channel.socket import SocketChannel
from dsec.errors import DsecError

_NONE = -1


class MovableChannel(SocketChannel):
    """As `SocketChannel`. In between nothing is lost, and operations wait."""

    def __init__(self, sock: socket.socket, **rest: Any) -> None:
        super().__init__(sock, **rest)
        self._quiet = False

    def quiet(self, quiet: bool) -> None:
        """Whether what is to be sent waits; what comes is taken."""
        self._quiet = quiet
        if not quiet and self._queue:
            self._loop.add_writer(self._fd, self._writable)

    def take_in(self) -> bool:
        """Take all that the socket has; whether it had anything."""
        some = False
        ready = select.poll()
        ready.register(self._fd, select.POLLIN)
        while self._error is None and ready.poll(0):
            self._readable()
            some = True
        return some

    def part(self) -> None:
        """Take all that the socket still has, and let go of it; `quiet` came before."""
        self.take_in()
        if self._error is not None:
            return
        self._poller.remove(self._fd)
        self._loop.remove_writer(self._fd)
        self._socket.close()
        self._fd = _NONE

    def rejoin(self, sock: socket.socket, rest: bytes) -> None:
        """Go on at this socket, which is owned from now on. `rest`: what the other side of the last one didn't take."""
        if self._error is not None:
            sock.close()
            return
        sock.setblocking(False)
        self._socket, self._fd = sock, sock.fileno()
        self._poller.add(self._fd, self._readable)
        if rest:
            self._queue.appendleft(rest)
            self._queued += len(rest)
        self.quiet(False)

    def _send(self, frame: bytes) -> None:
        if not self._quiet:
            super()._send(frame)
            return
        self._queue.append(frame)
        self._queued += len(frame)

    def _writable(self) -> None:
        if self._quiet:
            self._loop.remove_writer(self._fd)
        else:
            super()._writable()

    def _finish(self, error: DsecError) -> bool:
        if self._fd == _NONE:
            self._queue.clear()  # there is no socket to stop watching
        return super()._finish(error)
