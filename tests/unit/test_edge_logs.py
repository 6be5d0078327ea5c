"""The server's log, for people and as JSON: each line says what it is about."""

from __future__ import annotations

import json
import logging

from dsec.edge.context import REQUEST_ID, SANDBOX_ID
from dsec.edge.logs import Human, JsonLines, configure


def record(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("dsec.edge", logging.WARNING, "x.py", 1, message, arguments, info)


def test_json_lines() -> None:
    line = json.loads(JsonLines().format(record("sandbox %s: removal failed (%s)", "abc", "why")))
    assert line.pop("time") > 1.6e9
    assert line == {
        "level": "warning",
        "logger": "dsec.edge",
        "message": "sandbox abc: removal failed (why)",
        "sandbox_id": "abc",
    }


def test_the_request_is_named() -> None:
    request, sandbox = REQUEST_ID.set("r-1"), SANDBOX_ID.set("box")
    try:
        line = json.loads(JsonLines().format(record("no")))
        assert (line["request_id"], line["sandbox_id"]) == ("r-1", "box")
        assert Human().format(record("request %s: no", "r-1")).endswith("request r-1: no [sandbox_id=box]")
    finally:
        REQUEST_ID.reset(request)
        SANDBOX_ID.reset(sandbox)
    assert Human().format(record("plain")).endswith("WARNING dsec.edge: plain")


def test_one_event_is_one_line_whatever_it_holds() -> None:
    try:
        raise ValueError("two\nlines \udcff")
    except ValueError as error:
        text = JsonLines().format(record("a\nb %s", "\udcff", error=error))
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == "a\nb ?"
    assert "ValueError: two" in line["error"]


def test_configure_replaces_what_was_there() -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        configure("json", "warning")
        configure("human", "debug")
        assert [type(handler.formatter) for handler in root.handlers] == [Human]
        assert root.level == logging.DEBUG
    finally:
        for handler in list(root.handlers):
            root.removeHandler(handler)
        for handler in before:
            root.addHandler(handler)
        root.setLevel(level)
