"""Images become layers: one of ours for each of theirs, and the image's configuration on the topmost.

A layer that was imported before, over the same ones below, is not fetched again: `store/imports/<chain>` remembers
which layer it became. It is each project's own: who can only say what an image consists of must not get what another
brought.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple, cast

import msgspec
import zstandard

from dsec.errors import InvalidRequest, LayerCorrupt, TooLarge
from dsec.store.archive import read_layer
from dsec.store.data import GIB, Budget
from dsec.store.format import ImageConfig, Kind
from dsec.store.image import BlobRange, Image, ImageLayer, ImageSource, Platform
from dsec.store.layers import LayerStore
from dsec.store.shared import Progress, quiet
from dsec.store.tree import Node, directory, overlay

DOWNLOADS = 4
"""Layers of one image that are fetched at the same time."""
_READ = 1 << 20


class Imported(NamedTuple):
    """An image that has become layers."""

    layers: list[str]
    """Digests, top first."""
    config: ImageConfig
    digest: str
    """The image's."""


class Importer:
    """Imports images into one node's layers."""

    def __init__(self, layers: LayerStore, project: str = "", *, budget: Callable[[], Budget] | None = None) -> None:
        """`project`: for which it is. `budget`: for each layer."""
        self._layers = layers
        self._project = project
        self._budget = budget or (lambda: Budget(data_bytes=64 * GIB, file_bytes=256 * GIB))
        self._memory = layers.root.parent / "imports"
        self._memory.mkdir(exist_ok=True)

    async def run(self, source: ImageSource, platform: Platform, kind: Kind, progress: Progress = quiet) -> Imported:
        """Import one image. What was made of an image that fails in the middle stays unnamed, and is garbage.

        Raises `NotFound`, `InvalidRequest`, `Unsupported`, `TooLarge`, `LayerCorrupt`, `Unavailable`,
        `PermissionDenied`, OSError where the disk is full.
        """
        progress("reading the image's manifest")
        image = await source.image(platform)
        with self._layers.scratch() as scratch:
            return await self._run(source, image, kind, Path(scratch), progress)

    async def _run(self, source: ImageSource, image: Image, kind: Kind, scratch: Path, progress: Progress) -> Imported:
        chains = _chains(image, self._project)
        known = [self._remembered(chain) for chain in chains]
        first_new = next((n for n, layer in enumerate(known) if layer is None), len(known))
        window = asyncio.Semaphore(DOWNLOADS)
        here = dict.fromkeys(range(first_new, len(known)), 0)
        all_bytes = sum(image.layers[number].size for number in here)

        async def fetch(number: int) -> BlobRange:
            def told(step: str, done: int = 0, total: int = 0) -> None:
                here[number] = done
                progress(step, sum(here.values()), all_bytes)

            async with window:
                return await source.fetch(image.layers[number], str(scratch / f"{number}"), told)

        fetching = {n: asyncio.create_task(fetch(n)) for n in range(first_new, len(known))}
        below = directory()
        found: list[str] = []
        try:
            for number, layer in enumerate(image.layers):
                digest = known[number] if number < first_new else None
                if digest is None:
                    blob = await fetching[number]
                    top = number == len(image.layers) - 1
                    config = image.config if top else ImageConfig()
                    make = partial(self._make, kind=kind, config=config, progress=progress)
                    digest = await asyncio.to_thread(make, blob, layer, below)
                    (self._memory / chains[number]).write_text(digest)
                    if blob.path.startswith(f"{scratch}/"):
                        os.unlink(blob.path)
                if number < len(image.layers) - 1:
                    below = overlay(below, await asyncio.to_thread(self._layers.tree, digest))
                found.insert(0, digest)
        finally:
            for task in fetching.values():
                task.cancel()
            await asyncio.gather(*fetching.values(), return_exceptions=True)
        return Imported(found, image.config, image.digest)

    def _remembered(self, chain: str) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            layer = (self._memory / chain).read_text()
            if self._layers.has(layer):
                return layer
        return None

    def _make(
        self, blob: BlobRange, layer: ImageLayer, below: Node, *, kind: Kind, config: ImageConfig, progress: Progress
    ) -> str:
        budget = self._budget()
        source = {"diff_id": layer.diff_id}
        with self._layers.making(budget) as maker, open(blob.path, "rb") as file:
            file.seek(blob.offset)
            archive = _Opened(file, blob, layer, most_bytes=2 * budget.data_bytes, progress=progress)
            top = read_layer(archive.read, maker.data, below)
            archive.finish()
            return maker.finish(top, kind, f"layer {layer.diff_id[7:19]}", config=config, source=source).digest


