"""What the copier needs to serve a layer by itself (`native/copier/copier.h`: PLANS), and what it says of it.

Invariant: while a layer has a plan only the copier writes its data and its bits; the filler learns from the journal.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from dsec.store.lazy.cache import CachedLayer

_HEAD = struct.Struct("=IIIIQIxxxx")
"""noted, count, ahead, packs, bytes of the data, streams."""


class Plan:
    """Of one layer. Close it when it was withdrawn."""

    def __init__(self, cached: CachedLayer, packs: Sequence[Path], ahead: Sequence[int], streams: int) -> None:
        """`packs`: the files of the placement's. `ahead`: chunks to fetch before they are asked for. `streams`: so many
        at a time."""
        count = cached.manifest.chunk_count
        content = b"".join(
            (
                _HEAD.pack(0, count, len(ahead), len(packs), cached.manifest.data_bytes, streams),
                bytes(4 * count),
                struct.pack(f"={len(ahead)}I", *ahead),
                cached.manifest.chunks,
                cached.placement.places,
                b"".join(os.fsencode(pack) + b"\0" for pack in packs),
            )
        )
        self._read = 0
        self.descriptor = os.memfd_create("dsec-plan", os.MFD_CLOEXEC)
        os.truncate(self.descriptor, len(content))
        self._memory = mmap.mmap(self.descriptor, len(content))
        self._memory[:] = content

    def news(self) -> list[int]:
        """The chunks that came since the last call, in their order."""
        noted = _HEAD.unpack_from(self._memory)[0]
        entries = struct.unpack_from(f"={noted - self._read}I", self._memory, _HEAD.size + 4 * self._read)
        came = []
        for entry in entries:
            if not entry:  # not seen here yet: memory may be ordered otherwise
                break
            came.append(entry - 1)
        self._read += len(came)
        return came

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
