"""Waiting for patterns: what matches, and what is refused because it could take long."""

from __future__ import annotations

import pytest

from dsec.api.expect import WINDOW_BYTES, Expect
from dsec.errors import InvalidRequest


def test_the_earliest_match_counts() -> None:
    expect = Expect([">>> ", r"\(gdb\) ", r"\d+!"])
    assert expect.search(b"a (gdb) >>> ") == (r"\(gdb\) ", 2, 8)
    assert expect.search(b"x 123! >>> ") == (r"\d+!", 2, 6)
    assert expect.search(b">>>") is None
    assert Expect([]).search(b"a") is None


def test_positions_count_from_the_beginning_of_the_output() -> None:
    output = b"x" * (3 * WINDOW_BYTES) + b"$ "
    assert Expect([r"\$ "]).search(output) == (r"\$ ", 3 * WINDOW_BYTES, 3 * WINDOW_BYTES + 2)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", ".*.*x", r"(.)\1", "(a*){20}", "(?=a+)", "x" * 600, "(", "\ud800"]
)
def test_patterns_that_could_take_long_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        Expect([pattern])


@pytest.mark.parametrize("pattern", [">>> |\\.\\.\\. ", "(?i)password:\\s?", "[a-z]+\\$ ", "a{2,4}b"])
def test_usual_patterns_are_taken(pattern: str) -> None:
    Expect([pattern])


def test_too_many_patterns() -> None:
    with pytest.raises(InvalidRequest):
        Expect(["a"] * 17)
