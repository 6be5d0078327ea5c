"""Words of a Dockerfile: quotes, escapes and variables, by the rules of Docker's own builder.

`$NAME`, `${NAME}`, `${NAME:-word}`, `${NAME:+word}`, `${NAME:?word}` and the same without the colon (then an empty
variable counts as set). Single quotes keep everything; double quotes keep spaces; the escape character keeps the next
one. No command is ever run. Raises ValueError for what can't be read; callers add the line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
MAX_TEXT = 1 << 20
"""Of one expanded word: variables that double each other end here."""


def split(text: str, escape: str = "\\") -> list[str]:
    """Words as they are written, quotes and all."""
    found: list[str] = []
    word, quote, at = "", "", 0
    while at < len(text):
        char = text[at]
        if char == escape and quote != "'" and at + 1 < len(text):
            word += text[at : at + 2]
            at += 2
            continue
        if quote:
            quote = "" if char == quote else quote
            word += char
        elif char in "'\"":
            quote = char
            word += char
        elif char.isspace():
            if word:
                found.append(word)
            word = ""
        else:
            word += char
        at += 1
    return [*found, word] if word else found


def expand(word: str, variables: Mapping[str, str], escape: str = "\\") -> str:
    """A word with its quotes taken off and its variables replaced; unknown ones are empty."""
    text, at = _Expander(word, variables, escape).run(0, "")
    assert at == len(word)
    return text


def expand_text(text: str, variables: Mapping[str, str]) -> str:
    """The body of a heredoc: variables, and a backslash before `$`, `\\` or a new line; quotes mean nothing."""
    text, _ = _Expander(text, variables, "\\", quotes=False).run(0, "")
    return text


class _Expander:
    def __init__(self, text: str, variables: Mapping[str, str], escape: str, *, quotes: bool = True) -> None:
        self._text = text
        self._variables = variables
        self._escape = escape
        self._quotes = quotes
        self._depth = 0

    def run(self, at: int, stop: str) -> tuple[str, int]:
        """Expand until `stop` or the end. Returns the text, and where it stands (behind `stop`)."""
        parts: list[str] = []
        size, quoted, text = 0, False, self._text
        while at < len(text):
            char = text[at]
            if char == stop and not quoted:
                return "".join(parts), at + 1
            if char == "'" and self._quotes and not quoted:
                end = text.find("'", at + 1)
                if end < 0:
                    raise ValueError("a single quote is not closed")
                piece, at = text[at + 1 : end], end + 1
            elif char == '"' and self._quotes:
                quoted, piece, at = not quoted, "", at + 1
            elif char == self._escape and at + 1 < len(text):
                piece, at = self._escaped(text[at + 1], quoted), at + 2
            elif char == "$":
                piece, at = self._variable(at + 1)
            else:
                piece, at = char, at + 1
            parts.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                raise ValueError(f"a word is longer than {MAX_TEXT} characters with its variables replaced")
        if quoted:
            raise ValueError("a double quote is not closed")
        if stop:
            raise ValueError("a ${ is not closed")
        return "".join(parts), at

    def _escaped(self, char: str, quoted: bool) -> str:
        if not self._quotes:
            return char if char in "$\\" else "" if char == "\n" else self._escape + char
        if quoted and char not in ('"', "$", self._escape):
            return self._escape + char
        return char

    def _variable(self, at: int) -> tuple[str, int]:
        if self._text[at : at + 1] != "{":
            match = _NAME.match(self._text, at)
            if match is None:
                return "$", at
            return self._variables.get(match[0], ""), match.end()
        match = _NAME.match(self._text, at + 1)
        if match is None:
            raise ValueError("a ${ is followed by no name")
        value, at = self._variables.get(match[0]), match.end()
        if self._text[at : at + 1] == "}":
            return value or "", at + 1
        colon = self._text[at : at + 1] == ":"
        operator = self._text[at + colon : at + colon + 1]
        if not operator:
            raise ValueError("a ${ is not closed")
        if operator not in "-+?":
            raise ValueError(
                f"${{{match[0]}...}}: of the modifiers only :-, :+ and :? are known, with or without the colon"
            )
        self._depth += 1
        if self._depth > 50:
            raise ValueError("more than 50 ${ are inside one another")
        word, at = self.run(at + colon + 1, "}")
        self._depth -= 1
        is_set = bool(value) if colon else value is not None
        if operator == "+":
            return (word if is_set else ""), at
        if operator == "?" and not is_set:
            raise ValueError(f"{match[0]} is not set: {word}"[:300])
        return (value or "") if is_set else word, at
