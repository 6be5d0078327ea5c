"""Rounds, ratios and the readings of the meter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.bench import meter
from dsec.bench.rounds import Turn, interleave, median_rate, percentile, ratio


async def test_every_contestant_begins_a_round_in_its_turn() -> None:
    order: list[tuple[int, str]] = []

    def contestant(seconds: float) -> Callable[[], Awaitable[Turn]]:
        async def turn() -> Turn:
            return Turn(10, seconds)

        return turn

    turns = await interleave(
        {"a": contestant(1.0), "b": contestant(2.0), "c": contestant(4.0)},
        3,
        lambda index, name, _: order.append((index, name)),
    )
    assert [name for index, name in order if index == 0] == ["a", "b", "c"]
    assert [name for index, name in order if index == 1] == ["b", "c", "a"]
    assert {name: len(rounds) for name, rounds in turns.items()} == {"a": 3, "b": 3, "c": 3}
    assert median_rate(turns["a"]) == 10
    assert ratio(turns, "a", "c") == 4
    assert ratio(turns, "a", "missing") is None


def test_failures_are_not_rate() -> None:
    assert Turn(10, 1.0, failures=4).rate == 6
    assert ratio({"a": [Turn(10, 1.0)], "b": [Turn(10, 1.0, failures=10)]}, "a", "b") is None


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_a_percentile_is_one_of_the_values_that_so_many_do_not_exceed(values: list[float], percent: float) -> None:
    value = percentile(values, percent)
    assert value in values
    assert sum(each <= value for each in values) >= percent / 100 * len(values) - 1e-6


def test_percentiles_of_a_hundred() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([], 50) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_meter_sees_a_process_and_its_memory() -> None:
    code = "import os, sys; held = bytearray(64 << 20); del held; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        while meter.peak_kib(process.pid) < 64 << 10 or meter.resident_kib(process.pid) > 48 << 10:
            assert process.poll() is None
        assert process.pid in meter.descendants(os.getpid())
        assert meter.cpu_s([process.pid]) >= 0
        meter.reset_peak(process.pid)
        assert meter.peak_kib(process.pid) < 64 << 10
        process.stdin.close()
    assert meter.peak_kib(process.pid) == 0
    assert meter.memory().used_kib > 0
