"""Keys that are meant to collide are refused before a map is built; what values have otherwise passes."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from dsec.wire import packed

WORD = (1 << 64) - 1
FIRST, SECOND, FIFTH = 11400714785074694791, 14029467366897019727, 2870177450012600261


def colliding(count: int) -> list[tuple[int, int]]:
    """Pairs of one hash: the steps of CPython's hash of tuples, backwards."""
    needed = 12345 * pow(FIRST, -1, 1 << 64) & WORD
    needed = (needed >> 31 | needed << 33) & WORD
    found: list[tuple[int, int]] = []
    number = 1
    while len(found) < count:
        lane = FIFTH + number * SECOND & WORD
        lane = (lane << 31 | lane >> 33) * FIRST & WORD
        other = (needed - lane) * pow(SECOND, -1, 1 << 64) & WORD
        if other < (1 << 61) - 1:
            found.append((number, other))
        number += 1
    return found


def hostile(count: int) -> bytes:
    """A map of so many of them."""
    return (
        b"\xdf" + struct.pack(">I", count) + b"".join(msgspec.msgpack.encode(key) + b"\x01" for key in colliding(count))
    )


def test_keys_that_collide_are_refused_wherever_they_are() -> None:
    data = hostile(100)
    assert len({hash(key) for key in msgspec.msgpack.decode(data)}) == 1
    deep = b"\x92\xc4\x02\xde\xdf\x82\xa1a" + data + b"\xa1b\x01"
    behind = msgspec.msgpack.encode([{"x": 1.5, "y": [None, True, -7, 1 << 40, "t" * 40, b"b" * 300]}] * 20)
    for each in (data, deep, b"\xdc\x00\x02" + behind + data, b"\x81" + data + b"\x01"):
        with pytest.raises(ValueError, match="keys"):
            packed.check(each)


@pytest.mark.parametrize(
    "value",
    [
        {f"key {number}": number for number in range(70_000)},
        {number: str(number) for number in range(60_000)},
        [{number: number for number in range(1000)}] * 100,
        {b"%d" % number: {"\xde" * 5: [0.5, {}]} for number in range(2000)},
        [[], {}, [[{}]], {"": {"": None}}, dict.fromkeys(range(16), ())],
        b"\xde\xdf" * 1000,
    ],
    ids=["text", "numbers", "many of numbers", "bytes", "small", "no map"],
)
def test_values_pass(value: Any) -> None:
    packed.check(msgspec.msgpack.encode(value))


def test_numbers_are_counted_over_all_large_maps() -> None:
    with pytest.raises(ValueError, match="keys"):
        packed.check(msgspec.msgpack.encode([dict.fromkeys(range(7000), 0)] * 10))


NONE = (b"", b"\xdf", b"\xdf\xff\xff\xff\xff", b"\xc1\xde", b"\xde\x00\x02\xa1a", b"\xdb\xff\xff\xff\xff\xde")


@pytest.mark.parametrize("data", NONE)
def test_what_is_no_msgpack_is_left_to_who_decodes_it(data: bytes) -> None:
    packed.check(data)
