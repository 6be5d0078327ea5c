"""Which chunks to fetch beyond those that a read needs: pure decisions.

A reader that goes through a file in order is recognised by its second read in a row; from then on as much is fetched
ahead of it as it has read, as one large range of the store. Several readers of one layer are told apart.

Programs and libraries are mapped, and read here and there: a file of some chunks is fetched whole, a smaller one with
its first read. Where files begin and end is known by the rule of cutting (`format.Cutter`): a row of chunks of the
largest size, and the shorter one behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsec.store.format import CHUNK_BYTES

FIRST_WINDOW_BYTES = 256 << 10
LAST_WINDOW_BYTES = 4 << 20
SMALL_FILE_BYTES = 2 << 20
"""A file up to this size is fetched whole when it is read."""
FILE_BYTES = 16 << 20
"""A larger one than that, up to this size: when it is read a second time."""
_STREAMS = 16


class _Stream:
    __slots__ = ("after", "ahead", "first")

    def __init__(self, first: int, after: int) -> None:
        self.first = first
        """The chunk where it began."""
        self.after = after
        """The chunk that follows what it read."""
        self.ahead = after
        """The chunk up to which was fetched for it."""


class Readahead:
    """Of one layer, whose chunks begin at these offsets (with the end of the data as the last)."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self._offsets = offsets
        self._streams: list[_Stream] = []
        self._touched: set[tuple[int, bool]] = set()
        """First chunks of files that were read, and whether the whole file was asked for."""

    def file(self, index: int) -> range:
        """A read of this chunk came: the chunks of its file, where all of them should be fetched. Once for a file."""
        first = last = index
        while first and self._full(first - 1) and last - first <= FILE_BYTES // CHUNK_BYTES:
            first -= 1
        while self._full(last) and last + 2 < len(self._offsets) and last - first <= FILE_BYTES // CHUNK_BYTES:
            last += 1
        size = self._offsets[last + 1] - self._offsets[first]
        if first == last or size > FILE_BYTES or (first, True) in self._touched:
            return range(0)
        again = (first, False) in self._touched
        self._touched.add((first, again or size <= SMALL_FILE_BYTES))
        return range(first, last + 1) if again or size <= SMALL_FILE_BYTES else range(0)

    def _full(self, index: int) -> bool:
        return self._offsets[index + 1] - self._offsets[index] == CHUNK_BYTES

    def read(self, first: int, last: int) -> range:
        """A read of these chunks (inclusive) came: the chunks to fetch ahead, none if it seems to be alone."""
        # Reads of what is there don't come here: the next one that does may be anywhere in what was fetched ahead.
        found = next((s for s in self._streams if s.after <= last + 1 and first <= max(s.after, s.ahead)), None)
        if found is None:
            self._streams.append(_Stream(first, last + 1))
            del self._streams[:-_STREAMS]
            return range(0)
        self._streams.remove(found)
        self._streams.append(found)  # the oldest goes first
        if last + 1 == found.after:
            return range(0)  # the same chunk again
        found.after = last + 1
        count = len(self._offsets) - 1
        if found.after >= count:
            return range(0)
        read = self._offsets[found.after] - self._offsets[found.first]
        window = min(LAST_WINDOW_BYTES, max(FIRST_WINDOW_BYTES, read))
        begin, end = max(found.after, found.ahead), found.after
        limit = self._offsets[found.after] + window
        while end < count and self._offsets[end] < limit:
            end += 1
        # Only when half of the window is used up: large ranges, not a trickle.
        if found.ahead > found.after and self._offsets[found.ahead] - self._offsets[found.after] > window // 2:
            return range(0)
        found.ahead = max(found.ahead, end)
        return range(begin, end)
