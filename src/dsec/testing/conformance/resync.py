"""The edge is killed at a frame boundary, every one in turn; the next edge goes on: nothing is lost, nothing runs
twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from contextlib import suppress
from typing import Any

import pytest

from dsec.channel import SocketChannel
from dsec.errors import DsecError
from dsec.ports import GuestChannel
from dsec.spec.operations import EndKind, ExecFlag
from dsec.testing.conformance.kit import PATIENCE_S, Factory, Feature, Sandboxes, collect, needs, request
from dsec.testing.sockets import CuttingSocket

DATA = bytes(range(256)) * 1000
TAIL = b"".join(b"%d\n" % number for number in range(1, 20_001))
SCRIPT = "echo begin >&2; cat; seq 1 20000; exit 3"
MOST_FRAMES = 300


async def story(channel: GuestChannel) -> None:
    """A command that talks in both directions, by key; attaches where it exists and sends what is missing of stdin."""
    operation = channel.find(b"story")
    if operation is None:
        operation = await channel.start(request("sh", "-c", SCRIPT, key=b"story", flags=ExecFlag.STDIN))
    speaker = operation

    async def feed() -> None:
        at = speaker.stdin_offset
        await speaker.write(DATA[at:], at)
        await speaker.close_stdin()

    _, outcome = await asyncio.gather(feed(), collect(speaker))
    assert (outcome.err, outcome.end.kind, outcome.end.code) == (b"begin\n", EndKind.EXITED, 3)
    assert hashlib.sha256(outcome.out).digest() == hashlib.sha256(DATA + TAIL).digest()


class TestResync:
    """Where an edge and its guest have a `SocketChannel` between them."""

    @pytest.mark.parametrize("way", ["sends", "receives"])
    async def test_an_edge_killed_at_every_frame_boundary(
        self, sandboxes: Sandboxes, factory: Factory, monkeypatch: pytest.MonkeyPatch, way: str
    ) -> None:
        needs(factory, Feature.SOCKET_CHANNEL)
        instance = await sandboxes.one()
        original = SocketChannel.__init__
        cuts: list[CuttingSocket] = []
        limit: int | None = None

        def cutting(self: SocketChannel, sock: socket.socket, **more: Any) -> None:
            if limit is not None:
                sock = CuttingSocket(sock, **{way: limit})
                cuts.append(sock)
            original(self, sock, **more)

        monkeypatch.setattr(SocketChannel, "__init__", cutting)
        handshake = 1 if way == "sends" else 3  # within it `open` itself would not come back
        for frames in range(handshake, MOST_FRAMES):
            limit = frames
            cuts.clear()
            await sandboxes.next_edge()
            attempt = asyncio.create_task(story(sandboxes.channel(instance)))
            cut = asyncio.create_task(cuts[0].cut.wait())
            done, _ = await asyncio.wait([attempt, cut], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            assert done
            whole = attempt.done() and not cuts[0].cut.is_set()
            for task in (attempt, cut):
                task.cancel()
                with suppress(asyncio.CancelledError, DsecError):
                    await task
            limit = None
            await sandboxes.next_edge()
            channel = sandboxes.channel(instance)
            await story(channel)
            operations = channel.operations()
            assert len(operations) == 1, "it ran twice"
            await operations[0].release()
            await channel.ping()  # the guest has taken the release: else the next edge would find the operation again
            if whole:
                assert frames > handshake + 5
                return
        raise AssertionError(f"more than {MOST_FRAMES} frames")
