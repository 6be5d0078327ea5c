"""The edge's end of a container's way out: what its programs connect to and ask, taken off two sockets inside its net
namespace.

The kernel hands both over (native/common/firewall.c says how); the zygote made them and keeps duplicates. An accepted
connection's own address is the one that the program asked for. Invariants: a turn of the event loop takes a bounded
number from one sandbox; a fault of the callbacks ends one connection or one query; after `stop` nothing here holds the
sandbox's net namespace.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import struct
from collections.abc import Callable

Connected = Callable[[socket.socket, str, int], None]
Query = Callable[[bytes], bytes | None]

BACKLOG = 4096
"""Connections that wait to be accepted, as of a new net namespace's `somaxconn`; then programs' SYNs are repeated."""
ACCEPTS_A_TURN = 32
QUERIES_A_TURN = 32
MAX_QUERY = 4096
"""Bytes; longer ones are dropped."""
PAUSE_S = 0.2
"""How long nothing is accepted after this process ran out of descriptors or memory."""

_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_IP_PKTINFO = 8
_PACKET_INFO = struct.Struct("=i4s4s")
_ANCILLARY_SPACE = socket.CMSG_SPACE(_PACKET_INFO.size)

log = logging.getLogger(__name__)


class NetworkSockets:
    """A sandbox's two sockets, served from `start` to `stop`. Owns them."""

    __slots__ = ("_connected", "_listener", "_loop", "_pause", "_query", "_questions", "_sandbox_id")

    def __init__(
        self, sandbox_id: str, sockets: tuple[socket.socket, socket.socket], connected: Connected, query: Query
    ) -> None:
        self._sandbox_id = sandbox_id
        self._listener, self._questions = sockets
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self.set_callbacks(connected, query)

    def set_callbacks(self, connected: Connected, query: Query) -> None:
        """Whom to tell from now on."""
        self._connected = connected
        self._query = query

    def start(self) -> None:
        """From now on programs inside can connect. Raises OSError."""
        self._questions.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        self._listener.listen(BACKLOG)
        # For the accepted ones, which hold the port that was asked for: a program inside may listen on it all the same.
        # Only while it listens itself, or somebody could take its own.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._loop.add_reader(self._listener, self._accept)
        self._loop.add_reader(self._questions, self._answer)

    def stop(self, *, refuse: bool = False) -> None:
        """Let go. `refuse`: new connections, and those that wait, are refused until somebody serves again; else they
        wait for the next edge. Idempotent."""
        if self._listener.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._loop.remove_reader(self._questions)
        if refuse:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            self._listener.shutdown(socket.SHUT_RD)
        self._listener.close()
        self._questions.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            if self._listener.fileno() < 0:  # the callback ended it
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _SCARCE:
                    continue  # that connection's own end
                log.warning("sandbox %s: its connections wait: %s", self._sandbox_id, error)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(PAUSE_S, self._go_on)
                return
            try:
                connection.setblocking(False)
                address, port = connection.getsockname()
                self._connected(connection, address, port)
            except Exception:
                log.exception("sandbox %s: a connection was dropped", self._sandbox_id)
                connection.close()

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _answer(self) -> None:
        for _ in range(QUERIES_A_TURN):
            if self._questions.fileno() < 0:
                return
            try:
                packet, ancillary, flags, asker = self._questions.recvmsg(MAX_QUERY, _ANCILLARY_SPACE)
            except OSError:
                return
            if flags & socket.MSG_TRUNC:
                continue
            try:
                answer = self._query(packet)
            except Exception:
                log.exception("sandbox %s: a query was dropped", self._sandbox_id)
                continue
            if answer is not None:
                self._reply(answer, ancillary, asker)

    def _reply(self, answer: bytes, ancillary: list[tuple[int, int, bytes]], asker: tuple[str, int]) -> None:
        """From the address that was asked: clients take an answer from no other."""
        for level, kind, data in ancillary:
            if (level, kind) != (socket.IPPROTO_IP, _IP_PKTINFO):
                continue
            _, _, asked = _PACKET_INFO.unpack_from(data)
            source = _PACKET_INFO.pack(0, asked, asked)
            try:
                self._questions.sendmsg([answer], [(socket.IPPROTO_IP, _IP_PKTINFO, source)], 0, asker)
            except OSError as error:  # as lost on the way: the program asks again
                log.debug("sandbox %s: an answer was not sent: %s", self._sandbox_id, error)
