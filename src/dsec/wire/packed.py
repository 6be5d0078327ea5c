"""msgpack of values of any shape, from who isn't trusted: what it may hold before anybody builds it.

Python's hashes of numbers and tuples are no secret, so that whoever chooses a map's keys can have building it take
time by the square of its size: 1 MiB kept a server busy for minutes. Hashes of text and bytes are secret, and small
maps are harmless.
"""

from __future__ import annotations

SMALL, MIDDLE = 64, 1024
"""Maps of up to so many entries may have keys of any kind; of numbers."""
MOST_NUMBERS = 65536
"""Keys that are numbers, in all larger maps together."""
_BIG_MAPS = (0xDE, 0xDF)
_SIZES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8} | {
    0xD4 + power: 1 + (1 << power) for power in range(5)
}
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_COUNTS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def check(data: bytes) -> None:
    """Raise ValueError where a map's keys may be meant to collide: they are text or bytes, or few. What isn't msgpack
    passes: who decodes it says so. Takes next to nothing where there is no map of more than 15 entries."""
    if not any(mark in data for mark in _BIG_MAPS):
        return
    size = len(data)
    at, numbers = 0, 0
    open_ = [[1, 0]]
    """Of what isn't at its end: how many items are left of it, and of a map how many entries it has."""
    while open_ and at < size:
        top = open_[-1]
        if not top[0]:
            open_.pop()
            continue
        top[0] -= 1
        code = data[at]
        if top[1] > SMALL and top[0] & 1 and not (0xA0 <= code < 0xC0 or 0xC4 <= code <= 0xC6 or 0xD9 <= code <= 0xDB):
            numbers += top[1] > MIDDLE  # an odd number is left: this one is a key
            if numbers > MOST_NUMBERS or not (code < 0x80 or code >= 0xE0 or 0xCC <= code <= 0xD3):
                raise ValueError("a large map with keys that are neither text nor few")
        at += 1
        if code < 0x80 or code >= 0xE0 or code in (0xC0, 0xC2, 0xC3):
            continue
        if code < 0x90:
            open_.append([2 * (code & 15), code & 15])
        elif code < 0xA0:
            open_.append([code & 15, 0])
        elif code < 0xC0:
            at += code & 31
        elif code in _SIZES:
            at += _SIZES[code]
        elif code in _LENGTHS:
            wide = _LENGTHS[code]
            at += wide + int.from_bytes(data[at : at + wide], "big") + (0xC7 <= code <= 0xC9)
        elif code in _COUNTS:
            wide = _COUNTS[code]
            count = int.from_bytes(data[at : at + wide], "big")
            at += wide
            open_.append([2 * count, count] if code >= 0xDE else [count, 0])
        else:
            return
