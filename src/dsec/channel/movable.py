"""A channel whose stream can leave its socket and go on at another.

Either the same bytes go on there, of a machine that ends and goes on elsewhere (`quiet`, `part`, `rejoin`). Or the
stream was cut and begins anew, of a machine whose copies break its port (`settle`, `part`, `renew`): before that the
guest has taken all that was sent, and what it said and we didn't hear it says again.
"""

from __future__ import annotations

import asyncio
import secrets
import select
import socket
from collections import deque
from typing import Any, ClassVar

from dsec.channel.operation import again
from dsec.channel.socket import SocketChannel
from dsec.errors import DsecError, Unavailable
from dsec.wire.frames import StreamDecoder
from dsec.wire.renewal import RenewableSession
from dsec.wire.session import Known, Pong, Session, Status, Synced

_NONE = -1
SETTLE_S = 20.0


class MovableChannel(SocketChannel):
    """As `SocketChannel`. In between nothing is lost, and operations wait."""

    session_kind: ClassVar[type[Session]] = RenewableSession

    def __init__(self, sock: socket.socket, **rest: Any) -> None:
        super().__init__(sock, **rest)
        self._quiet = False
        self._held: deque[bytes] | None = None
        """What is to be sent since `settle`."""
        self._whole: asyncio.Future[None] | None = None
        """Since then, until it goes on."""

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
        """Take all that the socket still has, and let go of it; `quiet` or `settle` came before."""
        self.take_in()
        if self._error is not None:
            return
        self._poller.remove(self._fd)
        self._loop.remove_writer(self._fd)
        self._socket.close()
        self._fd = _NONE

    @property
    def parted(self) -> bool:
        """Whether it has no socket."""
        return self._fd == _NONE

    def give_up(self) -> None:
        """It can't go on: as if the guest had closed it. Idempotent."""
        self._lost()

    def rejoin(self, sock: socket.socket, rest: bytes) -> None:
        """Go on at this socket, which is owned from now on. `rest`: what the other side of the last one didn't take."""
        if not self._sits_at(sock):
            return
        if rest:
            self._queue.appendleft(rest)
            self._queued += len(rest)
        self.quiet(False)

    # --- a stream that is cut ---

    async def settle(self) -> None:
        """Returns when the guest has taken everything that was sent; what is to be sent since then waits, until `renew`
        or `go_on`. Raises `Unavailable` where it doesn't answer, `OutcomeUnknown` where it is gone; then nothing
        waits."""
        await self.drained()
        if self._error is not None:
            raise again(self._error)
        self._send_releases()
        token, frame = self.session.ping()
        answer: asyncio.Future[float] = self._loop.create_future()
        self._pings[token] = (self._clock.monotonic(), answer)
        self.send(frame)
        self._held, self._whole = deque(), self._loop.create_future()
        try:
            async with asyncio.timeout(SETTLE_S):
                await answer
        except BaseException as error:
            self.go_on()
            if isinstance(error, TimeoutError):
                raise Unavailable("the machine's guest doesn't answer", remedy="Try again.") from None
            raise
        finally:
            self._pings.pop(token, None)

    def go_on(self) -> None:
        """What waits is sent."""
        held, self._held = self._held, None
        whole, self._whole = self._whole, None
        if whole is not None and not whole.done():
            whole.set_result(None)
        if held and self._error is None:
            self._queue.extend(held)
            self._loop.add_writer(self._fd, self._writable)

    async def renew(self, sock: socket.socket) -> None:
        """Begin anew at this socket, which is owned from now on; returns when it goes on. Raises `OutcomeUnknown` where
        the guest is gone, or isn't the one that it was; the caller bounds the time."""
        if not self._sits_at(sock):
            raise again(self._error or Unavailable("the channel was closed"))
        assert isinstance(self.session, RenewableSession)
        incarnation = secrets.randbits(64)
        if self._decoder is not None:
            self._decoder = StreamDecoder(incarnation)
        self._live = self._loop.create_future()
        self._queue.append(self._token + self.session.renew(incarnation))
        self._queued += len(self._queue[-1])
        self._loop.add_writer(self._fd, self._writable)
        await self._live
        self.go_on()

    def _sits_at(self, sock: socket.socket) -> bool:
        if self._error is not None:
            sock.close()
            return False
        sock.setblocking(False)
        self._socket, self._fd = sock, sock.fileno()
        self._poller.add(self._fd, self._readable)
        return True

    async def drained(self) -> None:
        """As in `SocketChannel`."""
        while self._whole is not None:
            await asyncio.shield(self._whole)
        await super().drained()

    def _take_channel_event(self, event: Known | Synced | Pong | Status) -> None:
        if isinstance(event, Synced) and self._whole is not None:
            self._changed |= self._operations  # some may have more room than they know of
            if not self._live.done():
                self._live.set_result(None)
        else:
            super()._take_channel_event(event)

    def _send(self, frame: bytes) -> None:
        if self._held is not None:
            self._held.append(frame)
            self._queued += len(frame)
        elif self._quiet:
            self._queue.append(frame)
            self._queued += len(frame)
        else:
            super()._send(frame)

    def _writable(self) -> None:
        if self._quiet:
            self._loop.remove_writer(self._fd)
        else:
            super()._writable()

    def _finish(self, error: DsecError) -> bool:
        if self._fd == _NONE:
            self._queue.clear()  # there is no socket to stop watching
        done = super()._finish(error)
        if done:
            self.go_on()
        return done
