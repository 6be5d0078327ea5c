"""What model endpoints say that a call cost, read from their answers as they stream by, and what sandboxes have used of
their limits. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec
from msgspec import Struct

MAX_TEXT = 4 << 20
"""The longest JSON answer, or line of a streamed one, that is looked into."""
MAX_SANDBOXES = 65536


class Tokens(Struct):
    """Tokens of one call."""

    input: int = 0
    output: int = 0

    def update(self, document: Any) -> None:
        """What a JSON answer or an event says, in OpenAI's words or in Anthropic's; the largest numbers count, because
        streams repeat them."""
        if not isinstance(document, dict):
            return
        for each in (document, document.get("message"), document.get("response")):
            usage = each.get("usage") if isinstance(each, dict) else None
            if isinstance(usage, dict):
                self.input = max(self.input, _number(usage, "prompt_tokens", "input_tokens"))
                self.output = max(self.output, _number(usage, "completion_tokens", "output_tokens"))


def _number(usage: dict[str, Any], *names: str) -> int:
    return max((value for name in names if isinstance(value := usage.get(name), int) and value >= 0), default=0)


class Reader:
    """Reads tokens from a body as it streams by: JSON, or server-sent events."""

    def __init__(self) -> None:
        self.tokens = Tokens()
        self._text = bytearray()
        self._events: bool | None = None

    def feed(self, data: bytes) -> None:
        """More of the body."""
        self._text += data
        if self._events is None and self._text.strip():
            self._events = not self._text.lstrip().startswith((b"{", b"["))
        if self._events:
            *lines, rest = bytes(self._text).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and b'"usage"' in line:
                    self._document(line[5:])
            self._text[:] = rest[-MAX_TEXT:]
        elif len(self._text) > MAX_TEXT:
            self._text.clear()
            self._events = False

    def end(self) -> Tokens:
        """All of it."""
        if not self._events:
            self._document(bytes(self._text))
        elif self._text.startswith(b"data:"):
            self._document(bytes(self._text[5:]))
        return self.tokens

    def _document(self, text: bytes) -> None:
        try:
            self.tokens.update(msgspec.json.decode(text))
        except msgspec.MsgspecError:
            return  # `[DONE]`, an error in words


class Used(Struct):
    """By one sandbox, of one permission, since this server began."""

    requests: int = 0
    tokens: int = 0


class Book:
    """Who used what; the longest unseen are forgotten first."""

    def __init__(self) -> None:
        self._used: OrderedDict[tuple[str, str], Used] = OrderedDict()

    def of(self, sandbox_id: str, permission: str) -> Used:
        """To be added to."""
        key = (sandbox_id, permission)
        used = self._used.setdefault(key, Used())
        self._used.move_to_end(key)
        while len(self._used) > MAX_SANDBOXES:
            self._used.popitem(last=False)
        return used
