"""A layer that is filled before there is any, so that the first sandbox doesn't wait for what only a first time costs:
the filler's own program from the disk, threads, memory."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsec.errors import DsecError
from dsec.ports import Clock
from dsec.store import format as form
from dsec.store.blobs import DirectoryStore
from dsec.store.lazy.cache import CachedLayer, LazyCache
from dsec.store.lazy.copier import Copier
from dsec.store.lazy.filler import Filler
from dsec.store.lazy.holder import HolderStats, Waiting

log = logging.getLogger(__name__)

_CHUNKS = 4
_METADATA_BYTES = 512 << 10


class Nobody:
    """`Questions` that nobody asks."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[int] = asyncio.Queue()

    def start(self, on_read: Callable[[Waiting], None], on_gone: Callable[[], None]) -> None:
        """Nothing comes."""

    def add(self, number: int, layer: str, root: Path) -> None:
        """Nobody is told."""

    def remove(self, number: int) -> None:
        """Nobody is told."""

    def answer(self, token: int, error: int) -> None:
        self.answers.put_nowait(error)

    def complete(self, number: int, cached: CachedLayer) -> None:
        """Nobody is told."""

    def reopen(self, number: int, cached: CachedLayer) -> bool:
        return False

    def idle_s(self, number: int) -> float:
        return 0.0

    @property
    def to_copier(self) -> bool:
        return False

    def stats(self) -> HolderStats:
        return HolderStats(0, 0, 0, 0)

    def close(self) -> None:
        """Nothing is open."""


async def rehearse(root: Path, clock: Clock, copier: Copier | None) -> None:
    """Fill a layer in a temporary directory of `root` from a store in it. Where that fails the next one tells why."""
    try:
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            await _fill(Path(scratch), clock, copier)
    except (DsecError, OSError) as error:
        log.warning("a rehearsal of filling failed: %s", error)


async def _fill(scratch: Path, clock: Clock, copier: Copier | None) -> None:
    chunk, image = bytes(form.CHUNK_BYTES), bytes(_METADATA_BYTES)
    pack = "0" * 64
    manifest = form.Manifest(
        kind="directory",
        metadata=hashlib.sha256(image).hexdigest(),
        metadata_bytes=len(image),
        data_bytes=_CHUNKS * len(chunk),
        chunks=form.pack_chunks([(len(chunk), hashlib.sha256(chunk).digest())] * _CHUNKS),
    )
    placement = form.pack_places(form.Place(pack, index * len(chunk)) for index in range(_CHUNKS))
    objects = {
        form.manifest_key(manifest.digest): manifest.encode(),
        form.placement_key(manifest.digest): msgspec.json.encode(placement),
        form.metadata_key(manifest.metadata): image,
        form.image_key(manifest.digest): image,
        form.pack_key(pack): chunk * _CHUNKS,
    }
    for key, content in objects.items():
        path = scratch / key
        path.parent.mkdir()
        path.write_bytes(content)
    store, nobody = DirectoryStore(scratch), Nobody()
    cache = LazyCache(scratch / "cache")
    filler = Filler(cache, store, nobody, clock, most_bytes=1 << 30, copier=copier)
    try:
        await filler.attach(manifest.digest)
        filler.read(Waiting(0, 0, 0, form.CHUNK_BYTES))
        filler.read(Waiting(0, 0, 0, _CHUNKS * form.CHUNK_BYTES))
        await filler.complete(manifest.digest)
        for _ in range(2):
            await nobody.answers.get()
    finally:
        await filler.close()
        cache.close()
        await store.close()
