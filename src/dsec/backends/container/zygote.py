"""The edge's side of the zygote: start it, connect, spawn and attach sandboxes, hear of their ends.

Owns: one SOCK_SEQPACKET connection. Invariants: every descriptor that arrives has exactly one owner (the caller who is
handed it, else it is closed here); a request that gets no answer before the connection ends fails; `on_exit` is called
once for each Z_EXITED frame, after the answer to the spawn that made the sandbox. The frames are
native/common/wire.h's; the zygote is native/zygote.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from dsec.errors import CreateFailed, DsecError, Internal, SandboxNotFound, Unavailable
from dsec.kernel import lasting
from dsec.wire.frames import (
    HEADER_SIZE,
    MAX_PAYLOAD,
    PROTOCOL_VERSION,
    Frame,
    FrameType,
    ProtocolError,
    Tag,
    decode,
    encode,
    field,
    joined,
    path_field,
    split_request,
)

NO_NEW_PRIVS = 1  # SF_NO_NEW_PRIVS
NETWORK = 2  # SF_NETWORK
CELLS = 4  # SF_CELLS
_READS_AT_ONCE = 64
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)  # arithmetic on IntFlag is slow
_RIGHTS_SPACE = socket.CMSG_SPACE(2 * array.array("i").itemsize)


class SpawnRequest(Struct, frozen=True, kw_only=True):
    """One sandbox to clone. All paths are absolute and exist; see docs/THREATS.md for what they must hold."""

    sandbox: str
    lowers: tuple[str, ...]
    """Mounted layers, id-mapped into the range below; top first."""
    upper: str
    """Owned by `id_base`, empty at first; on one file system with `work`."""
    work: str
    id_base: int
    """At least 65536. Inside 0..id_count-1 is outside id_base..id_base+id_count-1."""
    id_count: int
    cgroup2: str
    """A directory in a v2 hierarchy. The zygote gives it and its cgroup.procs to root inside."""
    cgroups: tuple[str, ...] = ()
    """v1 directories, one a controller."""
    dev: str
    view: str | None = None
    hostname: str | None = None
    """None: the sandbox's id."""
    cpus: tuple[int, ...] = ()
    oom_score_adj: int = 0
    no_new_privs: bool = False
    network: bool = False
    """It will be given a network: its net namespace is one of those that are prepared for it."""
    cells: bool = False
    """For function calls: in place of the guest the program that makes cells; the channel speaks its messages."""

    def encode(self) -> bytes:
        """The payload of a Z_SPAWN. Raises ValueError for more than a request can hold."""
        fields = [
            field(Tag.SANDBOX, self.sandbox.encode()),
            field(Tag.ID_BASE, self.id_base),
            field(Tag.ID_COUNT, self.id_count),
            *[path_field(Tag.LOWER, lower) for lower in self.lowers],
            field(Tag.UPPER, os.fsencode(self.upper)),
            field(Tag.WORK, os.fsencode(self.work)),
            path_field(Tag.CGROUP2, self.cgroup2),
            *[path_field(Tag.CGROUP, cgroup) for cgroup in self.cgroups],
            path_field(Tag.DEV, self.dev),
        ]
        if self.view is not None:
            fields.append(path_field(Tag.VIEW, self.view))
        if self.hostname is not None:
            fields.append(field(Tag.HOSTNAME, self.hostname.encode()))
        fields += [field(Tag.CPUS, cpu) for cpu in self.cpus]
        fields.append(field(Tag.OOM_SCORE_ADJ, self.oom_score_adj))
        flags = (NO_NEW_PRIVS if self.no_new_privs else 0) | (NETWORK if self.network else 0)
        flags |= CELLS if self.cells else 0
        fields.append(field(Tag.SPAWN_FLAGS, flags))
        return joined(fields)


class Spawned(Struct, frozen=True):
    """A sandbox whose guest was executed. The caller owns `channel` and `pidfd` (-1: none could be made)."""

    pid: int
    channel: socket.socket
    pidfd: int
    mount_ns: int = 0
    clone_ns: int = 0
    setup_ns: int = 0
    total_ns: int = 0


class ZygoteState(Struct, frozen=True):
    """What a zygote holds when an edge connects."""

    pid: int
    epoch: int
    """Random 64 bits, another for each zygote."""
    live: dict[str, int]
    """Sandbox id to pid."""
    ended: dict[str, tuple[int, int]]
    """Sandbox id to pid and wait status, of those that ended and were not forgotten yet."""


