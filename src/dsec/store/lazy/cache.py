"""What this node has of layers that are filled on demand.

On disk, below the cache's root:

    <layer>/manifest.json   verified against the layer's digest
            placement.json  where the store has the chunks
            meta.erofs      verified, complete: names, owners, small files
            data            sparse; as large as the layer's data
            filled          a bit for each 4 KiB of data, mapped shared with the holder: set when the data is written
            synced          a copy of `filled` whose data is on disk, and the boot in which it is not needed
            asks            empty: whatever is mounted of it raises events, complete or not (layers of older versions
                            were mounted apart when they were complete)

A directory appears by a rename, with all of its files. After a power loss `filled` may promise data that never reached
the disk: what is opened in another boot than it was used in goes back to `synced`.

            (a file `.owner` beside the layers is held by the filler and its copier with a lock while they live)

One process at a time writes here: the filler, with its copier. Where a filler was killed its copier may be late: what
that writes is right, but nothing is taken away before it has ended (`LazyCache.alone`).
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import shutil
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from dsec.errors import LayerCorrupt
from dsec.kernel.files import replace_file
from dsec.kernel.syscalls import punch_hole
from dsec.store.format import BLOCK, Chunk, Manifest, Place, Placement, decode_manifest, decode_placement, is_layer

_SYNCED_HEAD = 36
"""The boot's id, before the bits."""


