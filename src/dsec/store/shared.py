"""Layers between a node's disk and the shared store: push what is new of them, pull them whole.

A layer is in the store when its manifest is, which is written last. Everything that is read is verified before it is
used; what turns out damaged is read once more, since the damage may have been on the way.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from dsec.errors import LayerCorrupt, NotFound, TooLarge
from dsec.ports import BlobStore
from dsec.store import format as form
from dsec.store.format import Chunk, Manifest, Place, Placement
from dsec.store.index import ChunkIndex
from dsec.store.layers import LayerMeta, LayerStore
from dsec.store.leases import Leases

T = TypeVar("T")

STREAMS = 8
"""Requests of one pull at the same time."""
READ_BYTES = 4 << 20
"""What one request reads at most."""


class Progress(Protocol):
    """Told about work that takes long; called on the event loop or a thread, must not block."""

    def __call__(self, step: str, done: int = 0, total: int = 0) -> None:
        """`step`: what is being done, for people. `done` of `total`: bytes of this step; a total of 0: unknown."""
        ...


def quiet(step: str, done: int = 0, total: int = 0) -> None:
    """A `Progress` that says nothing."""


class SharedLayers:
    """The layers of one store, seen from one node."""

    def __init__(self, store: BlobStore, layers: LayerStore, index: ChunkIndex, leases: Leases) -> None:
        self.store = store
        self.leases = leases
        self._layers = layers
        self._index = index

    # --- reading ---

    async def manifest(self, layer: str) -> Manifest:
        """Raises `NotFound`, `LayerCorrupt`, `Unavailable`."""
        return await self._decoded(form.manifest_key(layer), layer, form.decode_manifest)

    async def placement(self, layer: str) -> Placement:
        """Raises `NotFound`, `LayerCorrupt`, `Unavailable`."""
        return await self._decoded(form.placement_key(layer), layer, form.decode_placement)

    async def metadata(self, manifest: Manifest) -> bytes:
        """The metadata image. Raises `LayerCorrupt` (also where it is missing), `Unavailable`."""
        return await self._twice(lambda: self._metadata(manifest))

    async def _metadata(self, manifest: Manifest) -> bytes:
        try:
            data = await self.store.get(form.metadata_key(manifest.metadata), 0, manifest.metadata_bytes)
        except NotFound:
            raise LayerCorrupt(f"the metadata image {manifest.metadata} is missing in the store") from None
        if hashlib.sha256(data).hexdigest() != manifest.metadata:
            raise LayerCorrupt(f"the metadata image {manifest.metadata} is not what its digest says")
        return data

    async def chunks(self, place: Place, chunks: list[Chunk]) -> bytes:
        """Chunks that lie one after another in a pack, read by one request and verified. Raises `LayerCorrupt`,
        `Unavailable`."""
        return await self._twice(lambda: self._chunks(place, chunks))

    async def _chunks(self, place: Place, chunks: list[Chunk]) -> bytes:
        try:
            data = await self.store.get(form.pack_key(place.pack), place.offset, sum(chunk.size for chunk in chunks))
        except NotFound:
            raise LayerCorrupt(f"the pack {place.pack} is missing in the store") from None
        await asyncio.to_thread(_check_all, data, chunks)
        return data

    async def _decoded(self, key: str, layer: str, decode: Callable[[bytes, str], T]) -> T:
        async def read() -> T:
            size = await self.store.size(key)
            if size is None:
                raise NotFound(f"the store has no layer {layer}", remedy="Import it.")
            if size > form.MANIFEST_BYTES:
                raise LayerCorrupt(f"{key} is {size} bytes large")
            return decode(await self.store.get(key), layer)

        return await self._twice(read)

    async def _twice(self, read: Callable[[], Awaitable[T]]) -> T:
        try:
            return await read()
        except LayerCorrupt:
            return await read()

    async def all(self) -> AsyncIterator[str]:
        """The layers of the store."""
        async for info in self.store.list("manifests/"):
            yield info.key.rpartition("/")[2]

    # --- pulling ---

    async def pull(self, layer: str, progress: Progress = quiet, *, streams: int = STREAMS) -> LayerMeta:
        """Bring a layer onto this node's disk, whole. Nothing where it is there.

        Raises `NotFound`, `LayerCorrupt`, `Unavailable`; then nothing is left of it here.
        """
        if self._layers.has(layer):
            return self._layers.meta(layer)
        manifest = await self.manifest(layer)
        chunks = manifest.chunk_list()
        places = (await self.placement(layer)).place_list() if chunks else []
        if len(places) != len(chunks):
            raise LayerCorrupt(f"the placement of layer {layer} doesn't fit its manifest", layer=layer)
        with self._layers.scratch() as scratch:
            made = Path(scratch) / "layer"
            made.mkdir(mode=0o755)
            (made / "meta.erofs").write_bytes(await self.metadata(manifest))
            if manifest.data_bytes:
                runs = list(form.iter_runs(places, chunks, READ_BYTES))
                await self._fill(made / "data", manifest.data_bytes, runs, progress, streams=streams)
            return await asyncio.to_thread(self._layers.place, made, manifest)

    async def _fill(
        self, path: Path, size: int, runs: list[tuple[Place, list[Chunk]]], progress: Progress, *, streams: int
    ) -> None:
        work = iter(runs)
        done = 0
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(fd, size)

            async def stream() -> None:
                nonlocal done
                for place, run in work:
                    data = await self.chunks(place, run)
                    await asyncio.to_thread(os.pwrite, fd, data, run[0].offset)
                    done += len(data)
                    progress("fetching", done, size)

            async with _Group() as group:
                for _ in range(streams):
                    group.start(stream())
            await asyncio.to_thread(os.fdatasync, fd)
        finally:
            os.close(fd)

    # --- pushing ---

    async def push(self, layer: str, progress: Progress = quiet, *, anew: bool = False) -> int:
        """Bring a layer from this node's disk into the store. Returns the bytes that were new in the store. `anew`:
        what the store has of it is damaged, and is replaced.

        Raises `NotFound` where it isn't on this node, `LayerCorrupt` where it is damaged here, `Unavailable`.
        """
        manifest = await asyncio.to_thread(self._layers.manifest, layer)
        chunks = manifest.chunk_list()
        async with self.leases.upload():
            if not anew and await self.store.size(form.manifest_key(layer)) is not None:
                await self.store.put(form.manifest_key(layer), manifest.encode())  # it is young again: not garbage yet
                return 0
            known = {} if anew else await self._known(chunks, progress)
            new: dict[bytes, Chunk] = {}
            for chunk in chunks:
                if chunk.digest not in known:
                    new.setdefault(chunk.digest, chunk)
            files = self._layers.files(layer)
            image = await asyncio.to_thread(files.image.read_bytes)
            if hashlib.sha256(image).hexdigest() != manifest.metadata:
                raise LayerCorrupt(f"the metadata image of layer {layer} is damaged on this node", layer=layer)
            added = sum(chunk.size for chunk in new.values())
            if new and files.data is not None:
                with self._layers.scratch() as scratch:
                    pack = Path(scratch) / "pack"
                    digest = await asyncio.to_thread(_write_pack, files.data, pack, list(new.values()), progress)
                    told = partial(progress, "uploading", total=added)
                    told(0)
                    if anew:
                        await self.store.delete(form.pack_key(digest))
                    await self.store.put_if_absent(form.pack_key(digest), pack, told)
                offset = 0
                for chunk in new.values():
                    known[chunk.digest] = Place(digest, offset)
                    offset += chunk.size
            if anew:
                await self.store.put(form.metadata_key(manifest.metadata), image)
            elif await self.store.put_if_absent(form.metadata_key(manifest.metadata), image):
                added += len(image)
            await self.store.put(form.image_key(layer), image)
            places = [known[chunk.digest] for chunk in chunks]
            await self.store.put(form.placement_key(layer), msgspec.json.encode(form.pack_places(places)))
            await self.store.put(form.manifest_key(layer), manifest.encode())
        await asyncio.to_thread(self._index.add, layer, chunks, places)
        progress("uploaded", added, added)
        return added

    async def _known(self, chunks: list[Chunk], progress: Progress) -> dict[bytes, Place]:
        """Where the store has these chunks, as far as it does; packs that are gone don't count."""
        await self._read_index(progress)
        while True:
            known = await asyncio.to_thread(self._index.find, {chunk.digest for chunk in chunks})
            packs = sorted({place.pack for place in known.values()})
            sizes = await asyncio.gather(*(self.store.size(form.pack_key(pack)) for pack in packs))
            gone = [pack for pack, size in zip(packs, sizes, strict=True) if size is None]
            if not gone:
                return known
            for pack in gone:
                self._index.forget_pack(pack)

    async def _read_index(self, progress: Progress) -> None:
        """Learn of the layers that others pushed."""
        layers = [layer async for layer in self.all()]
        missing = sorted(self._index.unseen(layers))
        work = iter(missing)

        async def stream() -> None:
            for layer in work:
                try:
                    chunks = (await self.manifest(layer)).chunk_list()
                    places = (await self.placement(layer)).place_list()
                except (NotFound, LayerCorrupt):
                    continue  # it was removed meanwhile, or nobody should build on it
                if len(chunks) == len(places):
                    await asyncio.to_thread(self._index.add, layer, chunks, places)
                    progress("learning what the store has")

        async with _Group() as group:
            for _ in range(STREAMS):
                group.start(stream())

    # --- checking ---

    async def verify(self, layer: str, progress: Progress = quiet) -> Manifest:
        """Read all of a layer in the store and compare it with its digests. Raises `NotFound`, `LayerCorrupt`,
        `Unavailable`."""
        manifest = await self.manifest(layer)
        await self.metadata(manifest)
        chunks = manifest.chunk_list()
        places = (await self.placement(layer)).place_list()
        if len(places) != len(chunks):
            raise LayerCorrupt(f"the placement of layer {layer} doesn't fit its manifest", layer=layer)
        done = 0
        for place, run in form.iter_runs(places, chunks, READ_BYTES):
            done += len(await self.chunks(place, run))
            progress("verifying", done, manifest.data_bytes)
        return manifest

    # --- collecting garbage ---

    async def collect(
        self,
        roots: Callable[[], Awaitable[Iterable[str]]],
        *,
        least_age_s: float,
        now: float,
        progress: Progress = quiet,
    ) -> int:
        """Delete every layer that isn't in `roots`, isn't used by a node and is older than `least_age_s`, and every
        pack and image that only those need. `roots` is asked when all uploads have ended. Returns the bytes
        that were freed.

        Raises `Unavailable` where uploads don't end, `LayerCorrupt` (nothing is deleted) where a layer that is kept
        can't be read.
        """
        async with self.leases.collection():
            infos = {info.key: info for top in _COLLECTED async for info in self.store.list(f"{top}/")}
            keep = {*await roots(), *await self.leases.used()}
            needed: set[str] = set()
            for key, info in infos.items():
                top, _, layer = key.partition("/")
                if top == "manifests" and (layer in keep or info.modified_at > now - least_age_s):
                    progress(f"keeping {layer[:12]}")
                    needed |= {key, form.placement_key(layer), form.image_key(layer), form.trace_key(layer)}
                    manifest = await self.manifest(layer)
                    needed.add(form.metadata_key(manifest.metadata))
                    if manifest.data_bytes:
                        needed.update(form.pack_key(pack) for pack in (await self.placement(layer)).packs)
            # Manifests go first: a layer of which a part is missing must not look whole.
            doomed = sorted(
                (info for info in infos.values() if info.key not in needed and info.modified_at <= now - least_age_s),
                key=lambda info: not info.key.startswith("manifests/"),
            )
            for info in doomed:
                progress(f"deleting {info.key[:30]}")
                await self.store.delete(info.key)
            self._index.forget_layers(i.key.partition("/")[2] for i in doomed if i.key.startswith("manifests/"))
            for info in doomed:
                if info.key.startswith("packs/"):
                    self._index.forget_pack(info.key.partition("/")[2])
            return sum(info.size for info in doomed)


