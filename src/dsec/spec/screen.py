"""What is done to a full machine from outside: keys, clicks; and what is kept of it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Pixel = Annotated[int, Meta(ge=0, le=16383)]


class Click(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag="click"):
    """The pointer goes there, and a button goes down and up. 0, 0 is the upper left corner."""

    x: Pixel
    y: Pixel
    button: Literal["left", "middle", "right"] = "left"
    count: Annotated[int, Meta(ge=0, le=3)] = 1
    """2: a double click; 0: the pointer only moves."""


class Scroll(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag="scroll"):
    """The pointer goes there, and the wheel turns."""

    x: Pixel
    y: Pixel
    lines: Annotated[int, Meta(ge=-100, le=100)]
    """Below 0: upwards."""


class Type(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="type"):
    """Text as it would be typed on a US keyboard; a newline is the enter key."""

    text: Annotated[str, Meta(max_length=4096)]


class Press(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="press"):
    """Keys that go down together: `ctrl-l`, `alt-f4`, `enter`."""

    keys: Annotated[str, Meta(min_length=1, max_length=100)]


Input = Click | Scroll | Type | Press


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A full machine as it was at one moment: memory, disk, devices."""

    name: str
    created_at: float
    memory_bytes: int
    """What its memory takes, written down."""


class ConsolePiece(Struct, frozen=True, kw_only=True):
    """A part of what a serial console printed."""

    offset: int
    """Where it begins; the next one begins at `offset` and the length of `data`."""
    data: bytes
