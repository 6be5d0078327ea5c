"""Index pages as read, kept in memory: a file is looked up on its project's page each time, and some pages have tens of
megabytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

LIMIT_BYTES = 64 << 20
"""Of pages' bytes; what is made of them takes some times more."""

Page = TypeVar("Page")


class Parsed(Generic[Page]):
    """By the digest of the bytes (and whatever else the result hangs on); the least recently used goes first. What is
    kept is shared: nobody changes it."""

    def __init__(self) -> None:
        self._pages: OrderedDict[str, tuple[int, Page]] = OrderedDict()
        self._total = 0

    def get(self, key: str, size: int, make: Callable[[], Page]) -> Page:
        """The page of a key, made where it isn't known. Raises what `make` does."""
        found = self._pages.get(key)
        if found is not None:
            self._pages.move_to_end(key)
            return found[1]
        page = make()
        self._pages[key] = (size, page)
        self._total += size
        while self._total > LIMIT_BYTES:
            _, (gone, _) = self._pages.popitem(last=False)
            self._total -= gone
        return page
