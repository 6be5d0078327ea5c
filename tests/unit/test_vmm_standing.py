"""An operation of a guest's that is begun again: when, how often, and what whoever waits for it hears."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from dsec.errors import Unavailable, Unsupported
from dsec.spec.operations import Chunk, EndKind, Kind, OpEnd, OpRequest, Stage
from dsec.vmm.standing import Pace, Standing, Terms
from dsec.wire.frames import ProtocolError

PACE = Pace(first_s=0.1, most_s=0.4, good_s=60.0)
TERMS = Terms(what="it", stage=Stage.LOOK, takes="more", silent="say a word", refused=Unsupported, pace=PACE)
KILLED = OpEnd(kind=EndKind.SIGNALED, code=9)


class Guest:
    """Its operations say one thing each, and end."""

    def __init__(self, said: bytes, end: OpEnd = KILLED, good: int = 1 << 30) -> None:
        """After so many `good` ones there is no channel."""
        self.began_at: list[float] = []
        self.released = 0
        self._said = said
        self._end = end
        self._good = good

    async def start(self, _request: OpRequest) -> Any:
        if len(self.began_at) == self._good:
            raise Unavailable("no channel")
        self.began_at.append(asyncio.get_running_loop().time())
        return self

    async def read(self) -> AsyncGenerator[Chunk | OpEnd, None]:
        yield Chunk(True, 0, b"what a program says beside it")
        if self._said:
            yield Chunk(False, 0, self._said)
        yield self._end

    async def release(self) -> None:
        self.released += 1


class Listener:
    """Takes `ready`."""

    def __init__(self, guest: Guest) -> None:
        self.standing = Standing("box", guest, OpRequest(kind=Kind.LOOK), self, TERMS)  # type: ignore[arg-type]
        self.open = 0

    def begin(self, _operation: Any) -> None:
        self.open += 1

    async def hear(self, data: bytes) -> None:
        if data != b"ready":
            raise ProtocolError("what no guest says")
        self.standing.note_ready()

    def over(self) -> None:
        self.open -= 1


async def test_it_is_begun_again_ever_more_slowly_and_each_time_that_is_told() -> None:
    guest = Guest(b"ready", good=5)
    listener, told = Listener(guest), list[str]()
    listener.standing.start(told.append)
    await listener.standing.ready()
    async with asyncio.timeout(120):
        while len(told) < 5 or guest.released < 5:  # noqa: ASYNC110 (its ends are no events)
            await asyncio.sleep(0.01)
    waits = [after - before for before, after in itertools.pairwise(guest.began_at)]
    assert all(waited >= least for waited, least in zip(waits, (0.1, 0.2, 0.4, 0.4), strict=True)), waits
    assert told == ["it ended (signaled, 9)"] * 5
    listener.standing.stop()
    assert listener.open == 0


@pytest.mark.parametrize(
    ("said", "end", "words"),
    [
        (
            b"",
            OpEnd(kind=EndKind.START_FAILED, code=95, stage=Stage.LOOK, message="not here"),
            "not here; it takes more",
        ),
        (b"", OpEnd(kind=EndKind.START_FAILED, code=2, stage=Stage.EXEC, message="no file"), "no file"),
        (b"garbage", KILLED, "what no guest says"),
    ],
)
async def test_one_that_was_never_ready_is_not_begun_again(said: bytes, end: OpEnd, words: str) -> None:
    guest = Guest(said, end)
    listener = Listener(guest)
    listener.standing.start()
    with pytest.raises(Unsupported) as raised:
        await listener.standing.ready()
    assert raised.value.message == words
    assert (len(guest.began_at), guest.released, listener.open) == (1, 1, 0)


async def test_a_guest_that_says_nothing() -> None:
    class Silent(Guest):
        async def read(self) -> AsyncGenerator[Chunk | OpEnd, None]:
            await asyncio.Event().wait()
            yield KILLED

    guest = Silent(b"")
    listener = Listener(guest)
    listener.standing.start()
    with pytest.raises(Unavailable, match="does not say a word"):
        await listener.standing.ready(0.05)
    listener.standing.stop()
    async with asyncio.timeout(120):
        while not guest.released:  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0.01)
    assert listener.open == 0
