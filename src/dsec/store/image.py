"""OCI and Docker image documents: indexes, manifests, configurations. No I/O; nothing in a document is believed that
isn't checked."""

from __future__ import annotations

import platform as machine
import re
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct, field

from dsec.errors import InvalidRequest, NotFound, Unsupported
from dsec.store.format import ImageConfig
from dsec.store.shared import Progress

T = TypeVar("T")

MAX_DOCUMENT = 8 << 20
"""Of an index, a manifest or a configuration."""
MAX_LAYERS = 500
MAX_NESTING = 4
"""Indexes in indexes."""
INDEXES = frozenset(
    {"application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"}
)
MANIFESTS = frozenset(
    {"application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"}
)
_LAYER = re.compile(
    r"application/vnd\.(oci\.image\.layer\.v1\.tar(\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs\.diff\.tar(\.gzip|\.zstd)?)"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}


class Platform(Struct, frozen=True):
    """What an image is for."""

    os: str = "linux"
    architecture: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


class Descriptor(Struct, frozen=True):
    """A reference to a blob."""

    digest: str
    size: int
    media_type: str = field(name="mediaType", default="")
    platform: Platform | None = None
    annotations: dict[str, str] | None = None


class Document(Struct, frozen=True):
    """An index or a manifest: which, is seen by what it has."""

    media_type: str = field(name="mediaType", default="")
    schema_version: int = field(name="schemaVersion", default=2)
    manifests: list[Descriptor] | None = None
    config: Descriptor | None = None
    layers: list[Descriptor] | None = None


class _RunConfig(Struct, frozen=True):
    env: list[str] | None = field(name="Env", default=None)
    user: str | None = field(name="User", default=None)
    workdir: str | None = field(name="WorkingDir", default=None)
    entrypoint: list[str] | None = field(name="Entrypoint", default=None)
    cmd: list[str] | None = field(name="Cmd", default=None)
    labels: dict[str, str] | None = field(name="Labels", default=None)


class _RootFs(Struct, frozen=True):
    diff_ids: list[str]


class _Config(Struct, frozen=True):
    rootfs: _RootFs
    os: str = "linux"
    architecture: str = ""
    config: _RunConfig | None = None


class ImageLayer(NamedTuple):
    """One layer of an image, as its documents say."""

    digest: str | None
    """Of the blob; None: only the uncompressed archive's is known."""
    size: int
    diff_id: str
    """Digest of the uncompressed archive."""


class Image(NamedTuple):
    """An image for one platform."""

    digest: str
    config: ImageConfig
    layers: list[ImageLayer]
    """Bottom first."""


class BlobRange(NamedTuple):
    """Where a blob's bytes are, on disk."""

    path: str
    offset: int
    size: int


class ImageSource(Protocol):
    """Where images come from."""

    name: str

    async def image(self, platform: Platform) -> Image:
        """The image for a platform. Raises `NotFound`, `InvalidRequest`, `Unsupported`, `LayerCorrupt`, `Unavailable`,
        `PermissionDenied`."""
        ...

    async def fetch(self, layer: ImageLayer, into: str, progress: Progress) -> BlobRange:
        """A layer's blob, in the file `into` or where it lies already. It isn't verified. Raises as `image` does."""
        ...

    async def close(self) -> None: ...


def host_platform() -> Platform:
    """Of this machine."""
    name = machine.machine()
    return Platform("linux", _ARCHITECTURES.get(name, name))


def parse_platform(text: str) -> Platform:
    """`linux/arm64/v8` or `arm64`. Raises `InvalidRequest`."""
    parts = text.split("/")
    if len(parts) == 1:
        parts = ["linux", *parts]
    if len(parts) > 3 or not all(re.fullmatch(r"[a-z0-9_.-]+", part) for part in parts):
        raise InvalidRequest(f"not a platform: {text[:100]!r}", remedy="Like linux/amd64.", field="platform")
    return Platform(*parts)


def check_digest(digest: str) -> str:
    """Raises `Unsupported` for another kind than SHA-256, `InvalidRequest` for nonsense."""
    if not _DIGEST.fullmatch(digest):
        if re.fullmatch(r"[a-z0-9+._-]+:[0-9a-f]{32,}", digest):
            raise Unsupported(
                f"the image uses digests of the kind {digest.split(':', maxsplit=1)[0]!r}; sha256 is known here"
            )
        raise InvalidRequest(f"the image has a digest that is none: {digest[:100]!r}")
    return digest


