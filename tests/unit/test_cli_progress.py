"""What long work tells on a terminal: bytes, rate, time left."""

from __future__ import annotations

import pytest

from dsec.cli.progress import line, span

MIB = 1 << 20


@pytest.mark.parametrize(
    ("done", "total", "seconds", "shown"),
    [
        (0, 0, 0.0, "fetching"),
        (10 * MIB, 40 * MIB, 5.0, "fetching  10 MiB of 40 MiB  25 %  2 MiB/s  15 s left"),
        (40 * MIB, 40 * MIB, 20.0, "fetching  40 MiB of 40 MiB  100 %  2 MiB/s"),
        (10 * MIB, 0, 5.0, "fetching  10 MiB  2 MiB/s"),
    ],
)
def test_a_step_in_words(done: int, total: int, seconds: float, shown: str) -> None:
    assert line("fetching", done, total, seconds) == shown


@pytest.mark.parametrize(
    ("virtual_s", "rate", "shown"),
    [
        (0.0, 0.0, "seed 7  0 of 7,200 virtual s  0 %  40 live  0 virtual s/s"),
        (1800.0, 45.0, "seed 7  1,800 of 7,200 virtual s  25 %  40 live  45 virtual s/s  2.0 min left"),
    ],
)
def test_a_simulation_in_words(virtual_s: float, rate: float, shown: str) -> None:
    assert span("seed 7", virtual_s, 7200.0, rate, 40) == shown
