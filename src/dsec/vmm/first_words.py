"""What is said on a machine's port before its channel is one: READY by a template that has booted, CONFIGURE to a
clone (native/common/wire.h)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from dsec.errors import CreateFailed, Unavailable
from dsec.spec.operations import OpRequest
from dsec.wire.frames import (
    FIELD,
    HEADER_SIZE,
    MAX_PAYLOAD,
    TOKEN_SIZE,
    Frame,
    FrameType,
    ProtocolError,
    StreamDecoder,
    Tag,
    encode,
    encode_fields,
)
from dsec.wire.session import Session

NO_NEW_PRIVS = 1  # SF_NO_NEW_PRIVS
_REHEARSED = ((b"/proc/1/exe", b"--nothing"), (b"/bin/sh", b"-c", b"/bin/true; /bin/true"), (b"/bin/true",))
"""Commands: of the guest itself, and whatever an image has of these; how they end says nothing."""
_U64 = struct.Struct("<Q")
_OP_AT = 8
"""In a header."""


class Identity(Struct, frozen=True, kw_only=True):
    """What makes a clone somebody."""

    token: bytes
    hostname: str
    pids: int
    no_new_privs: bool = False
    own: bool = False
    """Its random state and machine id are nobody else's already: of one that was somebody before, and not copied."""


Introduce = Callable[[int], bytes]
"""What is said before the channel's first words, by the number that a refusal of it shall have."""


def new_token() -> bytes:
    """As wire.h's STREAMS wants it: its first byte is none of its others."""
    while True:
        token = secrets.token_bytes(TOKEN_SIZE)
        if token[0] not in token[1:]:
            return token


async def wait_ready(sock: socket.socket) -> float:
    """Until a machine that boots says READY: seconds since its kernel began. The caller bounds the time. Raises
    `CreateFailed` where it says something else, `Unavailable` where it is gone."""
    frame = await _one_frame(sock)
    if frame.type is not FrameType.READY:
        raise CreateFailed(f"the machine said {frame.type.name} instead of READY")
    ns: int = _U64.unpack(frame.payload)[0]
    return ns / 1e9


async def warm(sock: socket.socket, paths: Sequence[str]) -> None:
    """Have files of a machine that is ready read into its memory. As `wait_ready`."""
    fields: list[tuple[Tag, int | bytes]] = []
    room = MAX_PAYLOAD
    for path in paths:
        encoded = path.encode(errors="surrogateescape")
        room -= len(encoded) + FIELD.size
        if room < 0:
            break
        fields.append((Tag.PATH, encoded))
    await asyncio.get_running_loop().sock_sendall(sock, encode(FrameType.WARM, 0, encode_fields(fields)))
    await wait_ready(sock)


async def configure(sock: socket.socket, identity: Identity) -> float:
    """Make a clone somebody: seconds that it took inside. Raises `CreateFailed` with what it says, `Unavailable`."""
    await asyncio.get_running_loop().sock_sendall(sock, encode(FrameType.CONFIGURE, 0, _fields(identity)))
    return _configured(await _one_frame(sock))


def introduction(identity: Identity, before: bytes = b"") -> Introduce:
    """As `configure` and `become` (`before`: the parent's token), in one breath with the channel's first words."""
    return lambda number: before + encode(FrameType.CONFIGURE, number, _fields(identity))


async def become(sock: socket.socket, parent: bytes, identity: Identity) -> float:
    """The same of a fork's child, which goes on as the guest of the token `parent`. The caller bounds the time."""
    loop, number = asyncio.get_running_loop(), secrets.randbits(63) | 1
    await loop.sock_sendall(sock, parent + encode(FrameType.CONFIGURE, number, _fields(identity)))
    mark, buffer = _U64.pack(number), bytearray()
    while True:
        data = b""
        with contextlib.suppress(OSError):
            data = await loop.sock_recv(sock, 65536)
        if not data:
            raise Unavailable("the virtual machine is gone")
        buffer += data
        at = buffer.find(mark, _OP_AT)
        if at < 0:  # what the parent's guest had to say yet
            del buffer[:-HEADER_SIZE]
            continue
        del buffer[: at - _OP_AT]
        try:
            frames = StreamDecoder().feed(buffer)
        except ProtocolError as error:
            raise CreateFailed(f"the machine speaks nonsense: {error}") from None
        if frames:
            return _configured(frames[0])