_COLLECTED = ("manifests", "placements", "metadata", "images", "packs", "traces")


class _Group:
    """Tasks that fail together: like asyncio.TaskGroup, but the first error itself is raised."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> _Group:
        await self._group.__aenter__()
        return self

    def start(self, work: Awaitable[None]) -> None:
        self._group.create_task(_run(work))

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            await self._group.__aexit__(kind, error, trace)  # type: ignore[arg-type]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors


async def _run(work: Awaitable[None]) -> None:
    await work


def _check_all(data: bytes, chunks: list[Chunk]) -> None:
    view, offset = memoryview(data), 0
    for chunk in chunks:
        form.check_chunk(view[offset : offset + chunk.size], chunk)
        offset += chunk.size


def _write_pack(data: Path, pack: Path, chunks: list[Chunk], progress: Progress) -> str:
    """The chunks of a layer's data, verified, as a pack. Returns its digest."""
    digest, done = hashlib.sha256(), 0
    total = sum(chunk.size for chunk in chunks)
    with open(data, "rb") as source, open(pack, "xb") as target:
        free = shutil.disk_usage(pack.parent).free
        if total > free:
            raise TooLarge(f"{total >> 20} MiB have to be packed, {free >> 20} MiB are free", remedy="Free some space.")
        for chunk in chunks:
            piece = os.pread(source.fileno(), chunk.size, chunk.offset)
            form.check_chunk(piece, chunk)
            digest.update(piece)
            target.write(piece)
            done += len(piece)
            progress("packing", done, total)
    return digest.hexdigest()
