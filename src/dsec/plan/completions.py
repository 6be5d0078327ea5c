"""Code in a model's answer, and how its output is compared, as SandboxFusion's online judge does it. Pure."""

from __future__ import annotations

import math
import re

_FENCED = re.compile(r"```([^\n]*)\n(.*?)\n[ \t]*```", re.DOTALL)
_OPEN = re.compile(r"```([^\n]*)\n(.*)", re.DOTALL)
_ALIASES = {
    "py": "python",
    "python3": "python",
    "c++": "cpp",
    "javascript": "nodejs",
    "js": "nodejs",
    "node": "nodejs",
    "sh": "bash",
    "shell": "bash",
    "rs": "rust",
    "golang": "go",
}
_RELATIVE, _LEAST = 1e-5, 1e-10


def extract_code(completion: str, language: str) -> tuple[str, str]:
    """The program in an answer, and how it was found: the first fenced block of the language, else the first one; a
    block that was never closed; else nothing (`empty`)."""
    for pattern, how in ((_FENCED, "fenced"), (_OPEN, "incomplete_fenced")):
        blocks = [(_language(match[1]), match[2]) for match in pattern.finditer(completion)]
        if blocks:
            own = [code for name, code in blocks if name == language]
            return (own or [code for _, code in blocks])[0], how
    return "", "empty"


def _language(tag: str) -> str:
    name = tag.strip().lower()
    return _ALIASES.get(name, name)


def same_lines(output: str, expected: str) -> bool:
    """Line by line, whatever the case of letters and the white space around a line; a line that is one number may
    differ by a relative 1e-5."""
    got, wanted = output.strip().split("\n"), expected.strip().split("\n")
    return len(got) == len(wanted) and all(_same(*pair) for pair in zip(got, wanted, strict=True))


def _same(got: str, wanted: str) -> bool:
    got, wanted = got.strip().lower(), wanted.strip().lower()
    if got == wanted:
        return True
    if len(got) > 400 or len(wanted) > 400:
        return False
    try:
        left, right = float(got), float(wanted)
    except ValueError:
        return False
    if not (math.isfinite(left) and math.isfinite(right)):
        return False
    return abs(left - right) / max(abs(right), _LEAST) < _RELATIVE
