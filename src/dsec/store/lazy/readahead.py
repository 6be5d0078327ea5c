"""Which chunks to fetch beyond those that a read needs: pure decisions.

A reader that goes through a file in order is recognised by its second read in a row; from then on a window that
doubles is fetched ahead of it, as one large range of the store. Several readers of one layer are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST_WINDOW_BYTES = 256 << 10
LAST_WINDOW_BYTES = 4 << 20
_STREAMS = 16


class _Stream:
    __slots__ = ("after", "ahead", "window")

    def __init__(self, after: int) -> None:
        self.after = after
        """The chunk that follows what it read."""
        self.ahead = after
        """The chunk up to which was fetched for it."""
        self.window = 0


class Readahead:
    """Of one layer, whose chunks begin at these offsets (with the end of the data as the last)."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self._offsets = offsets
        self._streams: list[_Stream] = []

    def read(self, first: int, last: int) -> range:
        """A read of these chunks (inclusive) came: the chunks to fetch ahead, none if it seems to be alone."""
        found = next((s for s in self._streams if first <= s.after <= last + 1), None)
        if found is None:
            self._streams.append(_Stream(last + 1))
            del self._streams[:-_STREAMS]
            return range(0)
        self._streams.remove(found)
        self._streams.append(found)  # the oldest goes first
        if last + 1 == found.after:
            return range(0)  # the same chunk again
        found.after = last + 1
        found.window = min(LAST_WINDOW_BYTES, max(FIRST_WINDOW_BYTES, 2 * found.window))
        count = len(self._offsets) - 1
        if found.after >= count:
            return range(0)
        begin, end = max(found.after, found.ahead), found.after
        limit = self._offsets[found.after] + found.window
        while end < count and self._offsets[end] < limit:
            end += 1
        # Only when half of the window is used up: large ranges, not a trickle.
        if found.ahead > found.after and self._offsets[found.ahead] - self._offsets[found.after] > found.window // 2:
            return range(0)
        found.ahead = max(found.ahead, end)
        return range(begin, end)
