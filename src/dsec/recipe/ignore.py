"""Patterns: those of `.dockerignore`, and the wildcards of COPY. Go's rules: `*` and `?` stop at `/`, `[...]` is a
set, the escape is a backslash; `.dockerignore` has `**` for any directories, and `!` for exceptions; the last line that
matches decides. A pattern that matches a directory matches all below it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

from dsec.errors import InvalidRequest

MAX_PATTERNS = 10_000
_SPECIAL = re.compile(r"[\[&~|^]")
"""What means something in a set of Python's."""


def has_wildcard(text: str) -> bool:
    return any(char in text for char in "*?[")


class Pattern:
    """One pattern of a whole path. Takes time that is linear in pattern and name, whatever both are."""

    def __init__(self, text: str, *, deep: bool = False) -> None:
        """`deep`: `**` stands for any number of directories. Raises `InvalidRequest`."""
        parts = [part for part in text.split("/") if part]
        self._parts = [None if deep and part == "**" else _part(part) for part in parts]

    def __len__(self) -> int:
        return len(self._parts)

    def matches(self, path: list[str]) -> bool:
        """Whether it is this path."""
        return len(path) in self._ends(path)

    def matches_above(self, path: list[str]) -> bool:
        """Whether it is this path, or a directory that it lies in."""
        return any(self._ends(path))

    def _ends(self, path: list[str]) -> set[int]:
        """How much of the path, in parts, the whole pattern can stand for."""
        reached = {0}
        for part in self._parts:
            if part is None:
                reached = set(range(min(reached), len(path) + 1))
            else:
                reached = {at + 1 for at in reached if at < len(path) and part.fullmatch(path[at])}
            if not reached:
                break
        return reached


def _part(text: str) -> re.Pattern[str]:
    """Between stars, each literal piece is taken where it first fits, and never tried again elsewhere: for a pattern of
    stars and pieces that decides the same as trying them all."""
    pieces, at = [""], 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "*":
            if pieces[-1] or len(pieces) == 1:
                pieces.append("")
        elif char == "?":
            pieces[-1] += "."
        elif char == "[":
            end = _set_end(text, at)
            inside = text[at:end]
            negated = inside.startswith("^")
            inside = _SPECIAL.sub(r"\\\g<0>", inside[negated:])
            pieces[-1] += f"[{'^' if negated else ''}{inside}]"
            at = end + 1
        else:
            if char == "\\":
                char, at = text[at : at + 1], at + 1
            pieces[-1] += re.escape(char)
    first, *rest = pieces
    out = first + "".join(f"(?>.*?{piece})" for piece in rest[:-1])
    try:
        return re.compile(out + (f".*{rest[-1]}" if rest else ""), re.DOTALL)
    except re.error:
        raise InvalidRequest(f"not a pattern: {text[:200]!r}") from None


def _set_end(text: str, at: int) -> int:
    end = at + text.startswith("^", at)
    first = end
    while end < len(text) and (text[end] != "]" or end == first):
        end += 2 if text[end] == "\\" else 1
    if end >= len(text):
        raise InvalidRequest(f"not a pattern: {text[:200]!r}", remedy="A [ is not closed.")
    return end


class Ignored:
    """Says which paths of a context don't count."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Raises `InvalidRequest`."""
        self._patterns: list[tuple[Pattern, bool]] = []
        for line in lines:
            text = line.strip()
            if not text or line.startswith("#"):
                continue
            keeps = text.startswith("!")
            text = posixpath.normpath(text[keeps:].strip().lstrip("/") or ".")
            if text == "." or text.startswith("../"):
                continue
            self._patterns.append((Pattern(text, deep=True), keeps))
            if len(self._patterns) > MAX_PATTERNS:
                raise InvalidRequest(f"more than {MAX_PATTERNS} patterns of files to ignore")
        self.has_exceptions = any(keeps for _, keeps in self._patterns)
        """Then a directory that is ignored may hold files that aren't."""

    def __call__(self, path: str) -> bool:
        """Whether to leave out this path (relative, with `/`)."""
        parts = path.split("/")
        ignored = False
        for pattern, keeps in self._patterns:
            if ignored == keeps and pattern.matches_above(parts):
                ignored = not keeps
        return ignored
