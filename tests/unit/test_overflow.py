"""When nodes for overflow are started and ended."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dsec.cluster.overflow import read_overflow
from dsec.errors import InvalidRequest
from dsec.plan.overflow import Machine, Overflow, OverflowPolicy, Phase, Seen

POLICY = OverflowPolicy(edges=(11, 12, 13, 14), above=0.8, below=0.5, wait_s=10, idle_s=100, ready_s=60, most_at_once=2)


class World:
    """Two nodes that are always there, and those that are started for overflow."""

    def __init__(self, policy: OverflowPolicy = POLICY) -> None:
        self.now = 0.0
        self.load = 0.0
        self.waiting = 0.0
        self.asked = True
        self.machines: dict[int, Machine] = {}
        self.seen: dict[int, Seen] = {}
        self.policy = policy
        self.overflow = Overflow(policy)

    def tick(self, seconds: float = 5.0) -> list[tuple[int, Phase]]:
        """Time passes; what was decided is done."""
        self.now += seconds
        steps = self.overflow.decide(
            self.now,
            list(self.machines.values()),
            others=[self.load, self.load],
            seen=self.seen,
            waiting=self.waiting,
            asked=self.asked,
        )
        for step in steps:
            self.machines[step.edge] = Machine(step.edge, step.phase, self.now)
        return [(step.edge, step.phase) for step in steps]

    def ticks(self, seconds: float) -> list[tuple[int, Phase]]:
        return [step for _ in range(int(seconds / 5)) for step in self.tick()]


def test_pressure_that_lasts_starts_as_many_as_are_needed() -> None:
    world = World()
    world.load = 0.9
    assert world.ticks(10) == [], "it may pass"
    world.load = 0.7
    assert world.ticks(5) == []
    world.load = 1.0
    assert world.ticks(10) == []
    assert world.ticks(5) == [(11, Phase.STARTING)], "2 nodes' worth at 80 % are 3 nodes"
    assert world.ticks(30) == [], "one that starts counts"
    world.waiting = 3.0
    assert world.ticks(30) == [(12, Phase.STARTING)], "at most two on their way"
    world.seen[11] = world.seen[12] = Seen(10, 0.2)
    steps = world.ticks(10)
    assert steps[:2] == [(11, Phase.RUNNING), (12, Phase.RUNNING)]
    assert steps[2:] == [(13, Phase.STARTING), (14, Phase.STARTING)]
    world.waiting = 100.0
    world.seen[13] = world.seen[14] = Seen(0, 0.0)
    assert world.ticks(60) == [(13, Phase.RUNNING), (14, Phase.RUNNING)], "there are no more numbers"


def test_nobody_pays_for_what_no_request_may_use() -> None:
    world = World()
    world.load, world.asked = 1.0, False
    assert world.ticks(100) == []


def test_slack_that_lasts_empties_one_and_then_stops_it() -> None:
    world = World()
    world.machines = {edge: Machine(edge, Phase.RUNNING, 0.0) for edge in (11, 12)}
    world.seen = {11: Seen(5, 0.1), 12: Seen(2, 0.1)}
    world.load = 0.3
    assert world.ticks(100) == []
    assert world.ticks(5) == [(12, Phase.EMPTYING)]
    assert world.ticks(500) == [], "what is on it goes on"
    world.seen[12] = Seen(0, 0.0)
    assert world.ticks(5) == [(12, Phase.STOPPING)]
    del world.machines[12], world.seen[12]
    assert world.ticks(200)[0] == (11, Phase.EMPTYING)
    world.load = 1.0
    assert world.ticks(20) == [(11, Phase.RUNNING)], "kept, rather than another one started"
    assert len(world.machines) == 1


def test_one_that_does_not_come_or_is_lost_is_stopped() -> None:
    world = World()
    world.load = 1.0
    world.ticks(15)
    assert world.ticks(75) == [(11, Phase.STOPPING), (12, Phase.STARTING)], "another one instead"
    world.load, world.seen[12] = 0.7, Seen(1, 0.1)
    assert world.tick() == [(12, Phase.RUNNING)]
    del world.seen[12]
    assert world.tick() == [(12, Phase.STOPPING)]


def test_a_number_that_was_taken_out_is_let_go() -> None:
    world = World()
    world.machines = {20: Machine(20, Phase.RUNNING, 0.0)}
    world.seen = {20: Seen(1, 0.1)}
    assert world.tick() == [(20, Phase.EMPTYING)]
    world.load = 1.0
    world.seen[20] = Seen(0, 0.0)
    assert world.tick() == [(20, Phase.STOPPING)]


def test_without_nodes_nothing_is_started() -> None:
    overflow = Overflow(POLICY)
    for now in range(100):
        assert overflow.decide(now, [], others=[], seen={}, waiting=9.0, asked=True) == []


@pytest.mark.parametrize("wrong", [{"edges": []}, {"edges": [1, 1]}, {"edges": [1], "below": 0.9}, {"edges": [70000]}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, OverflowPolicy)


def test_the_file_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "overflow.json"
    path.write_text('{"hook": "/etc/dsec/hook", "policy": {"edges": [161, 162], "idle_s": 600}}')
    assert read_overflow(path).policy.idle_s == 600
    for text in ('{"hook": "hook", "policy": {"edges": [1]}}', '{"hook": "/h"}', '{"hook": "/h", "polcy": {}}', "no"):
        path.write_text(text)
        with pytest.raises(InvalidRequest, match=r"overflow\.json"):
            read_overflow(path)
