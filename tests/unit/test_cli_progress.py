"""What long work tells on a terminal: bytes, rate, time left."""

from __future__ import annotations

import pytest

from dsec.cli.progress import line

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
