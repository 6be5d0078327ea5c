"""Images on this machine's disk: an OCI layout directory, and the archives of `docker save` (of either form, also
compressed) and of an OCI layout."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from dsec.errors import InvalidRequest, LayerCorrupt, NotFound, TooLarge
from dsec.store.image import (
    MAX_DOCUMENT,
    MAX_NESTING,
    BlobRange,
    Descriptor,
    Image,
    ImageLayer,
    Platform,
    choose,
    decode_any,
    parse_config,
    parse_document,
    parse_image,
)
from dsec.store.packed import Unpacked
from dsec.store.shared import Progress
from dsec.store.tar import TarReader

_TAG = "org.opencontainers.image.ref.name"
_MAX_FILES = 100_000
_LEAST_FREE = 1 << 30
_READ = 4 << 20


class _Files(Protocol):
    """The files of a layout."""

    def find(self, name: str) -> BlobRange | None: ...


class _Directory:
    def __init__(self, top: Path) -> None:
        self._top = top.resolve()

    def find(self, name: str) -> BlobRange | None:
        path = (self._top / name).resolve()
        if self._top not in path.parents or not path.is_file():
            return None
        return BlobRange(str(path), 0, path.stat().st_size)


class _Archive:
    """An uncompressed tar archive: its files are ranges of it."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._ranges: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with open(path, "rb") as file:
            reader = TarReader(file.read, lambda size: _skip(file, size))
            for header in reader:
                name = str(PurePosixPath(os.fsdecode(header.name)))
                if header.kind == b"0":
                    self._ranges[name] = (reader.offset, header.size)
                elif header.kind in b"12":
                    base = PurePosixPath(name).parent if header.kind == b"2" else PurePosixPath()
                    self._links[name] = os.path.normpath(base / os.fsdecode(header.target))
                if len(self._ranges) + len(self._links) > _MAX_FILES:
                    raise TooLarge(f"the archive has more than {_MAX_FILES} files: it is no image")

    def find(self, name: str) -> BlobRange | None:
        found = self._ranges.get(name) or self._ranges.get(self._links.get(name, ""))
        return BlobRange(self._path, *found) if found else None


def _skip(file: BinaryIO, size: int) -> None:
    at = file.seek(size, os.SEEK_CUR)
    if at > os.fstat(file.fileno()).st_size:
        raise InvalidRequest("the archive is cut off in the middle of a file")


