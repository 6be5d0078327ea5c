"""Readiness of many descriptors through one."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from dsec.channel.poller import Poller, poller


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_each_handler_hears_of_its_own_and_nothing_is_left() -> None:
    before = open_descriptors()
    watch = Poller(asyncio.get_running_loop())
    pairs = [socket.socketpair() for _ in range(100)]
    heard: dict[int, bytes] = {}
    done = asyncio.Event()

    def taken(number: int) -> None:
        heard[number] = pairs[number][0].recv(100)
        if len(heard) == 50:
            done.set()

    for number, (ours, _) in enumerate(pairs):
        watch.add(ours.fileno(), lambda number=number: taken(number))  # type: ignore[misc]
    for number in range(0, 100, 2):
        pairs[number][1].send(b"%d" % number)
    await asyncio.wait_for(done.wait(), 120)
    assert heard == {number: b"%d" % number for number in range(0, 100, 2)}
    for ours, theirs in pairs:
        watch.remove(ours.fileno())
        watch.remove(ours.fileno())
        ours.close()
        theirs.close()
    assert open_descriptors() == before


async def test_a_handler_may_close_another_of_the_same_swarm() -> None:
    watch = Poller(asyncio.get_running_loop())
    pairs = [socket.socketpair() for _ in range(2)]
    calls: list[int] = []

    def first_come(number: int) -> None:
        calls.append(number)
        for ours, _ in pairs:
            watch.remove(ours.fileno())
            ours.close()

    for number, (ours, theirs) in enumerate(pairs):
        watch.add(ours.fileno(), lambda number=number: first_come(number))  # type: ignore[misc]
        theirs.send(b"x")
    await asyncio.sleep(0.05)
    assert len(calls) == 1
    for _, theirs in pairs:
        theirs.close()


async def test_a_closed_other_end_is_readiness() -> None:
    watch = Poller(asyncio.get_running_loop())
    ours, theirs = socket.socketpair()
    closed = asyncio.Event()
    watch.add(ours.fileno(), closed.set)
    theirs.close()
    await asyncio.wait_for(closed.wait(), 120)
    watch.remove(ours.fileno())
    ours.close()


async def test_one_an_event_loop() -> None:
    assert poller() is poller()
    assert await asyncio.to_thread(lambda: asyncio.run(_own())) is not poller()


async def _own() -> Poller:
    return poller()
