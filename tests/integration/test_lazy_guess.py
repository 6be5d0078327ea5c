"""A metadata image that is asked for before its digest is known: nothing else than that image is ever used, whatever
the store has under the layer's name."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import native_guest
import pytest
import store_kit

from dsec.edge.config import SystemClock
from dsec.errors import LayerCorrupt, NotFound
from dsec.ports import BlobStore
from dsec.store.blobs import open_store
from dsec.store.format import Manifest, image_key, metadata_key
from dsec.store.lazy.copier import Copier
from dsec.store.lazy.fetch import _GUESS_BYTES, Fetcher

LAYER = "ab" * 32
SIZES = [4096, 300_000, _GUESS_BYTES, _GUESS_BYTES + 700_000]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        with store_kit.s3_server() as url:
            yield url


@pytest.fixture(params=["copier", "near", "directory", "bucket"])
async def stored(request: pytest.FixtureRequest, s3: str, tmp_path: Path) -> AsyncIterator[tuple[BlobStore, Fetcher]]:
    """A store, and who fetches from it."""
    url = str(tmp_path / "store")
    if request.param == "bucket":
        name = tmp_path.name.replace("_", "-").strip("-")
        store_kit.make_bucket(s3, name)
        url = f"s3://{name}?endpoint={s3}&region=us-east-1"
    store = open_store(url)
    clock = SystemClock()
    program = native_guest.built("sanitized", "copier")
    copier = Copier(program, None, clock) if request.param in {"copier", "near"} else None
    fetcher = Fetcher(store, clock, copier)
    if request.param == "near":
        fetcher._took_s.append(0.0)
    assert fetcher.near == (request.param == "near")
    yield store, fetcher
    await fetcher.close()
    if copier is not None:
        await copier.close()
    await store.close()


def made(size: int) -> tuple[bytes, Manifest]:
    image = random.Random(size).randbytes(size)
    return image, Manifest(
        kind="directory", metadata=hashlib.sha256(image).hexdigest(), metadata_bytes=size, data_bytes=0
    )


async def fetched(fetcher: Fetcher, manifest: Manifest, path: Path) -> bytes:
    await fetcher.metadata(LAYER, manifest, path, fetcher.guess(LAYER, path))
    with open(path, "rb") as file:  # noqa: ASYNC230
        return file.read()


@pytest.mark.parametrize("size", SIZES)
async def test_it_is_what_the_manifest_says(stored: tuple[BlobStore, Fetcher], size: int, tmp_path: Path) -> None:
    store, fetcher = stored
    image, manifest = made(size)
    damaged = bytearray(image)
    damaged[size // 3] ^= 1
    await store.put(metadata_key(manifest.metadata), image)
    for number, guess in enumerate([image, None, bytes(damaged), image[:-4096], image + b"more" * 2000, b"", b"x"]):
        await store.delete(image_key(LAYER))
        if guess is not None:
            await store.put(image_key(LAYER), guess)
        assert await fetched(fetcher, manifest, tmp_path / f"image{number}") == image


@pytest.mark.parametrize("size", SIZES[:3])
async def test_one_turn_is_enough(stored: tuple[BlobStore, Fetcher], size: int, tmp_path: Path) -> None:
    store, fetcher = stored
    image, manifest = made(size)
    await store.put(image_key(LAYER), image)
    assert await fetched(fetcher, manifest, tmp_path / "image") == image
    await store.delete(image_key(LAYER))
    with pytest.raises(NotFound):
        await fetched(fetcher, manifest, tmp_path / "gone")
    for key in (image_key(LAYER), metadata_key(manifest.metadata)):
        await store.put(key, image[:-1] + bytes([image[-1] ^ 1]))
    with pytest.raises(LayerCorrupt, match=LAYER):
        await fetched(fetcher, manifest, tmp_path / "wrong")