class LocalSource:
    """`image.ImageSource` of one image on disk."""

    def __init__(self, path: Path, scratch: Path, tag: str | None = None, *, name: str = "") -> None:
        """`scratch`: an existing directory, for what has to be uncompressed. `tag`: which image, where there are
        several. `name`: what errors call it, where not its path. Raises `InvalidRequest`, `NotFound`, `TooLarge`.
        Blocks."""
        self.name = name or str(path)
        self._tag = tag
        if path.is_dir():
            self._files: _Files = _Directory(path)
        elif path.is_file():
            self._files = _Archive(_plain(path, scratch, self.name))
        else:
            raise NotFound(f"there is no {self.name}")
        if self._files.find("index.json") is None and self._files.find("manifest.json") is None:
            raise InvalidRequest(
                f"{self.name} is no image: it has neither index.json nor manifest.json",
                remedy="Give an OCI layout, or what `docker save` writes.",
            )

    async def close(self) -> None:
        """Nothing to let go of."""

    async def image(self, platform: Platform) -> Image:
        return await asyncio.to_thread(self._image, platform)

    async def fetch(self, layer: ImageLayer, into: str, progress: Progress) -> BlobRange:
        if layer.digest is None or layer.digest.startswith("file:"):
            name = (layer.digest or "").removeprefix("file:")
        else:
            name = f"blobs/sha256/{layer.digest.removeprefix('sha256:')}"
        found = self._files.find(name)
        if found is None:
            raise NotFound(f"{self.name} has no {name}")
        return found

    def _image(self, platform: Platform) -> Image:
        if self._files.find("index.json") is None:
            return self._docker_image(platform)
        index = parse_document(self._read("index.json"), "")
        if index.manifests is None:
            raise InvalidRequest(f"{self.name}: its index.json is no index")
        tagged = [each for each in index.manifests if _tag_of(each) == self._tag]
        if self._tag is not None and not tagged:
            raise NotFound(f"{self.name} has no image {self._tag!r}", remedy=f"It has: {_tags(index.manifests)}.")
        if self._tag is None and len({each.digest for each in index.manifests if not each.platform}) > 1:
            raise InvalidRequest(f"{self.name} has several images", remedy=f"Say which: {_tags(index.manifests)}.")
        descriptor = tagged[0] if tagged else choose(index, platform)
        for _ in range(MAX_NESTING):
            document = parse_document(self._blob(descriptor), descriptor.media_type)
            if document.manifests is None:
                assert document.config is not None
                return parse_image(descriptor.digest, document, self._blob(document.config), platform)
            descriptor = choose(document, platform)
        raise InvalidRequest(f"{self.name}: its indexes lead to indexes, {MAX_NESTING} times over")

    def _docker_image(self, platform: Platform) -> Image:
        """The older form of `docker save`: a list of images, whose layers are files."""
        listed = decode_any(self._read("manifest.json"), "manifest.json")
        if not isinstance(listed, list) or not all(
            isinstance(each, dict)
            and isinstance(each.get("Config"), str)
            and isinstance(each.get("Layers"), list)
            and all(isinstance(layer, str) for layer in each["Layers"])
            for each in listed
        ):
            raise InvalidRequest(f"{self.name}: its manifest.json is not what `docker save` writes")
        found = [each for each in listed if self._tag is None or self._tag in (each.get("RepoTags") or [])]
        if len(found) != 1:
            tags = ", ".join(str(tag) for each in listed for tag in each.get("RepoTags") or [])
            raise (NotFound if not found else InvalidRequest)(
                f"{self.name} has {len(found) or 'no such'} images", remedy=f"Say which: {tags[:300]}."
            )
        data = self._read(found[0]["Config"])
        config, diff_ids = parse_config(data, platform)
        names = found[0]["Layers"]
        if len(names) != len(diff_ids):
            raise InvalidRequest(
                f"{self.name}: it has {len(names)} layers, its configuration speaks of {len(diff_ids)}"
            )
        layers = [ImageLayer(f"file:{name}", 0, diff_id) for name, diff_id in zip(names, diff_ids, strict=True)]
        return Image(f"sha256:{hashlib.sha256(data).hexdigest()}", config, layers)

    def _blob(self, descriptor: Descriptor) -> bytes:
        data = self._read(f"blobs/sha256/{descriptor.digest.removeprefix('sha256:')}")
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != descriptor.digest:
            raise LayerCorrupt(f"{self.name}: the blob {descriptor.digest} is not what its digest says")
        return data

    def _read(self, name: str) -> bytes:
        found = self._files.find(name)
        if found is None:
            raise NotFound(f"{self.name} has no {name}")
        if found.size > MAX_DOCUMENT:
            raise InvalidRequest(f"{self.name}: {name} is {found.size} bytes large")
        with open(found.path, "rb") as file:
            file.seek(found.offset)
            return file.read(found.size)


def _plain(path: Path, scratch: Path, name: str) -> Path:
    """The archive itself, uncompressed where it is compressed."""
    target = scratch / "archive.tar"
    with open(path, "rb") as file:
        unpacked = Unpacked(file.read, name)
        if not unpacked.packed:
            return path
        with open(target, "xb") as plain:
            while data := unpacked.read(_READ):
                plain.write(data)
                if shutil.disk_usage(scratch).free < _LEAST_FREE:
                    raise TooLarge(f"{name} is too large to be uncompressed here", remedy="Free some space.")
    return target


def _tag_of(descriptor: Descriptor) -> str | None:
    return (descriptor.annotations or {}).get(_TAG)


def _tags(descriptors: list[Descriptor]) -> str:
    return ", ".join(sorted(tag for each in descriptors if (tag := _tag_of(each))))[:300] or "none has a name"
