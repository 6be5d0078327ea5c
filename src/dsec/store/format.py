"""The form of a layer, on a node's disk and in a store: docs/LAYERS.md draws it. No I/O.

A layer is an EROFS *metadata image* (names, owners, xattrs, the content of tiny files) and *data*: one blob, the
image's only extra device, in which every other file's content lies, 4 KiB aligned, in file order. The data is cut into
*chunks* at places that its content decides, so that equal files give equal chunks in different layers. The manifest
says all of it; its own digest names the layer. Where a store keeps the chunks is no part of it: that is a `Placement`.

Keys in a store:

    manifests/<layer>      canonical JSON, whose SHA-256 is <layer>
    metadata/<sha256>      a metadata image
    images/<layer>         the same once more, for who doesn't know its digest yet. Layers of older versions have none
    packs/<sha256>         chunks back to back: those of one layer that were new, in the order of its data
    placements/<layer>     where this layer's chunks lie; written before the manifest, replaced only by equivalents
    traces/<layer>         what sandboxes read first (written by lazy fill)
    names/..., leases/..., locks/...     names, and what collecting garbage needs
"""

from __future__ import annotations

import hashlib
import itertools
import re
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from dsec.errors import LayerCorrupt

FORMAT = 1
BLOCK = 4096
CHUNK_BYTES = 256 << 10
"""The largest chunk. All sizes are multiples of BLOCK."""
MANIFEST_BYTES = 256 << 20
"""Manifests and placements that are larger are refused unread."""

DIGEST = re.compile(r"[0-9a-f]{64}")
Kind = Literal["base", "workspace", "toolkit", "snapshot", "directory", "runtime"]

_CHUNK = struct.Struct("<I32s")
_PLACE = struct.Struct("<IQ")
_new_tuple: Any = tuple.__new__
"""Makes named tuples without a turn of the interpreter for each: the first sandbox of a layer waits for its lists."""


class ImageConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an image says about the commands that run in it. None: it doesn't say."""

    env: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    labels: dict[str, str] = {}


class Chunk(NamedTuple):
    """A piece of a layer's data."""

    offset: int
    """In the layer's data."""
    size: int
    digest: bytes


class Place(NamedTuple):
    """Where a store has a chunk."""

    pack: str
    offset: int


class Manifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a layer is. Nothing in it depends on when, where or into which store it was made."""

    format: int = FORMAT
    kind: Kind
    metadata: str
    """Digest of the metadata image."""
    metadata_bytes: int
    data_bytes: int
    """Of the data, which is the chunks back to back. 0: there is none, and the image has no extra device."""
    chunks: bytes = b""
    """Packed: for each chunk u32 size, 32 bytes SHA-256 (little-endian); see `chunk_list`."""
    files: int = 0
    """Entries of the tree, directories included."""
    file_bytes: int = 0
    """Sum of the sizes of the regular files."""
    config: ImageConfig = ImageConfig()
    source: dict[str, str] = {}
    """Where it came from, in words that are the same for the same input."""
    hot: list[str] = []
    """Files that most sandboxes read; `/`: all."""

    @property
    def chunk_count(self) -> int:
        """How long `chunk_list` is."""
        return len(self.chunks) // _CHUNK.size

    def chunk_list(self) -> list[Chunk]:
        """Raises `LayerCorrupt` where it contradicts itself."""
        if len(self.chunks) % _CHUNK.size:
            raise LayerCorrupt("a manifest's list of chunks is cut off")
        fields = struct.unpack("<" + "I32s" * (len(self.chunks) // _CHUNK.size), self.chunks)
        sizes, digests = fields[0::2], fields[1::2]
        for size in set(sizes):
            if not 0 < size <= CHUNK_BYTES or size % BLOCK:
                raise LayerCorrupt(f"a manifest has a chunk of {size} bytes")
        offsets = [0, *itertools.accumulate(sizes)]
        if offsets.pop() != self.data_bytes:
            raise LayerCorrupt(f"a manifest's chunks are {sum(sizes)} bytes, its data {self.data_bytes}")
        return list(map(_new_tuple, itertools.repeat(Chunk), zip(offsets, sizes, digests, strict=True)))

    def encode(self) -> bytes:
        """The canonical form: what the layer's digest is the SHA-256 of."""
        return msgspec.json.encode(self, order="sorted")

    @property
    def digest(self) -> str:
        """Names the layer."""
        return hashlib.sha256(self.encode()).hexdigest()


