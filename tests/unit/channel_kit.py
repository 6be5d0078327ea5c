"""What the tests of the channel share: a fake guest, and edges that come and go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from dsec.backends.fake import FakeGuest
from dsec.channel import GuestOperation, SocketChannel, Spool
from dsec.edge.config import SystemClock
from dsec.ports import Clock
from dsec.spec.operations import ExecFlag, OpEnd, OpRequest
from dsec.testing import seqpacket_pair

BIG = 1_000_000
NO_FLAGS = ExecFlag(0)
SEQ = b"".join(b"%d\n" % n for n in range(1, 100_001))


class Bench:
    """A guest, and edges that come and go."""

    def __init__(self, directory: Path, clock: Clock | None = None) -> None:
        self.guest = FakeGuest(hostname=b"h", disk_bytes=1 << 30)
        self.spool = directory / "spool"
        self.clock = clock or SystemClock()
        self.channels: list[SocketChannel] = []
        self.broken: list[str] = []
        self.eofs = 0

    async def edge(self, wrap: Callable[[socket.socket], socket.socket] = lambda sock: sock) -> SocketChannel:
        ours, theirs = seqpacket_pair()
        self.guest.attach(theirs)

        def on_eof() -> None:
            self.eofs += 1

        channel = await SocketChannel.open(
            wrap(ours), clock=self.clock, spool=Spool(self.spool), on_broken=self.broken.append, on_eof=on_eof
        )
        self.channels.append(channel)
        return channel

    def spooled(self) -> list[str]:
        return sorted(path.name for path in self.spool.iterdir()) if self.spool.exists() else []

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()
        self.guest.die()


def command(*argv: str, key: bytes | None = None, flags: ExecFlag = NO_FLAGS) -> OpRequest:
    return OpRequest(argv=tuple(word.encode() for word in argv), key=key, flags=flags)


async def collect(operation: GuestOperation, out: int = 0, err: int = 0) -> tuple[bytes, bytes, OpEnd]:
    got = [bytearray(), bytearray()]
    at = [out, err]
    async for item in operation.read(out, err):
        if isinstance(item, OpEnd):
            return bytes(got[0]), bytes(got[1]), item
        assert item.offset == at[item.stderr], "a gap or a repetition"
        at[item.stderr] += len(item.data)
        got[item.stderr] += item.data
    raise AssertionError("no end")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the condition is somebody else's state
            await asyncio.sleep(0.001)
