"""The zygote's client against a peer that says what a test tells it: no root, no sandbox."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.backends.container.zygote import SpawnRequest, ZygoteClient, ZygoteState, start_zygote
from dsec.errors import CreateFailed, Internal, SandboxNotFound, Unavailable
from dsec.wire.frames import PROTOCOL_VERSION, Frame, FrameType, RequestJoiner, Tag, decode, decode_fields, field_int

WELCOME = struct.pack("<HHIQII", PROTOCOL_VERSION, 0, 77, 0xE, 1, 1)
REQUEST = SpawnRequest(
    sandbox="s1",
    lowers=("/l/2", "/l/1"),
    upper="/u",
    work="/w",
    id_base=65536,
    id_count=10,
    cgroup2="/c2",
    cgroups=("/m", "/p"),
    dev="/dev",
    cpus=(3, 5),
    no_new_privs=True,
)


class Peer:
    """The other end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen(1)
        self.listener.setblocking(False)
        self.connection: socket.socket | None = None
        self.joiner = RequestJoiner()

    async def accept(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        self.connection.setblocking(False)

    async def receive(self) -> Frame:
        assert self.connection is not None
        packet = await asyncio.get_running_loop().sock_recv(self.connection, 1 << 20)
        return decode(packet)

    def send(self, kind: FrameType, op: int = 0, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        assert self.connection is not None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.connection.sendmsg([Frame(kind, op, payload).encode()], rights)

    async def greet(self) -> None:
        await self.accept()
        hello = await self.receive()
        assert hello.type is FrameType.Z_HELLO
        self.send(FrameType.Z_WELCOME, hello.op, WELCOME)
        self.send(FrameType.Z_SANDBOX, 0, struct.pack("<II", 5, 0) + b"alive")
        self.send(FrameType.Z_EXITED, 0, struct.pack("<II", 6, 9) + b"gone")
        self.send(FrameType.Z_SYNCED, hello.op)

    def close(self) -> None:
        self.listener.close()
        if self.connection is not None:
            self.connection.close()


class Heard:
    """What the client told."""

    def __init__(self) -> None:
        self.exits: list[tuple[str, int, int]] = []
        self.lost = asyncio.Event()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[ZygoteClient, Peer, Heard]]:
    peer, heard = Peer(tmp_path / "z"), Heard()
    client = ZygoteClient(on_exit=lambda *what: heard.exits.append(what), on_lost=heard.lost.set)
    _, state = await asyncio.gather(peer.greet(), client.connect(peer.path))
    assert state == ZygoteState(77, 0xE, {"alive": 5}, {"gone": (6, 9)})
    yield client, peer, heard
    client.close()
    peer.close()


Pair = tuple[ZygoteClient, Peer, Heard]


async def test_spawn_hands_over_both_descriptors(pair: Pair) -> None:
    client, peer, heard = pair
    task = asyncio.create_task(client.spawn(REQUEST))
    frame = await peer.receive()
    fields = decode_fields(frame.payload)
    assert [v for t, v in fields if t is Tag.LOWER] == [b"/l/2", b"/l/1"]
    assert [field_int(t, v) for t, v in fields if t is Tag.CPUS] == [3, 5]
    assert [field_int(t, v) for t, v in fields if t is Tag.SPAWN_FLAGS] == [1]
    assert not [v for t, v in fields if t in {Tag.VIEW, Tag.HOSTNAME}]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = os.pidfd_open(os.getpid())
    peer.send(FrameType.Z_SPAWNED, frame.op, struct.pack("<II4Q", 9, 0, 1, 2, 3, 4), (ours.fileno(), pidfd))
    peer.send(FrameType.Z_EXITED, 0, struct.pack("<II", 9, 256) + b"s1")
    spawned = await task
    assert (spawned.pid, spawned.mount_ns, spawned.total_ns) == (9, 1, 4)
    theirs.send(b"x")
    assert await asyncio.get_running_loop().sock_recv(spawned.channel, 10) == b"x"
    assert not os.get_inheritable(spawned.pidfd)
    assert heard.exits == [("s1", 9, 256)]
    os.close(spawned.pidfd)
    os.close(pidfd)
    for sock in (ours, theirs, spawned.channel):
        sock.close()


async def test_a_networks_sockets_are_handed_over(pair: Pair) -> None:
    client, peer, _ = pair
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        for fds, error in (((tcp.fileno(), udp.fileno()), None), ((tcp.fileno(),), Internal)):
            task = asyncio.create_task(client.network("s1"))
            frame = await peer.receive()
            assert (frame.type, frame.payload) == (FrameType.Z_NETWORK, b"s1")
            peer.send(FrameType.Z_OK, frame.op, b"", fds)
            if error is not None:
                with pytest.raises(error):
                    await task
                continue
            for got, ours in zip(await task, (tcp, udp), strict=True):
                assert (got.type, got.getsockname(), got.getblocking()) == (ours.type, ours.getsockname(), False)
                got.close()
    for number, kind in ((2, SandboxNotFound), (95, Unavailable)):
        task = asyncio.create_task(client.network("s1"))
        frame = await peer.receive()
        peer.send(FrameType.Z_FAILED, frame.op, struct.pack("<II", number, 0) + b"why")
        with pytest.raises(kind, match="why"):
            await task


async def test_a_long_request_comes_in_pieces(pair: Pair) -> None:
    client, peer, _ = pair
    request = SpawnRequest(
        **{**{f: getattr(REQUEST, f) for f in REQUEST.__struct_fields__}, "lowers": ("/" + "x" * 4000,) * 50}
    )
    task = asyncio.create_task(client.spawn(request))
    whole = None
    while whole is None:
        frame = await peer.receive()
        whole = peer.joiner.add(frame)
    assert len([v for t, v in decode_fields(whole) if t is Tag.LOWER]) == 50
    peer.send(FrameType.Z_FAILED, frame.op, struct.pack("<II", 7, 0) + b"request (too long)")
    with pytest.raises(CreateFailed, match="too long") as error:
        await task
    assert error.value.details == {"errno": 7}


async def test_descriptors_for_nobody_are_closed(pair: Pair) -> None:
    client, peer, _ = pair
    task = asyncio.create_task(client.spawn(REQUEST))
    frame = await peer.receive()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    ours, theirs = socket.socketpair()
    peer.send(FrameType.Z_SPAWNED, frame.op, struct.pack("<II4Q", 9, 0, 0, 0, 0, 0), (ours.fileno(),))
    ours.close()
    theirs.setblocking(False)
    assert await asyncio.get_running_loop().sock_recv(theirs, 1) == b"", "the client closed its copy"
    theirs.close()


async def test_failures_become_errors(pair: Pair) -> None:
    client, peer, _ = pair

    async def ask(call: object, number: int) -> BaseException:
        task = asyncio.ensure_future(call)  # type: ignore[call-overload]
        frame = await peer.receive()
        peer.send(FrameType.Z_FAILED, frame.op, struct.pack("<II", number, 0) + b"why")
        result: BaseException = (await asyncio.gather(task, return_exceptions=True))[0]
        return result

    assert isinstance(await ask(client.attach("x"), 2), SandboxNotFound)
    assert isinstance(await ask(client.attach("x"), 11), Unavailable)
    assert isinstance(await ask(client.forget("x"), 16), Unavailable)
    assert isinstance(await ask(client.spawn(REQUEST), 2), CreateFailed)


async def test_no_channel_in_the_answer(pair: Pair) -> None:
    client, peer, _ = pair
    task = asyncio.create_task(client.attach("x"))
    frame = await peer.receive()
    peer.send(FrameType.Z_ATTACHED, frame.op, bytes(8))
    with pytest.raises(Internal, match="descriptors"):
        await task


@pytest.mark.parametrize("how", ["close", "nonsense"])
async def test_a_lost_connection_fails_what_waits(pair: Pair, how: str) -> None:
    client, peer, heard = pair
    task = asyncio.create_task(client.spawn(REQUEST))
    await peer.receive()
    assert peer.connection is not None
    if how == "close":
        peer.connection.close()
    else:
        peer.connection.send(b"nonsense")
    with pytest.raises(Unavailable, match="lost"):
        await task
    await asyncio.wait_for(heard.lost.wait(), 120)
    with pytest.raises(Unavailable, match="lost"):
        await client.forget("x")


async def test_close_is_quiet(pair: Pair) -> None:
    client, _, heard = pair
    client.close()
    client.close()
    await asyncio.sleep(0)
    assert not heard.lost.is_set()


async def test_shutdown_waits_until_it_is_gone(pair: Pair) -> None:
    client, peer, heard = pair
    task = asyncio.create_task(client.shutdown())
    frame = await peer.receive()
    peer.send(FrameType.Z_OK, frame.op)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    assert peer.connection is not None
    peer.connection.close()
    await task
    assert not heard.lost.is_set(), "an end that was asked for is no loss"


async def test_a_client_connects_again_and_hears_of_the_next_loss(pair: Pair) -> None:
    client, peer, heard = pair
    client.close()
    await asyncio.gather(peer.greet(), client.connect(peer.path))
    assert not heard.lost.is_set()
    assert peer.connection is not None
    peer.connection.close()
    await asyncio.wait_for(heard.lost.wait(), 120)


async def test_another_version(tmp_path: Path) -> None:
    peer = Peer(tmp_path / "z")
    client = ZygoteClient(on_exit=lambda *_: None)
    task = asyncio.create_task(client.connect(peer.path))
    await peer.accept()
    frame = await peer.receive()
    peer.send(FrameType.Z_FAILED, frame.op, struct.pack("<II", 71, 0) + b"another protocol version")
    with pytest.raises(Unavailable, match="version"):
        await task
    peer.close()


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no zygote serves"):
        await ZygoteClient(on_exit=lambda *_: None).connect(tmp_path / "none")
    with pytest.raises(Unavailable, match="cannot be started"):
        await start_zygote(tmp_path / "none", tmp_path / "socket", unit="dsec-test")
