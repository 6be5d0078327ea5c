"""A layer's data while it is made: contents come in one by one, equal ones are kept once, pieces of zeros not at all.

Owns one file. What it holds depends only on the contents and their order. Every byte is hashed once, for its chunk, by
threads behind the writer, and is on its way to the disk long before the end; nothing is read again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import BinaryIO

from dsec.errors import InvalidRequest, TooLarge
from dsec.kernel.syscalls import start_writeback
from dsec.store.format import BLOCK, CHUNK_BYTES, Cutter, pack_chunks
from dsec.store.tree import EMPTY, HOLE, Content

INLINE_BYTES = 1024
"""Content up to this size lies in the metadata image: local, and no block of 4 KiB each."""
GIB = 1 << 30
_SMALL = CHUNK_BYTES
_SAMPLE = 4096
_BEHIND = 64
"""Chunks that may wait for their digest."""
_WRITEBACK_BYTES = 8 << 20
_ZEROS = bytes(BLOCK)
_XATTR_COST = 64
"""Of one attribute, beside its bytes."""
_hashers = ThreadPoolExecutor(2, thread_name_prefix="dsec-hash")

Piece = bytes | memoryview


class Budget:
    """What one layer may cost, so that a small archive can't become a full disk."""

    def __init__(
        self,
        *,
        data_bytes: int = 256 * GIB,
        file_bytes: int = 1024 * GIB,
        entries: int = 4_000_000,
        metadata_bytes: int = 1 << 30,
    ) -> None:
        """`data_bytes`: on disk. `file_bytes`: the largest sum of all files' sizes, holes included. `metadata_bytes`:
        of what is held in memory until the image is written: names, links' targets, attributes, tiny files."""
        self.data_bytes = data_bytes
        self.file_bytes = file_bytes
        self.entries = entries
        self.metadata_bytes = metadata_bytes

    def take(self, *, data: int = 0, file: int = 0, entries: int = 0, metadata: int = 0) -> None:
        """Spend. Raises `TooLarge`."""
        self.data_bytes -= data
        self.file_bytes -= file
        self.entries -= entries
        self.metadata_bytes -= metadata
        for left, what in (
            (self.data_bytes, "bytes of content"),
            (self.file_bytes, "bytes in files, holes included"),
            (self.entries, "entries"),
            (self.metadata_bytes, "bytes of names, links, attributes and tiny files"),
        ):
            if left < 0:
                raise TooLarge(f"the layer is larger than one may be: too many {what}", remedy="Split it.")

    def take_xattrs(self, xattrs: Mapping[bytes, bytes]) -> None:
        """Spend what a file's attributes take in memory, also where they are empty. Raises `TooLarge`."""
        self.take(metadata=sum(len(name) + len(value) + _XATTR_COST for name, value in xattrs.items()))


class _Digests:
    """The digests of a layer's chunks, in order."""

    def __init__(self) -> None:
        self._cutter = Cutter()
        self._open: deque[Piece] = deque()
        """Small files whose chunk isn't closed yet."""
        self._found: list[Future[bytes]] = []
        self._sizes: list[int] = []

    def add(self, data: bytes, key: bytes) -> None:
        """A file of less than a chunk."""
        self._open.append(data)
        self._cutter.add(_padded(len(data)), key)
        self._close()

    def add_row(self, size: int, key: bytes, row: Sequence[Future[bytes]]) -> None:
        """A file of one chunk and more: its chunks."""
        self._cutter.add(size, key)
        self._close(row)

    def _close(self, row: Sequence[Future[bytes]] = ()) -> None:
        sizes, own = self._cutter.sizes[len(self._sizes) :], iter(row)
        self._sizes += sizes
        for size in sizes:
            if not self._open:
                self._found.append(next(own))
                continue
            pieces, taken = [], 0
            while taken < size:
                pieces.append(self._open.popleft())
                taken += _padded(len(pieces[-1]))
            self._found.append(digest_behind(pieces))
        if len(self._found) > _BEHIND:
            self._found[-_BEHIND].result()

    def finish(self) -> bytes:
        """`Manifest.chunks`."""
        self._cutter.finish()
        self._close()
        return pack_chunks((size, found.result()) for size, found in zip(self._sizes, self._found, strict=True))


