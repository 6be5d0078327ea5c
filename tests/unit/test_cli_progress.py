"""What long work tells on a terminal: bytes, rate, time left."""

from __future__ import annotations

import sys

import pytest

from dsec.cli.progress import Steps, line, span

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


class Terminal:
    def __init__(self) -> None:
        self.shown: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.shown.append(text.strip())

    def flush(self) -> None:
        """Nothing is held back."""


def test_steps_that_go_on_together_have_each_their_own_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told in turns, as downloads and what is done with them are. What was there before doesn't count as quick."""
    now, terminal = 100.0, Terminal()
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    with Steps() as steps:
        for second in range(6):
            now = 100.0 + second
            steps.show("downloading", (10 + second) * MIB, 40 * MIB)
            now += 0.5
            steps.show("unpacking", second * MIB, 5 * MIB)
        first = "downloading  15 MiB of 40 MiB  37 %  1 MiB/s  25 s left"
        assert terminal.shown[-2:] == [
            f"{first}; unpacking  4 MiB of 5 MiB  80 %  1 MiB/s  1 s left",
            f"{first}; unpacking  5 MiB of 5 MiB  100 %  1 MiB/s",
        ]
        now = 106.0
        steps.show("downloading", 40 * MIB, 40 * MIB)
        assert terminal.shown[-1] == "downloading  40 MiB of 40 MiB  100 %  5 MiB/s"
        monkeypatch.setenv("COLUMNS", "30")
        now = 107.0
        steps.show("downloading", 40 * MIB, 40 * MIB)
        assert len(terminal.shown[-1]) <= 29
    assert terminal.shown[-1] == ""
