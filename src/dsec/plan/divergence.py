"""Whether a command's output is the same as it was. Pure.

What differs from run to run without meaning anything is put into one form on both sides before they are compared; the
list is short and each rule narrow, so that a difference in what a program found or did is not hidden.
docs/TRAJECTORY.md has it as a table.
"""

from __future__ import annotations

import re

_EXCERPT = 160
_DAY = rb"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? )?"
_MONTH = rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = rb"\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?"
_RULES: tuple[tuple[bytes, bytes], ...] = (
    (rb"\b\d{4}-\d\d-\d\d(?:[T ]" + _CLOCK + rb")?(?: ?(?:Z\b|UTC\b|[+-]\d\d:?\d\d\b))?", b"<time>"),
    (rb"\b" + _DAY + _MONTH + rb" {1,2}\d{1,2} {1,2}" + _CLOCK + rb"(?: [AP]M)?(?: [A-Z]{3,4})?(?: \d{4})?", b"<time>"),
    (rb"\b" + _DAY + rb"\d{1,2} " + _MONTH + rb" \d{4}(?: " + _CLOCK + rb")?(?: GMT| UTC| [+-]\d{4})?", b"<time>"),
    (rb"\b\d{1,2}:\d\d:\d\d(?:\.\d+)?\b", b"<time>"),
    (rb"\b1[6-9]\d{8}(?:\.\d+|\d{3}|\d{6}|\d{9})?\b", b"<time>"),
    (rb"\b\d+m\d+(?:\.\d+)?s\b", b"<duration>"),
    (rb"\b\d+(?:\.\d+)? ?(?:ns|us|\xc2\xb5s|ms|s|secs?|seconds?|minutes?)\b", b"<duration>"),
    (rb"(?i)\b(pid|ppid|process|thread)([ =:#\[(]+)\d+", rb"\1\2<pid>"),
    (rb"(?m)^\[\d+\] \d+$", b"<job>"),
    (rb"\b0x[0-9a-f]{6,16}\b", b"<address>"),
    (rb"(/tmp/|/var/tmp/)[A-Za-z0-9._-]*", rb"\1<name>"),
    (rb"(?i)\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", b"<uuid>"),
    (rb"\b(127\.0\.0\.1|localhost|0\.0\.0\.0)(:| port )\d{2,5}\b", rb"\1\2<port>"),
)
"""Dates and times (ISO, as `date` and `ls -l` say them, as headers do, of day, since 1970), durations, process ids, a
shell's jobs, addresses in memory, names of temporary files, UUIDs, ports of the loopback."""
_COMPILED = tuple((re.compile(pattern), form) for pattern, form in _RULES)


def normal(data: bytes, names: dict[bytes, bytes] | None = None) -> bytes:
    """`data` with what doesn't count put into one form. `names`: further words to replace, such as a sandbox's id."""
    for name, stands_for in (names or {}).items():
        data = data.replace(name, stands_for)
    for pattern, form in _COMPILED:
        data = pattern.sub(form, data)
    return data


def differ(expected: bytes, got: bytes, names: dict[bytes, bytes] | None = None) -> tuple[str, str] | None:
    """The first lines that differ, as text; None: the outputs are the same."""
    if expected == got:
        return None
    before, after = normal(expected, names).split(b"\n"), normal(got, names).split(b"\n")
    if before == after:
        return None
    for old, new in zip([*before, b"<end>"], [*after, b"<end>"], strict=False):
        if old != new:
            return _shown(old), _shown(new)
    return "", ""


def _shown(line: bytes) -> str:
    return line[:_EXCERPT].decode("utf-8", "replace")
