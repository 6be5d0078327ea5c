"""A machine's screen, keyboard and mouse, by QEMU's machine protocol.

A picture comes from the VMM, which may be in the hands of what runs in it: it is bounded, and checked to be a PNG by
its first bytes, no further. Keys are those of a US keyboard.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Iterable
from typing import Any

from dsec.errors import InvalidRequest, Unavailable
from dsec.spec.screen import Click, Input, Press, Scroll, Type
from dsec.vmm.qemu import QemuControl

MOST_PICTURE = 64 << 20
MOST_SIDE = 16384
KEY_S = 0.02
"""From one key to the next: a keyboard's buffer has room for a few."""
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_AXIS = 0x7FFF

_SHIFTED = dict(zip('~!@#$%^&*()_+{}|:"<>?', "`1234567890-=[]\\;',./", strict=True))
_NAMES = {
    "`": "grave_accent", "-": "minus", "=": "equal", "[": "bracket_left", "]": "bracket_right", "\\": "backslash",
    ";": "semicolon", "'": "apostrophe", ",": "comma", ".": "dot", "/": "slash", " ": "spc", "\n": "ret", "\t": "tab",
    "\b": "backspace", "\x1b": "esc",
}  # fmt: skip
_WORDS = {
    "enter": "ret", "return": "ret", "escape": "esc", "space": "spc", "control": "ctrl", "super": "meta_l",
    "win": "meta_l", "meta": "meta_l", "pageup": "pgup", "pagedown": "pgdn", "del": "delete", "ins": "insert",
    "minus": "minus", "plus": "shift-equal",
}  # fmt: skip
_KEYS = frozenset(
    [*"abcdefghijklmnopqrstuvwxyz0123456789", *_NAMES.values(), *_WORDS.values(), *(f"f{n}" for n in range(1, 25)),
     "shift", "shift_r", "alt", "alt_r", "ctrl", "ctrl_r", "meta_r", "menu", "caps_lock", "num_lock", "scroll_lock",
     "print", "sysrq", "pause", "insert", "delete", "home", "end", "pgup", "pgdn", "up", "down", "left", "right"]
)  # fmt: skip


async def screenshot(control: QemuControl) -> bytes:
    """The screen as a PNG. Raises `Unavailable`."""
    memory = os.memfd_create("picture", os.MFD_CLOEXEC)
    try:
        writer = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            passed = await control.command("add-fd", fd=writer)
        finally:
            os.close(writer)
        number = passed.get("fdset-id") if isinstance(passed, dict) else None
        if not isinstance(number, int):
            raise Unavailable("the VMM doesn't take a file for its picture")
        try:
            await control.command("screendump", filename=f"/dev/fdset/{number}", format="png")
        finally:
            await control.command("remove-fd", **{"fdset-id": number})
        size = os.fstat(memory).st_size
        picture = os.pread(memory, min(size, MOST_PICTURE), 0)
        if size > MOST_PICTURE or size_of(picture) is None:
            raise Unavailable("the VMM's picture is no PNG")
        return picture
    finally:
        os.close(memory)


def size_of(picture: bytes) -> tuple[int, int] | None:
    """Width and height, or None where it is no PNG of a sensible size."""
    if len(picture) < 33 or not picture.startswith(_PNG):
        return None
    width, height = struct.unpack_from(">II", picture, 16)
    return (width, height) if 0 < width <= MOST_SIDE and 0 < height <= MOST_SIDE else None


async def send(control: QemuControl, inputs: Iterable[Input]) -> None:
    """One after the other. Raises `InvalidRequest` for a key that doesn't exist or a place that isn't on the screen,
    before anything was sent of that input; `Unavailable`."""
    for each in inputs:
        match each:
            case Type(text=text):
                for strokes in [_strokes(character) for character in text]:
                    await _stroke(control, strokes)
            case Press(keys=keys):
                await _stroke(control, chord(keys))
            case Click() | Scroll():
                await _point(control, each)


def chord(keys: str) -> list[str]:
    """`ctrl-alt-delete` as QEMU's names of keys, in the order in which they go down."""
    parts = keys.split("-") if len(keys) > 1 else [keys]
    if keys.endswith("--"):
        parts = [*parts[:-2], "-"]
    found: list[str] = []
    for part in parts:
        if len(part) == 1:
            found += _strokes(part)
        else:
            word = part.lower()
            found += _WORDS.get(word, word).split("-")
    for name in found:
        if name not in _KEYS:
            raise InvalidRequest(
                f"there is no key {name!r}",
                remedy="Keys are characters, f1 to f24, and names such as enter, tab, esc, up, pgdn, ctrl, alt, shift.",
                field="keys",
            )
    return found


def _strokes(character: str) -> list[str]:
    """The keys of one character."""
    base = _SHIFTED.get(character, character.lower() if character.isascii() and character.isupper() else "")
    plain = base or character
    name = _NAMES.get(plain, plain)
    if name not in _KEYS:
        raise InvalidRequest(f"{character!r} is not on a US keyboard", field="text")
    return ["shift", name] if base else [name]


async def _stroke(control: QemuControl, names: list[str]) -> None:
    for down, order in ((True, names), (False, names[::-1])):
        await _events(control, [_key(name, down) for name in order])
        await asyncio.sleep(KEY_S)


async def _point(control: QemuControl, at: Click | Scroll) -> None:
    size = size_of(await screenshot(control))
    assert size is not None
    for value, most, name in ((at.x, size[0], "x"), (at.y, size[1], "y")):
        if not 0 <= value < most:
            raise InvalidRequest(f"{name}={value} is not on the screen, which is {size[0]}x{size[1]}", field=name)
    await _events(control, [_axis("x", at.x, size[0]), _axis("y", at.y, size[1])])
    if isinstance(at, Scroll):
        buttons = ["wheel-up" if at.lines < 0 else "wheel-down"] * abs(at.lines)
    else:
        buttons = [at.button] * at.count
    for button in buttons:
        for down in (True, False):
            await asyncio.sleep(KEY_S)
            await _events(control, [{"type": "btn", "data": {"down": down, "button": button}}])


def _key(name: str, down: bool) -> dict[str, Any]:
    return {"type": "key", "data": {"down": down, "key": {"type": "qcode", "data": name}}}


def _axis(axis: str, value: int, size: int) -> dict[str, Any]:
    return {"type": "abs", "data": {"axis": axis, "value": (value * _MOST_AXIS) // max(1, size - 1)}}


async def _events(control: QemuControl, events: list[dict[str, Any]]) -> None:
    await control.command("input-send-event", events=events)