def _chains(image: Image, project: str) -> list[str]:
    """For each layer a name of it and all below it, for one project; the topmost's also of the configuration that it
    will carry."""
    found = []
    chain = hashlib.sha256(project.encode()).digest()
    for number, layer in enumerate(image.layers):
        chain = hashlib.sha256(chain + layer.diff_id.encode()).digest()
        if number == len(image.layers) - 1:
            chain = hashlib.sha256(chain + msgspec.json.encode(image.config, order="sorted")).digest()
        found.append(chain.hex())
    return found


class _Opened:
    """A layer's blob, uncompressed as a stream, with both digests counted along."""

    def __init__(
        self, file: BinaryIO, blob: BlobRange, layer: ImageLayer, *, most_bytes: int, progress: Progress
    ) -> None:
        self._file = file
        self._blob = blob
        self._layer = layer
        self._progress = progress
        self._left = blob.size
        self._room = most_bytes
        self._blob_hash = hashlib.sha256()
        self._hash = hashlib.sha256()
        self._pieces = self._uncompressed()
        self._buffer = b""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes."""
        if not self._buffer:
            self._buffer = next(self._pieces, b"")
            self._hash.update(self._buffer)
            self._room -= len(self._buffer)
            if self._room < 0:
                raise TooLarge("the layer is larger than one may be", remedy="Split it.")
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def finish(self) -> None:
        """Read the rest and compare the digests. Raises `LayerCorrupt`."""
        while self.read(_READ):
            pass
        digest = self._layer.digest or ""
        if digest.startswith("sha256:") and digest != f"sha256:{self._blob_hash.hexdigest()}":
            raise LayerCorrupt(f"the image's blob {digest} is not what its digest says")
        if self._layer.diff_id != f"sha256:{self._hash.hexdigest()}":
            raise LayerCorrupt(f"the image's layer is not what its configuration says ({self._layer.diff_id})")

    def _raw(self) -> bytes:
        data = self._file.read(min(_READ, self._left))
        self._left -= len(data)
        self._blob_hash.update(data)
        self._progress(f"unpacking {self._layer.diff_id[7:19]}", self._blob.size - self._left, self._blob.size)
        return data

    def _uncompressed(self) -> Iterator[bytes]:
        head = self._raw()
        try:
            if head.startswith(b"\x1f\x8b"):
                yield from self._gunzipped(head)
            elif head.startswith(b"\x28\xb5\x2f\xfd"):
                yield from self._unzstd(head)
            else:
                while head:
                    yield head
                    head = self._raw()
        except (zlib.error, zstandard.ZstdError) as error:
            raise InvalidRequest(f"the layer can't be uncompressed: {error}") from None

    def _gunzipped(self, data: bytes) -> Iterator[bytes]:
        """Also several gzip members one after another."""
        member = zlib.decompressobj(31)
        while data:
            piece = member.decompress(data, _READ)
            if piece:
                yield piece
            if member.eof:
                data = member.unused_data or self._raw()
                if data:
                    member = zlib.decompressobj(31)
            else:
                data = member.unconsumed_tail or self._raw()
        if not member.eof:
            raise InvalidRequest("the layer can't be uncompressed: it is cut off")

    def _unzstd(self, data: bytes) -> Iterator[bytes]:
        stream = _Chained(data, self._raw)
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
            cast("IO[bytes]", stream), read_across_frames=True
        ) as out:
            while piece := out.read(_READ):
                yield piece


class _Chained:
    """A file of a first piece and what follows it."""

    def __init__(self, first: bytes, more: Callable[[], bytes]) -> None:
        self._data = first
        self._more = more

    def read(self, size: int = -1) -> bytes:
        if not self._data:
            self._data = self._more()
        data, self._data = (self._data, b"") if size < 0 else (self._data[:size], self._data[size:])
        return data
