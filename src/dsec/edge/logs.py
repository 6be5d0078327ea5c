"""How the server's log looks: a line for people, or a JSON object a line, each with the request and sandbox it is
about.

The request comes from the context (`dsec.edge.context`). A message that begins with `sandbox %s` names its sandbox by
its first argument; else the context's is taken.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import msgspec

from dsec.edge.context import REQUEST_ID, SANDBOX_ID

LogFormat = Literal["human", "json"]
_NAMED = "sandbox %s"
_encode = msgspec.json.Encoder().encode


def configure(form: LogFormat = "human", level: str = "info") -> None:
    """Log to stderr from now on. `level`: debug, info, warning or error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Human())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


def _about(record: logging.LogRecord) -> dict[str, str]:
    """Request and sandbox, where they are known."""
    sandbox_id = SANDBOX_ID.get()
    if isinstance(record.msg, str) and record.msg.startswith(_NAMED) and isinstance(record.args, tuple) and record.args:
        sandbox_id = str(record.args[0])
    found = {"request_id": REQUEST_ID.get(), "sandbox_id": sandbox_id}
    return {name: value for name, value in found.items() if value}


class Human(logging.Formatter):
    """Time, level, part, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        about = " ".join(f"{name}={value}" for name, value in _about(record).items() if value not in text)
        return f"{text} [{about}]" if about else text


class JsonLines(logging.Formatter):
    """`time` (seconds since the epoch), `level`, `logger`, `message`, and `request_id`, `sandbox_id`, `error` where
    there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_about(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        try:
            return _encode(line).decode()
        except UnicodeEncodeError:  # surrogates, from a name that isn't UTF-8
            return _encode({name: _clean(value) for name, value in line.items()}).decode()


def _clean(value: object) -> object:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
