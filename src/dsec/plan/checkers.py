"""Comparing a submission's output with what is expected. Pure."""

from __future__ import annotations

import math

from dsec.spec.judging import Checker


def accepts(checker: Checker, output: bytes, expected: bytes, tolerance: float) -> bool:
    """For every checker but a program."""
    if checker is Checker.EXACT:
        return output == expected
    got, wanted = output.split(), expected.split()
    if checker is Checker.TOKENS:
        return got == wanted
    return len(got) == len(wanted) and all(_close(*pair, tolerance) for pair in zip(got, wanted, strict=True))


def _close(got: bytes, wanted: bytes, tolerance: float) -> bool:
    if got == wanted:
        return True
    if len(got) > 400 or b"_" in got:
        return False
    try:
        left, right = float(got), float(wanted)
    except ValueError:
        return False
    if not (math.isfinite(left) and math.isfinite(right)):
        return False
    return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
