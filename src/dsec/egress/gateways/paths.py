"""What a request's path means: decided once, on the decoded segments, and sent on in one canonical spelling, so that
what was checked is what the upstream gets. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote, unquote_to_bytes

MAX_PATH = 4096

_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SAFE = "-._~!$&'()*+,;=:@"


class BadPath(ValueError):
    """A path that different programs would read differently; the text says what is odd about it."""


def segments(raw: str) -> list[str]:
    """The decoded segments of a raw path; a trailing slash is an empty last one. `/a/b%20c` is `["a", "b c"]`.

    Raises `BadPath` for dot segments (also with parameters, `..;x`), empty ones, encoded slashes, backslashes, control
    characters, text that isn't UTF-8, and what would decode twice.
    """
    if not raw.startswith("/") or len(raw) > MAX_PATH:
        raise BadPath(f"a path begins with / and has at most {MAX_PATH} characters")
    if _BAD_ESCAPE.search(raw):
        raise BadPath("a % that isn't followed by two hexadecimal digits")
    parts = raw[1:].split("/")
    decoded = []
    for index, part in enumerate(parts):
        try:
            text = unquote_to_bytes(part).decode()
        except UnicodeDecodeError as error:
            raise BadPath("a path that isn't UTF-8") from error
        if not text and index < len(parts) - 1:
            raise BadPath("an empty segment")
        if text.split(";", 1)[0] in {".", ".."}:
            raise BadPath("a dot segment")
        if any(character in "/\\%#?" or ord(character) < 32 or ord(character) == 127 for character in text):
            raise BadPath("a slash, backslash, percent sign, ?, # or control character within a segment")
        decoded.append(text)
    return decoded


def spell(parts: Iterable[str]) -> str:
    """The canonical raw path of decoded segments."""
    return "/" + "/".join(quote(part, safe=_SAFE) for part in parts)


def allowed(parts: Sequence[str], pattern: str) -> bool:
    """Whether a decoded path is one that `pattern` names: `/v1/models` exactly that, `/v1/*` whatever begins so; an
    empty pattern is any."""
    path = "/" + "/".join(parts)
    if not pattern or pattern == "*":
        return True
    pattern = pattern if pattern.startswith("/") else "/" + pattern
    return path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern


def split_host(argument: str) -> tuple[str, str]:
    """`HOST[:PORT]/rest` as (host in lower case, rest without the slash). Raises `ValueError`."""
    host, _, rest = argument.partition("/")
    host = host.lower().rstrip(".")
    if not re.fullmatch(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?(:[0-9]{1,5})?", host):
        raise ValueError(f"{argument!r} does not begin with a host")
    return host, rest