class LayerData:
    """The data file of a layer that is being made."""

    def __init__(self, file: BinaryIO, budget: Budget | None = None) -> None:
        """`file`: empty, open for reading and writing."""
        self.budget = budget or Budget()
        self.file_bytes = 0
        self._fd = file.fileno()
        self._end = 0
        self._sent = 0
        self._digests = _Digests()
        self._known: dict[bytes, Content | dict[bytes, Content]] = {}
        """Small contents by what is quickly told of them; where several have that in common, by their digests."""
        self._known_large: dict[bytes, Content] = {}

    def add(self, read: Callable[[int], bytes], size: int) -> Content:
        """Take a file of `size` bytes; `read(n)` gives the next up to `n` of them. Raises `InvalidRequest` where it
        ends early, `TooLarge`."""
        self.budget.take(file=size)
        self.file_bytes += size
        if size == 0:
            return EMPTY
        if size <= INLINE_BYTES:
            self.budget.take(metadata=size)
            return Content(size, _exactly(read, size))
        if size <= _SMALL:
            return self._add_small(_exactly(read, size))
        return self._add_large(read, size)

    def _add_small(self, data: bytes) -> Content:
        key = _key(data)
        known = self._known.get(key)
        if isinstance(known, Content):
            kept = os.pread(self._fd, known.size, known.blocks[0] * BLOCK)
            known = self._known[key] = {sha256(kept).digest(): known}
        if known is not None:
            digest = sha256(data).digest()
            if digest in known:
                return known[digest]
        content = Content(len(data), b"", max(12, (len(data) - 1).bit_length()), (self._write(data),))
        if known is None:
            self._known[key] = content
        else:
            known[digest] = content
        self._digests.add(data, key)
        return content

    def _add_large(self, read: Callable[[int], bytes], size: int) -> Content:
        bits = max(18, (size - 1).bit_length() - 16)
        zeros, begin = bytes(1 << bits), self._end
        blocks: list[int] = []
        last = b""
        row: list[Future[bytes]] = []
        for offset in range(0, size, 1 << bits):
            piece = _exactly(read, min(1 << bits, size - offset))
            if piece == zeros[: len(piece)]:
                blocks.append(HOLE)
                continue
            blocks.append(self._write(piece))
            last = piece
            view = memoryview(piece)
            row += [digest_behind([view[at : at + CHUNK_BYTES]]) for at in range(0, len(piece), CHUNK_BYTES)]
            if len(row) > _BEHIND:
                row[-_BEHIND].result()
        holes = bytes(block == HOLE for block in blocks)
        key = sha256(b"".join((size.to_bytes(8, "little"), holes, *(each.result() for each in row)))).digest()
        known = self._known_large.get(key)
        if known is not None:
            self.budget.take(data=begin - self._end)
            self._end = begin
            os.ftruncate(self._fd, begin)
            return known
        if HOLE not in blocks:
            bits, blocks = (size - 1).bit_length(), blocks[:1]
        content = self._known_large[key] = Content(size, b"", bits, tuple(blocks))
        length = self._end - begin
        if length >= CHUNK_BYTES:
            self._digests.add_row(length, key, row)
        elif length:
            self._digests.add(last, key)
        return content

    def _write(self, data: bytes) -> int:
        """Returns its first block."""
        padded = _padded(len(data))
        self.budget.take(data=padded)
        begin, view = self._end, memoryview(data)
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, view[done:], begin + done)
        self._end += padded
        if self._end - self._sent >= _WRITEBACK_BYTES:
            start_writeback(self._fd, self._sent, self._end - self._sent)
            self._sent = self._end
        return begin // BLOCK

    def finish(self) -> tuple[int, bytes]:
        """Complete the file on disk. Returns its size and `Manifest.chunks`."""
        os.ftruncate(self._fd, self._end)
        os.fdatasync(self._fd)
        return self._end, self._digests.finish()


def digest_behind(pieces: Sequence[Piece]) -> Future[bytes]:
    """SHA-256 of pieces in a row, each padded to whole blocks; worked out by another thread."""
    return _hashers.submit(_digest, pieces)


def _digest(pieces: Sequence[Piece]) -> bytes:
    found = sha256()
    for piece in pieces:
        found.update(piece)
        found.update(_ZEROS[: -len(piece) % BLOCK])
    return found.digest()


def _key(data: bytes) -> bytes:
    """Says nearly always whether two contents are equal, without a look at all of a larger one."""
    if len(data) <= 3 * _SAMPLE:
        return sha256(data).digest()
    middle = len(data) // 2
    samples = (data[:_SAMPLE], data[middle : middle + _SAMPLE], data[-_SAMPLE:])
    return sha256(b"".join((len(data).to_bytes(8, "little"), *samples))).digest()


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
