"""One connection from inside, from the moment it arrives to its last byte.

Owns its socket and what is known about it. Invariant: `end` is told once; afterwards the socket is closed, whoever had
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from dsec.egress.http1 import Refused
from dsec.egress.meters import Use
from dsec.egress.splice import Gate, Splice, reset
from dsec.plan.egress import Rule
from dsec.spec.network import Address, Reason

if TYPE_CHECKING:
    from dsec.egress.box import Peer

_CHUNK = 64 << 10
_TCP_QUERIES = 100


class Flight:
    """Kept small: there are thousands."""

    __slots__ = (
        "_back",
        "_ended",
        "_out",
        "_task",
        "address",
        "began",
        "connected",
        "done",
        "name",
        "outside",
        "permission",
        "port",
        "proxied",
        "quiet",
        "rule",
        "sock",
        "splice",
        "transport",
        "use",
        "where",
    )

    def __init__(self, sock: socket.socket, address: str, port: int, began: float) -> None:
        self.sock = sock
        self.address = address
        """As the program named it."""
        self.port = port
        self.began = began
        self.name: str | None = None
        self.where: Address | None = None
        """Where the program named an address itself."""
        self.outside = ""
        """The address that was connected to."""
        self.permission = ""
        self.rule: Rule | None = None
        self.use: Use | None = None
        self.splice: Splice | None = None
        self.transport: asyncio.BaseTransport | None = None
        self.done: Callable[[Reason, str], None] = lambda reason, text: None
        self.connected = False
        """It got as far as another side."""
        self.proxied = False
        """A request to the proxy, which wants an answer in HTTP."""
        self.quiet = False
        """Nothing to tell: it was a look-up, or its requests were told one by one."""
        self._out = self._back = 0
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    @property
    def out(self) -> int:
        """Bytes that left the sandbox."""
        return self._out if self.splice is None else self.splice.out.count

    @property
    def back(self) -> int:
        """Bytes that came into it."""
        return self._back if self.splice is None else self.splice.back.count

    def count(self, *, out: int = 0, back: int = 0) -> None:
        """Bytes that no splice counts."""
        self._out += out
        self._back += back

    def end(self, reason: Reason, text: str = "") -> None:
        """Close it and tell."""
        if self._ended:
            return
        self._ended = True
        self._close(reason, text)
        self.done(reason, text)

    def _close(self, reason: Reason, text: str) -> None:
        if self.splice is not None:
            self.splice.cut(reason, text)
        elif self.transport is not None:
            self.transport.close()
        elif reason is Reason.GRANTED:
            self.sock.close()
        else:
            reset(self.sock)

    def spliced_end(self, reason: Reason, text: str) -> None:
        """The splice has ended by itself, and closed the sockets."""
        self.end(reason, text)

    def follow(self, task: asyncio.Task[None]) -> None:
        """The task that serves it, until it ends or a splice takes over."""
        self._task = task
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            self._close(Reason.ENDED, "")
            self.end(Reason.ENDED)

    def cut(self, reason: Reason) -> None:
        """End it, whatever it is doing. Told now; closed now, or as soon as its task has let go of the socket."""
        if self._ended:
            return
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()
        if self._task is None or not self._task.cancel():
            self.end(reason)
        else:
            self._ended = True
            self.done(reason, "")


async def read_head(sock: socket.socket, gate: Gate) -> bytes:
    """Read until something passes the gate. Raises `Refused`."""
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(sock, _CHUNK)
        if not data:
            raise Refused(Reason.SAID_NOTHING, "it closed")
        passed = gate.feed(data)
        if passed:
            return passed


async def explain(flight: Flight, reason: Reason) -> None:
    """Where a program spoke HTTP and gets nothing, it is told why."""
    spoke = flight.proxied or (flight.port == 80 and flight.name is not None)
    if not spoke or flight.splice is not None or reason is Reason.SAID_NOTHING:
        return
    outside = reason in (Reason.UNRESOLVED, Reason.CONNECT_FAILED)
    text = f"dsec: {flight.name or flight.where or flight.address}: {reason.value}\n".encode()
    head = (
        f"HTTP/1.1 {'502 Bad Gateway' if outside else '403 Forbidden'}\r\ncontent-type: text/plain\r\n"
        f"content-length: {len(text)}\r\nx-dsec-reason: {reason.value}\r\nconnection: close\r\n\r\n"
    )
    with contextlib.suppress(OSError):
        flight.sock.send(head.encode() + text)
        flight.sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(1.0):  # unread data would make the close a reset, and the answer lost
            while await asyncio.get_running_loop().sock_recv(flight.sock, _CHUNK):
                pass


async def pump(flight: Flight, peer: Peer) -> None:
    """Bytes to and from a port of another sandbox, until both directions have ended."""
    loop, sock = asyncio.get_running_loop(), flight.sock
    flight.connected = True

    async def out() -> None:
        while data := await loop.sock_recv(sock, _CHUNK):
            flight.count(out=len(data))
            await _metered(flight, len(data))
            await peer.write(data)
        await peer.close_write()

    async def back() -> None:
        while data := await peer.read():
            flight.count(back=len(data))
            await _metered(flight, len(data))
            await loop.sock_sendall(sock, data)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(out())
            group.create_task(back())
    except* OSError as errors:
        raise OSError(str(errors.exceptions[0])) from None
    except* Refused as errors:
        refused = errors.exceptions[0]
        raise refused if isinstance(refused, Refused) else Refused(Reason.RESET) from None
    finally:
        await peer.close()


async def _metered(flight: Flight, size: int) -> None:
    if flight.use is not None:
        wait_s = flight.use.take(size)
        if wait_s > 0:
            await asyncio.sleep(wait_s)


async def answer_dns(flight: Flight, query: Callable[[bytes], bytes | None], timeout_s: float) -> None:
    """DNS over TCP: each message behind its length."""
    loop, sock = asyncio.get_running_loop(), flight.sock
    flight.quiet = True
    held = b""
    for _ in range(_TCP_QUERIES):
        async with asyncio.timeout(timeout_s):
            while len(held) < 2 or len(held) < 2 + int.from_bytes(held[:2], "big"):
                data = await loop.sock_recv(sock, 4096)
                if not data:
                    flight.end(Reason.GRANTED)
                    return
                held += data
            end = 2 + int.from_bytes(held[:2], "big")
            message, held = held[2:end], held[end:]
            answer = query(message)
            if answer is not None:
                await loop.sock_sendall(sock, len(answer).to_bytes(2, "big") + answer)
    flight.end(Reason.GRANTED)