async def halt(sock: socket.socket, token: bytes) -> None:
    """Have a machine write everything to its disk and shut down; it says nothing."""
    await asyncio.get_running_loop().sock_sendall(sock, token + encode(FrameType.HALT))


def _fields(identity: Identity) -> bytes:
    fresh: tuple[tuple[Tag, bytes], ...] = ()
    if not identity.own:
        fresh = (Tag.SEED, os.urandom(64)), (Tag.MACHINE_ID, secrets.token_hex(16).encode())
    return encode_fields(
        (
            (Tag.TOKEN, identity.token),
            (Tag.CLOCK_NS, time.time_ns()),
            (Tag.HOSTNAME, identity.hostname.encode()),
            (Tag.PIDS, identity.pids),
            (Tag.SPAWN_FLAGS, NO_NEW_PRIVS if identity.no_new_privs else 0),
            *fresh,
        )
    )


def _configured(frame: Frame) -> float:
    if frame.type is FrameType.REFUSED:
        raise CreateFailed(f"the machine can't become one: {frame.payload[8:].decode(errors='replace')[:500]}")
    if frame.type is not FrameType.CONFIGURED:
        raise CreateFailed(f"the machine said {frame.type.name} instead of CONFIGURED")
    ns: int = _U64.unpack(frame.payload)[0]
    return ns / 1e9


async def rehearse(sock: socket.socket) -> None:
    """Have a machine that waits go through what each one does first, as somebody whom it forgets: what the VMM, the
    kernel and the guest have done once they do in a fraction of the time. Then it waits again. The caller bounds the
    time. As `configure`."""
    await configure(sock, Identity(token=(token := new_token()), hostname="rehearsal", pids=128))
    await _go_through(sock, token, _REHEARSED, again=True)


async def settle_in(sock: socket.socket, parent: bytes) -> bytes:
    """`become` one of whom nothing is left but the token that is returned, and go through what each one does first
    that changes nothing: it is quick when it is done again. The caller bounds the time. Raises as `become`."""
    await become(sock, parent, Identity(token=(token := new_token()), hostname="copy", pids=0))
    await _go_through(sock, token, ((b"/proc/self/exe", b"--nothing"),))
    return token


async def _go_through(
    sock: socket.socket, token: bytes, commands: Iterable[Sequence[bytes]], *, again: bool = False
) -> None:
    """`again`: and forget it all."""
    loop, incarnation = asyncio.get_running_loop(), secrets.randbits(64)
    session, decoder = Session(incarnation, machine=True), StreamDecoder(incarnation)

    async def until(wanted: FrameType) -> None:
        while data := await loop.sock_recv(sock, 65536):
            for frame in decoder.feed(data):
                if frame.type is FrameType.REFUSED:
                    raise CreateFailed(f"a rehearsal was refused: {frame.payload[8:].decode(errors='replace')[:500]}")
                if frame.type is not FrameType.READY:
                    session.receive(frame)
                if frame.type is wanted:
                    return
        raise Unavailable("the virtual machine is gone")

    try:
        await loop.sock_sendall(sock, token + session.hello())
        await until(FrameType.SYNCED)
        for argv in commands:
            op, packets = session.start(OpRequest(argv=tuple(argv)))
            await loop.sock_sendall(sock, b"".join(packets))
            await until(FrameType.EXIT)
            await loop.sock_sendall(sock, session.release(op))
        if again:
            await loop.sock_sendall(sock, encode(FrameType.AGAIN))
            await until(FrameType.READY)
    except OSError as error:
        raise Unavailable(f"the virtual machine is gone: {error}") from None
    except ProtocolError as error:
        raise CreateFailed(f"the machine speaks nonsense: {error}") from None


async def _one_frame(sock: socket.socket) -> Frame:
    decoder = StreamDecoder()
    loop = asyncio.get_running_loop()
    while True:
        data = b""
        with contextlib.suppress(OSError):
            data = await loop.sock_recv(sock, 4096)
        if not data:
            raise Unavailable("the virtual machine is gone")
        try:
            frames = decoder.feed(data)
        except ProtocolError as error:
            raise CreateFailed(f"the machine speaks nonsense: {error}") from None
        if len(frames) > 1:
            raise CreateFailed("the machine said more than it was asked")
        if frames:
            return frames[0]
