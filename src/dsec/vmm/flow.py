"""One connection of a program in a machine: a socket pair, between records of its guest's and who serves it.

Owns its end of the pair. Invariants: of what the guest sent at most a window waits here, and it may not send more; of
what it is sent never more than it said that it takes; both directions end by themselves; a reset on one side is one on
the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any, Protocol

from dsec.wire.flows import MAX_DATA, WINDOW, FlowKind, encode, encode_credit
from dsec.wire.frames import ProtocolError

Connected = Callable[[socket.socket, str, int], None]

LET_GO_S = 60.0
"""How long a program may keep its side of a connection whose other side is gone: then it is reset."""
_CREDIT_AT = WINDOW // 4


class Lines(Protocol):
    """What a flow needs of its machine's network."""

    def say(self, record: bytes) -> None: ...
    def has_room(self, flow: Flow) -> bool: ...
    def gone(self, flow: Flow) -> None: ...


class _Served(socket.socket):
    """The end of who serves it: as a TCP connection's, whose close with a lingering time of nothing is a reset. A unix
    socket's other end can't see that, so it is noted here."""

    hard = False

    def setsockopt(self, *arguments: Any) -> None:
        if arguments[:2] == (socket.SOL_SOCKET, socket.SO_LINGER):
            self.hard = True
        super().setsockopt(*arguments)


class Flow:
    """Made by `MachineNetwork`. Kept small: there are a thousand."""

    __slots__ = (
        "_held",
        "_in_ended",
        "_lines",
        "_loop",
        "_may_send",
        "_ours",
        "_out_ended",
        "_reading",
        "_served",
        "_taken",
        "_timer",
        "_window",
        "_writing",
        "id",
    )  # fmt: skip

    def __init__(self, lines: Lines, number: int) -> None:
        """Raises OSError."""
        self.id = number
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._ours, theirs = socket.socketpair()
        self._served = _Served(fileno=theirs.detach())
        self._ours.setblocking(False)
        self._served.setblocking(False)
        self._held = b""
        self._window = self._may_send = WINDOW
        self._taken = 0
        self._in_ended = self._out_ended = self._reading = self._writing = False
        self._timer: asyncio.TimerHandle | None = None

    def hand_over(self, connected: Connected, address: str, port: int) -> None:
        """To who serves it."""
        connected(self._served, address, port)
        self.read_on()

    # --- from the guest ---

    def give(self, data: bytes) -> None:
        """Bytes of the program's. Raises `ProtocolError` where they are more than it may send."""
        self._window -= len(data)
        if self._window < 0 or self._in_ended:
            raise ProtocolError("more bytes of a flow than it may send")
        if self._writing:
            self._held += data
        else:
            self._send(data)

    def credit(self, size: int) -> None:
        """The program took so many. Raises `ProtocolError` where it was never sent as many."""
        self._may_send += size
        if not size or self._may_send > WINDOW:
            raise ProtocolError("more bytes of a flow were taken than were sent")
        self.read_on()

    def end(self) -> None:
        """The program has ended its direction."""
        self._in_ended = True
        if not self._writing:
            self._finish()

    def cut(self) -> None:
        """It is over inside: who serves it sees a reset."""
        with contextlib.suppress(OSError):
            self._served.send(b"\0")  # what its other end leaves unread makes the close a reset
        self._close()

    def fail(self) -> None:
        """It is over here: the program sees a reset."""
        self._lines.say(encode(FlowKind.RESET, self.id))
        self._close()

    def _send(self, data: bytes) -> None:
        try:
            sent = self._ours.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.fail()
            return
        self._took(sent)
        self._held = data[sent:]
        if self._held and not self._writing:
            self._loop.add_writer(self._ours, self._writable)
            self._writing = True

    def _writable(self) -> None:
        self._send(self._held)
        if self._writing and not self._held:
            self._loop.remove_writer(self._ours)
            self._writing = False
            if self._in_ended:
                self._finish()

    def _took(self, size: int) -> None:
        self._taken += size
        if self._taken >= _CREDIT_AT and not self._in_ended:
            self._window += self._taken
            self._lines.say(encode_credit(self.id, self._taken))
            self._taken = 0

    def _finish(self) -> None:
        with contextlib.suppress(OSError):  # its other end is closed
            self._ours.shutdown(socket.SHUT_WR)
        if self._out_ended:
            self._close()

    # --- to the guest ---

    def read_on(self) -> None:
        """There may be room for more."""
        if not self._reading and not self._out_ended and self._may_send and self._ours.fileno() >= 0:
            self._loop.add_reader(self._ours, self._readable)
            self._reading = True

    def _readable(self) -> None:
        if not self._may_send or not self._lines.has_room(self):
            self._pause()
            return
        try:
            data = self._ours.recv(min(MAX_DATA, self._may_send))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.fail()
            return
        if data:
            self._may_send -= len(data)
            self._lines.say(encode(FlowKind.DATA, self.id, data))
        elif self._served.hard:
            self.fail()
        else:
            self._ended()

    def _ended(self) -> None:
        """Who serves it has ended their direction, or all of it."""
        self._pause()
        self._out_ended = True
        self._lines.say(encode(FlowKind.END, self.id))
        if self._in_ended and not self._writing:
            self._close()
        elif self._served.fileno() < 0:
            self._timer = self._loop.call_later(LET_GO_S, self.fail)

    def _pause(self) -> None:
        if self._reading:
            self._loop.remove_reader(self._ours)
            self._reading = False

    def _close(self) -> None:
        if self._ours.fileno() < 0:
            return
        self._pause()
        if self._writing:
            self._loop.remove_writer(self._ours)
            self._writing = False
        if self._timer is not None:
            self._timer.cancel()
        self._ours.close()
        self._lines.gone(self)
