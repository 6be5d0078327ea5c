"""A layer's data while it is made: contents come in one by one, equal ones are kept once, pieces of zeros not at all.

Owns one file. What it holds depends only on the contents and their order.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import BinaryIO

from dsec.errors import InvalidRequest, TooLarge
from dsec.store.format import BLOCK, CHUNK_BYTES, Cutter, pack_chunks
from dsec.store.tree import EMPTY, HOLE, Content

INLINE_BYTES = 1024
"""Content up to this size lies in the metadata image: local, and no block of 4 KiB each."""
GIB = 1 << 30
_SMALL = CHUNK_BYTES


class Budget:
    """What one layer may cost, so that a small archive can't become a full disk."""

    def __init__(
        self,
        *,
        data_bytes: int = 256 * GIB,
        file_bytes: int = 1024 * GIB,
        entries: int = 4_000_000,
        path_bytes: int = 1 << 30,
    ) -> None:
        """`data_bytes`: on disk. `file_bytes`: the largest sum of all files' sizes, holes included. `path_bytes`: of
        all names."""
        self.data_bytes = data_bytes
        self.file_bytes = file_bytes
        self.entries = entries
        self.path_bytes = path_bytes

    def take(self, *, data: int = 0, file: int = 0, entries: int = 0, path: int = 0) -> None:
        """Spend. Raises `TooLarge`."""
        self.data_bytes -= data
        self.file_bytes -= file
        self.entries -= entries
        self.path_bytes -= path
        for left, what in (
            (self.data_bytes, "bytes of content"),
            (self.file_bytes, "bytes in files, holes included"),
            (self.entries, "entries"),
            (self.path_bytes, "bytes of names"),
        ):
            if left < 0:
                raise TooLarge(f"the layer is larger than one may be: too many {what}", remedy="Split it.")


class LayerData:
    """The data file of a layer that is being made."""

    def __init__(self, file: BinaryIO, budget: Budget | None = None) -> None:
        """`file`: empty, open for reading and writing."""
        self.budget = budget or Budget()
        self.file_bytes = 0
        self._file = file
        self._end = 0
        self._known: dict[bytes, Content] = {}
        self._cutter = Cutter()

    def add(self, read: Callable[[int], bytes], size: int) -> Content:
        """Take a file of `size` bytes; `read(n)` gives the next up to `n` of them. Raises `InvalidRequest` where it
        ends early, `TooLarge`."""
        self.budget.take(file=size)
        self.file_bytes += size
        if size == 0:
            return EMPTY
        if size <= INLINE_BYTES:
            return Content(size, _exactly(read, size))
        if size <= _SMALL:
            return self._add_small(_exactly(read, size))
        return self._add_large(read, size)

    def _add_small(self, data: bytes) -> Content:
        digest = hashlib.sha256(data).digest()
        known = self._known.get(digest)
        if known is None:
            bits = max(12, (len(data) - 1).bit_length())
            known = self._known[digest] = Content(len(data), b"", bits, (self._write(data),))
            self._cutter.add(_padded(len(data)), digest)
        return known

    def _add_large(self, read: Callable[[int], bytes], size: int) -> Content:
        bits = max(18, (size - 1).bit_length() - 16)
        zeros = bytes(1 << bits)
        digest, begin, blocks = hashlib.sha256(), self._end, []
        for offset in range(0, size, 1 << bits):
            piece = _exactly(read, min(1 << bits, size - offset))
            digest.update(piece)
            blocks.append(HOLE if piece == zeros[: len(piece)] else self._write(piece))
        if HOLE not in blocks:
            bits, blocks = (size - 1).bit_length(), blocks[:1]
        key = digest.digest()
        known = self._known.get(key)
        if known is not None and known.size == size:
            self.budget.take(data=begin - self._end)
            self._end = begin
            self._file.truncate(begin)
            return known
        content = self._known[key] = Content(size, b"", bits, tuple(blocks))
        if self._end > begin:
            self._cutter.add(self._end - begin, key)
        return content

    def _write(self, data: bytes) -> int:
        """Returns its first block."""
        padded = _padded(len(data))
        self.budget.take(data=padded)
        block = self._end // BLOCK
        self._file.seek(self._end)
        self._file.write(data)
        self._end += padded
        return block

    def finish(self) -> tuple[int, bytes]:
        """Complete the file on disk. Returns its size and `Manifest.chunks`."""
        self._file.flush()
        self._file.truncate(self._end)
        self._file.seek(0)
        found = []
        for size in self._cutter.finish():
            found.append((size, hashlib.sha256(_exactly(self._file.read, size)).digest()))
        os.fdatasync(self._file.fileno())
        return self._end, pack_chunks(found)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    data = read(size)
    if len(data) == size:
        return data
    parts, left = [data], size - len(data)
    while left and data:
        data = read(left)
        parts.append(data)
        left -= len(data)
    if left:
        raise InvalidRequest(f"a file ends {left} bytes early: it changed while it was read, or the archive is cut off")
    return b"".join(parts)
