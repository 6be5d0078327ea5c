"""What the command line says of things that others named: no name controls the terminal, none breaks a table."""

from __future__ import annotations

import pytest

from dsec.cli.layers import drawn
from dsec.cli.output import complain, note, printable, write_table
from dsec.errors import NotFound

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202egnp.exe"


def test_what_others_named_is_shown_and_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(["name", "what"], [(HOSTILE, None), ("[/x]", "[red]plain[/red]"), (7, "two\nlines")])
    complain(NotFound(f"there is no {HOSTILE}", remedy=HOSTILE))
    note(HOSTILE)
    found = capsys.readouterr()
    for text in (found.out, found.err):
        assert all(c.isprintable() or c == "\n" for c in text)
    assert r"\x1b[2J\x1b]0;owned" in found.out
    assert "[/x]" in found.out
    assert "[red]plain[/red]" in found.out
    assert found.err.count(r"\x1b[2J") == 3


def test_an_environment_is_drawn_with_what_an_image_says() -> None:
    layer = {"digest": "a" * 64, "description": HOSTILE, "size_bytes": 1}
    made = {"name": "e", "env": {"A": HOSTILE}, "user": HOSTILE}
    for line in drawn({"environment": made, "layers": [layer]}):
        assert line == printable(line)