def boot_id() -> bytes:
    """Names this boot of the kernel: 36 characters."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


class CachedLayer:
    """A layer's directory, opened. Close it."""

    def __init__(self, root: Path, layer: str, fresh: tuple[Manifest, Placement] | None = None) -> None:
        """`fresh`: what its files say, where nothing of it is filled; its lists are not read before they are needed,
        see `check`. Raises FileNotFoundError where it isn't there, `LayerCorrupt` where it is damaged."""
        self.layer = layer
        self.root = root
        self.manifest, self.placement = fresh or (
            decode_manifest((root / "manifest.json").read_bytes(), layer),
            decode_placement((root / "placement.json").read_bytes(), layer),
        )
        if self.placement.place_count != self.manifest.chunk_count:
            raise LayerCorrupt(f"the placement of layer {layer} is of another one", layer=layer)
        if fresh is None:
            self.check()
        self.data = os.open(root / "data", os.O_RDWR | os.O_CLOEXEC)
        self.bitmap = os.open(root / "filled", os.O_RDWR | os.O_CLOEXEC)
        self._bits = mmap.mmap(self.bitmap, 0)
        if fresh is None:
            self._go_back()
        self.have = bytearray(self.manifest.chunk_count)
        self.filled_bytes = 0
        """How much of the data is here."""
        if fresh is None and any(bytes(self._bits)):
            self.have[:] = bytes(self._is_filled(chunk) for chunk in self.chunks)
            self.filled_bytes = sum(chunk.size for chunk, here in zip(self.chunks, self.have, strict=True) if here)
        self.missing = self.have.count(0)
        self.dirty = False
        """Filled something since the last `sync`."""
        self._syncing = threading.Lock()

    def check(self) -> None:
        """Raise `LayerCorrupt` where its lists contradict themselves."""
        _ = self.places, self.offsets

    @cached_property
    def chunks(self) -> list[Chunk]:
        return self.manifest.chunk_list()

    @cached_property
    def places(self) -> list[Place]:
        return self.placement.place_list()

    @cached_property
    def offsets(self) -> list[int]:
        """Of the chunks, and the end of the data."""
        return [*(chunk.offset for chunk in self.chunks), self.manifest.data_bytes]

    def close(self) -> None:
        """What is still written fails with EBADF: the numbers may be another file's soon."""
        data, bitmap, self.data, self.bitmap = self.data, self.bitmap, -1, -1
        self._bits.close()
        os.close(data)
        os.close(bitmap)

    @property
    def asks(self) -> bool:
        """Whether what was mounted of it when it was complete can still be made to ask."""
        return (self.root / "asks").exists()

    @property
    def metadata_path(self) -> Path:
        return self.root / "meta.erofs"

    def chunks_of(self, offset: int, count: int) -> range:
        """Indexes of the chunks that a read of the data touches."""
        end = min(offset + count, self.manifest.data_bytes)
        if offset >= end:
            return range(0)
        return range(bisect_right(self.offsets, offset) - 1, bisect_right(self.offsets, end - 1))

    def write(self, first: Chunk, data: bytes | memoryview) -> None:
        """Put verified data where it belongs; `note` says that it is there. Raises OSError: a full disk."""
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += os.pwrite(self.data, view[done:], first.offset + done)

    def note(self, indexes: Iterable[int]) -> None:
        """These chunks are written."""
        for index in indexes:
            if self._count(index):
                self._set(self.chunks[index])
        self.dirty = True

    def learn(self, indexes: Iterable[int]) -> None:
        """These chunks were written and noted by the copier."""
        for index in indexes:
            self._count(index)
            self.dirty = True

    def _count(self, index: int) -> bool:
        if self.have[index]:
            return False
        self.have[index] = 1
        self.missing -= 1
        self.filled_bytes += self.chunks[index].size
        return True

    def sync(self) -> None:
        """Bring what is filled to the disk, so that it is good after a power loss too. Blocks. Raises OSError: a full
        disk."""
        if not self.dirty:
            return
        with self._syncing:
            self.dirty = False
            bits = bytes(self._bits)
            try:
                os.fdatasync(self.data)
                self._write_synced(bits)
            except OSError:
                self.dirty = True
                raise
        os.posix_fadvise(self.data, 0, 0, os.POSIX_FADV_DONTNEED)  # EROFS has its own copy of what was read

    def forget(self) -> None:
        """Take back what `note` said of all chunks: from now on each read is asked for again. The data stays until
        `punch`, and may be promised on the disk until `forget_synced`."""
        self._bits[:] = bytes(len(self._bits))
        self.have[:] = bytes(len(self.have))
        self.missing = len(self.have)
        self.filled_bytes = 0

    def forget_synced(self) -> None:
        """Take back what the disk promises. Blocks."""
        with self._syncing:
            self._write_synced(bytes(len(self._bits)))

    def punch(self, indexes: Iterable[int]) -> None:
        """Give the disk space of those of these chunks back that aren't noted. No read of them that was allowed may be
        on its way, and none of them may be being written. On the thread that notes."""
        for index in indexes:
            if not self.have[index]:
                punch_hole(self.data, self.chunks[index].offset, self.chunks[index].size)

    def _go_back(self) -> None:
        path = self.root / "synced"
        synced = path.read_bytes() if path.exists() else b""
        boot, bits = synced[:_SYNCED_HEAD], synced[_SYNCED_HEAD:]
        if boot != boot_id():
            self._bits[:] = bits if len(bits) == len(self._bits) else bytes(len(self._bits))
            self._write_synced(bytes(self._bits))

    def _write_synced(self, bits: bytes) -> None:
        replace_file(self.root / "synced", boot_id() + bits, 0o644)

    def _is_filled(self, chunk: Chunk) -> bool:
        return all(self._bits[b >> 3] >> (b & 7) & 1 for b in _blocks(chunk))

    def _set(self, chunk: Chunk) -> None:
        bits, blocks = self._bits, _blocks(chunk)
        first, last = -(-blocks.start // 8), blocks.stop // 8  # whole bytes between
        if first < last:
            bits[first:last] = b"\xff" * (last - first)
            blocks_left: Iterable[int] = (*range(blocks.start, first * 8), *range(last * 8, blocks.stop))
        else:
            blocks_left = blocks
        for block in blocks_left:
            bits[block >> 3] |= 1 << (block & 7)


def _blocks(chunk: Chunk) -> range:
    return range(chunk.offset // BLOCK, (chunk.offset + chunk.size) // BLOCK)


READY = 16
"""Directories that are there before a layer needs one: making files may wait for the disk."""
_EMPTY = ("manifest.json", "placement.json", "synced", "asks", "number", "meta.erofs", "data", "filled")
_BEGUN = ".begun-"
"""Beside the layers, so that one appears by a change in a single directory."""


def open_new(path: Path) -> int:
    """A descriptor of a file that is empty, or isn't there yet, to write it. Never by O_TRUNC: after that ext4 brings
    the new content to disk when it is closed, while a sandbox waits."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


def put_new(path: Path, content: bytes, length: int = 0) -> None:
    """Fill such a file. `length`: of a sparse one. Raises OSError."""
    fd = open_new(path)
    try:
        done = 0
        while done < len(content):
            done += os.write(fd, content[done:])
        if length:
            os.truncate(fd, length)
    finally:
        os.close(fd)


class LazyCache:
    """All layers of a cache directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.scratch = root / "tmp"
        """Emptied here."""
        for left in (self.scratch, *root.glob(f"{_BEGUN}*")):
            shutil.rmtree(left, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        self._boot = boot_id()
        self.owner = os.open(root / ".owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        """The copier gets it too: what is locked by it is so while either lives."""
        self._ready: deque[Path] = deque()
        self._names = itertools.count()

    def layers(self) -> Iterator[str]:
        """Those that have a directory."""
        return (entry.name for entry in os.scandir(self.root) if is_layer(entry.name))

    def alone(self) -> bool:
        """Whether no predecessor of ours writes here any more."""
        try:
            fcntl.flock(self.owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self.owner)

    def path(self, layer: str) -> Path:
        return self.root / layer

    def prepare(self) -> None:
        """Have directories with empty files ready for the next layers. Blocks; one call at a time. Raises OSError."""
        while len(self._ready) < READY:
            begun = self._new()
            for name in _EMPTY:
                (begun / name).touch(0o644)
            self._ready.append(begun)

    def make(self) -> Path:
        """A directory in which `begin` can begin a layer; `finish` or `unmake` it."""
        try:
            return self._ready.popleft()
        except IndexError:
            return self._new()

    def _new(self) -> Path:
        begun = self.root / f"{_BEGUN}{next(self._names)}"
        begun.mkdir()
        return begun

    def begin(self, begun: Path, layer: str, decoded: Manifest, manifest: bytes, placement: bytes) -> CachedLayer:
        """Fill a directory that was made, but for data, number and metadata: nobody sees it before `finish`.
        `manifest`: encoded. Raises `LayerCorrupt`."""
        placed = decode_placement(placement, layer)
        size = decoded.data_bytes
        bits = max(1, -(-size // (8 * BLOCK)))
        # Promises of nothing need no disk: what is lost of them promises nothing, too.
        for name, content, length in (
            ("manifest.json", manifest, 0),
            ("placement.json", placement, 0),
            ("synced", self._boot + bytes(bits), 0),
            ("asks", b"", 0),
            ("data", b"", size),
            ("filled", b"", bits),
        ):
            put_new(begun / name, content, length)
        return CachedLayer(begun, layer, (decoded, placed))

    @staticmethod
    def unmake(begun: Path) -> None:
        """A layer that was begun can't be finished."""
        shutil.rmtree(begun, ignore_errors=True)

    def finish(self, cached: CachedLayer) -> None:
        """Let a layer that was begun appear: its metadata image is verified and in its place."""
        root = self.root / cached.layer
        cached.root.rename(root)
        cached.root = root

    def remove(self, layer: str) -> None:
        """Forget a layer that nothing mounts. Idempotent."""
        shutil.rmtree(self.root / layer, ignore_errors=True)
