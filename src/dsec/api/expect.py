"""Waiting for a pattern in output: regular expressions of a caller's, matched in bounded time.

Owns what is allowed: the matcher backtracks in the server's event loop, so that a pattern holds at most one repetition
without a small bound, and is matched over a window of a few KiB.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any, cast

from dsec.errors import InvalidRequest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import sre_constants
    import sre_parse

MAX_PATTERNS = 16
MAX_PATTERN_CHARS = 512
WINDOW_BYTES = 4096
"""A pattern with a repetition matches within the last so many bytes of output."""
_SMALL = 4
_REPEATS = (sre_constants.MAX_REPEAT, sre_constants.MIN_REPEAT)


class Expect:
    """Patterns to wait for."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises `InvalidRequest` for one that is broken or could take long."""
        if len(patterns) > MAX_PATTERNS:
            raise InvalidRequest(f"at most {MAX_PATTERNS} patterns at a time")
        self._patterns = [(pattern, *_compiled(pattern)) for pattern in patterns]
        self._seen = 0
        """So much of the output held no match when it was searched last."""

    def search(self, output: bytes | bytearray) -> tuple[str, int, int] | None:
        """The earliest match: which pattern, where it begins and ends. Call it with what grows, or was taken from."""
        fresh = max(0, self._seen - WINDOW_BYTES) if self._seen <= len(output) else 0
        found: tuple[str, int, int] | None = None
        for text, pattern, repeats in self._patterns:
            match = pattern.search(output, max(fresh, len(output) - WINDOW_BYTES) if repeats else fresh)
            if match is not None and (found is None or match.start() < found[1]):
                found = (text, match.start(), match.end())
        self._seen = 0 if found else len(output)
        return found


def _compiled(text: str) -> tuple[re.Pattern[bytes], bool]:
    """Also says whether it holds a repetition."""
    try:
        raw = text.encode()
        parsed = cast("Any", sre_parse).parse(raw, re.DOTALL)
        cost = _cost(parsed)
        if len(text) > MAX_PATTERN_CHARS or cost > 1:
            raise InvalidRequest(
                f"the pattern {text[:100]!r} could take long to match",
                remedy=f"Use at most {MAX_PATTERN_CHARS} characters with one repetition (*, +).",
            )
        return re.compile(raw, re.DOTALL), cost > 0
    except (re.error, UnicodeEncodeError, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"the pattern {text[:100]!r} is not a regular expression: {error}") from None


def _cost(parsed: Any, inside: bool = False) -> int:
    """How many repetitions there are, those inside others counted as too many."""
    cost = 0
    for op, argument in parsed:
        if op in _REPEATS:
            _, most, body = argument
            big = most > _SMALL
            cost += (2 if inside else 1) if big else 0
            cost += _cost(body, inside or most > 1)
        elif op is sre_constants.BRANCH:
            cost += sum(_cost(branch, inside) for branch in argument[1])
            cost += inside
        elif op is sre_constants.SUBPATTERN:
            cost += _cost(argument[3], inside)
        elif op in (
            sre_constants.GROUPREF,
            sre_constants.GROUPREF_EXISTS,
            sre_constants.ASSERT,
            sre_constants.ASSERT_NOT,
        ):
            cost += 2
    return cost
