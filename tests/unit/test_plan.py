"""Admission and expiry, as pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.plan.admission import Limits, Load, Wait, never_fits, plan
from dsec.plan.expiry import Deadlines, Expiry, expiry
from dsec.spec.causes import Cause

LIMITS = Limits(
    max_starting=4,
    max_live=10,
    max_queued=100,
    memory_capacity_bytes=1000,
    memory_reserve_bytes=50,
    disk_reserve_bytes=50,
)
EMPTY = Load(starting=0, live=0, memory_committed_bytes=0, memory_free_bytes=500, disk_free_bytes=500)


def load(**fields: int) -> Load:
    return Load(
        **{
            "starting": 0,
            "live": 0,
            "memory_committed_bytes": 0,
            "memory_free_bytes": 500,
            "disk_free_bytes": 500,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("queue", "now", "start", "wait"),
    [
        ([], EMPTY, 0, None),
        ([], load(memory_free_bytes=0), 0, None),
        ([1, 1], EMPTY, 2, None),
        ([1] * 9, EMPTY, 4, Wait.STARTING),
        ([1] * 9, load(starting=3), 1, Wait.STARTING),
        ([1] * 9, load(live=8), 2, Wait.LIVE),
        (
            [600, 600, 1],
            EMPTY,
            1,
            Wait.MEMORY_COMMITTED,
        ),  # first in, first out: the small one waits behind the large one
        ([1000], EMPTY, 1, None),
        ([1], load(memory_committed_bytes=1000), 0, Wait.MEMORY_COMMITTED),
        ([1], load(memory_free_bytes=49), 0, Wait.MEMORY_FREE),
        ([1], load(disk_free_bytes=49), 0, Wait.DISK_FREE),
    ],
)
def test_plan(queue: list[int], now: Load, start: int, wait: Wait | None) -> None:
    decided = plan(queue, now, LIMITS)
    assert (decided.start, decided.wait) == (start, wait)


def test_never_fits() -> None:
    assert never_fits(1000, LIMITS) is None
    assert "1001" in (never_fits(1001, LIMITS) or "")
    assert never_fits(1, Limits(max_starting=1, max_live=0, max_queued=1, memory_capacity_bytes=10)) is not None


@given(
    st.lists(st.integers(1, 600), max_size=30),
    st.integers(0, 6),
    st.integers(0, 12),
    st.integers(0, 1200),
)
def test_a_plan_keeps_every_limit_and_stops_only_for_one(
    queue: list[int], starting: int, live: int, committed: int
) -> None:
    decided = plan(queue, load(starting=starting, live=live, memory_committed_bytes=committed), LIMITS)
    if decided.start:
        assert starting + decided.start <= LIMITS.max_starting
        assert live + decided.start <= LIMITS.max_live
        assert committed + sum(queue[: decided.start]) <= LIMITS.memory_capacity_bytes
    assert (decided.wait is None) == (decided.start == len(queue))


class TestDeadlines:
    def test_order_and_renewal(self) -> None:
        deadlines: Deadlines[str] = Deadlines()
        assert deadlines.next_due() is None
        deadlines.set("a", 5.0)
        deadlines.set("b", 3.0)
        deadlines.set("c", 4.0)
        assert deadlines.next_due() == 3.0
        deadlines.set("b", 10.0)
        assert deadlines.next_due() == 4.0
        assert deadlines.pop_due(5.0) == ["c", "a"]
        assert deadlines.pop_due(9.9) == []
        assert deadlines.pop_due(10.0) == ["b"]
        assert len(deadlines) == 0

    def test_dropped_is_never_due(self) -> None:
        deadlines: Deadlines[str] = Deadlines()
        deadlines.set("a", 1.0)
        deadlines.set("a", None)
        deadlines.set("never", None)
        assert deadlines.next_due() is None
        assert deadlines.pop_due(100.0) == []

    def test_renewals_take_no_memory(self) -> None:
        deadlines: Deadlines[str] = Deadlines()
        for n in range(100_000):
            deadlines.set("a", float(n))
        assert len(deadlines._heap) < 1000
        assert deadlines.pop_due(1e9) == ["a"]

    @given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 20))), max_size=200))
    def test_changed_between_the_looks(self, changes: list[tuple[int, int | None]]) -> None:
        """In the order of the times, and of the last word about each where those are equal."""
        deadlines: Deadlines[int] = Deadlines()
        model: dict[int, tuple[int, int]] = {}
        for n, (key, due) in enumerate(changes):
            now = n // 8
            expected = sorted((said, each) for each, said in model.items() if said[0] <= now)
            assert deadlines.pop_due(now) == [each for _, each in expected]
            for _, each in expected:
                del model[each]
            assert deadlines.next_due() == min((said[0] for said in model.values()), default=None)
            deadlines.set(key, due)
            model.pop(key, None)
            if due is not None:
                model[key] = (due, n)

    @given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 20))), max_size=200))
    def test_like_a_plain_dictionary(self, changes: list[tuple[int, int | None]]) -> None:
        deadlines: Deadlines[int] = Deadlines()
        model: dict[int, int] = {}
        for key, due in changes:
            deadlines.set(key, due)
            if due is None:
                model.pop(key, None)
            else:
                model[key] = due
        assert deadlines.next_due() == min(model.values(), default=None)
        for now in range(21):
            expected = {key for key, due in model.items() if due == now}
            assert set(deadlines.pop_due(now)) == expected


@pytest.mark.parametrize(
    ("ttl_due", "idle_ttl_s", "idle_since", "expected"),
    [
        (None, None, 0.0, None),
        (10.0, None, 0.0, Expiry(10.0, Cause.TTL)),
        (None, 5.0, 2.0, Expiry(7.0, Cause.IDLE_TTL)),
        (None, 5.0, None, None),
        (10.0, 5.0, 2.0, Expiry(7.0, Cause.IDLE_TTL)),
        (6.0, 5.0, 2.0, Expiry(6.0, Cause.TTL)),
        (7.0, 5.0, 2.0, Expiry(7.0, Cause.TTL)),
        (10.0, 5.0, None, Expiry(10.0, Cause.TTL)),
    ],
)
def test_expiry(
    ttl_due: float | None, idle_ttl_s: float | None, idle_since: float | None, expected: Expiry | None
) -> None:
    assert expiry(ttl_due=ttl_due, idle_ttl_s=idle_ttl_s, idle_since=idle_since) == expected