class Placement(Struct, frozen=True, kw_only=True):
    """Where one store has a layer's chunks."""

    packs: list[str]
    """Digests of packs, as in their keys."""
    places: bytes
    """Packed: for each chunk of the layer, in order, u32 index into `packs`, u64 offset (little-endian)."""

    @property
    def place_count(self) -> int:
        """How long `place_list` is."""
        return len(self.places) // _PLACE.size

    def place_list(self) -> list[Place]:
        """Raises `LayerCorrupt` where it contradicts itself."""
        if len(self.places) % _PLACE.size:
            raise LayerCorrupt("a placement is cut off")
        fields = struct.unpack("<" + "IQ" * (len(self.places) // _PLACE.size), self.places)
        try:
            packs = map(self.packs.__getitem__, fields[0::2])
            return list(map(_new_tuple, itertools.repeat(Place), zip(packs, fields[1::2], strict=True)))
        except IndexError:
            raise LayerCorrupt("a placement names a pack that it doesn't list") from None


def pack_chunks(chunks: Iterable[tuple[int, bytes]]) -> bytes:
    """`Manifest.chunks` of (size, digest) pairs."""
    return b"".join(_CHUNK.pack(size, digest) for size, digest in chunks)


def pack_places(places: Iterable[Place]) -> Placement:
    """The placement of a layer whose chunks lie there."""
    index: dict[str, int] = {}
    packed = b"".join(_PLACE.pack(index.setdefault(place.pack, len(index)), place.offset) for place in places)
    return Placement(packs=list(index), places=packed)


def decode_manifest(data: bytes, layer: str) -> Manifest:
    """The manifest of `layer`, checked against its name. Raises `LayerCorrupt`."""
    if hashlib.sha256(data).hexdigest() != layer:
        raise LayerCorrupt(f"the manifest of layer {layer} is not what its digest says", layer=layer)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LayerCorrupt(f"the manifest of layer {layer} can't be read: {error}", layer=layer) from None
    if manifest.format != FORMAT:
        raise LayerCorrupt(
            f"layer {layer} has format {manifest.format}; this version knows {FORMAT}", remedy="Upgrade.", layer=layer
        )
    return manifest


def decode_placement(data: bytes, layer: str) -> Placement:
    """Raises `LayerCorrupt`."""
    try:
        return msgspec.json.decode(data, type=Placement)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LayerCorrupt(f"the placement of layer {layer} can't be read: {error}", layer=layer) from None


def check_chunk(data: bytes | memoryview, chunk: Chunk) -> None:
    """Raise `LayerCorrupt` unless `data` is the chunk."""
    if len(data) != chunk.size or hashlib.sha256(data).digest() != chunk.digest:
        raise LayerCorrupt(
            f"chunk {chunk.digest.hex()} is not what its digest says ({len(data)} of {chunk.size} bytes)",
            remedy="`dsec layer verify`, on a node that has the layer whole, replaces what is damaged in the store.",
        )


class Cutter:
    """Says where a layer's data is cut, from the sizes and digests of its files: a large file is a row of CHUNK_BYTES
    from its own start on; small ones share chunks that end after a file whose digest says so, so that a file that
    changes moves only the cuts near it."""

    SHARED_BYTES = 64 << 10
    """A chunk of small files ends no sooner."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._open = 0

    def add(self, size: int, digest: bytes) -> None:
        """The next file: its size in the data (a multiple of BLOCK, above 0) and a digest of its content."""
        if self._open + size > CHUNK_BYTES:
            self._close()
        if size >= CHUNK_BYTES:
            whole, rest = divmod(size, CHUNK_BYTES)
            self.sizes += [CHUNK_BYTES] * whole + ([rest] if rest else [])
            return
        self._open += size
        if self._open >= self.SHARED_BYTES and digest[0] < 64:
            self._close()

    def finish(self) -> list[int]:
        """The sizes of all chunks."""
        self._close()
        return self.sizes

    def _close(self) -> None:
        if self._open:
            self.sizes.append(self._open)
            self._open = 0


def manifest_key(layer: str) -> str:
    return f"manifests/{layer}"


def metadata_key(digest: str) -> str:
    return f"metadata/{digest}"


def image_key(layer: str) -> str:
    return f"images/{layer}"


def pack_key(digest: str) -> str:
    return f"packs/{digest}"


def placement_key(layer: str) -> str:
    return f"placements/{layer}"


def trace_key(layer: str) -> str:
    return f"traces/{layer}"


def is_layer(text: str) -> bool:
    """Whether it has the form of a layer's digest."""
    return DIGEST.fullmatch(text) is not None


def iter_runs(places: list[Place], chunks: list[Chunk], most_bytes: int) -> Iterator[tuple[Place, list[Chunk]]]:
    """Group chunks (in order) whose places follow one another into ranges that one request can read, of at most
    `most_bytes` each (or one chunk)."""
    start: Place | None = None
    run: list[Chunk] = []
    length = 0
    for place, chunk in zip(places, chunks, strict=True):
        if (
            start is not None
            and place.pack == start.pack
            and place.offset == start.offset + length
            and length + chunk.size <= most_bytes
        ):
            run.append(chunk)
            length += chunk.size
            continue
        if start is not None:
            yield start, run
        start, run, length = place, [chunk], chunk.size
    if start is not None:
        yield start, run
