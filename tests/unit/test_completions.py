"""Code in answers, and outputs compared as SandboxFusion does."""

from __future__ import annotations

import pytest

from dsec.plan.completions import extract_code, same_lines

FENCE = "`" * 3


@pytest.mark.parametrize(
    ("completion", "language", "code", "how"),
    [
        (f"Here:\n{FENCE}python\nx = 1\n{FENCE}\nbye", "python", "x = 1", "fenced"),
        (f"{FENCE}\nx = 1\n{FENCE}", "python", "x = 1", "fenced"),
        (f"{FENCE}sh\necho\n{FENCE}\n{FENCE}py\nx\n{FENCE}\n{FENCE}python\ny\n{FENCE}", "python", "x", "fenced"),
        (f"{FENCE}c++\nint\n{FENCE}", "cpp", "int", "fenced"),
        (f"{FENCE}python\nx\n{FENCE}", "cpp", "x", "fenced"),
        (f"{FENCE}python\nx = 1\nprint(x)", "python", "x = 1\nprint(x)", "incomplete_fenced"),
        (f"{FENCE}python\n  x\n\n  {FENCE}", "python", "  x\n", "fenced"),
        ("no code", "python", "", "empty"),
        ("", "python", "", "empty"),
    ],
)
def test_code_is_found(completion: str, language: str, code: str, how: str) -> None:
    assert extract_code(completion, language) == (code, how)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("3", "3", True),
        ("3\n", "3", True),
        ("\n 3 \n\n", "3", True),
        ("YES", "yes", True),
        ("a\nb", "a\nb\n", True),
        ("a \n b", "a\nb", True),
        ("a\n\nb", "a\nb", False),
        ("a b", "a  b", False),
        ("0.3333333", "0.3333334", True),
        ("0.33", "0.3333334", False),
        ("0.0", "0", True),
        ("1e-20", "0", True),
        ("nan", "nan", True),
        ("nan", "0", False),
        ("inf", "1e400", False),
        ("", "3", False),
        ("", "", True),
        ("3", "3 4", False),
    ],
)
def test_outputs_are_compared(output: str, expected: str, same: bool) -> None:
    assert same_lines(output, expected) is same
