"""A node's beats: when they come, when a node asks whether it is heard, and when it goes to another server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from dsec.bench.cluster_edges import Fleet, SimEdge
from dsec.cluster import member as members
from dsec.cluster.bus import Bus
from dsec.cluster.member import ASK_AFTER_S, BEAT_S, SOON_S, TOGETHER, UNHEARD, Membership, until_beat
from dsec.cluster.wire import Heard, Joined
from dsec.errors import Unavailable
from dsec.plan.fencing import Claim
from dsec.spec.cluster import NodeFacts


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1e6

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Line(Bus):
    """A network that answers, or doesn't."""

    def __init__(self) -> None:
        super().__init__(Client(), [])
        self.answers = True
        self.published = self.asked = self.moved = 0

    async def publish(self, subject: str, value: object) -> None:
        self.published += 1

    async def ask(self, subject: str, value: object, timeout_s: float = 5.0) -> bytes:
        self.asked += 1
        if not self.answers:
            raise Unavailable("nobody answered")
        return b""

    async def elsewhere(self) -> None:
        self.moved += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(members, "time", made)
    return made


async def joined(line: Line, state: Path, *, hears: bool = True) -> Membership:
    node = Membership(SimEdge(Fleet(9), 9), line, NodeFacts(edge=9), url="http://127.0.0.1:1", state=state)
    claim = Claim(edge=9, incarnation=1, instance=node.instance, host="h")
    await node.accept(Joined(claim=claim, brief=True, hears=hears))
    return node


def pulse(*edges: int) -> Msg:
    return Msg(_client=Client(), data=msgspec.json.encode(Heard.of(edges)))


def test_nodes_beat_at_the_same_moments_whatever_their_clocks_say() -> None:
    for edge in (0, 1, TOGETHER - 1):
        assert until_beat(edge, 100 * BEAT_S + 0.4) == pytest.approx(BEAT_S - 0.4)
    assert until_beat(TOGETHER, 100 * BEAT_S + 0.4) != pytest.approx(BEAT_S - 0.4), "not all nodes at once"
    for edge in (0, 300, 5000, 65535):
        for step in range(2000):
            assert SOON_S < until_beat(edge, step * 0.00731 - 3.0) <= BEAT_S + SOON_S
    assert 2 * (BEAT_S + SOON_S) <= 3.0, "one may be missed before a node is silent"


def test_who_is_heard_is_a_bit_a_number() -> None:
    heard = msgspec.json.decode(msgspec.json.encode(Heard.of([0, 7, 8, 159, 65535])), type=Heard)
    assert [edge for edge in range(66000) if heard.has(edge)] == [0, 7, 8, 159, 65535]
    assert not Heard.of([]).has(0)
    assert len(Heard.of(range(160)).edges) == 20


async def test_a_node_that_is_told_that_it_is_heard_asks_nothing(clock: Clock, tmp_path: Path) -> None:
    line = Line()
    node = await joined(line, tmp_path)
    await node.say()
    assert (line.asked, line.published) == (1, 0), "the first one asks"
    for _ in range(20):
        clock.now += BEAT_S
        await node.hear_heard(pulse(1, 9))
        await node.say()
    assert line.asked == 1
    line.published = 0
    for _ in range(round(3 * ASK_AFTER_S / BEAT_S)):  # nobody tells any more, or tells of others alone
        clock.now += BEAT_S
        await node.hear_heard(pulse(1, 8, 10))
        await node.say()
    assert line.asked == 1 + 3
    await node.hear_heard(Msg(_client=Client(), data=b"nonsense"))


async def test_a_node_that_is_not_heard_goes_elsewhere_once_in_two_questions(clock: Clock, tmp_path: Path) -> None:
    line = Line()
    node = await joined(line, tmp_path)
    await node.say()
    line.answers, line.asked = False, 0
    clock.now += ASK_AFTER_S
    for turn in range(1, 9):
        clock.now += BEAT_S
        await node.say()
        assert (line.asked, line.moved) == (turn, turn // UNHEARD)
    line.answers = True
    await node.say()
    line.answers = False
    clock.now += ASK_AFTER_S
    await node.say()
    assert line.moved == 4, "one question without an answer says nothing"


async def test_an_apiserver_of_the_release_before_is_asked_nothing(clock: Clock, tmp_path: Path) -> None:
    line = Line()
    node = await joined(line, tmp_path, hears=False)
    for _ in range(10):
        clock.now += BEAT_S
        await node.say()
    assert (line.asked, line.published) == (0, 10)
