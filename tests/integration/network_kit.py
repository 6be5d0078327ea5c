"""What the network tests share: a container backend, sandboxes with Python in them, and an edge's side that takes down
who connected and answers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from dsec.app import Config, open_host
from dsec.backends.container.backend import ContainerBackend
from dsec.backends.container.instance import ContainerInstance
from dsec.edge.config import SystemClock
from dsec.kernel import syscalls
from dsec.ports import Handle
from dsec.spec.operations import Chunk, ExecFlag, OpEnd, OpRequest
from dsec.spec.sandbox import SandboxSpec

MIB = 1 << 20
PATIENCE_S = 150.0

PRELUDE = """
import os, socket, struct, sys, threading, time
def dial(address, port, timeout=100):
    s = socket.create_connection((address, port), timeout)
    return s
def say(address, port):
    with dial(address, port) as s:
        return s.makefile().read()
def ask(server, port=53, text=b'who', timeout=100):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(timeout)
        s.connect((server, port))  # takes an answer from nobody else
        s.send(text)
        return s.recv(4096).decode()
def fails(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return type(error).__name__, error.errno
    return None
"""


class Outside:
    """The edge's side: greets every connection with the address that was asked for, and answers queries."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.queries: list[bytes] = []
        self.held: list[socket.socket] = []
        self.hold = False
        self.answer: Callable[[bytes], bytes] = b"answer to ".__add__

    def connected(self, connection: socket.socket, address: str, port: int) -> None:
        self.seen.append((address, port))
        assert connection.gettimeout() == 0
        if self.hold:
            self.held.append(connection)
            return
        connection.send(f"{address}:{port}".encode())
        connection.close()

    def query(self, packet: bytes) -> bytes | None:
        self.queries.append(packet)
        return None if packet == b"silence" else self.answer(packet)

    def close(self) -> None:
        for connection in self.held:
            connection.close()


def a_record(query: bytes) -> bytes:
    """DNS: 198.18.7.7 for every question of type A, nothing for others."""
    end = query.index(b"\0", 12) + 5
    is_a = query[end - 4 : end - 2] == b"\0\1"
    record = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + bytes((198, 18, 7, 7)) if is_a else b""
    return query[:2] + b"\x84\x80\0\1" + (b"\0\1" if is_a else b"\0\0") + bytes(4) + query[12:end] + record


class Box:
    """A sandbox of the backend's."""

    def __init__(self, backend: ContainerBackend, sandbox_id: str, handle: Handle, instance: ContainerInstance) -> None:
        self.backend = backend
        self.id = sandbox_id
        self.handle = handle
        self.instance = instance
        self.outside = Outside()

    async def serve(self) -> Outside:
        await self.instance.serve_network(self.outside.connected, self.outside.query)
        return self.outside

    async def python(self, code: str, *, prelude: str = PRELUDE) -> str:
        """Run a program inside; what it prints. It must end well."""
        return await self.run("python3", "-c", prelude + code)

    async def run(self, *argv: str) -> str:
        request = OpRequest(
            argv=tuple(word.encode() for word in argv),
            env=(b"PATH=/usr/bin:/bin",),
            timeout_ms=int(PATIENCE_S * 1000),
            flags=ExecFlag.KILL_LEFTOVERS | ExecFlag.MERGE,
        )
        operation = await self.instance.channel.start(request)
        out, end = bytearray(), None
        async for piece in operation.read():
            if isinstance(piece, Chunk):
                out += piece.data
            else:
                end = piece
        await operation.release()
        assert isinstance(end, OpEnd)
        assert end.code == 0, (end, out.decode(errors="replace"))
        return out.decode().rstrip("\n")

    async def end(self) -> None:
        self.outside.close()
        await self.backend.destroy(self.id, self.handle)


def open_backend(state: Path, run: Path) -> ContainerBackend:
    """Not opened yet."""
    return ContainerBackend(open_host(Config(state=state, run=run)), SystemClock())


def spec(*, network: bool = True, environment: str = "debian") -> SandboxSpec:
    return SandboxSpec(environment=environment, memory_bytes=256 * MIB, network={"pypi": True} if network else None)


async def make(backend: ContainerBackend, *, network: bool = True) -> Box:
    """A new sandbox."""
    wanted = spec(network=network)
    backend.check(wanted)
    sandbox_id = "n" + secrets.token_hex(8)
    handle = backend.reserve(sandbox_id, wanted)
    return Box(backend, sandbox_id, handle, await backend.create(sandbox_id, wanted, handle))


@asynccontextmanager
async def box_of(backend: ContainerBackend, *, network: bool = True, serve: bool = True) -> AsyncIterator[Box]:
    """The same, served and ended."""
    box = await make(backend, network=network)
    try:
        if serve:
            await box.serve()
        yield box
    finally:
        await box.end()


async def until(what: Callable[[], bool]) -> None:
    """Wait until it says yes."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not what():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)


def tracked_connections(pid: int) -> int:
    """That the kernel remembers for the net namespace of a process: the first column of any CPU's line."""
    table = Path(f"/proc/{pid}/net/stat/nf_conntrack")
    return int(table.read_text().split("\n")[1].split()[0], 16) if table.exists() else 0


class NetworkWatch:
    """Whether a net namespace still exists, however it is held: another one, a thread's own, gives it a number, which
    the kernel takes back when it is gone."""

    _NEWNSID, _GETNSID, _ERROR, _DONE = 88, 90, 2, 3

    def __init__(self) -> None:
        with ThreadPoolExecutor(1) as thread:
            self._netlink = thread.submit(self._open).result()

    @staticmethod
    def _open() -> socket.socket:
        syscalls.unshare(syscalls.CLONE_NEWNET)
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)

    def close(self) -> None:
        self._netlink.close()

    def add(self, pid: int, number: int) -> None:
        """Number the namespace of a process."""
        fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._ask(
                self._NEWNSID, 0x5, _attribute(1, struct.pack("=i", number)) + _attribute(3, struct.pack("=I", fd))
            )
        finally:
            os.close(fd)

    def existing(self) -> set[int]:
        """The numbers of those that are still there."""
        return self._ask(self._GETNSID, 0x301, b"")

    def _ask(self, kind: int, flags: int, payload: bytes) -> set[int]:
        body = struct.pack("=B3x", socket.AF_UNSPEC) + payload
        self._netlink.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
        found: set[int] = set()
        while True:
            data = self._netlink.recv(1 << 16)
            while data:
                size, what = struct.unpack_from("=IH", data)
                if what == self._ERROR:
                    assert struct.unpack_from("=i", data, 16)[0] == 0
                if what in {self._ERROR, self._DONE}:
                    return found
                found.add(struct.unpack_from("=i", data, 24)[0])  # its first attribute
                data = data[(size + 3) & ~3 :]


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value
