"""Places are shared fairly, and none gets lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from dsec.grading.slots import Slots
from dsec.plan.turns import Turns


def test_many_asked_for_are_no_more_given() -> None:
    turns: Turns[str] = Turns(1)
    for number in range(100):
        turns.wait(("greedy", number), f"greedy {number}")
    assert turns.give() == "greedy 0"
    turns.wait(("modest", 0), "modest")
    assert turns.give() is None
    turns.free(("greedy", 0))
    assert turns.give() == "modest"


def test_long_work_leaves_places_for_others() -> None:
    turns: Turns[str] = Turns(4)
    for number in range(10):
        turns.wait(("long", 0), f"long {number}")
    given = [turns.give() for _ in range(3)]
    turns.wait(("short", 0), "short 0")
    turns.wait(("short", 0), "short 1")
    given.append(turns.give())
    assert given == ["long 0", "long 1", "long 2", "short 0"]
    turns.free(("short", 0))
    assert turns.give() == "short 1"  # although the long ones wait longer: they hold three places


def test_weights_are_shares() -> None:
    turns: Turns[str] = Turns(6, lambda project: 2.0 if project == "heavy" else 1.0)
    for project in ("light", "heavy"):
        for _ in range(100):
            turns.wait((project, 0), project)
    given = [turns.give() for _ in range(6)]
    for _ in range(60):
        assert given.count("heavy") == 4
        turns.free((given.pop(0), 0))
        given.append(turns.give())


def test_a_place_is_taken_where_nobody_waits() -> None:
    turns: Turns[str] = Turns(2)
    assert turns.take(("a", 0))
    turns.wait(("b", 0), "b")
    assert not turns.take(("a", 1))  # b waits for it
    assert turns.give() == "b"
    assert not turns.take(("a", 1))
    turns.free(("a", 0))
    turns.free(("b", 0))
    assert turns.take(("a", 1))
    assert turns.held == 1


def test_who_comes_back_again_and_again_gains_nothing() -> None:
    turns: Turns[str] = Turns(1)
    turns.wait(("patient", 0), "patient")
    for number in range(3):
        turns.wait((f"quick {number}", 0), f"quick {number}")
    seen = []
    for _ in range(8):
        ticket = turns.give()
        assert ticket is not None
        seen.append(ticket)
        turns.free((ticket.split(":")[0], 0))
        if ticket != "patient":
            turns.wait((ticket, 0), ticket)
    assert seen[0] == "patient"
    assert [seen.count(f"quick {number}") for number in range(3)] == [3, 2, 2]


def test_a_project_gains_nothing_by_many_submissions() -> None:
    turns: Turns[tuple[str, int]] = Turns(2)
    for number in range(50):
        turns.wait(("many", number), ("many", number))
    turns.wait(("one", 0), ("one", 0))
    assert {turns.give(), turns.give()} == {("many", 0), ("one", 0)}


@pytest.mark.parametrize("seed", range(5))
async def test_no_place_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    slots = Slots(3)
    running = 0
    most = 0

    async def work(caller: int) -> None:
        nonlocal running, most
        async with slots.turn((caller % 4, caller), rng.choice((None, 0.001, 0.01))):
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(rng.random() * 0.002)
            finally:
                running -= 1

    tasks = [asyncio.ensure_future(work(number)) for number in range(200)]
    for task in rng.sample(tasks, 80):
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(rng.random() * 0.02, task.cancel)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(each is None or isinstance(each, asyncio.CancelledError | TimeoutError) for each in ended)
    assert (running, most) == (0, 3)
    for _ in range(3):  # all places can be had again
        await asyncio.wait_for(slots.turn(("after", 0)).__aenter__(), 120)