async def start_zygote(programs: Path, socket_path: str | Path, *, unit: str, net_pool: int = 32) -> None:
    """Start a zygote that outlives this process; returns when it listens on `socket_path`. `programs`: the directory
    with it and what it executes inside.

    Where systemd runs the host it gets a scope of its own, named `unit`, so that a restart of our service doesn't take
    it (and every sandbox) down. Raises `Unavailable` with what the zygote said.
    """
    argv = [str(programs / "zygote"), "--socket", str(socket_path), "--net-pool", str(net_pool)]
    argv += ["--guest", str(programs / "guest"), "--cells", str(programs / "cells")]
    try:
        said = await lasting.start(argv, unit=unit)
    except OSError as error:
        raise Unavailable(f"the zygote cannot be started: {error}", remedy=f"Is {argv[0]} there?") from error
    if said:
        raise Unavailable(f"the zygote did not start: {said}", remedy="`dsec doctor` lists what the host lacks.")


class ZygoteClient:
    """One connection to a zygote. A later connection of anyone's ends this one."""

    def __init__(
        self,
        *,
        on_exit: Callable[[str, int, int], None],
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """`on_exit(sandbox, pid, wait_status)`; `on_lost()` when the connection ends without `close`."""
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._quiet = False  # this end of the connection was asked for
        self._gone = asyncio.Event()
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ops = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Frame, list[int]]]] = {}
        self._outgoing: deque[bytes] = deque()
        self._greeting: tuple[dict[str, int], dict[str, tuple[int, int]]] | None = None
        self._synced: asyncio.Future[None] | None = None

    async def connect(self, path: str | Path) -> ZygoteState:
        """Connect (again, if need be), say hello and learn what runs.

        Raises `Unavailable` where no zygote of our version serves there.
        """
        loop = self._loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise Unavailable(f"no zygote serves at {path}: {error}") from error
        self._socket = sock
        self._quiet = False
        self._gone = asyncio.Event()
        loop.add_reader(sock, self._readable)
        self._synced = loop.create_future()
        live: dict[str, int] = {}
        ended: dict[str, tuple[int, int]] = {}
        self._greeting = (live, ended)
        try:
            welcome, _ = await self._ask(FrameType.Z_HELLO, struct.pack("<HHI", PROTOCOL_VERSION, 0, 0))
            self._expect(welcome, FrameType.Z_WELCOME)
            await self._synced
        except BaseException:
            self.close()
            raise
        _, _, pid, epoch, _, _ = struct.unpack("<HHIQII", welcome.payload)
        return ZygoteState(pid, epoch, live, ended)

    async def spawn(self, request: SpawnRequest) -> Spawned:
        """Clone a sandbox; returns when its guest was executed.

        A caller that is cancelled, or told `Unavailable` (the connection is lost), must destroy the sandbox by its
        cgroup: it may exist. Raises `CreateFailed` with the stage where it doesn't.
        """
        frame, fds = await self._ask(FrameType.Z_SPAWN, request.encode())
        if frame.type is not FrameType.Z_SPAWNED:
            raise self._failure(frame, CreateFailed)
        pid, _, mount, clone, setup, total = struct.unpack("<II4Q", frame.payload)
        channel, pidfd = self._take(fds)
        return Spawned(pid, channel, pidfd, mount, clone, setup, total)

    async def attach(self, sandbox: str) -> Spawned:
        """A fresh channel to a live sandbox; its guest drops the former one. Raises `SandboxNotFound` for no such
        live one."""
        frame, fds = await self._ask(FrameType.Z_ATTACH, sandbox.encode())
        if frame.type is not FrameType.Z_ATTACHED:
            raise self._failure(frame, Unavailable)
        channel, pidfd = self._take(fds)
        return Spawned(struct.unpack_from("<I", frame.payload)[0], channel, pidfd)

    async def network(self, sandbox: str) -> tuple[socket.socket, socket.socket]:
        """The sockets to which a live sandbox's way out leads, made if it has none yet: a TCP one, which listens only
        if an earlier edge made it, and a UDP one for DNS. The caller owns them. Raises `SandboxNotFound`,
        `Unavailable`."""
        frame, fds = await self._ask(FrameType.Z_NETWORK, sandbox.encode())
        if frame.type is not FrameType.Z_OK:
            raise self._failure(frame, Unavailable)
        if len(fds) != 2:
            _close_all(fds)
            raise Internal("the zygote sent no sockets: is this process out of descriptors?")
        kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM)
        tcp, udp = (socket.socket(socket.AF_INET, kind, 0, fd) for kind, fd in zip(kinds, fds, strict=True))
        tcp.setblocking(False)
        udp.setblocking(False)
        return tcp, udp

    async def forget(self, sandbox: str) -> None:
        """Its end is on record: the zygote need not tell it again. Idempotent. Raises `Unavailable` while it runs."""
        frame, _ = await self._ask(FrameType.Z_FORGET, sandbox.encode())
        if frame.type is not FrameType.Z_OK:
            raise self._failure(frame, Unavailable)

    def forget_soon(self, sandbox: str) -> None:
        """`forget` without waiting for it. Nothing where the connection is lost."""
        if self._socket is not None:
            self._send(iter((encode(FrameType.Z_FORGET, next(self._ops), sandbox.encode()),)))

    async def shutdown(self) -> None:
        """End every sandbox, a few at a time, and then the zygote. Returns when it is gone."""
        gone = self._gone
        self._quiet = True
        frame, _ = await self._ask(FrameType.Z_SHUTDOWN, b"")
        if frame.type is not FrameType.Z_OK:
            raise self._failure(frame, Unavailable)
        await gone.wait()

    def close(self) -> None:
        """Let go of the connection; zygote and sandboxes go on. Idempotent."""
        self._quiet = True
        self._lost()

    # --- the connection ---

    def _ask(self, kind: FrameType, payload: bytes) -> asyncio.Future[tuple[Frame, list[int]]]:
        assert self._loop is not None, "not connected"
        future: asyncio.Future[tuple[Frame, list[int]]] = self._loop.create_future()
        if self._socket is None:
            future.set_exception(Unavailable("the connection to the zygote is lost"))
            return future
        op = next(self._ops)
        self._waiting[op] = future
        if kind is FrameType.Z_SPAWN:
            self._send(split_request(kind, op, payload))
        else:
            self._send(iter((encode(kind, op, payload),)))
        return future

    def _send(self, packets: Iterator[bytes]) -> None:
        was_empty = not self._outgoing
        self._outgoing.extend(packets)
        if was_empty:
            self._flush()

    def _flush(self) -> None:
        sock, loop = self._socket, self._loop
        if sock is None or loop is None:
            return
        while self._outgoing:
            try:
                sock.send(self._outgoing[0])
            except (BlockingIOError, InterruptedError):
                loop.add_writer(sock, self._flush)
                return
            except OSError:
                self._lost()
                return
            self._outgoing.popleft()
        loop.remove_writer(sock)

    def _readable(self) -> None:
        for _ in range(_READS_AT_ONCE):
            if self._socket is None:
                return
            try:
                # not socket.recv_fds: it loses the flags
                packet, ancillary, _, _ = self._socket.recvmsg(HEADER_SIZE + MAX_PAYLOAD, _RIGHTS_SPACE, _RECEIVE)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._lost()
                return
            fds = [fd for _, _, data in ancillary for fd in array.array("i", data[: len(data) - len(data) % 4])]
            try:
                frame = decode(packet) if packet else None
            except ProtocolError:
                frame = None
            if frame is None:
                _close_all(fds)
                self._lost()
                return
            self._receive(frame, fds)

    def _receive(self, frame: Frame, fds: list[int]) -> None:
        match frame.type:
            case FrameType.Z_EXITED | FrameType.Z_SANDBOX:
                pid, status = struct.unpack_from("<II", frame.payload)
                sandbox = frame.payload[8:].decode()
                if self._greeting is None:
                    self._on_exit(sandbox, pid, status)
                elif frame.type is FrameType.Z_SANDBOX:
                    self._greeting[0][sandbox] = pid
                else:
                    self._greeting[1][sandbox] = (pid, status)
            case FrameType.Z_SYNCED:
                self._greeting = None
                if self._synced is not None and not self._synced.done():
                    self._synced.set_result(None)
            case _:
                future = self._waiting.pop(frame.op, None)
                if future is None or future.done():  # the asker was cancelled
                    _close_all(fds)
                else:
                    future.set_result((frame, fds))

    def _lost(self) -> None:
        sock, self._socket = self._socket, None
        if sock is None:
            return
        if self._loop is not None:
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
        sock.close()
        self._outgoing.clear()
        waiting: list[asyncio.Future[Any]] = [*self._waiting.values()]
        if self._synced is not None:
            waiting.append(self._synced)
        self._waiting.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(Unavailable("the connection to the zygote is lost"))
                future.exception()  # who still waits is told; nobody waiting is no fault
        self._gone.set()
        if self._on_lost is not None and not self._quiet:
            self._on_lost()

    @staticmethod
    def _take(fds: list[int]) -> tuple[socket.socket, int]:
        if not fds:
            raise Internal("the zygote sent no channel: is this process out of descriptors?")
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fds[0])  # told, it need not ask the kernel
        channel.setblocking(False)
        return channel, fds[1] if len(fds) > 1 else -1

    @staticmethod
    def _expect(frame: Frame, kind: FrameType) -> None:
        if frame.type is not kind:
            raise ZygoteClient._failure(frame, Unavailable)

    @staticmethod
    def _failure(frame: Frame, kind: type[DsecError]) -> DsecError:
        if frame.type is not FrameType.Z_FAILED:
            return Internal(f"the zygote answered {frame.type.name}")
        number = struct.unpack_from("<I", frame.payload)[0]
        text = frame.payload[8:].decode(errors="replace")
        if kind is Unavailable and number == 2:
            return SandboxNotFound(text)
        return kind(f"zygote: {text}", errno=number)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