def parse_document(data: bytes, media_type: str) -> Document:
    """An index or a manifest. Raises `InvalidRequest`, `Unsupported`."""
    document = _decode(data, Document, "manifest")
    media_type = document.media_type or media_type
    if document.manifests is None and (document.config is None or document.layers is None):
        kind = f"the media type {media_type!r}" if media_type else "no media type"
        raise Unsupported(f"the image's manifest has {kind} and is neither an image's nor an index")
    known = INDEXES if document.manifests is not None else MANIFESTS
    if media_type and media_type not in known and media_type != "application/json":
        raise Unsupported(f"the image's manifest has an unknown media type: {media_type[:200]!r}")
    for each in (*(document.manifests or ()), *(document.layers or ()), *filter(None, [document.config])):
        check_digest(each.digest)
        if each.size < 0:
            raise InvalidRequest("the image has a blob of a negative size")
    return document


def choose(document: Document, platform: Platform) -> Descriptor:
    """The entry of an index for a platform. Raises `NotFound`."""
    fits = [
        each
        for each in document.manifests or ()
        if each.media_type in (*INDEXES, *MANIFESTS, "") and _fits(each.platform, platform)
    ]
    if not fits:
        known = sorted({str(each.platform) for each in document.manifests or () if each.platform})
        raise NotFound(
            f"the image isn't there for {platform}", remedy=f"It is for: {', '.join(known)[:300] or 'nothing known'}."
        )
    return next((each for each in fits if each.platform is not None), fits[0])


def _fits(has: Platform | None, wanted: Platform) -> bool:
    if has is None:
        return True
    variant = not wanted.variant or not has.variant or has.variant == wanted.variant
    return (has.os, has.architecture) == (wanted.os, wanted.architecture) and variant


def parse_image(digest: str, manifest: Document, config: bytes, platform: Platform) -> Image:
    """An image of its manifest and configuration. Raises `InvalidRequest`, `Unsupported`, `NotFound` where it is for
    another platform."""
    layers = manifest.layers or []
    for each in layers:
        if not _LAYER.fullmatch(each.media_type):
            raise Unsupported(f"the image has a layer of an unknown media type: {each.media_type[:200]!r}")
    parsed, found = parse_config(config, platform)
    if len(found) != len(layers):
        raise InvalidRequest(f"the image has {len(layers)} layers, its configuration speaks of {len(found)}")
    return Image(digest, parsed, [ImageLayer(e.digest, e.size, d) for e, d in zip(layers, found, strict=True)])


def parse_config(config: bytes, platform: Platform) -> tuple[ImageConfig, list[str]]:
    """What an image's configuration says about commands, and the digests of its uncompressed layers. Raises as
    `parse_image`."""
    parsed = _decode(config, _Config, "configuration")
    has = Platform(parsed.os, parsed.architecture)
    if parsed.architecture and not _fits(has, platform):  # none: it says nothing, as images without programs may
        raise NotFound(
            f"the image is for {has}, not for {platform}",
            remedy=f"To have it all the same, ask for {has} (--platform).",
        )
    diff_ids = parsed.rootfs.diff_ids
    if len(diff_ids) > MAX_LAYERS:
        raise InvalidRequest(f"the image has {len(diff_ids)} layers; {MAX_LAYERS} is the limit")
    for diff_id in diff_ids:
        check_digest(diff_id)
    run = parsed.config or _RunConfig()
    env: dict[str, str] = {}
    for line in run.env or ():
        name, _, value = line.partition("=")
        if not name or "\0" in line:
            raise InvalidRequest(f"the image sets a variable that can't be: {line[:100]!r}")
        env[name] = value
    for text in (run.user or "", run.workdir or ""):
        if "\0" in text or len(text) > 4096:
            raise InvalidRequest("the image has a user or directory that can't be")
    workdir = run.workdir or None
    if workdir is not None and not workdir.startswith("/"):
        workdir = f"/{workdir}"
    return (
        ImageConfig(
            env=env,
            user=run.user or None,
            workdir=workdir,
            entrypoint=run.entrypoint or None,
            cmd=run.cmd or None,
            labels=run.labels or {},
        ),
        diff_ids,
    )


def _decode(data: bytes, kind: type[T], what: str) -> T:
    if len(data) > MAX_DOCUMENT:
        raise InvalidRequest(f"the image's {what} is {len(data)} bytes; {MAX_DOCUMENT} is the limit")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the image's {what} can't be read: {error}") from None


def decode_any(data: bytes, what: str) -> Any:
    """A document of another form. Raises `InvalidRequest`."""
    return _decode(data, object, what)
